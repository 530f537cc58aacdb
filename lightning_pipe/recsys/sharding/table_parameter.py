"""Parameters of sharded tables, which refuse to be frozen.

PyTorch cannot freeze them, since they are views of a kernel's storage. Its error names neither the table nor a way to
leave the table unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_pipe.engine.common.errors import SetupError


class ShardedTableParameter(TableBatchedEmbeddingSlice):
    """TorchRec's parameter of a sharded table, with an error that names the table if it is frozen.

    Attributes:
        table: name of the table.
    """

    __slots__ = ()
    table: str

    @property
    def requires_grad(self) -> bool:
        """True: the optimizer fused into the lookup trains the table."""
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse False."""
        if requires_grad:
            return self
        raise SetupError(
            f"table {self.table} cannot be frozen after sharding (requires_grad must stay True, got False), since the"
            " optimizer fused into its lookup trains all rows that it looks up. To leave the table unchanged from now"
            " on, call .detach() on the module's output in training_step; an evaluation does not train it anyway."
        )


def install_table_freezing_check(name: str, parameter: nn.Parameter) -> None:
    """Let the parameter of a sharded table refuse to be frozen. Parameters of other kinds stay as they are."""
    if type(parameter) is TableBatchedEmbeddingSlice:
        parameter.__class__ = ShardedTableParameter
        parameter.table = name  # type: ignore[attr-defined]
