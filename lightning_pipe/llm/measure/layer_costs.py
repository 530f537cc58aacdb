"""What each layer of a model costs, in seconds or bytes, measured: what ``split_by_cost`` deals out to stages by.

Each piece is run by itself (``layer_bench``), so no rank holds more than one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.torch import storage_key
from lightning_pipe.engine.plans.errors import SetupError
from lightning_pipe.engine.ranks.together import from_rank
from lightning_pipe.llm.measure.layer_bench import LayerBench, LayerPiece, LossOf
from lightning_pipe.llm.model.module_config import ModuleConfig

__all__ = ["LayerCosts", "measure_costs"]

_CPU = torch.device("cpu")
_WARM_UPS = 2
_RUNS = 5


@dataclass(frozen=True)
class LayerCosts:
    """Costs in one unit, as :func:`~lightning_pipe.llm.split.by_name.split_by_cost` takes them.

    Attributes:
        input: of the modules before the layers, together.
        layers: of each layer.
        output: of the modules after them, together, and the loss.
    """

    input: float
    layers: tuple[float, ...]
    output: float


def measure_costs(
    model: nn.Module,
    config: ModuleConfig,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: LossOf,
    *,
    unit: Literal["time", "memory"] = "time",
    microbatches: int = 1,
    optimizer_states: int = 2,
    device: torch.device = _CPU,
    group: dist.ProcessGroup | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Run a micro-batch forward and backward through the modules before the layers, each layer and those after.

    Time is the median of five runs, after two that do not count. Memory is that of parameters, gradients, optimiser
    states, buffers, and of what a forward pass keeps for the backward pass, its input included. What a stage without
    modules costs, building a mask, say, is taken off both. Layers that are alike, by class, tensors and plain
    attributes, and get alike inputs, are measured once. Autocast holds as it is set around the call. Random states stay
    as they are.

    Args:
        model: the unsplit one, real or deferred; it is left as it is.
        config: what it is made of.
        args: what it is called with for one micro-batch, with values, on ``device``.
        kwargs: its keywords.
        loss_of: from the model's output, and the part of the model that gave it, the loss: a scalar.
        unit: "time", in seconds, or "memory", in bytes.
        microbatches: how many micro-batches' activations a stage keeps at a time, for memory.
        optimizer_states: how many tensors of a parameter's size the optimiser keeps for each, for memory: Adam 2.
        device: where to measure.
        group: ranks that need the same costs: the first measures, and tells the others. Each has to call this.
        clock: seconds.

    Raises:
        SetupError: another unit; a model that cannot be cut as the config says; on every rank, where the first could
            not measure.
    """
    if unit not in ("time", "memory"):
        raise SetupError(f"the unit of costs is {unit!r}; needed is 'time' or 'memory'")

    def measured() -> LayerCosts:
        bench = LayerBench(model, config, args, kwargs, device)
        cost = _Timer(clock, device) if unit == "time" else _Weigher(microbatches, optimizer_states)
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.enable_grad():
            found = bench.ask(loss_of, cost)
        last, *layers = (max(one - found.empty, 0.0) for one in (found.output, *found.layers))
        first = 0.0 if found.input is None else max(found.input - found.empty, 0.0)
        return LayerCosts(first, tuple(layers), last)

    failed = "the first rank could not measure what layers cost"
    return measured() if group is None else from_rank(measured, failed, group)


class _Timer:
    """Seconds that a forward and a backward take."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock = clock
        self._device = device

    def __call__(self, piece: LayerPiece) -> float:
        taken = [self._run(piece) for _ in range(_WARM_UPS + _RUNS)]
        return statistics.median(taken[_WARM_UPS:])

    def _run(self, piece: LayerPiece) -> float:
        for one in [*piece.stage.parameters(), *(one for one in piece.inputs if isinstance(one, Tensor))]:
            one.grad = None
        begin = self._now()
        output = piece.run(*piece.inputs)
        forward = self._now() - begin
        if not output.requires_grad:
            return forward
        gradient = torch.ones_like(output)
        begin = self._now()
        output.backward(gradient)
        return forward + self._now() - begin

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


class _Weigher:
    """Bytes that a stage needs for a piece."""

    def __init__(self, microbatches: int, optimizer_states: int) -> None:
        self._microbatches = microbatches
        self._states = optimizer_states

    def __call__(self, piece: LayerPiece) -> float:
        parameters = _distinct(one for module in piece.modules for one in module.parameters())
        buffers = _distinct(one for module in piece.modules for one in module.buffers())
        fixed = sum(_bytes(one) * (2 + self._states if one.requires_grad else 1) for one in parameters)
        return float(fixed + sum(map(_bytes, buffers)) + self._microbatches * self._saved(piece))

    def _saved(self, piece: LayerPiece) -> int:
        others = [*piece.stage.parameters(), *piece.stage.buffers(), *piece.batch]
        known = {storage_key(one) for one in others}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in known:
                saved[storage_key(storage)] = storage  # held, so that no other gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = piece.run(*piece.inputs)
        found = sum(storage.nbytes() for storage in saved.values())
        del output
        return found


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(one): one for one in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
