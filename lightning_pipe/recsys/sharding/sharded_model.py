"""A module whose tables are sharded: what its tables are, what trains them, how to read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from lightning_pipe._compat.torchrec import lookups_of
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.ranks.together import gather
from lightning_pipe.recsys.dense.dense_optimizer import TableParameters
from lightning_pipe.recsys.dense.dense_values import broadcast_from_first_rank
from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables
from lightning_pipe.recsys.kernels.gradient_norm import table_norm
from lightning_pipe.recsys.kernels.kernel_calls import KernelGradients
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.data_parallel_tables import DataParallelTables, unwrap_lookups
from lightning_pipe.recsys.sharding.replicas import ReplicaAverage, ReplicaGroups, refuse_norm
from lightning_pipe.recsys.sharding.table_values import full_tensor

__all__ = ["ShardedModel"]


class ShardedModel:
    """A module whose tables are sharded, and what trains them.

    Attributes:
        module: the user's module, the same object (a new one only where the module itself is a TorchRec embedding).
        dmp: TorchRec's wrapper around it.
        sharded_modules: TorchRec's sharded modules by name.
        tables: what is known of each table, by the name of its parameter.
        fused_optimizer: TorchRec's optimiser over all tables, replicated ones included, for checkpoints.
        dynamic_rows: the rows of dynamic modules on this rank, by the module's name.
        replicas: averages the replicas of the tables; None where they are sharded over all ranks.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        tables: Sequence[Table],
        group: dist.ProcessGroup,
        device: torch.device,
        replicas: ReplicaGroups | None = None,
    ) -> None:
        self.dmp = dmp
        self.module: nn.Module = dmp.module
        self.tables = {table.name: table for table in tables}
        self.sharded_modules = dict(_outermost_sharded(self.module))
        self.dynamic_rows: dict[str, RowTables] = {}
        self._table_parameters = TableParameters()
        self._group = group
        self._shard_group = group if replicas is None else replicas.shards
        self.replicas = None if replicas is None else ReplicaAverage(replicas, self._averaged)
        self._device = device
        self._data_parallel = DataParallelTables(group)
        parameters = dict(self.module.named_parameters())
        for name in self.tables:
            self._table_parameters.add_sharded(name, parameters[name])
        optimizers = {table.name: table.known_optimizer for table in tables}
        for module_name, sharded in self.sharded_modules.items():
            names = {table.config.name: table.name for table in tables if table.module_name == module_name}
            lookups = lookups_of(sharded)
            unwrap_lookups(lookups)
            for lookup in lookups:
                self._data_parallel.add(lookup, names, optimizers, parameters)
        self.fused_optimizer = CombinedOptimizer(
            [*dmp.fused_optimizer.optimizers, *self._data_parallel.keyed_optimizers]
        )
        self._rates = {name: table.learning_rate for name, table in self.tables.items()}
        self._kernels = dict(_leaves("", self.fused_optimizer))
        self._rate_groups = _merge(gather([sorted(names) for names in self._kernels.values()], group))

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter that is not a table, feature processors' included, with its name in the module."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if self._table_parameters.name_of(parameter) is None
        ]

    def share_buffers(self) -> None:
        """Gives every rank the first one's dense buffers, such as BatchNorm's running statistics; every rank calls it.

        Each rank computes its own from its own samples. ``DistributedDataParallel`` takes the first rank's before every
        forward; they are used in evaluation and checkpoints only, so before those is soon enough.
        """
        inside = tuple(f"{name}." if name else "" for name in self.sharded_modules)
        buffers = (buffer for name, buffer in self.module.named_buffers() if not name.startswith(inside))
        broadcast_from_first_rank(buffers, self._group)

    def table_parameters(self) -> TableParameters:
        """Which parameters are tables: those of the sharded module, and those that it held before it was sharded."""
        return self._table_parameters

    @property
    def replicated_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that step the replicated tables."""
        return self._data_parallel.optimizers

    def sync_replicas(self) -> None:
        """Averages the replicas of the tables now, if they have been trained since the last time; every rank calls it.

        For whoever reads the tables between two averages: validation, checkpoints.
        """
        if self.replicas is not None:
            self.replicas.bring_together()

    def _averaged(self) -> list[Mapping[str, Any]]:
        """The tables, and the states of their optimisers."""
        tables = [sharded.state_dict() for _, sharded in sorted(self.sharded_modules.items())]
        return [*tables, self.fused_optimizer.state_dict()["state"]]

    def forget_gradients(self) -> None:
        """Lets go of the gradients of all parameters, those of replicated tables included."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._data_parallel.forget_gradients()

    def step_data_parallel_tables(self) -> None:
        """Trains the replicated tables with the gradients that the tables' backward left.

        To be called by every rank after that backward, from any one thread; it reduces over the sharding group.
        """
        self._data_parallel.step()

    def table_gradient_norm(self, gradients: KernelGradients) -> torch.Tensor:
        """The 2-norm of the gradients of all tables, as if none were sharded: a scalar, the same on every rank.

        Args:
            gradients: what the first half of the tables' backward has left. Every rank of the sharding group calls it.

        Raises:
            SetupError: there are replicas of the tables, each with gradients of its own.
        """
        refuse_norm(self.replicas)
        return table_norm(gradients, self._data_parallel.average(), self._group, self._device)

    def set_learning_rate_factor(self, factor: float) -> None:
        """Sets every table's rate to its base rate times ``factor``, from the next lookup on."""
        self.set_learning_rates({name: table.learning_rate * factor for name, table in self.tables.items()})

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Sets the rates of the named tables, from the next lookup on; the others keep theirs.

        Costs nothing for rates that do not change. FBGEMM takes a rate at lookup on CPU: a backward uses the rate
        of its own lookup.

        Raises:
            SetupError: an unknown table, or two rates for tables that share a kernel.
        """
        wanted = {**self._rates, **{self._named(name).name: float(rate) for name, rate in rates.items()}}
        if wanted == self._rates:
            return
        for group in self._rate_groups:
            if len({wanted[name] for name in group}) > 1:
                found = ", ".join(f"{name}: {wanted[name]:g}" for name in group)
                raise SetupError(
                    f"tables that share one kernel cannot have learning rates of their own ({found}); give them one"
                    " rate, or base rates that differ, which puts them into kernels of their own"
                )
        for optimizer, names in self._kernels.items():
            rate = wanted[next(iter(names))]
            if rate != self._rates[next(iter(names))]:
                for parameter_group in optimizer.param_groups:
                    parameter_group["lr"] = rate
                optimizer.step()  # hands the rate to the kernel; it steps nothing
        self._rates = wanted

    def learning_rates(self) -> dict[str, float]:
        """The rate of each table as it stands."""
        return dict(self._rates)

    def full_table(self, name: str) -> torch.Tensor:
        """The whole table on every rank, a copy: rows x columns. Every rank of the group calls it.

        Of replicas that are averaged every few steps it is this rank's; :meth:`sync_replicas` makes them one.

        Args:
            name: the table's full name, or its short one where only one module has it.
        """
        table = self._of_known_size(name)
        state = self.sharded_modules[table.module_name].state_dict()
        return full_tensor(state[table.key], self._shard_group, self._device)

    def full_optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """The whole optimiser state of a table on every rank, a copy. Every rank of the group calls it.

        Returns:
            State tensors by TorchRec's names: none for SGD, ``momentum1`` for Adagrad (rows x columns) and row-wise
            Adagrad (rows, times the number of shards across where the table is split by columns).
        """
        table = self._of_known_size(name)
        state = self.fused_optimizer.state_dict()["state"].get(table.name, {})
        prefix = f"{table.config.name}."
        keys = sorted({key for keys in gather(list(state), self._group) for key in keys})
        return {key.removeprefix(prefix): full_tensor(state.get(key), self._shard_group, self._device) for key in keys}

    def _of_known_size(self, name: str) -> Table:
        table = self._named(name)
        if table.is_dynamic:
            raise SetupError(
                f"table {table.name} has no size, so there is no whole tensor of it; its rows are in"
                f" dynamic_rows[{table.module_name!r}].rows({table.config.name!r})"
            )
        return table

    # ------------------------------------------------------------------ rows of dynamic tables

    def without_dynamic(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict by the names of parameters, without those of dynamic tables: caches of rows."""
        return {name: value for name, value in state.items() if name not in self._dynamic_names}

    @property
    def _dynamic_names(self) -> set[str]:
        return {table.name for table in self.tables.values() if table.is_dynamic}

    def commit_rows(self) -> dict[str, dict[str, Any]]:
        """Makes the rows as they are now those that all ranks open with after a crash. All ranks call it together.

        Returns:
            what :meth:`read_rows` wants to know of rows that are written now.

        Raises:
            SetupError: on every rank, if any cannot write; the commit before is whole.
        """
        return {
            name: {"version": rows.commit(), "progress": rows.progress(), "tables": rows.description}
            for name, rows in self.dynamic_rows.items()
        }

    def write_rows(self, folder: str | Path, since: int = 0) -> None:
        """Writes this rank's rows of dynamic tables below a folder, for :meth:`read_rows` on any number of ranks.

        :func:`lightning_pipe.recsys.read_rows` reads them without a model.

        Args:
            folder: one that all ranks share.
            since: only rows that were in a batch of at least this number: what has changed since then.
        """
        for name, rows in self.dynamic_rows.items():
            rows.write(_rows_folder(Path(folder), name), since)

    def close(self) -> None:
        """Lets go of the stores of dynamic tables, for another module to open; what was not committed is lost."""
        for rows in self.dynamic_rows.values():
            rows.close()

    def read_rows(
        self, folder: Path, committed: Mapping[str, Mapping[str, Any]] | None, *, with_optimizers: bool
    ) -> None:
        """Makes the rows of dynamic tables those that were written, and commits them. All ranks call it together.

        Args:
            folder: of :meth:`write_rows`.
            committed: what :meth:`commit_rows` has returned for the same rows.
            with_optimizers: whether to read the states of optimisers, too.

        Raises:
            SetupError: on every rank: rows of other tables, or that any rank cannot read; *committed* is damaged.
        """
        _check_committed(committed)
        for name, rows in self.dynamic_rows.items():
            found = (committed or {}).get(name)
            if found is None:
                raise SetupError(
                    f"{str(folder)!r} has no rows of the dynamic module {name or 'given'!r}, it has those of"
                    f" {', '.join(committed or ()) or 'none'}; needed is a checkpoint of the same module"
                )
            if found["tables"] != rows.description:
                raise SetupError(
                    f"rows of the dynamic module {name or 'given'!r} in {str(folder)!r} are of the tables"
                    f" {found['tables']}, and the module has {rows.description}; needed are the same dimensions and"
                    " optimisers: build it as it was"
                )
            rows.read(
                _rows_folder(folder, name), found["progress"], version=found["version"], with_states=with_optimizers
            )

    def _named(self, name: str) -> Table:
        if name in self.tables:
            return self.tables[name]
        found = [table for table in self.tables.values() if table.config.name == name]
        if len(found) != 1:
            raise SetupError(
                f"{name!r} is the name of {len(found)} tables; needed is one of {', '.join(sorted(self.tables))}"
            )
        return found[0]


def _outermost_sharded(module: nn.Module) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    inside: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, ShardedModule) and not any(not o or name.startswith(f"{o}.") for o in inside):
            inside.append(name)
            yield name, child


def _leaves(path: str, optimizer: KeyedOptimizer) -> Iterator[tuple[KeyedOptimizer, list[str]]]:
    """The optimisers of the kernels, one each, with the full names of the tables that it trains on this rank."""
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            yield from _leaves(f"{path}.{key}" if path and key else path or key, part)
    elif optimizer.params:
        yield optimizer, [f"{path}.{key}" if path else key for key in optimizer.params]


def _merge(groups: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Joins the tables that share a kernel on any rank: those that have one learning rate."""
    merged: list[set[str]] = []
    for names in (set(names) for rank in groups for names in rank):
        touching = [group for group in merged if group & names]
        merged = [group for group in merged if not group & names] + [names.union(*touching)]
    return sorted(sorted(group) for group in merged)


def _check_committed(committed: Any) -> None:
    """See that what a checkpoint says of rows has the form of :meth:`ShardedModel.commit_rows`."""
    of_modules = list(committed.values()) if isinstance(committed, Mapping) else [committed] * (committed is not None)
    for found in of_modules:
        if not (
            isinstance(found, Mapping)
            and "tables" in found
            and isinstance(found.get("progress"), Mapping)
            and isinstance(found.get("version", 0), str | None)
        ):
            raise SetupError(
                "what the checkpoint says of the rows of a dynamic module is damaged: expected version, progress and"
                f" tables, got {shown(found)}; take another checkpoint"
            )


def _rows_folder(folder: Path, name: str) -> Path:
    return folder / "rows" / (name or "module")
