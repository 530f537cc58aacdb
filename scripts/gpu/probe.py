"""Exit with status 1 and a reason unless the ranks can exchange tensors of their devices.

``torchrun --nproc-per-node 2 -m scripts.gpu.probe --device cuda all_to_all`` calls one collective and checks its
result. Parts with two ranks run it first: on one GPU the ranks use Gloo, which lacks some collectives for CUDA tensors.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

from scripts.gpu.devices import connect

__all__: list[str] = []


def all_to_all(sent: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("collective", choices=("all_to_all",))
    given = options.parse_args()
    device = connect(given.device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = torch.arange(ranks, device=device)
    sent, expected = everyone + 10 * rank, 10 * everyone + rank
    found: object
    try:
        found = all_to_all(sent).tolist()
    except Exception as error:
        found = str(error).splitlines()[0]
    if found != expected.tolist():
        what = f"{given.collective} of {device.type} tensors between {ranks} ranks by {dist.get_backend()}"
        print(f"{what}: expected {expected.tolist()}, got {found}", flush=True)
        os._exit(1)  # other ranks may wait in the collective
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
