"""What each layer of a model costs, in seconds or bytes, measured: what ``split_by_cost`` deals out to stages by.

Pieces are run one by one, as the stage that would hold nothing else, over stand-ins of the model's tensors: a model
that is deferred stays so, and no rank holds more than a piece. What a layer costs is taken not to depend on values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.llm.module_config import ModuleConfig
from lightning_pipe.llm.stage_module import StageModule, make_stage, shallow_copy

__all__ = ["LayerCosts", "measure_costs"]

_CPU = torch.device("cpu")
_WARM_UPS = 2
_RUNS = 5


@dataclass(frozen=True)
class LayerCosts:
    """Costs in one unit, as :func:`~lightning_pipe.llm.split.split_by_cost` takes them.

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
    loss_of: Callable[[Any], Tensor],
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
        loss_of: from the model's output, the loss: a scalar.
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
        bench = _Bench(model, config, args, kwargs, device)
        cost = _Timer(clock, device) if unit == "time" else _Weigher(microbatches, optimizer_states)
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.enable_grad():
            return bench.costs(loss_of, cost)

    return measured() if group is None else _from_first(measured, group)


def _from_first(measured: Callable[[], LayerCosts], group: dist.ProcessGroup) -> LayerCosts:
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            found[0] = measured()
        except Exception as error:  # of whatever kind: the others wait
            failure, found[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(found, group=group, group_src=0)
    if found[1] is not None:
        raise SetupError(f"the first rank could not measure what layers cost: {found[1]}") from failure
    costs: LayerCosts = found[0]
    return costs


@dataclass(frozen=True)
class _Piece:
    """Something to measure.

    Attributes:
        stage: that holds nothing else.
        modules: what it holds.
        run: forward, from inputs to output; for the last, to the loss.
        inputs: of it.
        batch: tensors that are there in any case.
    """

    stage: StageModule
    modules: tuple[nn.Module, ...]
    run: Callable[..., Tensor]
    inputs: tuple[Any, ...]
    batch: tuple[Tensor, ...]


class _Bench:
    def __init__(
        self,
        model: nn.Module,
        config: ModuleConfig,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._args = args
        self._kwargs = dict(kwargs)
        self._device = device

    def costs(self, loss_of: Callable[[Any], Tensor], cost: Callable[[_Piece], float]) -> LayerCosts:
        config = self._config
        inputs, first = self._args, 0.0
        if config.input_fqns:
            piece = self._piece(config.input_fqns, 0, inputs)
            first = cost(piece)
            inputs = (_hidden_like(piece.run(*inputs)),)
        empty = cost(self._piece((), 1, inputs))
        layers: list[float] = []
        known: dict[Any, tuple[float, Tensor]] = {}
        described = _described([self._model.get_submodule(name) for name in config.layers])
        for name, description in zip(config.layers, described, strict=True):
            alike = (description, _signature(inputs))
            if alike not in known:
                piece = self._piece((name,), 1, inputs)
                known[alike] = cost(piece), _hidden_like(piece.run(*inputs))
            found, output = known[alike]
            layers.append(found)
            inputs = (output,)
        last = cost(self._piece(config.output_fqns, 2, inputs, loss_of))
        first, last, *layers = (max(one - empty, 0.0) for one in (first, last, *layers))
        return LayerCosts(first, tuple(layers), last)

    def _piece(
        self,
        names: Sequence[str],
        stage_index: int,
        inputs: tuple[Any, ...],
        result_of: Callable[[Any], Tensor] | None = None,
    ) -> _Piece:
        """A stage of three: the input modules', a layer's or the output modules'."""
        stage = make_stage(shallow_copy(self._model), self._config, names, stage_index, 3).train()
        _stand_in(stage, self._device)

        def run(*given: Any) -> Tensor:
            output: Tensor = stage(*given, result_of=result_of, **self._kwargs)
            return output

        modules = tuple(map(stage.module.get_submodule, names))
        batch = tuple(one for one in tree_leaves((self._args, self._kwargs)) if isinstance(one, Tensor))
        return _Piece(stage, modules, run, inputs, batch)


class _Timer:
    """Seconds that a forward and a backward take."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock = clock
        self._device = device

    def __call__(self, piece: _Piece) -> float:
        taken = [self._run(piece) for _ in range(_WARM_UPS + _RUNS)]
        return statistics.median(taken[_WARM_UPS:])

    def _run(self, piece: _Piece) -> float:
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

    def __call__(self, piece: _Piece) -> float:
        parameters = _distinct(one for module in piece.modules for one in module.parameters())
        buffers = _distinct(one for module in piece.modules for one in module.buffers())
        fixed = sum(_bytes(one) * (2 + self._states if one.requires_grad else 1) for one in parameters)
        return float(fixed + sum(map(_bytes, buffers)) + self._microbatches * self._saved(piece))

    def _saved(self, piece: _Piece) -> int:
        others = [*piece.stage.parameters(), *piece.stage.buffers(), *piece.batch]
        known = {one.untyped_storage()._cdata for one in others}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                saved[storage._cdata] = storage  # held, so that no other gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = piece.run(*piece.inputs)
        found = sum(storage.nbytes() for storage in saved.values())
        del output
        return found


def _stand_in(stage: nn.Module, device: torch.device) -> None:
    """Give a stage, in place, tensors of its own, like those it had in all but values: small ones, not all alike."""
    made: dict[int, Any] = {}

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            # Those that are not trained may be variances or frequencies.
            bare = _some_values(tensor, device, *((-0.1, 0.1) if isinstance(tensor, nn.Parameter) else (0.1, 1.0)))
            made[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
        found: Tensor = made[id(tensor)]
        return found

    for module in stage.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for values in held:
            values.update({name: like(value) for name, value in values.items() if isinstance(value, Tensor)})


def _some_values(like: Tensor, device: torch.device, low: float, high: float) -> Tensor:
    bare = torch.zeros(like.shape, dtype=like.dtype, device=device)
    own = torch.Generator(device).manual_seed(0)
    return bare.uniform_(low, high, generator=own) if bare.is_floating_point() else bare


def _hidden_like(output: Tensor) -> Tensor:
    return _some_values(output, output.device, -1.0, 1.0).requires_grad_(output.is_floating_point())


def _described(layers: Sequence[nn.Module]) -> list[Any]:
    """For each layer, what decides what it costs; a number that is each one's own index does not."""
    plain = [
        {
            (name, key): value
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (bool, str, float, int))
        }
        for layer in layers
    ]
    indices = {key for key in plain[0] if [one.get(key) for one in plain] == list(range(len(layers)))}
    return [
        (
            type(layer),
            repr(layer),
            repr([item for item in own.items() if item[0] not in indices]),
            tuple(
                (name, tuple(one.shape), one.dtype, one.requires_grad)
                for name, one in [*layer.named_parameters(), *layer.named_buffers()]
            ),
        )
        for layer, own in zip(layers, plain, strict=True)
    ]


def _signature(inputs: tuple[Any, ...]) -> Any:
    return tuple((tuple(one.shape), one.dtype) if isinstance(one, Tensor) else repr(one) for one in inputs)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(one): one for one in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
