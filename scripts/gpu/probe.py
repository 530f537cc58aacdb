"""Exit with status 1 and a reason unless the ranks can exchange tensors of their devices.

``torchrun --nproc-per-node 2 -m scripts.gpu.probe --device cuda all_to_all`` calls one collective and checks its
result. Parts with two ranks run it first: on one GPU the ranks use Gloo, which lacks some collectives for CUDA tensors.
With ``--own-devices``, the ranks must not share a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist

from scripts.gpu.devices import backend, connect

__all__ = ["main"]


def all_to_all(sent: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("collective", choices=("all_to_all",))
    parser.add_argument("--own-devices", action="store_true")
    options = parser.parse_args()
    if options.own_devices and options.device == "cuda" and backend(options.device) == "gloo":
        print(f"needs a GPU for each of {os.environ['WORLD_SIZE']} ranks, found {torch.cuda.device_count()}")
        sys.exit(1)
    device = connect(options.device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = torch.arange(ranks, device=device)
    sent, expected = everyone + 10 * rank, 10 * everyone + rank
    received: object
    try:
        received = all_to_all(sent).tolist()
    except Exception as error:
        received = str(error).splitlines()[0]
    if received != expected.tolist():
        description = f"{options.collective} of {device.type} tensors between {ranks} ranks by {dist.get_backend()}"
        print(f"{description}: expected {expected.tolist()}, got {received}", flush=True)
        os._exit(1)  # other ranks may wait in the collective
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
