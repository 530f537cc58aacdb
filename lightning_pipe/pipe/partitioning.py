"""Assignment of layers to partitions and devices, checked before any layer is moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.engine.common.options import check_choice, check_whole_number, is_whole_numbers
from lightning_pipe.pipe.balance import balance_by_costs
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.skip import SkipRoute, find_skip_routes

CheckpointMode = Literal["always", "except_last", "never"]


def check_sequential(module: Any) -> None:
    """Refuse modules other than a plain Sequential."""
    if not isinstance(module, nn.Sequential):
        raise SetupError(
            f"the module is a {type(module).__name__}; expected an nn.Sequential, whose layers can be split into"
            " partitions. For other models use strategy='llm_1f1b_pipeline', which runs several processes"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise SetupError(
            f"{type(module).__name__} overrides forward, which partitions would not run; expected a plain"
            " nn.Sequential. Move the code of its forward into layers"
        )
    lazy = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise SetupError(
            f"{lazy[0]!r} of the Sequential has no shape yet; expected initialized parameters and buffers. Run the"
            " Sequential once on a batch before building the pipe"
        )
    direct_names = [*module._parameters, *module._buffers]
    if direct_names:
        raise SetupError(
            f"the Sequential has {', '.join(map(repr, direct_names))} in addition to its layers; expected parameters"
            " and buffers in layers only. Move them into the layer that uses them"
        )


def check_pipe_options(chunks: Any, checkpoint: Any) -> None:
    """Refuse an invalid number of micro-batches or checkpoint mode."""
    check_whole_number("chunks", chunks, 1, error=PlanError)
    check_choice("checkpoint", checkpoint, get_args(CheckpointMode), PlanError)


def make_partitions(
    layers: Sequence[nn.Module],
    devices: Iterable[torch.device | str | int] | None,
    balance: Sequence[int] | None,
) -> tuple[list[Partition], list[SkipRoute]]:
    """Assign layers to partitions, and move them to their devices."""
    places = _resolve_partition_devices(devices, balance)
    shares = (
        balance_by_costs([sum(p.numel() for p in layer.parameters()) for layer in layers], len(places))
        if balance is None
        else _checked_balance(balance, len(layers), len(places))
    )
    ends = list(accumulate(shares))
    parts = [list(layers[end - share : end]) for share, end in zip(shares, ends, strict=True)]
    routes = find_skip_routes(parts)
    _refuse_shared(parts)
    for part, device in zip(parts, places, strict=True):
        for layer in part:
            layer.to(device)
    return [
        Partition(index, ends[index] - shares[index], part, places[index], routes) for index, part in enumerate(parts)
    ], routes


def _resolve_partition_devices(
    devices: Iterable[torch.device | str | int] | None, balance: Sequence[int] | None
) -> list[torch.device]:
    if devices is None:
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if gpus:
            return gpus if balance is None else gpus[: len(balance)]
        return [torch.device("cpu")] * (1 if balance is None else len(balance))
    if isinstance(devices, str | torch.device | int):
        raise PlanError(f"devices is the single device {devices!r}; expected a list. Give one device per partition")
    parsed = []
    for entry in devices:
        if isinstance(entry, bool):
            raise SetupError(
                f"devices contains {entry!r}, which is not a device; expected for example 'cpu', 'cuda:0' or 0"
            )
        try:
            device = torch.device("cuda", entry) if isinstance(entry, int) else torch.device(entry)
        except (RuntimeError, TypeError) as error:
            raise SetupError(
                f"devices contains {entry!r}, which is not a device ({str(error).splitlines()[0]}); expected for"
                " example 'cpu', 'cuda:0' or 0 (the index of a GPU)"
            ) from error
        if device.type == "meta":
            raise SetupError(
                f"devices contains {entry!r}, which cannot run layers; expected for example 'cpu', 'cuda:0' or 0"
            )
        if device.type == "cpu":
            device = torch.device("cpu")  # "cpu:0" is the same device
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise SetupError(
                    f"devices contains {device}, but PyTorch finds no GPU on this machine. Use 'cpu', which may appear"
                    " several times"
                )
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if device.index >= torch.cuda.device_count():
                raise SetupError(
                    f"devices contains {device}, but this machine has {torch.cuda.device_count()} GPUs. Use a smaller"
                    " index"
                )
        parsed.append(device)
    if not parsed:
        raise PlanError("devices is empty; expected at least one device. Give one device per partition")
    return parsed


def _checked_balance(balance: Sequence[int], layers: int, devices: int) -> list[int]:
    if not (is_whole_numbers(balance) and len(balance) == devices and min(balance) >= 1 and sum(balance) == layers):
        raise PlanError(
            f"balance is {balance!r}; expected the number of layers of each device: a list of {devices} whole numbers,"
            f" 1 or more, that add up to {layers}. balance_by_time, balance_by_memory and balance_by_parameters return"
            " such lists"
        )
    return list(balance)


def _refuse_shared(parts: Sequence[Sequence[nn.Module]]) -> None:
    owner: dict[int, int] = {}
    for partition, layers in enumerate(parts):
        for layer in layers:
            tensors: list[tuple[str, str, Tensor]] = [
                ("parameter", *named) for named in layer.named_parameters(remove_duplicate=False)
            ]
            tensors += [("buffer", *named) for named in layer.named_buffers(remove_duplicate=False)]
            for kind, name, tensor in tensors:
                first = owner.setdefault(id(tensor), partition)
                if first != partition:
                    raise SetupError(
                        f"the {kind} {name!r} of a {type(layer).__name__} is shared by partitions {first} and"
                        f" {partition}; expected each {kind} in one partition. Put the layers that share it into one"
                        " partition with balance, or copy it"
                    )
