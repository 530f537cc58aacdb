"""The two ways in which ranks share sequences: how they cut them, and how attention sees the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_leaves, tree_map
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.padding import SequenceKeys
from lightning_pipe.llm.model.stage_module import base_model, is_causal_lm
from lightning_pipe.llm.parallel.context_parallel import check_sequence, cut_sequence, join_sequence
from lightning_pipe.llm.parallel.ring_attention import RingAttention
from lightning_pipe.llm.parallel.ulysses import Ulysses

__all__ = ["ContextMethod", "ContextRanks"]

ContextMethod = Literal["ulysses", "ring"]
ModelInputs = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share the sequences of the same batch.

    Attributes:
        group: of these ranks, in the order of their chunks.
        method: ``ulysses`` exchanges heads for tokens, ``ring`` sends keys and values round.
        causal_lm: the model is one of Hugging Face's, which makes masks itself of what it is given.
        leaves_masks_out: of a mask of ones it makes none.
    """

    group: dist.ProcessGroup
    method: ContextMethod = "ulysses"
    causal_lm: bool = False
    leaves_masks_out: bool = True

    @staticmethod
    def of(group: dist.ProcessGroup, method: ContextMethod, model: nn.Module) -> ContextRanks:
        """For a model, or the part of it that a rank has."""
        if not is_causal_lm(model):
            return ContextRanks(group, method)
        code = sys.modules.get(type(base_model(model)).__module__)
        # What older code makes of a mask depends on its values, which are not there where shapes are found.
        return ContextRanks(group, method, causal_lm=True, leaves_masks_out=hasattr(code, "create_causal_mask"))

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

    def check(self, micro_batch: Mapping[str, Any], keys: SequenceKeys) -> None:
        """See, before it is padded for all, that a micro-batch can be cut.

        Raises:
            InputError: it cannot (see :func:`cut_sequence`).
        """
        check_sequence(micro_batch, keys)

    def inputs(self, part: dict[str, Any], model_inputs: ModelInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments and keywords for this rank's chunk.

        A causal LM of Hugging Face's gets the chunk's ``position_ids``, asked for or not, and a mask that masks
        nothing, or none, but for a square one: it repeats heads of keys where it has to make a mask, and ranks whose
        chunks differ in that would send each other tensors of several sizes. Who attends to whom is not its to say.

        Args:
            part: of :meth:`cut`.
            model_inputs: gives the model's arguments and keywords for a micro-batch.

        Raises:
            InputError: another model is not given the positions, and would count from 0 in every chunk.
        """
        positions, watched = part["position_ids"], _Watched(part)
        given = model_inputs(watched)
        # Where it hands on the micro-batch itself, it hands on a plain one.
        arguments, keywords = tree_map(lambda one: dict(one) if isinstance(one, _Watched) else one, given)
        if self.causal_lm:
            keywords = {"position_ids": positions} | keywords
            mask = keywords.get("attention_mask")
            if not isinstance(mask, Tensor) or mask.ndim != 4:
                keywords["attention_mask"] = (
                    torch.ones_like(positions, dtype=torch.bool) if self.leaves_masks_out else None
                )
        elif not (watched.positions_seen or any(one is positions for one in tree_leaves((arguments, keywords)))):
            raise InputError(
                f"with parallel.cp={self.size} a rank has a part of each sequence, and model_inputs does not"
                " look at the micro-batch's 'position_ids', so that the model cannot know which; needed is a model"
                " that takes positions from its inputs, and a model_inputs that hands them on"
            )
        return arguments, keywords

    def join(self, part: Tensor) -> Tensor:
        """Of this rank's (rows, length / size, ...) and the others' the whole; see :func:`join_sequence`."""
        return join_sequence(part, self.group, balanced=self.method == "ring")


class _Watched(dict[str, Any]):
    """A micro-batch that knows whether anybody has asked for its positions."""

    positions_seen = False

    def __getitem__(self, key: str) -> Any:
        self.positions_seen |= key == "position_ids"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.positions_seen |= key == "position_ids"
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.positions_seen |= key == "position_ids"
        return super().pop(key, *default)
