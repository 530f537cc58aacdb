"""What embeddings, and their gradients, are on their way between ranks: numbers of 32, 16 or 8 bits.

    lookup ──► encode ──► output dist ──► decode ──► dense part          forward
    kernel ◄── decode ◄── output dist's backward ◄── encode ◄──          backward

TorchRec's output dists take the encoding as codecs, one for each of their collectives. The tables, the optimisers and
the dense part know nothing of it. FBGEMM's codecs are used with two differences: the row that shares a scale in int8
fits the tables, where FBGEMM's has 32 values whether a batch can be cut into them or not; and the loss scale is taken
out in 32 bits, where FBGEMM does so in the 16 that the scale was to save from underflow. TorchRec's own registry would
also put fp16 in the place of bf16 on CPU, which Gloo has learnt since.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import (
    CommOp,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection
from lightning_pipe.recsys.modules.tables import Table

__all__ = ["PRECISIONS", "QuantizedComms"]

PRECISIONS = {
    "fp32": SparseType.FP32,
    "fp16": SparseType.FP16,
    "bf16": SparseType.BF16,
    "int8": SparseType.INT8,
}
_OPS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)
# Parts of a pooled embedding are added up on their way; int8 has a scale for each row, and codes that do not add up.
_ADDED_UP = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}
_LARGEST = torch.finfo(torch.float32).max
_ADVICE = "for example {'forward': 'bf16', 'backward': 'fp16'}"


@dataclass(frozen=True)
class QuantizedComms:
    """How embeddings travel forward, and their gradients backward.

    Args:
        forward: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        backward: the same.
        forward_loss_scale: what embeddings are multiplied by before they are encoded, and divided by after.
        backward_loss_scale: what gradients are. Those below 6e-8 are nothing in fp16, and in int8 those far below the
            greatest of their row or below 1e-8.
        int8_row_dim: how many values next to each other share a scale and an offset, which take 8 bytes. It must divide
            the widths of all shards of a module's tables; their greatest common divisor where none is given.

    Raises:
        SetupError: another precision, a scale that is no positive number, or one that nothing uses.
    """

    forward: str = "fp32"
    backward: str = "fp32"
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    int8_row_dim: int | None = None

    @classmethod
    def from_config(cls, config: QuantizedComms | Mapping[str, Any] | None) -> QuantizedComms:
        """Reads ``{"forward": "bf16", "backward": "fp16"}``, as YAML gives it; None quantises nothing.

        Raises:
            SetupError: another key, or what the class raises.
        """
        if isinstance(config, QuantizedComms):
            return config
        if config is not None and not isinstance(config, Mapping):
            raise SetupError(f"quantized_comms is {config!r}; needed is a mapping, {_ADVICE}")
        given = dict(config or {})
        allowed = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(str(key) for key in given if key not in allowed):
            raise SetupError(
                f"quantized_comms has the unknown key {', '.join(unknown)}; allowed are {', '.join(allowed)}"
            )
        return cls(**given)

    def __post_init__(self) -> None:
        for way, precision, scale in (
            ("forward", self.forward, self.forward_loss_scale),
            ("backward", self.backward, self.backward_loss_scale),
        ):
            if not isinstance(precision, str) or precision not in PRECISIONS:
                raise SetupError(
                    f"quantized_comms has {way}={precision!r}; needed is one of {', '.join(PRECISIONS)}, {_ADVICE}"
                )
            if scale is None:
                continue
            if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= _LARGEST:
                raise SetupError(
                    f"quantized_comms has {way}_loss_scale={scale!r}; needed is a positive number of 32 bits, for"
                    " example 1024.0"
                )
            if precision == "fp32":
                raise SetupError(
                    f"quantized_comms has {way}_loss_scale={scale!r}, but {way} is fp32, which needs none; give"
                    f" {way} another precision, or leave the scale out"
                )
        row = self.int8_row_dim
        check_whole_number("int8_row_dim of quantized_comms", row, 1, optional=True)
        if row is not None and not self.has_int8:
            raise SetupError(
                f"quantized_comms has int8_row_dim={row}, but forward is {self.forward} and backward {self.backward};"
                " give one of them int8, or leave int8_row_dim out"
            )

    @property
    def quantizes(self) -> bool:
        """Whether anything travels in less than 32 bits."""
        return (self.forward, self.backward) != ("fp32", "fp32")

    @property
    def has_int8(self) -> bool:
        return "int8" in (self.forward, self.backward)

    def usable(self, sharding_types: Sequence[str], *, pooled: bool) -> list[str]:
        """Those of the sharding types that a table may have."""
        return [kind for kind in sharding_types if not (pooled and self.has_int8 and kind in _ADDED_UP)]

    def check_types(self, where: str, sharding_types: Sequence[str] | None, table: Table) -> None:
        """Raises SetupError if a table's embeddings cannot travel under any of its sharding types."""
        types = list(sharding_types or ())
        if types and not self.usable(types, pooled=not issubclass(table.module_type, EmbeddingCollection)):
            if issubclass(table.module_type, DynamicEmbeddingBagCollection):
                raise SetupError(
                    f"quantized_comms has forward={self.forward!r} and backward={self.backward!r}, and the dynamic"
                    f" module {table.module_name or 'given'!r} adds up parts of a pooled embedding on their way (it is"
                    " sharded by rows, and in no other way), where numbers of int8 cannot be added up: use fp16 or bf16"
                )
            raise SetupError(
                f"{where} names {', '.join(types)} for table {table.name}, whose parts of a pooled embedding are added"
                f" up on their way; quantized_comms has forward={self.forward!r} and backward={self.backward!r}, and"
                " numbers of int8 cannot be added up: use fp16 or bf16, or shard the table table_wise or column_wise"
            )

    def check_plan(self, plan: ShardingPlan, tables: Sequence[Table]) -> None:
        """Raises SetupError, on every rank with the same plan, for a table that cannot travel as it is planned."""
        for table in tables:
            module_plan = plan.get_plan_for_module(table.module_name)
            assert isinstance(module_plan, EmbeddingModuleShardingPlan)
            where = f"the sharding plan of table {table.name}"
            self.check_types(where, [module_plan[table.config.name].sharding_type], table)
            self._row(module_plan, table.module_name)

    def check_backend(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Sends a number to every rank in each way that embeddings will be sent. All ranks call it.

        Raises:
            SetupError: on every rank, where the group's backend cannot.
        """
        if group.size() == 1 or not self.quantizes:
            return
        for precision in dict.fromkeys((self.forward, self.backward)):
            sent = torch.zeros(group.size(), dtype=PRECISIONS[precision].as_dtype(), device=device)
            try:
                dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
                if precision != "int8":
                    dist.reduce_scatter(torch.empty_like(sent[:1]), list(sent.split(1)), group=group)
            except RuntimeError as error:  # before anything is sent: every rank has the same dtype
                raise SetupError(
                    f"quantized_comms has the precision {precision}, which the process group's backend"
                    f" {dist.get_backend(group)} cannot send ({error}); use fp16, or another version of PyTorch"
                ) from error

    def registry(
        self, sharding: Mapping[str, ParameterSharding] | None = None
    ) -> dict[str, QuantizedCommCodecs] | None:
        """The codecs for TorchRec, by collective; None where nothing is quantised.

        Args:
            sharding: how each table of the module is sharded; None for a registry that only the planner reads.
        """
        if not self.quantizes:
            return None
        row = self._row(sharding or {}, "")
        codecs = QuantizedCommCodecs(
            forward=_Codec(PRECISIONS[self.forward], self.forward_loss_scale, row),
            backward=_Codec(PRECISIONS[self.backward], self.backward_loss_scale, row),
        )
        return {op.name: codecs for op in _OPS}

    def _row(self, sharding: Mapping[str, ParameterSharding], module_name: str) -> int:
        """How many values share a scale: a number that divides whatever the module's ranks send each other."""
        shards = (shard for one in sharding.values() for shard in getattr(one.sharding_spec, "shards", ()))
        widest = math.gcd(*(int(shard.shard_sizes[1]) for shard in shards))
        if self.int8_row_dim is None:
            return widest or 1  # nothing of the module travels
        if widest % self.int8_row_dim:
            raise SetupError(
                f"quantized_comms has int8_row_dim={self.int8_row_dim}, but the shards of the tables of module"
                f" {module_name or 'given'} have widths that only {widest} and its divisors divide: give one of these,"
                " or leave int8_row_dim out"
            )
        return self.int8_row_dim


class _Codec(QuantizedCommCodec):
    """FBGEMM's codec of one way.

    Args:
        precision: on the wire.
        scale: what values are multiplied by before they are encoded, and divided by after.
        row: values that share a scale, in int8.
    """

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
