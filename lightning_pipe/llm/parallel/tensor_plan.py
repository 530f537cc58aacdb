"""Plans of tensor parallelism: the modules of a model's layers that ranks share, and the style of each.

A plan comes from the model itself or from its Hugging Face config. It is checked here, before any rank shards its
stages, and applied by ``tensor_parallel``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.stage_module import PassThroughModule, is_causal_lm

TensorPlan = Mapping[str, str | ParallelStyle]

PARTIAL_GRADIENT = "partial_gradient"
# Parallel style of each word of a plan; None for modules that stay whole.
_STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicate": None,
    PARTIAL_GRADIENT: None,
}
# Words of a config's plan in transformers 5. Experts stay whole on every rank: they have no modules to cut.
_HUGGING_FACE = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "replicated_with_grad_allreduce": PARTIAL_GRADIENT,
    "moe_tp_experts": "replicate",
}
# Sharded dimension of the weight.
_CUT: dict[tuple[type[nn.Module], type[ParallelStyle]], int] = {
    (nn.Linear, ColwiseParallel): 0,
    (nn.Linear, RowwiseParallel): 1,
    (nn.Embedding, ColwiseParallel): 1,
    (nn.Embedding, RowwiseParallel): 0,
}
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads")


def derive_tensor_plan(model: nn.Module, config: PPModuleConfig) -> dict[str, str | ParallelStyle]:
    """Derive the plan from a model's ``get_tensor_parallel_plan()``, or from its Hugging Face config.

    Only the layers' entries of the config's ``base_model_tp_plan`` are used; embedding, last norm and head stay whole
    on every rank. Modules with parameters between sharded matrices, which that plan leaves out, are added as
    ``partial_gradient``.
    """
    needed = (
        "Add get_tensor_parallel_plan() to the model; it returns a dict from module names, such as"
        f" '{_make_layer_pattern(config)}.mlp.up_proj', to {', '.join(_STYLES)} or PyTorch's ParallelStyle objects"
    )
    get_plan = getattr(model, "get_tensor_parallel_plan", None)
    plan = get_plan() if callable(get_plan) else _derive_plan_from_hf_config(model, config)
    if not isinstance(plan, Mapping) or not plan:
        raise SetupError(
            f"{type(model).__name__} has no plan for tensor parallelism of its layers, got {plan!r}. {needed}"
        )
    return dict(plan)


def _derive_plan_from_hf_config(model: nn.Module, config: PPModuleConfig) -> dict[str, str | ParallelStyle]:
    words = (getattr(model.config, "base_model_tp_plan", None) if is_causal_lm(model) else None) or {}
    # The plan's names are relative to the module that holds the list of layers.
    prefix = config.layer_prefix.rpartition(".")[0]
    prefix = f"{prefix}." if prefix else ""
    plan: dict[str, str | ParallelStyle] = {
        prefix + pattern: _HUGGING_FACE.get(word, word)
        for pattern, word in words.items()
        if any(_is_in_layer(name, config) for name in _find_matching_module_names(prefix + pattern, model))
    }
    for name in _find_unsharded_modules_in_blocks(model, config, plan):
        plan.setdefault(_replace_layer_index_by_star(name, config), PARTIAL_GRADIENT)
    return plan


def resolve_parallel_styles(
    model: nn.Module, config: PPModuleConfig, plan: TensorPlan, size: int
) -> dict[str, str | ParallelStyle]:
    """Resolve a plan to the style of each module, and check it. All ranks get the same result for the unsplit model."""
    is_whole = not any(isinstance(module, PassThroughModule) for module in model.modules())
    styles: dict[str, str | ParallelStyle] = {}
    for pattern, entry in plan.items():
        style = _make_parallel_style(pattern, entry)
        names = _find_matching_module_names(pattern, model)
        if not names and is_whole:
            raise SetupError(
                f"the tensor-parallel plan names {pattern}, which {type(model).__name__} does not have; expected names"
                f" of modules in its layers. Use names such as {_format_example_module_names(model, config)},"
                " with * for any index"
            )
        for name in names:
            if style != "replicate" and not _is_in_layer(name, config):
                raise SetupError(
                    f"the tensor-parallel plan cuts {name}, which is in no layer; expected modules in"
                    f" {_make_layer_pattern(config)}. Remove it from the plan: embedding, norm and head stay whole"
                )
            if name in styles:
                raise SetupError(f"the tensor-parallel plan has two entries for {name}; expected one. Remove {pattern}")
            styles[name] = style
    for name, module_style in styles.items():
        _check_style_fits_module(name, model.get_submodule(name), module_style, size)
    _check_heads(model, styles, size)
    return styles


def _make_parallel_style(pattern: str, entry: object) -> str | ParallelStyle:
    if isinstance(entry, ParallelStyle):
        return entry
    if not isinstance(entry, str) or entry not in _STYLES:
        raise SetupError(
            f"the tensor-parallel plan has {entry!r} for {pattern}; expected one of {', '.join(_STYLES)}, or one of"
            " PyTorch's ParallelStyle objects. Return another plan from the model's get_tensor_parallel_plan()"
        )
    make_style = _STYLES[entry]
    return entry if make_style is None else make_style()


def _check_style_fits_module(name: str, module: nn.Module, style: str | ParallelStyle, size: int) -> None:
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    cut = [
        dim
        for (module_class, style_class), dim in _CUT.items()
        if isinstance(module, module_class) and isinstance(style, style_class)
    ]
    weight = getattr(module, "weight", None)
    if not cut or not isinstance(weight, Tensor):
        raise SetupError(
            f"the tensor-parallel plan has {type(style).__name__} for {name}, a {type(module).__name__}; expected an"
            " nn.Linear or nn.Embedding. Name those inside it, or remove it from the plan"
        )
    if weight.shape[cut[0]] % size:
        raise SetupError(
            f"{name} has {weight.shape[cut[0]]} {'columns' if isinstance(style, ColwiseParallel) else 'rows'}, which"
            f" {size} ranks cannot share evenly; expected a multiple of parallel.tp. Change the width or parallel.tp"
        )


def _check_heads(model: nn.Module, styles: Mapping[str, str | ParallelStyle], size: int) -> None:
    """Check that no head is cut: from a part of a head, the model's forward would infer a wrong number of heads."""
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel) or style.output_layouts != (Shard(-1),):
            continue
        owner_name = name.rpartition(".")[0]
        owner = model.get_submodule(owner_name)
        last = owner_name.rpartition(".")[2].lower()
        if "attn" not in last and "attention" not in last:
            continue
        for source in (owner, getattr(model, "config", None)):
            for key in _HEADS:
                count = getattr(source, key, None)
                if isinstance(count, int) and count % size:
                    raise SetupError(
                        f"{key} is {count}, and {name} is cut among {size} ranks; expected a multiple of parallel.tp,"
                        " so that each rank has whole heads. Change one of them"
                    )


def _find_unsharded_modules_in_blocks(model: nn.Module, config: PPModuleConfig, plan: TensorPlan) -> list[str]:
    """Modules with parameters between a ``colwise`` and a ``rowwise`` module, which see a part of the activations.

    They are the remaining modules of the smallest module that contains both.
    """
    styles = {name: word for pattern, word in plan.items() for name in _find_matching_module_names(pattern, model)}
    columns, rows = ([name for name, word in styles.items() if word == kind] for kind in ("colwise", "rowwise"))
    blocks = find_colwise_rowwise_blocks(config, columns, rows)
    return [
        name
        for name, module in model.named_modules()
        if name not in styles
        and next(module.parameters(recurse=False), None) is not None
        and any(name == block or name.startswith(f"{block}.") for block in blocks)
    ]


def find_colwise_rowwise_blocks(config: PPModuleConfig, columns: Collection[str], rows: Collection[str]) -> set[str]:
    """The smallest modules of layers that contain matrices cut by columns and by rows, such as attention."""
    blocks = set()
    for name in columns:
        block = name.rpartition(".")[0]
        while _is_in_layer(block, config) and not any(row.startswith(f"{block}.") for row in rows):
            block = block.rpartition(".")[0]
        if _is_in_layer(block, config):
            blocks.add(block)
    return blocks


def _find_matching_module_names(pattern: str, model: nn.Module) -> list[str]:
    """Names of the model's modules that match a pattern; each part between dots is matched separately."""
    parts = pattern.split(".")
    return [
        name
        for name, module in model.named_modules()
        if name
        and name.count(".") + 1 == len(parts)
        and not isinstance(module, PassThroughModule)
        and all(map(fnmatchcase, name.split("."), parts))
    ]


def _is_in_layer(name: str, config: PPModuleConfig) -> bool:
    return f"{name}.".startswith(tuple(f"{layer}." for layer in config.layer_fqns))


def _make_layer_pattern(config: PPModuleConfig) -> str:
    return f"{config.layer_prefix}.*" if config.layer_prefix else "*"


def _replace_layer_index_by_star(name: str, config: PPModuleConfig) -> str:
    return re.sub(rf"^{re.escape(_make_layer_pattern(config)[:-1])}\d+", lambda _: _make_layer_pattern(config), name)


def _format_example_module_names(model: nn.Module, config: PPModuleConfig) -> str:
    kinds = tuple({kind for kind, _ in _CUT})
    inside = [
        _replace_layer_index_by_star(name, config)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and _is_in_layer(name, config)
    ]
    return ", ".join(list(dict.fromkeys(inside))[:4])
