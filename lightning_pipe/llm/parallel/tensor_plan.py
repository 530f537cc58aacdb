"""Plans of tensor parallelism: which modules of a model's layers several ranks share, and how.

A plan is a model's own, or comes from its Hugging Face config; it is checked here, before any rank has its part, and
carried out by ``tensor_parallel``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.stage_module import PassThrough, is_causal_lm

__all__ = ["PARTIAL_GRADIENT", "TensorPlan", "derive_tensor_plan", "resolve_tensor_plan"]

TensorPlan = Mapping[str, str | ParallelStyle]

PARTIAL_GRADIENT = "partial_gradient"
# What the words of a plan do to a module; None: nothing, it stays whole.
_STYLES: dict[str, Callable[[], ParallelStyle] | None] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "replicate": None,
    PARTIAL_GRADIENT: None,
}
# The dimension of the weight that is cut.
_CUT: dict[tuple[type[nn.Module], type[ParallelStyle]], int] = {
    (nn.Linear, ColwiseParallel): 0,
    (nn.Linear, RowwiseParallel): 1,
    (nn.Embedding, ColwiseParallel): 1,
    (nn.Embedding, RowwiseParallel): 0,
}
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads")


def derive_tensor_plan(model: nn.Module, config: ModuleConfig) -> dict[str, str | ParallelStyle]:
    """How a model's layers are shared out: as its ``get_tensor_parallel_plan()`` says, or its Hugging Face config.

    Of the latter's ``base_model_tp_plan`` the entries of layers are taken; embedding, last norm and head stay whole on
    every rank. Parameters between the matrices, which that plan leaves out, are added as ``partial_gradient``.

    Args:
        model: the unsplit one; its parameters may be fake.
        config: what it is made of.

    Returns:
        A plan for :func:`~lightning_pipe.llm.parallel.tensor_parallel.parallelise_tensors`.

    Raises:
        SetupError: the model does not say, or nothing in its layers is named by what it says.
    """
    needed = (
        "needed is get_tensor_parallel_plan() on the model, which returns a dict from names of its modules, such as"
        f" '{_any_layer(config)}.mlp.up_proj', to {', '.join(_STYLES)} or PyTorch's ParallelStyle objects"
    )
    kind = type(model).__name__
    if callable(own := getattr(model, "get_tensor_parallel_plan", None)):
        given = own()
        if not isinstance(given, Mapping) or not given:
            raise SetupError(f"get_tensor_parallel_plan() of {kind} returned {given!r}; {needed}")
        return dict(given)
    words = getattr(model.config, "base_model_tp_plan", None) if is_causal_lm(model) else None
    if not words:
        raise SetupError(f"{kind} does not say how tensor parallelism cuts its layers; {needed}")
    # The plan's names are those of the module that holds the list of layers.
    prefix = config.layer_prefix.rpartition(".")[0]
    prefix = f"{prefix}." if prefix else ""
    plan: dict[str, str | ParallelStyle] = {
        prefix + pattern: word
        for pattern, word in words.items()
        if any(_is_in_layer(name, config) for name in _matches(prefix + pattern, model))
    }
    if not plan:
        raise SetupError(f"base_model_tp_plan of {kind} names none of the modules in its layers; {needed}")
    for name in _between(model, config, plan):
        plan.setdefault(_of_any_layer(name, config), PARTIAL_GRADIENT)
    return plan


def resolve_tensor_plan(
    model: nn.Module, config: ModuleConfig, plan: TensorPlan, size: int
) -> dict[str, str | ParallelStyle]:
    """What a plan says of each module, checked. Of the unsplit model, it is the same on all ranks: all raise, or none.

    Args:
        model: the unsplit one, or a stage's; its parameters may be fake.
        config: what the unsplit one is made of.
        plan: from names of the unsplit model's modules, in which ``*`` stands for a part between dots, to a word or a
            ``ParallelStyle``. For the words see
            :func:`~lightning_pipe.llm.parallel.tensor_parallel.parallelise_tensors`.
        size: number of ranks that share a layer.

    Returns:
        By the names of modules that are there: PyTorch's style, ``replicate`` or ``partial_gradient``.

    Raises:
        SetupError: an entry that names no module of the unsplit model, or one outside of the layers; a style that is
            unknown, or that the module cannot be cut by; widths, heads or key and value heads that are not divisible
            by the size.
    """
    is_whole = not any(isinstance(module, PassThrough) for module in model.modules())
    found: dict[str, str | ParallelStyle] = {}
    for pattern, given in plan.items():
        style = _style(pattern, given)
        names = _matches(pattern, model)
        if not names and is_whole:
            raise SetupError(
                f"the tensor-parallel plan names {pattern}, which {type(model).__name__} does not have; needed are"
                f" names of modules in its layers, such as {_some_names(model, config)}, with * for any index"
            )
        for name in names:
            if style != "replicate" and not _is_in_layer(name, config):
                raise SetupError(
                    f"the tensor-parallel plan cuts {name}, which is in no layer; needed are modules in"
                    f" {_any_layer(config)}: embedding, norm and head stay whole, so leave it out of the plan"
                )
            if name in found:
                raise SetupError(
                    f"the tensor-parallel plan has two entries for {name}; needed is one: remove {pattern}"
                )
            found[name] = style
    for name, module_style in found.items():
        _check_module(name, model.get_submodule(name), module_style, size)
    _check_heads(model, found, size)
    return found


def _style(pattern: str, given: object) -> str | ParallelStyle:
    if isinstance(given, ParallelStyle):
        return given
    if not isinstance(given, str) or given not in _STYLES:
        raise SetupError(
            f"the tensor-parallel plan says {given!r} for {pattern}; needed is one of {', '.join(_STYLES)}, or one of"
            " PyTorch's ParallelStyle objects: give a plan of your own as the model's get_tensor_parallel_plan()"
        )
    make = _STYLES[given]
    return given if make is None else make()


def _check_module(name: str, module: nn.Module, style: str | ParallelStyle, size: int) -> None:
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    cut = [dim for (kind, of), dim in _CUT.items() if isinstance(module, kind) and isinstance(style, of)]
    weight = getattr(module, "weight", None)
    if not cut or not isinstance(weight, Tensor):
        raise SetupError(
            f"the tensor-parallel plan says {type(style).__name__} for {name}, a {type(module).__name__}; needed is an"
            " nn.Linear or nn.Embedding: name those inside it, or leave it out of the plan"
        )
    if isinstance(weight, DTensor):
        raise SetupError(
            f"{name} is sharded already (placements {weight.placements}); needed are plain parameters: cut matrices"
            " once, before data parallelism"
        )
    if weight.shape[cut[0]] % size:
        raise SetupError(
            f"{name} has {weight.shape[cut[0]]} {'columns' if isinstance(style, ColwiseParallel) else 'rows'}, which"
            f" {size} ranks cannot share evenly; needed is a multiple of parallel.tp: change either"
        )


def _check_heads(model: nn.Module, styles: Mapping[str, str | ParallelStyle], size: int) -> None:
    """A head is never cut: the model's forward would take what a rank has of it for another number of heads."""
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
                        f"{key} is {count}, and {name} is cut among {size} ranks; needed is a multiple of"
                        " parallel.tp, so that each has whole heads: change either"
                    )


def _between(model: nn.Module, config: ModuleConfig, plan: TensorPlan) -> list[str]:
    """Modules with parameters of their own that see what a ``colwise`` module gives, before a ``rowwise`` one takes it.

    Those are, beside such a module, in the smallest module that holds both of them.
    """
    styles = {name: word for pattern, word in plan.items() for name in _matches(pattern, model)}
    blocks = set()
    for name in [name for name, word in styles.items() if word == "colwise"]:
        block = name.rpartition(".")[0]
        while _is_in_layer(block, config) and not any(
            word == "rowwise" and other.startswith(f"{block}.") for other, word in styles.items()
        ):
            block = block.rpartition(".")[0]
        if _is_in_layer(block, config):
            blocks.add(block)
    return [
        name
        for name, module in model.named_modules()
        if name not in styles
        and next(module.parameters(recurse=False), None) is not None
        and any(name == block or name.startswith(f"{block}.") for block in blocks)
    ]


def _matches(pattern: str, model: nn.Module) -> list[str]:
    """Names of the modules that are there, and that a pattern is for: each part between dots matches by itself."""
    parts = pattern.split(".")
    return [
        name
        for name, module in model.named_modules()
        if name
        and name.count(".") + 1 == len(parts)
        and not isinstance(module, PassThrough)
        and all(map(fnmatchcase, name.split("."), parts))
    ]


def _is_in_layer(name: str, config: ModuleConfig) -> bool:
    return f"{name}.".startswith(tuple(f"{layer}." for layer in config.layers))


def _any_layer(config: ModuleConfig) -> str:
    return f"{config.layer_prefix}.*" if config.layer_prefix else "*"


def _of_any_layer(name: str, config: ModuleConfig) -> str:
    return re.sub(rf"^{re.escape(_any_layer(config)[:-1])}\d+", lambda _: _any_layer(config), name)


def _some_names(model: nn.Module, config: ModuleConfig) -> str:
    kinds = tuple({kind for kind, _ in _CUT})
    inside = [
        _of_any_layer(name, config)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and _is_in_layer(name, config)
    ]
    return ", ".join(list(dict.fromkeys(inside))[:4])
