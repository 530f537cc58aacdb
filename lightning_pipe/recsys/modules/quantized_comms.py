"""Precision of embeddings and their gradients between ranks: numbers of 32, 16 or 8 bits.

    lookup ──► encode ──► output dist ──► decode ──► dense part          forward
    kernel ◄── decode ◄── output dist's backward ◄── encode ◄──          backward

TorchRec's output dists take the encoding as codecs, one for each of their collectives. Tables, optimizers and the dense
part are not affected. FBGEMM's codecs are used with two differences. In int8, the number of values that share a scale
fits the tables, while FBGEMM's codec uses 32 values even if they do not divide the data. The loss scale is divided out
in 32 bits, while FBGEMM does so in the 16 bits whose underflow the scale is meant to prevent. TorchRec's own registry
would also replace bf16 by fp16 on CPU, although Gloo supports bf16 now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import (
    CommOp,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingPlan,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from lightning_pipe._compat.torchrec import get_output_group_and_codecs
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_choice
from lightning_pipe.recsys.modules.row_means import ROW_SHARDED_TYPES
from lightning_pipe.recsys.modules.tables import Table

PRECISIONS = {
    "fp32": SparseType.FP32,
    "fp16": SparseType.FP16,
    "bf16": SparseType.BF16,
    "int8": SparseType.INT8,
}
# Formats with a scale per row, whose codes cannot be added.
SCALED_BY_ROW = ("int8",)
_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class QuantizedComms:
    """Precision of embeddings in the forward and of their gradients in the backward.

    Args:
        forward: precision of embeddings: ``fp32`` (default), ``fp16``, ``bf16`` or ``int8``.
        backward: precision of their gradients, with the same choices.
        forward_loss_scale: factor that multiplies embeddings before they are encoded, and is divided out afterwards
            (default None).
        backward_loss_scale: the same for gradients. Without it, gradients below 6e-8 become 0 in fp16; in int8, those
            below 1e-8 or far below the largest of their row.

    Raises:
        SetupError: a precision is unknown, or a number is not positive.
    """

    forward: str = "fp32"
    backward: str = "fp32"
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None

    def __post_init__(self) -> None:
        for way, precision, scale in (
            ("forward", self.forward, self.forward_loss_scale),
            ("backward", self.backward, self.backward_loss_scale),
        ):
            check_choice(f"{way} of quantized_comms", precision, tuple(PRECISIONS))
            if scale is None:
                continue
            if not 0 < scale <= _LARGEST:
                raise SetupError(
                    f"{way}_loss_scale of quantized_comms must be a positive number of 32 bits, got {scale!r}. Set it"
                    " to 1024.0, for example."
                )

    @property
    def quantizes(self) -> bool:
        """True if anything is sent in less than 32 bits."""
        return (self.forward, self.backward) != ("fp32", "fp32")

    @property
    def row_scaled_precision(self) -> str | None:
        """The format whose codes cannot be added, because it has a scale per row; None if both can be."""
        return next((precision for precision in (self.forward, self.backward) if precision in SCALED_BY_ROW), None)

    def supported_sharding_types(self, sharding_types: Sequence[str], *, pooled: bool) -> list[str]:
        """Return the sharding types that a table can have with these precisions."""
        # ROW_SHARDED_TYPES add up parts of a pooled embedding on the way. Codes with a scale per row cannot be added.
        return [
            kind for kind in sharding_types if not (pooled and self.row_scaled_precision and kind in ROW_SHARDED_TYPES)
        ]

    def check_sharding_types(self, where: str, sharding_types: Sequence[str] | None, table: Table) -> None:
        """Raise SetupError if a table's embeddings cannot be sent under one of its sharding types."""
        types = list(sharding_types or ())
        if types and not self.supported_sharding_types(
            types, pooled=not issubclass(table.module_type, EmbeddingCollection)
        ):
            fix = "" if table.is_dynamic else ", or shard the table table_wise or column_wise"
            raise SetupError(
                f"{where} names {', '.join(types)} for table {table.name}, which adds up parts of a pooled embedding"
                f" between ranks, but quantized_comms has forward={self.forward!r} and backward={self.backward!r}, and"
                f" {self.row_scaled_precision} does not support that. Use fp16 or bf16{fix}."
            )

    def check_sharding_plan(self, plan: ShardingPlan, tables: Sequence[Table]) -> None:
        """Raise SetupError for a table that cannot be sent as planned, on every rank that has the same plan."""
        for table in tables:
            module_plan = plan.get_plan_for_module(table.module_name)
            assert isinstance(module_plan, EmbeddingModuleShardingPlan)
            where = f"the sharding plan of table {table.name}"
            self.check_sharding_types(where, [module_plan[table.config.name].sharding_type], table)

    def registry(
        self, sharding: Mapping[str, ParameterSharding] | None = None
    ) -> dict[str, QuantizedCommCodecs] | None:
        """Return the codecs for a module's sharding, or those that the planner reads; None if nothing is quantized."""
        if not self.quantizes:
            return None
        shards = (
            shard for parameter in (sharding or {}).values() for shard in getattr(parameter.sharding_spec, "shards", ())
        )
        # In int8, values that share a scale. Their number divides the size of any data that the module exchanges.
        row = math.gcd(*(int(shard.shard_sizes[1]) for shard in shards)) or 1
        codecs = QuantizedCommCodecs(
            forward=_LossScaledCommCodec(PRECISIONS[self.forward], self.forward_loss_scale, row),
            backward=_LossScaledCommCodec(PRECISIONS[self.backward], self.backward_loss_scale, row),
        )
        return {op.name: codecs for op in _OPS}


def has_own_codecs(all_to_all: Any) -> bool:
    """Return True if an all-to-all of TorchRec sends without codecs or with those of this module."""
    _, codecs = get_output_group_and_codecs(all_to_all)
    return codecs is None or isinstance(codecs.forward, _LossScaledCommCodec)


class _LossScaledCommCodec(QuantizedCommCodec):
    """FBGEMM's codec of one direction."""

    def __init__(self, precision: SparseType, scale: float | None, row: int) -> None:
        super().__init__(precision)
        self._scale = scale
        self._row = row

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        values = input_tensor if self._scale is None else input_tensor * self._scale
        encoded: torch.Tensor = super().encode(values.contiguous(), ctx)
        return encoded

    def decode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        decoded: torch.Tensor = super().decode(input_tensor, ctx)
        return decoded if self._scale is None else decoded / self._scale

    def create_context(self) -> QuantizationContext:
        return QuantizationContext(self._row)
