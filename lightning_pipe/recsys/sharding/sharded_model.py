"""A module whose tables are sharded, with access to its tables and to the optimizers that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from lightning_pipe._compat.torch import ShardedTensor
from lightning_pipe._compat.torchrec import lookups_of
from lightning_pipe.checkpoints.compiled_names import plain_name
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects
from lightning_pipe.recsys.dense.dense_optimizer import TableParameterRegistry
from lightning_pipe.recsys.dense.dense_values import broadcast_from_first_rank
from lightning_pipe.recsys.kernels.gradient_norm import get_total_table_grad_norm
from lightning_pipe.recsys.kernels.kernel_calls import KernelOutputGradients
from lightning_pipe.recsys.modules.output_order import detach_output
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.data_parallel_tables import DataParallelTables, unwrap_lookups
from lightning_pipe.recsys.sharding.id_maps import IdMaps
from lightning_pipe.recsys.sharding.replicas import ReplicaAverage, ReplicaGroups, refuse_clipping
from lightning_pipe.recsys.sharding.table_parameter import install_table_freezing_check
from lightning_pipe.recsys.sharding.table_values import full_tensor, local_shards

if TYPE_CHECKING:
    from lightning_pipe.recsys.dynamic.tables.row_dump import ModelRowCommit
    from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables


class ShardedModel:
    """A module whose tables are sharded, with the optimizers of its tables.

    Attributes:
        module: the user's module (the same object, unless the module itself is a TorchRec embedding module).
        dmp: TorchRec's wrapper around it.
        sharded_modules: TorchRec's sharded modules by name.
        tables: description of each table, by the name of its parameter.
        fused_optimizer: TorchRec's optimizer over all tables, replicated ones included, for checkpoints.
        dynamic_rows: rows of dynamic modules on this rank, by the module's name without the level of ``torch.compile``.
        replicas: averages the replicas of the tables; None if they are sharded over all ranks.
        id_maps: maps from ids to rows of managed-collision tables; false without any.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        tables: Sequence[Table],
        group: dist.ProcessGroup,
        device: torch.device,
        replicas: ReplicaGroups | None = None,
        untrained: Sequence[str] = (),
    ) -> None:
        self.dmp = dmp
        self._untrained = untrained
        self.module: nn.Module = dmp.module
        self.tables = {table.name: table for table in tables}
        self.sharded_modules = dict(_outermost_sharded(self.module))
        self.dynamic_rows: dict[str, RowTables] = {}
        self._table_parameters = TableParameterRegistry()
        self._group = group
        self._shard_group = group if replicas is None else replicas.shards
        self.replicas = None if replicas is None else ReplicaAverage(replicas, self._get_table_and_optimizer_states)
        self._device = device
        self._data_parallel = DataParallelTables(group)
        parameters = dict(self.module.named_parameters())
        for name in self.tables:
            install_table_freezing_check(name, parameters[name], self.tables[name].is_frozen)
            self._table_parameters.add_sharded(name, parameters[name])
        optimizers = {table.name: table.resolved_optimizer for table in tables}
        for module_name, sharded in self.sharded_modules.items():
            names = {table.config.name: table.name for table in tables if table.module_name == module_name}
            lookups = lookups_of(sharded)
            unwrap_lookups(lookups)
            if any(self.tables[name].is_frozen for name in names.values()):
                _detach_outputs(sharded)
                continue
            for lookup in lookups:
                self._data_parallel.add(lookup, names, optimizers, parameters)
        self.fused_optimizer = CombinedOptimizer(
            [*dmp.fused_optimizer.optimizers, *self._data_parallel.keyed_optimizers]
        )
        # Initial rate of a dense optimizer in a search (Lightning's learning-rate finder), by the rate that it found.
        self.searched_rates: dict[float, float] = {}
        self._rates = {name: table.learning_rate for name, table in self.tables.items() if not table.is_frozen}
        self._rate_factor: float | None = 1.0  # None if the rates were set otherwise
        self._kernels = {
            optimizer: names
            for optimizer, names in _iterate_kernel_optimizers("", self.fused_optimizer)
            if names[0] in self._rates
        }
        self.id_maps = IdMaps(self.sharded_modules, self._get_local_rows_and_states, self._shard_group)
        self._rate_groups = _merge_shared_kernel_groups(
            all_gather_objects([sorted(names) for names in self._kernels.values()], group)
        )

    def refuse_untrainable_tables(self) -> None:
        """Check that all tables can be trained.

        Raises:
            SetupError: the module was sharded for evaluation only, with tables that are frozen or have no optimizer.
        """
        if self._untrained:
            raise SetupError(
                f"the module was sharded for an evaluation, without an optimizer for, or with frozen,"
                f" {', '.join(self._untrained)}, so these tables cannot be trained. Create a new module to train, whose"
                " tables have an optimizer and are not frozen."
            )

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters except tables, with their names in the module. Includes feature processors."""
        return [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if self._table_parameters.name_of(parameter) is None
        ]

    def broadcast_buffers(self) -> None:
        """Copy rank 0's dense buffers, such as BatchNorm's running statistics, to all ranks. Every rank calls it.

        Each rank computes its buffers from its own samples. ``DistributedDataParallel`` copies rank 0's before every
        forward. They are only read in evaluation and checkpoints, so a copy before these is sufficient.
        """
        self.broadcast(self.dense_buffers().values())

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors on all ranks with those of rank 0. Every rank calls it."""
        broadcast_from_first_rank(tensors, self._group)

    def dense_buffers(self) -> dict[str, torch.Tensor]:
        """Return all buffers except those of embedding modules, by their names in the module."""
        inside = tuple(f"{name}." if name else "" for name in self.sharded_modules)
        return {name: buffer for name, buffer in self.module.named_buffers() if not name.startswith(inside)}

    def table_parameters(self) -> TableParameterRegistry:
        """Return the parameters of the sharded tables, and those that held the tables before sharding."""
        return self._table_parameters

    @property
    def data_parallel_table_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the replicated tables."""
        return self._data_parallel.optimizers

    def sync_replicas(self) -> None:
        """Average the replicas of the tables now, if they have stepped since the last average. Every rank calls it.

        Call it before tables are read between two averages: before validation and checkpoints.
        """
        if self.replicas is not None:
            self.replicas.average()

    def _get_table_and_optimizer_states(self) -> list[Mapping[str, Any]]:
        """State dicts of the tables that are trained, and of their optimizers."""
        trained = {self.tables[name].module_name for name in self._rates}
        tables = [sharded.state_dict() for name, sharded in sorted(self.sharded_modules.items()) if name in trained]
        return [*tables, self.fused_optimizer.state_dict()["state"]]

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters, including those of replicated tables."""
        for parameter in self.module.parameters():
            parameter.grad = None
        self._data_parallel.zero_grad()

    def step_data_parallel_tables(self) -> None:
        """Step the replicated tables with the gradients from the tables' backward.

        Every rank calls it after that backward, from one thread; it reduces over the sharding group.
        """
        self._data_parallel.step()

    def table_gradient_norm(self, gradients: KernelOutputGradients) -> torch.Tensor:
        """2-norm of the gradients of all tables, as if none were sharded: a scalar, equal on all ranks.

        Args:
            gradients: result of the first half of the tables' backward. Every rank of the sharding group calls this
                method.

        Raises:
            SetupError: the tables have replicas, each with different gradients.
        """
        refuse_clipping(self.replicas)
        return get_total_table_grad_norm(gradients, self._data_parallel.average_gradients(), self._group, self._device)

    def set_learning_rate_factor(self, factor: float) -> None:
        """Set every table's rate to its base rate times ``factor``, from the next lookup on."""
        if factor != self._rate_factor:
            self.set_learning_rates({name: self.tables[name].learning_rate * factor for name in self._rates})
            self._rate_factor = factor

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Set the rates of the named tables, from the next lookup on. Other tables keep their rates.

        Free for rates that do not change. On CPU, FBGEMM takes the rate at lookup: a backward uses the rate of its
        lookup.

        Raises:
            SetupError: a table is unknown, or tables that share a kernel get different rates.
        """
        new_rates = {**self._rates, **{self._find_table(name).name: float(rate) for name, rate in rates.items()}}
        if new_rates == self._rates:
            return
        for group in self._rate_groups:
            if len({new_rates[name] for name in group}) > 1:
                group_rates = ", ".join(f"{name}: {new_rates[name]:g}" for name in group)
                raise SetupError(
                    f"tables that share one kernel must have the same learning rate, got {group_rates}. Give them one"
                    " rate, or base rates that differ, which puts them into separate kernels."
                )
        for optimizer, names in self._kernels.items():
            rate = new_rates[next(iter(names))]
            if rate != self._rates[next(iter(names))]:
                for parameter_group in optimizer.param_groups:
                    parameter_group["lr"] = rate
                optimizer.step()  # passes the rate to the kernel, and steps no table
        self._rates = new_rates
        self._rate_factor = None

    def learning_rates(self) -> dict[str, float]:
        """Return the current rate of each table that is not frozen."""
        return dict(self._rates)

    def full_table(self, name: str) -> torch.Tensor:
        """Return a copy of the whole table on every rank: rows x columns. Every rank of the group calls it.

        Between two averages of replicas, it is the copy of this rank's replica; :meth:`sync_replicas` makes them equal.

        Args:
            name: the table's full name, or its short name if only one module has a table of that name.
        """
        table = self._get_fixed_size_table(name)
        state = self.sharded_modules[table.module_name].state_dict()
        return full_tensor(state[table.module_state_dict_key], self._shard_group, self._device)

    def full_table_optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of a table's whole optimizer state on every rank. Every rank of the group calls it.

        Returns:
            State tensors by TorchRec's names: none for SGD; ``momentum1`` for Adagrad (rows x columns) and row-wise
            Adagrad (rows, times the number of column shards if the table is split by columns).
        """
        table = self._get_fixed_size_table(name)
        state = self.fused_optimizer.state_dict()["state"].get(table.name, {})
        prefix = f"{table.config.name}."
        keys = sorted({key for keys in all_gather_objects(list(state), self._group) for key in keys})
        return {key.removeprefix(prefix): full_tensor(state.get(key), self._shard_group, self._device) for key in keys}

    def _get_local_rows_and_states(self, module: str, table: str) -> list[torch.Tensor]:
        """This rank's parts of a row-wise sharded table and of its optimizer's states."""
        (row_table,) = (
            candidate
            for candidate in self.tables.values()
            if (candidate.module_name, candidate.config.name) == (module, table)
        )
        states = self.fused_optimizer.state_dict()["state"].get(row_table.name, {})
        tensors = [
            self.sharded_modules[module].state_dict()[row_table.module_state_dict_key],
            *(states[key] for key in sorted(states)),
        ]
        return [
            piece.values for tensor in tensors if isinstance(tensor, ShardedTensor) for piece in local_shards(tensor)
        ]

    def _get_fixed_size_table(self, name: str) -> Table:
        table = self._find_table(name)
        if table.is_dynamic:
            raise SetupError(
                f"table {table.name} is a dynamic table, which has no fixed size and no whole tensor. Read its rows"
                f" from dynamic_rows[{plain_name(table.module_name)!r}].rows({table.config.name!r})."
            )
        return table

    # ------------------------------------------------------------------ rows of dynamic tables

    def drop_dynamic_entries(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict, by names of parameters, without the entries of dynamic tables, which are caches."""
        return {name: value for name, value in state.items() if name not in self._dynamic_names}

    @property
    def _dynamic_names(self) -> set[str]:
        return {table.name for table in self.tables.values() if table.is_dynamic}

    def prepare_row_dump(self) -> ModelRowCommit:
        """Prepare a commit and a checkpoint of the current rows. All ranks call it together."""
        from lightning_pipe.recsys.dynamic.tables.row_dump import ModelRowCommit  # lazy: few models have dynamic tables

        return ModelRowCommit({name: rows.create_commit() for name, rows in self.dynamic_rows.items()})

    def commit_rows(self) -> dict[str, dict[str, Any]]:
        """Commit the current rows, so that all ranks open with them after a crash. All ranks call it together.

        Returns:
            The second argument of :meth:`read_rows` for rows that are written now.

        Raises:
            SetupError: a rank cannot write; raised on every rank. The previous commit stays complete.
        """
        dumped = self.prepare_row_dump()
        dumped.commit()
        return dumped.committed

    def write_rows_to_folder(self, folder: str | Path, since: int = 0) -> None:
        """Write this rank's rows of dynamic tables to a folder, for :meth:`read_rows` on any number of ranks.

        :func:`lightning_pipe.recsys.read_rows` reads them without a model.

        Args:
            folder: folder that all ranks share.
            since: write only rows from batches with at least this number, which are those changed since then (default
                0).
        """
        for name, rows in self.dynamic_rows.items():
            rows.write_row_files(_rows_folder(Path(folder), name), since)

    def close(self) -> None:
        """Close the stores of dynamic tables, so that another module can open them. Uncommitted rows are lost."""
        for rows in self.dynamic_rows.values():
            rows.close()

    def read_rows_from_folder(
        self, folder: Path, committed: Mapping[str, Mapping[str, Any]] | None, *, with_optimizers: bool
    ) -> None:
        """Replace the rows of dynamic tables with those in a folder, and commit them. All ranks call it together.

        Args:
            folder: folder that :meth:`write_rows_to_folder` wrote to.
            committed: result of :meth:`commit_rows` for the same rows.
            with_optimizers: True to read the states of optimizers, too.

        Raises:
            SetupError: the rows are of other tables, a rank cannot read them, or *committed* is damaged; raised on
                every rank.
        """
        _check_committed_rows_format(committed)
        for name, rows in self.dynamic_rows.items():
            module_rows = (committed or {}).get(name)
            if module_rows is None:
                raise SetupError(
                    f"expected rows of the dynamic module {name or 'given'!r} in {str(folder)!r}, got rows of"
                    f" {', '.join(committed or ()) or 'no module'}. Use a checkpoint of the same module."
                )
            if module_rows["tables"] != rows.description:
                raise SetupError(
                    f"expected rows of the tables {rows.description} of the dynamic module {name or 'given'!r}, got"
                    f" rows of {module_rows['tables']} in {str(folder)!r}. Build the module with the same dimensions"
                    " and optimizers as in the checkpoint."
                )
            rows.replace_rows_from_files(
                _rows_folder(folder, name),
                module_rows["progress"],
                version=module_rows["version"],
                with_states=with_optimizers,
            )

    def _find_table(self, name: str) -> Table:
        if name in self.tables:
            return self.tables[name]
        named_tables = [table for table in self.tables.values() if table.config.name == name]
        if len(named_tables) != 1:
            raise SetupError(
                f"expected the name of one table, one of {', '.join(sorted(self.tables))}, got {name!r}, which names"
                f" {len(named_tables)} tables. Pass a full name from this list."
            )
        return named_tables[0]


def _rows_folder(folder: Path, module: str) -> Path:
    from lightning_pipe.recsys.dynamic.store.row_files import rows_folder  # lazy: few models have dynamic tables

    return rows_folder(folder, module)


def _outermost_sharded(module: nn.Module) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    inside: list[str] = []
    for name, child in module.named_modules():
        if isinstance(child, ShardedModule) and not any(not o or name.startswith(f"{o}.") for o in inside):
            inside.append(name)
            yield name, child


def _detach_outputs(sharded: ShardedModule[Any, Any, Any, Any]) -> None:
    """Let a sharded module of frozen tables return outputs without gradients."""

    def detach(method: Callable[..., LazyAwaitable[Any]], *arguments: Any, **named: Any) -> LazyAwaitable[Any]:
        awaitable = method(*arguments, **named)
        awaitable.callbacks.append(detach_output)
        return awaitable

    for name in ("output_dist", "compute_and_output_dist"):
        setattr(sharded, name, partial(detach, getattr(sharded, name)))


def _iterate_kernel_optimizers(path: str, optimizer: KeyedOptimizer) -> Iterator[tuple[KeyedOptimizer, list[str]]]:
    """Yield the optimizer of each kernel with the full names of the tables that it trains on this rank."""
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            yield from _iterate_kernel_optimizers(f"{path}.{key}" if path and key else path or key, part)
    elif optimizer.params:
        yield optimizer, [f"{path}.{key}" if path else key for key in optimizer.params]


def _merge_shared_kernel_groups(groups: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Merge groups of tables that share a kernel on any rank: they have one learning rate."""
    merged: list[set[str]] = []
    for names in (set(names) for rank in groups for names in rank):
        touching = [group for group in merged if group & names]
        merged = [group for group in merged if not group & names] + [names.union(*touching)]
    return sorted(sorted(group) for group in merged)


def _check_committed_rows_format(committed: Any) -> None:
    """Check that a checkpoint's description of rows has the form of :meth:`ShardedModel.commit_rows`."""
    try:
        for module_rows in ({} if committed is None else committed).values():
            if not isinstance(module_rows["progress"], Mapping) or not isinstance(module_rows["version"], str | None):
                raise TypeError
            module_rows["tables"]
    except (AttributeError, LookupError, TypeError):
        raise SetupError(
            "the checkpoint's description of the rows of a dynamic module is damaged: expected version, progress and"
            f" tables, got {short_repr(committed)}. Take another checkpoint."
        ) from None
