#!/usr/bin/env bash
# Smoke test of the oldest supported versions (torch 2.11 with torchrec and fbgemm 1.6) in a separate environment,
# .venv-oldest: the engine, the loops, the pipe, and recommenders under every plan. Language models need a newer torch.
#
# The package index has no CPU build of torch 2.11, so pip installs the default one with several GB of CUDA packages.
#
# Environment:
#   PYTHON  interpreter for .venv-oldest (default: python3.11, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
there=.venv-oldest

if ! [ -e "$there/.complete" ]; then
    "$python" -m venv --clear "$there"
    pip() { "$there/bin/python" -m pip "$@"; }
    pip install -q "torch==2.11.0"
    # --no-deps: torchrec requires fbgemm-gpu, whose files would overwrite those of fbgemm-gpu-cpu.
    pip install -q --no-deps "torchrec==1.6.1" "fbgemm-gpu-cpu==1.6.0" "iopath" "portalocker"
    # The pinned packages without those that torch installs.
    sed -n 's/ \\$//p' requirements/pinned.txt | grep "==" |
        grep -v -i -E "^(#|torch|pip|transformers|tokenizers|huggingface|hf-xet|safetensors|sympy|mpmath|networkx|filelock|fsspec|typing|setuptools|triton)" \
            > "$there/pinned.txt"
    pip install -q "torch==2.11.0" -r "$there/pinned.txt"
    pip install -q --no-deps --editable .
    touch "$there/.complete"
fi

export OMP_NUM_THREADS=1
"$there/bin/python" -m pytest -p no:cacheprovider -q \
    tests/engine tests/loops/test_training_epoch_loop.py tests/scenarios/checkpoints/test_exactly_once.py tests/pipe/test_pipe.py \
    tests/recsys/plans/test_named.py tests/recsys/tasks/test_train_pipeline.py tests/recsys/dynamic/tables/test_slot_lookup.py \
    tests/strategies/recommender/test_strategy.py tests/test_environment.py "$@"
