"""The two methods of context parallelism: cutting the sequences, and attention over whole sequences."""

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
from lightning_pipe.llm.batches.padding import PadValues
from lightning_pipe.llm.model.stage_module import get_hf_base_model, is_causal_lm
from lightning_pipe.llm.parallel.ring_attention import RingAttention
from lightning_pipe.llm.parallel.sequence_chunks import gather_sequence_without_grad, shard_micro_batch
from lightning_pipe.llm.parallel.ulysses import UlyssesAttention

ContextMethod = Literal["ulysses", "ring"]
ModelInputs = Callable[[Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class ContextParallelGroup:
    """The ranks that share the sequences of one batch."""

    group: dist.ProcessGroup
    method: ContextMethod = "ulysses"
    causal_lm: bool = False
    model_ignores_ones_mask: bool = True

    @staticmethod
    def from_model(group: dist.ProcessGroup, method: ContextMethod, model: nn.Module) -> ContextParallelGroup:
        """Build it for a model, or for the part of it that a rank holds."""
        if not is_causal_lm(model):
            return ContextParallelGroup(group, method)
        code = sys.modules.get(type(get_hf_base_model(model)).__module__)
        # Older code branches on the values of the mask, and shapes are inferred without values.
        return ContextParallelGroup(
            group, method, causal_lm=True, model_ignores_ones_mask=hasattr(code, "create_causal_mask")
        )

    @property
    def size(self) -> int:
        return self.group.size()

    def shard(
        self, micro_batch: Mapping[str, Any], keys: PadValues, on_host: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Callable[[], AbstractContextManager[Any]]]:
        """This rank's chunk of a padded micro-batch, and the context for its forwards."""
        ring = self.method == "ring"
        rank = self.group.rank()
        part, attention = shard_micro_batch(micro_batch, rank, self.size, keys, balanced=ring, on_host=on_host)
        return part, partial(RingAttention if ring else UlyssesAttention, self.group, attention)

    def build_model_inputs(
        self, part: dict[str, Any], model_inputs: ModelInputs
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments and keywords for this rank's chunk.

        A Hugging Face causal LM always gets the chunk's ``position_ids``. Unless the mask is square, it gets a mask of
        ones or no mask: a model that builds a mask repeats the heads of keys, and ranks that differ in this would send
        each other tensors of different shapes. The attention pattern comes from the batch, not from the model.
        """
        positions, watched = part["position_ids"], _ReadTrackingMicroBatch(part)
        inputs = model_inputs(watched)
        # If it passes the micro-batch itself to the model, pass a plain dict.
        arguments, keywords = tree_map(
            lambda value: dict(value) if isinstance(value, _ReadTrackingMicroBatch) else value, inputs
        )
        if self.causal_lm:
            keywords = {"position_ids": positions} | keywords
            mask = keywords.get("attention_mask")
            if not isinstance(mask, Tensor) or mask.ndim != 4:
                keywords["attention_mask"] = (
                    torch.ones_like(positions, dtype=torch.bool) if self.model_ignores_ones_mask else None
                )
        elif not (watched.positions_seen or any(leaf is positions for leaf in tree_leaves((arguments, keywords)))):
            raise InputError(
                f"with parallel.cp={self.size} a rank holds a part of each sequence, and model_inputs does not"
                " read the micro-batch's 'position_ids', so that the model cannot know which part; expected a model"
                " that takes positions as input. Pass micro_batch['position_ids'] to the model in model_inputs"
            )
        return arguments, keywords

    def gather(self, part: Tensor) -> Tensor:
        """Whole outputs from the ranks' parts of (rows, length / size, ...)."""
        return gather_sequence_without_grad(part, self.group, balanced=self.method == "ring")


class _ReadTrackingMicroBatch(dict[str, Any]):
    """A micro-batch that records if its positions are read."""

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
