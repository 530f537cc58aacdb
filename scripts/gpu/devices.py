"""Device, process group and kernels of the programs, whose ranks may share one GPU.

NCCL refuses two ranks on one GPU. If there are fewer GPUs than ranks, all ranks use the first GPU and Gloo, as if each
were alone on a machine: TorchRec places the tables of the second rank of a machine on its second GPU.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "backend",
    "connect",
    "device_of",
    "parser",
    "peak_bytes",
    "recorded_kernels",
    "save",
    "separate_machines",
    "tensors",
]


def parser(description: str | None, ways: str) -> argparse.ArgumentParser:
    """Parser with the options of every program that trains."""
    arg_parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    arg_parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arg_parser.add_argument("--ways", nargs="+", required=True, help=ways)
    arg_parser.add_argument("--steps", type=int, default=6)
    arg_parser.add_argument("--save", type=Path, required=True, help="file for losses and values of each way")
    return arg_parser


def device_of(kind: str) -> torch.device:
    """Device of this rank."""
    if kind == "cpu":
        return torch.device("cpu")
    ranks, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local if torch.cuda.device_count() >= ranks else 0)


def backend(kind: str) -> str:
    """Name of the backend that the ranks can use."""
    shared = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "gloo" if kind == "cpu" or shared else "nccl"


def separate_machines() -> None:
    """Let torchrun's ranks train as if each were alone on a machine, after the choice of device and backend."""
    if "RANK" in os.environ:
        rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
        os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0", GROUP_RANK=rank, GROUP_WORLD_SIZE=ranks)


def connect(kind: str) -> torch.device:
    """Make the process group of torchrun's ranks, or of this process alone, and return this rank's device."""
    device = device_of(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend(kind))
    else:
        dist.init_process_group(backend(kind), store=dist.HashStore(), rank=0, world_size=1)
    if kind == "cuda" and dist.get_backend() == "gloo":
        separate_machines()
    return device


@contextmanager
def recorded_kernels() -> Iterator[list[str]]:
    """Use deterministic kernels in the body, and float32 products without TF32, which containers may enable.

    Yields:
        Operations that have no deterministic kernel. The list is complete after the body.
    """
    messages: list[str] = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_warn_always(True)  # kernels of attention warn once in a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield messages
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_warn_always(False)
            torch.set_float32_matmul_precision(precision)
    lines = {str(warning.message).partition("\n")[0] for warning in caught}
    texts = "does not have a deterministic implementation", "defaults to a non-deterministic algorithm"
    messages += sorted(line for line in lines if any(text in line for text in texts))


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int]]:
    """Measure the caching allocator's peak in the body.

    Yields:
        After the body, one number of bytes above those at its begin; empty on a CPU.
    """
    peaks: list[int] = []
    if device.type == "cpu":
        yield peaks
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield peaks
    torch.cuda.synchronize(device)
    peaks.append(torch.cuda.max_memory_allocated(device) - before)


def tensors(values: Any, prefix: str = "") -> dict[str, Tensor]:
    """Copies on the host of this rank's tensors in nested mappings and lists, by path. Shards have their offsets."""
    if isinstance(values, dict):
        copies = {}
        for key, value in values.items():
            copies.update(tensors(value, f"{prefix}/{key}" if prefix else str(key)))
        return copies
    if isinstance(values, list | tuple):
        return tensors(dict(enumerate(values)), prefix)
    if callable(shards := getattr(values, "local_shards", None)):
        parts = [getattr(shard, "tensor", shard) for shard in shards()]
        return {f"{prefix}[{index}]": part.detach().cpu().clone() for index, part in enumerate(parts)}
    if callable(full := getattr(values, "full_tensor", None)):
        values = full()  # FSDP's parameters
    return {prefix: values.detach().cpu().clone()} if isinstance(values, Tensor) else {}


def save(results: dict[str, Any], path: Path) -> None:
    """Write the results of this rank; the files of later ranks end in ``.rankN``."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = path.with_name(f"{path.name}.rank{rank}") if rank else path
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(results, path)
