"""Makes partitions of layers: on which device each layer is, checked before anything is moved.

Tested in ``tests/pipe/test_pipe.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.pipe.balance import even_shares
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.skip import SkipRoute, skip_routes

__all__ = ["Checkpoint", "check_checkpoint", "check_sequential", "make_partitions"]

Checkpoint = Literal["always", "except_last", "never"]


def check_sequential(module: Any) -> None:
    """Refuse what is no Sequential.

    Raises:
        SetupError: it is not, has a forward of its own, or no layer.
    """
    if not isinstance(module, nn.Sequential):
        raise SetupError(
            f"the module is a {type(module).__name__}; needed is an nn.Sequential, whose layers can be cut into"
            " partitions. Models that are none: strategy='llm_1f1b_pipeline', in several processes"
        )
    if type(module).forward is not nn.Sequential.forward:
        raise SetupError(
            f"{type(module).__name__} has a forward of its own, which partitions would not run; needed is a plain"
            " nn.Sequential of layers"
        )
    if not len(module):
        raise SetupError("the Sequential has no layers; needed is one for each partition at least")
    lazy = [name for name, one in (*module.named_parameters(), *module.named_buffers()) if is_lazy(one)]
    if lazy:
        raise SetupError(
            f"{lazy[0]!r} of the Sequential has no shape yet; needed are layers that know what they hold: run the"
            " Sequential once on a batch, before the pipe is made"
        )
    own = [*module._parameters, *module._buffers]
    if own:
        raise SetupError(
            f"the Sequential has {', '.join(map(repr, own))} of its own, beside its layers; needed is a plain"
            " nn.Sequential: put them into the layer that uses them"
        )


def check_checkpoint(chunks: Any, checkpoint: Any) -> None:
    """Refuse what is no number of micro-batches, and no mode.

    Raises:
        PlanError: see above.
    """
    check_whole_number("chunks", chunks, 1, error=PlanError)
    if checkpoint not in get_args(Checkpoint):
        raise PlanError(f"checkpoint is {checkpoint!r}; needed is one of {', '.join(map(repr, get_args(Checkpoint)))}")


def make_partitions(
    layers: Sequence[nn.Module],
    devices: Iterable[torch.device | str | int] | None,
    balance: Sequence[int] | None,
) -> tuple[list[Partition], list[SkipRoute]]:
    """Share out layers, and move them to their devices.

    Returns:
        the partitions, and the skips between them.

    Raises:
        PlanError: see :class:`~lightning_pipe.pipe.Pipe`.
        SetupError: see there.
    """
    places = _devices(devices, balance)
    shares = (
        even_shares([sum(p.numel() for p in layer.parameters()) for layer in layers], len(places))
        if (balance is None)
        else _checked_balance(balance, len(layers), len(places))
    )
    ends = list(accumulate(shares))
    parts = [list(layers[end - share : end]) for share, end in zip(shares, ends, strict=True)]
    routes = skip_routes(parts)
    _refuse_shared(parts)
    for part, device in zip(parts, places, strict=True):
        for layer in part:
            layer.to(device)
    return [
        Partition(index, ends[index] - shares[index], part, places[index], routes) for index, part in enumerate(parts)
    ], routes


def _devices(devices: Iterable[torch.device | str | int] | None, balance: Sequence[int] | None) -> list[torch.device]:
    if devices is None:
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if gpus:
            return gpus if balance is None else gpus[: len(balance)]
        return [torch.device("cpu")] * (1 if balance is None else len(balance))
    if isinstance(devices, str | torch.device | int):
        raise PlanError(f"devices is the single device {devices!r}; give a list, one for each partition")
    found = []
    for one in devices:
        if isinstance(one, bool):
            raise SetupError(f"devices has {one!r}, which is no device; needed are such as 'cpu', 'cuda:0' or 0")
        try:
            device = torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
        except (RuntimeError, TypeError) as error:
            raise SetupError(
                f"devices has {one!r}, which is no device ({str(error).splitlines()[0]}); needed are such as 'cpu',"
                " 'cuda:0' or 0, a GPU's number"
            ) from error
        if device.type == "meta":
            raise SetupError(f"devices has {one!r}, where nothing can run; needed are such as 'cpu', 'cuda:0' or 0")
        if device.type == "cpu":
            device = torch.device("cpu")  # "cpu:0" is the same
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise SetupError(
                    f"devices has {device}, but PyTorch finds no GPU here; give 'cpu' as often as you like"
                )
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if device.index >= torch.cuda.device_count():
                raise SetupError(f"devices has {device}, but there are {torch.cuda.device_count()} GPUs here")
        found.append(device)
    if not found:
        raise PlanError("devices is empty; give one for each partition")
    return found


def _checked_balance(balance: Sequence[int], layers: int, devices: int) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        raise PlanError(
            f"balance is {balance!r}; needed are numbers of layers, one for each device: balance_by_time,"
            " balance_by_memory and balance_by_parameters give them"
        )
    shares = list(balance)
    if len(shares) != devices:
        raise PlanError(f"balance has {len(shares)} entries and there are {devices} devices; needed is one for each")
    if any(not isinstance(share, int) or isinstance(share, bool) or share < 1 for share in shares):
        raise PlanError(f"balance is {shares}; expected whole numbers of layers, 1 or more for each partition")
    if sum(shares) != layers:
        raise PlanError(
            f"balance is {shares}, which is {sum(shares)} layers, and the Sequential has {layers}; expected numbers"
            " of layers that add up to that"
        )
    return shares


def _refuse_shared(parts: Sequence[Sequence[nn.Module]]) -> None:
    owner: dict[int, int] = {}
    for partition, layers in enumerate(parts):
        for layer in layers:
            tensors: list[tuple[str, str, Tensor]] = [
                ("parameter", *named) for named in layer.named_parameters(remove_duplicate=False)
            ]
            tensors += [("buffer", *named) for named in layer.named_buffers(remove_duplicate=False)]
            for what, name, tensor in tensors:
                first = owner.setdefault(id(tensor), partition)
                if first != partition:
                    raise SetupError(
                        f"the {what} {name!r} of a {type(layer).__name__} is in partitions {first} and {partition};"
                        f" a {what} is on one device: put its layers into one partition by balance, or copy it"
                    )
