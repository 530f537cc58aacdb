"""Parameters of sharded tables, which stay frozen or trained.

PyTorch cannot freeze them, since they are views of a kernel's storage. Its error names neither the table nor a way to
leave the table unchanged.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_pipe.engine.common.errors import SetupError


class _FixedRequiresGrad:
    """Error that names the table if it is frozen or unfrozen.

    Attributes:
        table: name of the table.
        is_frozen: True if no table of its module is trained.
    """

    __slots__ = ()
    table: str
    is_frozen: bool

    @property
    def requires_grad(self) -> bool:
        """True if the optimizer fused into the lookup trains the table."""
        return not self.is_frozen

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuse a change."""
        if bool(requires_grad) != self.is_frozen:
            return self
        if self.is_frozen:
            raise SetupError(
                f"table {self.table} cannot be unfrozen after sharding (requires_grad must stay False, got True), since"
                " its lookups have no optimizer. To train it, create a new module in which it is not frozen, and start"
                " with a checkpoint of this run (init_from, with optimizer_states='reset')."
            )
        raise SetupError(
            f"table {self.table} cannot be frozen after sharding (requires_grad must stay True, got False), since the"
            " optimizer fused into its lookup trains all rows that it looks up. To leave the table unchanged from now"
            " on, call .detach() on the module's output in training_step; an evaluation does not train it anyway."
        )


class ShardedTableParameter(_FixedRequiresGrad, TableBatchedEmbeddingSlice):
    """TorchRec's parameter of a table, of which this rank has a part."""

    __slots__ = ()


class RemoteTableParameter(_FixedRequiresGrad, nn.Parameter):
    """TorchRec's empty parameter of a table that other ranks have."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Return a plain parameter, since a copy is no table of the module."""
        return nn.Parameter(self.data.clone(), self.requires_grad)


def install_table_freezing_check(name: str, parameter: nn.Parameter, is_frozen: bool) -> None:
    """Let the parameter of a sharded table refuse to be frozen or unfrozen."""
    parameter.__class__ = (
        ShardedTableParameter if isinstance(parameter, TableBatchedEmbeddingSlice) else RemoteTableParameter
    )
    parameter.table, parameter.is_frozen = name, is_frozen  # type: ignore[attr-defined]
