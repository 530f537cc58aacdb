"""Cost of each kind of work in each layer: measured seconds; or operations and bytes, found on fake tensors.

A schedule's actions are a forward, and a backward in one or in two parts. The parts are computed by the functions of
PyTorch that its stages call. A simulation uses all of these numbers; a split by cost uses one number a layer, which
``layer_costs`` derives from them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_pipe._compat.attention import SAME_FLOPS_OPERATORS
from lightning_pipe._compat.pipelining import stage_backward_input, stage_backward_weight
from lightning_pipe._compat.torch import (
    GROUPED_MM,
    FakeTensorMode,
    TorchDispatchMode,
    get_operator_schema,
    get_overload_packet,
    is_view,
    tree_leaves,
    tree_map_only,
)
from lightning_pipe._compat.transformers import disable_packed_sequence_detection
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.measure.layer_bench import LayerBench, LossOf, ModelPiece, ModelPieceResults
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.llm.model.hf_experts import experts_of
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.shapes import FalseTensorBoolMode
from lightning_pipe.llm.model.stage_module import StageModule

_CPU = torch.device("cpu")
_WARM_UPS = 2
_RUNS = 5


class LayerWork(NamedTuple):
    """Cost of each kind of work, in one unit."""

    forward: float  # forward, including the loss for the last piece
    backward: float  # backward for inputs and weights together
    # first part of a split backward; 0 if no gradient goes to the inputs, as then the second part does all of it
    input_backward: float
    weight_backward: float  # second part of a split backward


@dataclass(frozen=True)
class Footprint:
    """Bytes and operations of a piece of a model, excluding its inputs."""

    parameters: int  # bytes of all parameters
    gradients: int  # bytes of the trained parameters' gradients
    buffers: int  # bytes of the buffers
    output: int  # bytes of the output
    after_forward: int  # bytes that remain after the forward: activations for backward, and the output
    after_input_backward: int  # bytes that remain between the two parts of a backward
    in_forward: int  # peak in the forward, beyond the bytes in use before it
    in_backward: int  # peak in the backward, beyond ``after_forward``
    in_input_backward: int  # peak in the first part of a backward, beyond ``after_forward``
    in_weight_backward: int  # peak in the second part of a backward, beyond ``after_input_backward``
    operations: LayerWork  # floating-point operations of matrix products, convolutions and attention
    experts: int = 0  # bytes of those parameters that expert parallelism shares


def measure_layer_times(
    model: nn.Module,
    config: PPModuleConfig,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: LossOf,
    *,
    device: torch.device = _CPU,
    prepare: Callable[[StageModule], object] = lambda stage: None,
    varies: Callable[[int], Any] = lambda index: None,
    parts: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelPieceResults[LayerWork]:
    """Measure the seconds of each piece for one micro-batch: medians of five runs, after two warm-up runs.

    It runs under the autocast mode of the caller. Random states are preserved.
    """
    watch = _PieceTimer(clock, device, parts)
    bench = LayerBench(model, config, args, kwargs, device, prepare, varies)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), torch.enable_grad():
        return bench.measure_each_piece(loss_of, watch.time_piece)


class _PieceTimer:
    def __init__(self, clock: Callable[[], float], device: torch.device, parts: bool) -> None:
        self._clock = clock
        self._device = device
        self._parts = parts

    def time_piece(self, piece: ModelPiece) -> LayerWork:
        runs = [self._run(piece) for _ in range(_WARM_UPS + _RUNS)][_WARM_UPS:]
        return LayerWork(*(statistics.median(column) for column in zip(*runs, strict=True)))

    def _run(self, piece: ModelPiece) -> LayerWork:
        forward, (outputs, inputs) = self._time_call(lambda: _run_piece_forward(piece))
        backward, _ = self._time_call(lambda: _run_full_backward(outputs))
        if not self._parts or not _can_split_backward(piece, inputs):
            return LayerWork(forward, backward, 0.0, backward)
        outputs, inputs = _run_piece_forward(piece)
        first, groups = self._time_call(lambda: _input_backward(piece, outputs, inputs))
        second, _ = self._time_call(lambda: _weight_backward(piece, groups))
        return LayerWork(forward, backward, first, second)

    def _time_call(self, work: Callable[[], Any]) -> tuple[float, Any]:
        begin = self._now()
        result = work()
        return self._now() - begin, result

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


def measure_footprints(
    model: nn.Module,
    config: PPModuleConfig,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_of: LossOf,
    *,
    prepare: Callable[[StageModule], object] = lambda stage: None,
    varies: Callable[[int], Any] = lambda index: None,
) -> ModelPieceResults[Footprint]:
    """Find the bytes and operations of each piece for one micro-batch, by running it on tensors without memory.

    Temporary memory within an operation is not seen. A model that reads the values of its tensors is run with values,
    on the CPU. Tensors may be on any device, including the meta device, and count as CPU tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # targets of the loss

    @contextmanager
    def fake_tensor_modes() -> Iterator[None]:
        with (
            mode,
            FalseTensorBoolMode(),
            _PadValueHeadDimMode(),
            _FakeGroupedMmMode(),
            disable_packed_sequence_detection(),
        ):
            yield

    def measure_pieces_on_cpu(
        convert: Callable[[Tensor], Tensor], context: Callable[[], AbstractContextManager[None]]
    ) -> ModelPieceResults[Footprint]:
        with context():
            converted_args, converted_kwargs = tree_map_only(Tensor, convert, (args, dict(kwargs)))
        bench = LayerBench(model, config, converted_args, converted_kwargs, _CPU, prepare, varies, context)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            return bench.measure_each_piece(loss_of, _measure_piece_footprint)

    try:
        return measure_pieces_on_cpu(_empty_cpu_like, fake_tensor_modes)
    except Exception as error:  # any exception: code may fail in any way without values
        leaves = tree_leaves((args, dict(kwargs)))
        if isinstance(error, SetupError) or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            raise
    return measure_pieces_on_cpu(Tensor.cpu, nullcontext)


def _empty_cpu_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


def _measure_piece_footprint(piece: ModelPiece) -> Footprint:
    parameters = {id(parameter): parameter for module in piece.modules for parameter in module.parameters()}.values()
    buffers = {id(buffer): buffer for module in piece.modules for buffer in module.buffers()}.values()
    for parameter in piece.stage.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    after_forward, in_forward, in_backward, output_bytes, operations = _measure_with_full_backward(piece)
    after_input_backward, in_first, in_second, first, second = after_forward, 0, in_backward, 0.0, operations[1]
    if _can_split_backward(piece, piece.inputs):
        after_input_backward, in_first, in_second, first, second = _measure_with_split_backward(piece)
    return Footprint(
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        sum(buffer.nbytes for buffer in buffers),
        output_bytes,
        after_forward,
        after_input_backward,
        in_forward,
        in_backward,
        in_first,
        in_second,
        LayerWork(*operations, first, second),
        sum(parameter.nbytes for experts in experts_of(piece.stage).values() for parameter in experts.parameters()),
    )


def _measure_with_full_backward(piece: ModelPiece) -> tuple[int, int, int, int, tuple[float, float]]:
    with _live_byte_and_flop_counters() as (live, operations):
        outputs, _ = _run_piece_forward(piece)
        forward, after_forward, in_forward = operations(), live.current, live.peak
        live.peak = live.current
        _run_full_backward(outputs)
        output_bytes = sum(output.nbytes for output in outputs)
        return after_forward, in_forward, live.peak - after_forward, output_bytes, (forward, operations() - forward)


def _measure_with_split_backward(piece: ModelPiece) -> tuple[int, int, int, float, float]:
    with _live_byte_and_flop_counters() as (live, operations):
        outputs, inputs = _run_piece_forward(piece)
        forward, after_forward, live.peak = operations(), live.current, live.current
        groups = _input_backward(piece, outputs, inputs)
        in_first, first = live.peak - after_forward, operations() - forward
        for tensor in inputs:
            tensor.grad = None  # sent gradients are counted elsewhere
        del outputs
        after_input_backward, live.peak = live.current, live.current
        _weight_backward(piece, groups)
        return after_input_backward, in_first, live.peak - after_input_backward, first, operations() - forward - first


@contextmanager
def _live_byte_and_flop_counters() -> Iterator[tuple[LiveBytes, Callable[[], float]]]:
    """Count bytes, and operations so far."""
    # Entered for forward and backward together: selective checkpointing must see the same modes in both.
    with LiveBytes() as live, _FlopCounter() as operations:
        yield live, lambda: operations.total


class _FlopCounter(TorchDispatchMode):
    """Counts as ``FlopCounterMode``, whose module hooks do not work with a backward in parts.

    Unlike it, it counts products of experts, and half of causal attention, whose kernels skip the masked half.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, packet = func(*args, **(kwargs or {})), get_overload_packet(func)
        if func is GROUPED_MM:
            rows, width = args[0].shape[-2:]
            self.total += 2 * rows * width * args[1].shape[-1]
        elif (count_flops := flop_registry.get(SAME_FLOPS_OPERATORS.get(packet, packet))) is not None:
            flops = count_flops(*args, **(kwargs or {}), out_val=output)
            names = [argument.name for argument in get_operator_schema(func).arguments]
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.total += flops / 2 if arguments.get("is_causal") is True else flops
        return output


class _PadValueHeadDimMode(TorchFunctionMode):
    """Attention whose values are narrower than its keys (DeepSeek-V3), with values padded as for flash attention.

    On a CPU, PyTorch would compute it from whole matrices of scores, which a GPU's kernels do not have.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or len(args) < 3:
            return func(*args, **(kwargs or {}))
        query, key, value, *options = args
        width = value.shape[-1]
        padded = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
        return func(query, key, padded, *options, **(kwargs or {}))[..., :width]


class _FakeGroupedMmMode(TorchDispatchMode):
    """Products of experts on fake tensors, which PyTorch refuses in float32, although it computes them on real ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not GROUPED_MM:
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        groups = (len((kwargs or {}).get("offs", args[2])),) if left.dim() == right.dim() == 2 else ()
        return left.new_empty(*groups, left.shape[-2], right.shape[-1])


# ---------------------------------------------------------------------- a piece's work, as PyTorch's stages do it


def _run_piece_forward(piece: ModelPiece) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Outputs and inputs of a forward; the inputs are leaves without gradients, as a stage receives them."""
    inputs = tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in piece.inputs
    )
    return piece.run(*inputs), inputs


def _run_full_backward(outputs: Sequence[Tensor]) -> None:
    if trained := [output for output in outputs if output.requires_grad]:
        torch.autograd.backward(trained, list(map(torch.ones_like, trained)))


def _can_split_backward(piece: ModelPiece, inputs: tuple[Any, ...]) -> bool:
    """Return True if the piece has modules and inputs that require gradients."""
    return bool(piece.modules) and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _input_backward(piece: ModelPiece, outputs: Sequence[Tensor], inputs: tuple[Any, ...]) -> list[dict[str, Any]]:
    # PyTorch detaches outputs in place; see ``TimedStage``.
    trained = [output.clone() if is_view(output) else output for output in outputs if output.requires_grad]
    gradients = list(map(torch.ones_like, trained)) if all(output.dim() for output in trained) else None
    _, groups = stage_backward_input(trained, gradients, list(inputs), piece.stage.parameters())
    return groups


def _weight_backward(piece: ModelPiece, groups: list[dict[str, Any]]) -> None:
    stage_backward_weight(piece.stage.parameters(), groups)
