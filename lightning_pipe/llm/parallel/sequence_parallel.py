"""Sequence parallelism: outside the blocks that tensor-parallel ranks share, each rank has a part of the tokens.

A block is the smallest module with matrices cut by columns and by rows, such as attention. Its input is gathered, and
the ranks' partial sums are added and divided in one exchange. Norms, dropout and sums between blocks run on the part::

    stage's input ──► part ──► norm ──► gather ──► block ──► reduce-scatter ──► part ──► gather ──► stage's output
    (all tokens)              (part)            (all tokens)                                     (all tokens)

Parameters outside blocks get partial gradients, which ``TensorParallelGradients`` sums.

Source: Megatron-LM (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.hf_experts import has_routers
from lightning_pipe.llm.model.module_config import PPModuleConfig, is_inside
from lightning_pipe.llm.model.slots import PassThroughModule
from lightning_pipe.llm.parallel.tensor_plan import TensorPlan, find_colwise_rowwise_blocks

TOKEN_SHARD = Shard(1)  # dimension of the tokens in hidden states
_WHOLE = Replicate()

Styles = Mapping[str, str | ParallelStyle]


def check_sequence_parallel(model: nn.Module, config: PPModuleConfig, plan: TensorPlan, styles: Styles) -> None:
    """Check that a model works on parts of the tokens outside its blocks."""
    reason, style_objects = None, [name for name, style in plan.items() if isinstance(style, ParallelStyle)]
    blocks = _find_tensor_parallel_blocks(model, config, styles)
    unsupported = {
        name
        for name, module in find_sequence_parallel_modules(model, config, styles).items()
        if not _is_norm(name, module, config)
    }
    if has_routers(model):
        reason = "has a mixture of experts, whose routers need all tokens"
    elif config.layer_outputs > 1:
        reason = f"has layers that return {config.layer_outputs} tensors; expected one"
    elif style_objects:
        reason = (
            f"has a plan with ParallelStyle objects for {', '.join(style_objects)}; expected words such as 'colwise'"
        )
    elif unsupported or blocks & set(config.layer_fqns):
        names = ", ".join(sorted({*unsupported, *(blocks & set(config.layer_fqns))})[:3])
        reason = (
            f"has {names} in its layers; expected only norms next to modules that contain a 'colwise' and a 'rowwise'"
            " matrix each, such as attention and feed-forward"
        )
    if reason is not None:
        raise SetupError(
            f"parallel.sequence_parallel is true, but {type(model).__name__} {reason}. Set it to false, or change the"
            " model"
        )


def find_sequence_parallel_modules(model: nn.Module, config: PPModuleConfig, styles: Styles) -> dict[str, nn.Module]:
    """Modules of the layers with own parameters that see a part of the tokens, by name."""
    blocks, layers = _find_tensor_parallel_blocks(model, config, styles), set(config.layer_fqns)
    return {
        name: module
        for name, module in model.named_modules()
        if is_inside(f"{name}.", layers)
        and not is_inside(f"{name}.", blocks)
        and next(module.parameters(recurse=False), None) is not None
    }


def apply_sequence_parallel(model: nn.Module, config: PPModuleConfig, mesh: DeviceMesh, styles: Styles) -> None:
    """Let the layers of a stage work on this rank's part of the tokens, in place; the stage takes and returns all.

    Call it before the plan's styles are applied, with ``rowwise`` matrices that return the dimension ``TOKEN_SHARD``
    cut.
    """

    def make_redistribute_fn(source: Placement, target: Placement, gradient: Placement) -> Callable[[Tensor], Tensor]:
        return lambda tensor: (
            DTensor.from_local(tensor, mesh, [source])
            .redistribute(placements=[target])
            .to_local(grad_placements=[gradient])
        )

    def keep_input_gradient_partial(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # The gradient of a block's input is summed where it leaves the block, once for all its matrices.
        return DTensor.from_local(args[0], mesh, [_WHOLE], grad_placements=[Partial()]), *args[1:]

    stage_layers = [
        layer for layer in map(model.get_submodule, config.layer_fqns) if not isinstance(layer, PassThroughModule)
    ]
    if stage_layers:
        _register_input_transform_hook(stage_layers[0], make_redistribute_fn(_WHOLE, TOKEN_SHARD, TOKEN_SHARD))
        _register_output_transform_hook(stage_layers[-1], make_redistribute_fn(TOKEN_SHARD, _WHOLE, _WHOLE))
    for name in _find_tensor_parallel_blocks(model, config, styles):
        _register_input_transform_hook(model.get_submodule(name), make_redistribute_fn(TOKEN_SHARD, _WHOLE, Partial()))
    for name, style in styles.items():
        if isinstance(style, ColwiseParallel):
            model.get_submodule(name).register_forward_pre_hook(keep_input_gradient_partial)


def _find_tensor_parallel_blocks(model: nn.Module, config: PPModuleConfig, styles: Styles) -> set[str]:
    columns, rows = (
        [name for name, style in styles.items() if isinstance(style, style_class)]
        for style_class in (ColwiseParallel, RowwiseParallel)
    )
    return find_colwise_rowwise_blocks(config, columns, rows)


def _is_norm(name: str, module: nn.Module, config: PPModuleConfig) -> bool:
    is_near = name in config.layer_fqns or name.rpartition(".")[0] in config.layer_fqns
    return is_near and all(parameter.dim() < 2 for parameter in module.parameters(recurse=False))


def _register_input_transform_hook(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first argument of a module, which is its hidden states."""

    def change_first_argument(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: change(kwargs[first])}

    module.register_forward_pre_hook(change_first_argument, with_kwargs=True)


def _register_output_transform_hook(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    def change_first_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(change_first_output)
