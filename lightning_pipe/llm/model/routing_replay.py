"""Replay of a mixture's choices of experts, which were recorded in an earlier forward or come with the batch.

In reinforcement learning an inference engine has chosen the experts of each token. Training in other arithmetic would
choose some others, so its forward takes the engine's choices ("rollout routing replay", R3, arXiv 2510.11370). The
weights of the chosen experts are computed from the trained router, and it gets their gradients::

    router ──► scores ──► topk ──► choices, recorded or replayed ──► scores of these experts ──► experts

Recomputed layers replay the choices of their forward (:class:`LayerRouting`): kernels that are not deterministic could
choose others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipe._compat.torch import function_mode_stack
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.model.hf_experts import experts_of

ROUTED_EXPERTS = "routed_experts"
"""Key of the batch for choices of experts."""


@dataclass(frozen=True)
class MoEBlockInfo:
    """A mixture of experts in a layer.

    Attributes:
        name: name of the module.
        layer: number of its layer in the whole model.
        experts: number of experts.
        top_k: number of experts of a token; None if the module does not have it.
        tokens: rows and length of its input; empty outside of a forward.
    """

    name: str
    layer: int
    experts: int
    top_k: int | None = None
    tokens: tuple[int, ...] = ()


class RoutingReplay(TorchFunctionMode):
    """Choices of experts of one micro-batch, replayed in each forward within it; a layer without choices records them.

    Layers are numbered as in the whole model, and each calls one mixture once. A micro-batch may hold an object of this
    class under the key ``routed_experts``, in place of the tensor: a first forward records on each rank the choices of
    the rank's layers, and later ones replay them.
    """

    def __init__(self, choices: Tensor | None = None) -> None:
        super().__init__()
        self._choices = choices
        self._recorded: dict[int, Tensor] = {}
        self._block: MoEBlockInfo | None = None
        self._used = False
        # Layers of the current forward. None in a recomputation, which restores modes without entering them.
        self._seen: set[int] | None = None

    def __enter__(self) -> Self:
        self._seen = set()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._seen = None
        super().__exit__(*error)

    @property
    def recorded_choices(self) -> Mapping[int, Tensor]:
        """Recorded choices by layer: (rows, length, k) of this rank's part of the sequences."""
        return self._recorded

    @contextmanager
    def moe_block_context(self, block: MoEBlockInfo) -> Iterator[None]:
        """Take a ``topk`` over the block's experts for its choice."""
        if self._seen is not None:
            if block.layer in self._seen:
                raise InputError(
                    f"{block.name} is not the first call of a mixture in its layer, and choices can be recorded or"
                    " replayed for one call in each layer. Give each mixture its own layer, or leave"
                    f" {ROUTED_EXPERTS!r} out of the batch"
                )
            self._seen.add(block.layer)
        self._block, self._used = block, False
        try:
            yield
        finally:
            self._block = None
        if not self._used:
            raise InputError(
                f"{block.name} does not choose its experts by a topk over their scores, so its choices cannot be"
                f" recorded or replayed; expected a router that does. Leave {ROUTED_EXPERTS!r} out of the batch"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        block = self._block
        keywords = dict(kwargs or {})
        if block is None or func not in (torch.topk, Tensor.topk):
            return func(*args, **keywords)
        return self._choose(block, *(args or (keywords.pop("input"),)), **keywords)

    def _choose(self, block: MoEBlockInfo, scores: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        if scores.ndim != 2 or dim not in (-1, 1) or scores.shape[1] != block.experts:
            return torch.topk(self._make_group_scores_for_replay(block, scores), k, dim, *args, **kwargs)
        self._used = True
        expected = (*(block.tokens or scores.shape[:1]), k)
        key = self._get_record_key(block)
        chosen = self._recorded.get(key) if self._choices is None else self._choices[:, :, block.layer]
        if chosen is None:
            chosen = torch.topk(scores.detach(), k, dim, *args, **kwargs).indices
            self._recorded[key] = chosen.view(expected)
        elif tuple(chosen.shape) != expected:
            raise InputError(
                f"the choices of experts for {block.name} have the shape {tuple(chosen.shape)}; expected {expected}:"
                " rows, padded length, and experts of each token. Give choices for these tokens, or pad the micro-batch"
                " as in the forward that recorded them"
            )
        # By gather in all cases, so that a forward and its recomputation save the same tensors, and by a copy, since
        # tensors of inference mode cannot be saved for a backward.
        chosen = chosen.reshape(-1, k).to(torch.long, copy=True)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    def _make_group_scores_for_replay(self, block: MoEBlockInfo, scores: Tensor) -> Tensor:
        """Scores by which a router that limits its choice to groups of experts takes those of the replayed experts.

        DeepSeek-V2's gives experts of other groups the weight 0.
        """
        choices = self._recorded.get(block.layer) if self._choices is None else self._choices[:, :, block.layer]
        if choices is None or choices.shape[:-1] != block.tokens or scores.ndim != 2 or block.experts % scores.shape[1]:
            return scores
        groups = choices.reshape(len(scores), -1).long() // (block.experts // scores.shape[1])
        return torch.zeros_like(scores).scatter_add(1, groups, torch.ones_like(groups, dtype=scores.dtype))

    def _get_record_key(self, block: MoEBlockInfo) -> int:
        return block.layer


class LayerRouting(RoutingReplay):
    """Choices of one forward of a layer, in their order, which are replayed when it is entered again.

    Enter it around the forward and around its recomputation. A layer may have any mixtures; those whose choices cannot
    be recorded choose again.
    """

    _count = 0

    def __enter__(self) -> Self:
        self._count = 0
        return super().__enter__()

    @contextmanager
    def moe_block_context(self, block: MoEBlockInfo) -> Iterator[None]:
        self._block = replace(block, tokens=())
        try:
            yield
        finally:
            self._block = None

    def _get_record_key(self, block: MoEBlockInfo) -> int:
        self._count += 1
        return self._count


def find_moe_blocks(model: nn.Module, layers: Sequence[str]) -> list[MoEBlockInfo]:
    """Mixtures of a model, or of a stage's module, in the whole model's layers of these names."""
    mixtures = []
    for name, experts in experts_of(model).items():
        path = name.rpartition(".")[0]
        block: Any = model.get_submodule(path)
        number = len(experts) if isinstance(experts, nn.ModuleList) else len(next(experts.parameters(), ()))
        sizes = [getattr(module, "top_k", None) for module in (block, *block.children())]
        top_k = next((size for size in sizes if isinstance(size, int)), None)
        places = [layer for layer, prefix in enumerate(layers) if f"{path}.".startswith(f"{prefix}.")]
        mixtures += [MoEBlockInfo(path, layer, number, top_k) for layer in places]
    return mixtures


def install_moe_block_tracking(model: nn.Module, layers: Sequence[str]) -> list[MoEBlockInfo]:
    """Let :class:`RoutingReplay` know which mixture runs, and return the mixtures as :func:`find_moe_blocks`.

    Call it before layers are checkpointed.
    """
    mixtures = find_moe_blocks(model, layers)
    for mixture in mixtures:
        block: Any = model.get_submodule(mixture.name)
        # Not by hooks, which a layer that is a mixture itself would not run when it is recomputed.
        block.forward = partial(
            _forward_with_routing_replay, block.forward, mixture, model.get_submodule(layers[mixture.layer])
        )
    return mixtures


def check_routed_experts(
    micro_batch: Mapping[str, Any], mixtures: Sequence[MoEBlockInfo], size: tuple[int, int]
) -> None:
    """Check that a model can replay a micro-batch's choices of experts, if it has any."""
    choices = micro_batch.get(ROUTED_EXPERTS)
    if choices is None:
        return
    if not mixtures:
        raise InputError(
            f"the batch has {ROUTED_EXPERTS!r}, but no layer of the model can replay choices of experts; expected a"
            " mixture of experts in the layers, which are neither compiled nor traced. Leave the key out of the batch"
        )
    if isinstance(choices, RoutingReplay):
        return
    layers, sizes = max(mixture.layer for mixture in mixtures) + 1, {mixture.top_k for mixture in mixtures} - {None}
    if not isinstance(choices, Tensor) or choices.is_floating_point():
        description = f"{choices.dtype}" if isinstance(choices, Tensor) else f"a {type(choices).__name__}"
    elif choices.ndim == 4 and choices.shape[:2] == size and choices.shape[2] >= layers and sizes <= {choices.shape[3]}:
        _check_expert_indices(choices, mixtures)
        return
    else:
        description = f"the shape {tuple(choices.shape)}"
    chosen = " or ".join(map(str, sorted(filter(None, sizes)))) or "experts of a token"
    raise InputError(
        f"the batch's {ROUTED_EXPERTS!r} has {description}; expected integers of (rows, length, layers, experts of a"
        f" token), here ({size[0]}, {size[1]}, at least {layers}, {chosen})"
    )


def check_replays_not_shared(micro_batches: Sequence[Mapping[str, Any]]) -> None:
    """Check that micro-batches do not share an object that holds the choices of one."""
    replay_ids = [
        id(item[ROUTED_EXPERTS]) for item in micro_batches if isinstance(item.get(ROUTED_EXPERTS), RoutingReplay)
    ]
    if len(set(replay_ids)) < len(replay_ids):
        raise InputError(
            f"{len(replay_ids)} micro-batches have the same RoutingReplay as their {ROUTED_EXPERTS!r}; expected one for"
            " each micro-batch. Make the batch a list of micro-batches, each with its own RoutingReplay()"
        )


def _check_expert_indices(choices: Tensor, mixtures: Sequence[MoEBlockInfo]) -> None:
    used = choices[:, :, [mixture.layer for mixture in mixtures]].long()
    for mixture, low, high in zip(mixtures, used.amin((0, 1, 3)).tolist(), used.amax((0, 1, 3)).tolist(), strict=True):
        if low < 0 or high >= mixture.experts:
            raise InputError(
                f"the batch's {ROUTED_EXPERTS!r} has the experts {low} to {high} for {mixture.name}; expected numbers"
                f" from 0 to {mixture.experts - 1}"
            )


def current_routing() -> RoutingReplay | None:
    """The innermost active recorder or replay."""
    return next((mode for mode in reversed(function_mode_stack()) if isinstance(mode, RoutingReplay)), None)


def pop_routed_experts_from_batch(
    micro_batch: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[Callable[[], RoutingReplay], ...]]:
    """A micro-batch without its choices of experts, and factories of the context that replays them, if it has any."""
    inputs = dict(micro_batch)
    choices = inputs.pop(ROUTED_EXPERTS, None)
    if choices is None:
        return inputs, ()
    replay = choices if isinstance(choices, RoutingReplay) else RoutingReplay(choices)
    return inputs, (lambda: replay,)


def _forward_with_routing_replay(
    forward: Callable[..., Any], block: MoEBlockInfo, layer: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    replay = current_routing()
    if replay is None:
        return forward(*args, **kwargs)
    if getattr(layer, "gradient_checkpointing", False) and layer.training and not isinstance(replay, LayerRouting):
        raise InputError(
            f"the batch has {ROUTED_EXPERTS!r}, and activation_checkpointing_enable() was called on the model, which"
            " recomputes layers without these choices. Use the strategy's activation_checkpoint instead, or leave"
            f" {ROUTED_EXPERTS!r} out of the batch"
        )
    tokens = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).shape[:-1]
    with replay.moe_block_context(replace(block, tokens=tuple(tokens))):
        return forward(*args, **kwargs)
