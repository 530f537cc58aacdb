#!/bin/bash
# Trains on one to four nodes that may come and go. Run this on each node, from the folder of the project:
#
#     examples/cluster/torchrun.sh HOST examples/recsys_movielens/two_nodes.yaml
#     examples/cluster/torchrun.sh HOST examples/llm_text/1f1b.yaml
#
# HOST is the node that the others meet at. It must stay: without it, the job ends, and continues when it is started
# again. All nodes need the same folder, on a file system that they share. Further arguments go to lightning-pipe fit.
#
# Environment:
#   JOB               name of the job and of its folder in logs/ (default: elastic- and the configuration's name)
#   NODES             smallest and largest number of nodes (default: 1:4)
#   PROCESSES         number of processes on each node (default: 1)
#   RESTARTS          how often torchrun restarts all processes (default: 100)
#   EVERY             steps between two checkpoints (default: 100)
#   PORT              port on HOST (default: 29500)
#   TORCHRUN_OPTIONS  further options of torchrun
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: examples/cluster/torchrun.sh HOST CONFIGURATION [OPTION...]" >&2; exit 2; }
job=${JOB:-elastic-$(basename "$2" .yaml)}
folder=logs/$job

# A node that joins, or is told to leave, ends training with SIGTERM, and OnExceptionCheckpoint saves. A node that dies
# costs the steps since the last ModelCheckpoint. A node that vanishes costs the strategy's timeout as well.
command=(
    -m lightning_pipe.cli fit --config "$2" --ckpt_path last
    --trainer.strategy.timeout 0:10:00
    --trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint --trainer.callbacks.dirpath "$folder"
    --trainer.callbacks.every_n_train_steps "${EVERY:-100}" --trainer.callbacks.save_top_k 0
    --trainer.callbacks.save_last true
    --trainer.callbacks+=lightning.pytorch.callbacks.OnExceptionCheckpoint --trainer.callbacks.dirpath "$folder"
    "${@:3}"
)
# torchrun would restart a command that can never succeed, so the configuration is read once before.
python "${command[@]}" --print_config > /dev/null

# Without this, PyTorch 2.13 and 2.14 keep the addresses of ranks that have ended, and restarts with Gloo fail.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "${NODES:-1:4}" --nproc-per-node "${PROCESSES:-1}" --max-restarts "${RESTARTS:-100}" \
    --rdzv-backend c10d --rdzv-id "$job" --rdzv-endpoint "$1:${PORT:-29500}" ${TORCHRUN_OPTIONS:-} "${command[@]}"
