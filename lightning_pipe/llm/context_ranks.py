"""The two ways in which ranks share sequences: how they cut them, and how attention sees the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_pipe.engine.errors import InputError
from lightning_pipe.llm.context_parallel import cut_sequence, join_sequence
from lightning_pipe.llm.padding import SequenceKeys
from lightning_pipe.llm.ring_attention import RingAttention
from lightning_pipe.llm.ulysses import Ulysses

__all__ = ["ContextMethod", "ContextRanks", "length_multiple"]

ContextMethod = Literal["ulysses", "ring"]
ModelInputs = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def length_multiple(size: int, method: ContextMethod) -> int:
    """What the length of a sequence is a multiple of, so that ``size`` ranks can share it."""
    return 2 * size if method == "ring" and size > 1 else size


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share the sequences of the same batch.

    Attributes:
        group: of these ranks, in the order of their chunks.
        method: ``ulysses`` exchanges heads for tokens, ``ring`` sends keys and values round.
        causal_lm: the model is one of Hugging Face's, which makes masks itself of what it is given.
    """

    group: dist.ProcessGroup
    method: ContextMethod = "ulysses"
    causal_lm: bool = False

    @property
    def size(self) -> int:
        return self.group.size()

    def cut(
        self, micro_batch: Mapping[str, Any], keys: SequenceKeys
    ) -> tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]:
        """This rank's chunk of a padded micro-batch, and what its forwards run within; see :func:`cut_sequence`."""
        ring = self.method == "ring"
        part, attention = cut_sequence(micro_batch, self.group.rank(), self.size, keys, balanced=ring)
        return part, partial(RingAttention if ring else Ulysses, self.group, attention)

    def inputs(self, part: dict[str, Any], model_inputs: ModelInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments and keywords for this rank's chunk.

        A causal LM of Hugging Face's gets the chunk's ``position_ids``, asked for or not, and a mask that masks
        nothing, but for a square one: it repeats heads of keys where it has to make a mask, and ranks whose chunks
        differ in that would send each other tensors of several sizes. Who attends to whom is not the mask's to say.

        Args:
            part: of :meth:`cut`.
            model_inputs: gives the model's arguments and keywords for a micro-batch.

        Raises:
            InputError: another model is not given the positions, and would count from 0 in every chunk.
        """
        watched = _Watched(part)
        arguments, keywords = model_inputs(watched)
        positions = part["position_ids"]
        if self.causal_lm:
            keywords = {"position_ids": positions} | keywords
            mask = keywords.get("attention_mask")
            if not isinstance(mask, Tensor) or mask.ndim != 4:
                keywords["attention_mask"] = torch.ones_like(positions, dtype=torch.bool)
            return arguments, keywords
        given = {id(one) for one in tree_leaves((arguments, keywords))}
        if not watched.positions_seen and given.isdisjoint((id(positions), id(watched))):
            raise InputError(
                f"with context_parallel_size={self.size} a rank has a part of each sequence, and model_inputs does not"
                " look at the micro-batch's 'position_ids', so that the model cannot know which; needed is a model"
                " that takes positions from its inputs, and a model_inputs that hands them on"
            )
        return arguments, keywords

    def join(self, part: Tensor) -> Tensor:
        """Of this rank's (rows, length / size, ...) and the others' the whole; see :func:`join_sequence`."""
        return join_sequence(part, self.group, balanced=self.method == "ring")


class _Watched(dict[str, Any]):
    """A micro-batch that knows whether anybody has looked at its positions, or gone through all it has."""

    positions_seen = False

    def __getitem__(self, key: str) -> Any:
        self.positions_seen |= key == "position_ids"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.positions_seen |= key == "position_ids"
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self.positions_seen = True
        return super().__iter__()

    def items(self) -> Any:
        self.positions_seen = True
        return super().items()

    def values(self) -> Any:
        self.positions_seen = True
        return super().values()
