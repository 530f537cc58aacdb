"""Collectives of evaluation batches that only some ranks have.

An evaluation step contains collectives: lookups in the other ranks' shards, sums of logged values. A rank without a
batch must take part in them, but must not evaluate an old batch again: its metrics would count rows twice. It *joins*
the other ranks instead::

    rank 0 (has the batch)       step: ... call("lookup", ...) ── lookup ── ... ── end(logged values)
    rank 1 (has no batch)              waits ──────────────────── join: empty lookup ── waits ── end

Ranks with a batch announce each collective before they start it. Ranks without a batch then start the same collective
with empty input. Announcements are gathered over one CPU process group, so these batches take longer than others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from math import prod
from typing import Any, Literal
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_pipe._compat.lightning import Metadata, ResultCollection, ResultMetric, Sync
from lightning_pipe._compat.logged_values import (
    clear_metric_compute_cache,
    get_metric_state_reductions,
    increment_metric_update_count,
    is_metric_computed,
)
from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects

# Handling of evaluations in which some ranks have fewer batches.
UnevenEvaluation = Literal["join", "error"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(0),
    "avg": lambda values: values.mean(0),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


class UnevenBatchCoordinator:
    """One evaluation batch on some of the ranks. Constructed on every rank at the same point."""

    def __init__(self, group: dist.ProcessGroup, have: Sequence[bool], batch: str) -> None:
        self._group = group
        self._have = list(have)
        self._batch = batch
        self._over = False
        self.rank_has_batch = self._have[group.rank()]
        self.results: list[Tensor] = []  # computed from the batch, with the same value on every rank

    # ------------------------------------------------------------------ a rank with the batch

    def announce_collective(self, collective: str, detail: Any = None) -> None:
        """Announce a collective. All ranks with a batch call this in the same order."""
        self._gather_announced_collectives(("call", collective, detail))

    def announce_batch_end(self, logged: Sequence[LoggedValue] = ()) -> None:
        """Announce the end of the batch, with the logged values."""
        if not self._over:
            self._gather_announced_collectives(("end", "", list(logged)))
            self._over = True

    def fail(self, error: Exception) -> None:
        """Announce an error of this rank, unless the batch has ended."""
        if not self._over:
            self._over = True
            all_gather_objects(("error", "", f"{type(error).__name__}: {error}"), self._group)

    def reduce_tensor(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """Reduce a tensor over the ranks that have a batch."""
        name = str(reduce_op).rsplit(".", 1)[-1].lower()
        if name not in _REDUCTIONS:
            raise InputError(
                f"reduce_op is {reduce_op!r} in {self._batch_description}; expected one of {', '.join(_REDUCTIONS)}"
            )
        self.announce_collective("reduce")
        values = torch.stack(
            [value for value in all_gather_objects(tensor.detach().cpu(), self._group) if value is not None]
        )
        if name in ("mean", "avg") and not values.is_floating_point():
            values = values.to(torch.get_default_dtype())  # as DistributedStrategy.reduce does
        return _REDUCTIONS[name](values).to(tensor.device)

    def equals_shared_result(self, value: Tensor) -> bool:
        """Return True if *value* equals one of the results bit for bit."""
        return any(torch.equal(value, result.detach().cpu()) for result in self.results)

    def refuse_collective(self, collective: str) -> None:
        """Refuse a collective that needs a value from every rank."""
        raise InputError(
            f"{collective} was called in {self._batch_description}. Call it in the epoch-end hook, which all ranks run"
        )

    @property
    def _batch_description(self) -> str:
        without = ", ".join(str(rank) for rank, has in enumerate(self._have) if not has)
        return f"{self._batch}, which rank(s) {without} do not have"

    # ------------------------------------------------------------------ a rank without it

    def join_collectives_of_other_ranks(self, do: Callable[[str, Any], None]) -> list[LoggedValue]:
        """Take part in the announced collectives until the batch ends."""
        while True:
            kind, collective, detail = self._gather_announced_collectives(None)
            if kind == "end":
                self._over = True
                return list(detail)
            if collective == "reduce":
                all_gather_objects(None, self._group)
            else:
                do(collective, detail)

    # ------------------------------------------------------------------ both

    def _gather_announced_collectives(self, announcement: tuple[str, str, Any] | None) -> tuple[str, str, Any]:
        """Gather all announcements, check them, and return the first rank's."""
        announcements = all_gather_objects(announcement, self._group)
        failed = [
            f"rank {rank}: {entry[2]}" for rank, entry in enumerate(announcements) if entry and entry[0] == "error"
        ]
        if failed:
            self._over = True
            raise InputError(f"{self._batch} failed on another rank. {'; '.join(failed)}")
        of_ranks = {rank: entry for rank, entry in enumerate(announcements) if entry is not None}
        if len({entry[:2] for entry in of_ranks.values()}) > 1:
            self._over = True
            calls = ", ".join(
                f"{kind} {collective!r} on rank {rank}" for rank, (kind, collective, _) in of_ranks.items()
            )
            raise InputError(
                f"ranks start different collectives in {self._batch}: {calls}. Make the same calls of sharded modules,"
                " run_batch and self.log(sync_dist=True) in the step on every rank"
            )
        first: tuple[str, str, Any] = next(iter(of_ranks.values()))
        return first


# ---------------------------------------------------------------------- logged values


@dataclasses.dataclass(frozen=True)
class LoggedValue:
    """One call of ``self.log``, with picklable fields of Lightning's metadata and a value on the CPU."""

    key: str
    metadata: dict[str, Any]
    synced: bool  # sync_dist=True
    shared: bool  # the value is the same on all ranks, including ranks without the batch
    value: Tensor | None  # None for a torchmetrics metric, which has its own state
    batch_size: float | Tensor


@contextmanager
def record_logged_values(
    results: ResultCollection, logged: list[LoggedValue], is_shared: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Context that appends each logged value to *logged*."""
    update = results.update_metrics

    def update_and_record_logged_value(key: str, value: Any, batch_size: Any) -> None:
        meta = results[key].meta
        if not meta.sync.rank_zero_only and meta.on_epoch:
            fields = {
                field.name: getattr(meta, field.name) for field in dataclasses.fields(meta) if field.name != "_sync"
            }
            cpu_value = value.detach().cpu() if isinstance(value, Tensor) else None
            shared = cpu_value is not None and is_shared(cpu_value)
            weight = batch_size.detach().cpu() if isinstance(batch_size, Tensor) else batch_size
            logged.append(LoggedValue(key, fields, meta.sync.should, shared, cpu_value, weight))
        update(key, value, batch_size)

    with patch.object(results, "update_metrics", update_and_record_logged_value):
        yield


def register_remote_logged_values(
    trainer: pl.Trainer, results: ResultCollection, logged: Sequence[LoggedValue], unsynced: bool
) -> None:
    """Register another rank's logged values on a rank without a batch.

    At the end of the epoch all ranks reduce each value logged with ``sync_dist=True``. A rank that does not know the
    value would leave the other ranks waiting.
    """
    device = trainer.strategy.root_device
    for entry in logged:
        if entry.key not in results:
            meta = Metadata(**entry.metadata)
            meta.sync = Sync(_should=entry.synced, fn=trainer.strategy.reduce)
            metric = ResultMetric(meta, entry.value is not None)
            if entry.value is None:
                metric.value = trainer.lightning_module.get_submodule(entry.metadata["metric_attribute"])
            results[entry.key] = metric.to(device)
        metric = results[entry.key]
        metric.has_reset = False
        # Lightning would warn about a metric without updates, and return the cached value of an earlier evaluation.
        increment_metric_update_count(metric)
        clear_metric_compute_cache(metric)
        if entry.value is not None and (entry.shared if entry.synced else unsynced):
            _accumulate_into_result_metric(metric, entry.value.to(device), entry.batch_size)
        elif entry.value is not None:
            _promote_result_metric_dtypes(metric, entry.value, entry.batch_size)


def _promote_result_metric_dtypes(metric: ResultMetric, value: Tensor, batch_size: float | Tensor) -> None:
    """Convert accumulators to the dtypes of the other ranks: double for a double value, float for a float weight."""
    if value.is_floating_point():
        metric.value = metric.value.to(torch.promote_types(metric.value.dtype, value.dtype))
    if metric.meta.is_mean_reduction:
        metric.cumulated_batch_size = metric.cumulated_batch_size + 0 * batch_size


def _accumulate_into_result_metric(metric: ResultMetric, value: Tensor, batch_size: float | Tensor) -> None:
    """Accumulate a value. The metric's own update would also reduce step values over ranks."""
    value = value if value.is_floating_point() else value.to(metric.value.dtype)
    if metric.meta.is_mean_reduction:
        metric.value = metric.value + value * batch_size
        metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
    elif metric.meta.is_sum_reduction:
        metric.value = metric.value + value
    else:
        metric.value = (torch.maximum if metric.meta.is_max_reduction else torch.minimum)(metric.value, value)


def align_metric_states_across_ranks(module: nn.Module) -> None:
    """Make torchmetrics metrics start the same collectives on all ranks. Every rank calls this.

    torchmetrics gathers each tensor of a metric's state. If ranks have different numbers of tensors, or tensors of
    different dtypes or numbers of dimensions, they wait for each other or fail. Found in torchmetrics 1.0:

    - The states of a metric that stores all rows (an exact AUROC, ranking per query) are lists, empty on a rank without
      batches. Lists that torchmetrics does not concatenate hold one tensor per batch.
    - A single stored number has no dimension, several numbers have one. The same holds for the states of a correlation
      after one batch and after several. Values in double precision make a state double on the ranks that saw them.
    - A metric without updates since its last ``compute`` returns the cached value and skips the gather.
    """
    metrics: dict[str, Any] = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    states: dict[tuple[str, str], Any] = {}
    for name, metric in metrics.items():
        for state, reduction in get_metric_state_reductions(metric).items():
            value = getattr(metric, state)
            if isinstance(value, list) and value and reduction is dim_zero_cat:
                value = [dim_zero_cat(value)]
            states[name, state] = value
    forms = {key: _get_metric_state_spec(value) for key, value in states.items()}
    changed = {name for name, metric in metrics.items() if not is_metric_computed(metric)}
    ranks = all_gather_objects((forms, changed), dist.group.WORLD)
    for name, metric in metrics.items():
        if any(name in of_rank for _, of_rank in ranks):
            clear_metric_compute_cache(metric)
    for key, value in states.items():
        name, state = key
        of_ranks = [of_rank[key] for of_rank, _ in ranks]
        if any(of_ranks):
            setattr(metrics[name], state, _align_metric_state(value, of_ranks, f"{name}.{state}", metrics[name].device))


@dataclasses.dataclass(frozen=True)
class _MetricStateSpec:
    """Dtype and shape of a state tensor, or of the first of *count* tensors in a list."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int = 0


def _get_metric_state_spec(state: Any) -> _MetricStateSpec | None:
    """Return the form of a state; None for an empty list."""
    if isinstance(state, Tensor):
        return _MetricStateSpec(state.dtype, tuple(state.shape))
    if isinstance(state, list) and state and isinstance(state[0], Tensor):
        return _MetricStateSpec(state[0].dtype, tuple(state[0].shape), len(state))
    return None


def _align_metric_state(state: Any, ranks: Sequence[_MetricStateSpec | None], name: str, device: torch.device) -> Any:
    """Convert a state to one that torchmetrics can gather. At least one rank has a tensor."""
    forms = [form for form in ranks if form is not None]
    if isinstance(state, Tensor):
        state = state.to(reduce(torch.promote_types, (form.dtype for form in forms)))
        shape = max((form.shape for form in forms), key=len)
        return state.reshape(shape) if state.numel() == prod(shape) else state
    counts = [0 if form is None else form.count for form in ranks]
    if not forms[0].shape and len(set(counts)) > 1:
        raise InputError(
            f"metric state {name!r} has {' and '.join(map(str, counts))} numbers on the ranks, because they have"
            " evaluated uneven numbers of batches; torchmetrics expects equal numbers. Use a metric state that is"
            " summed or concatenated (dist_reduce_fx='sum' or 'cat')"
        )
    empty = torch.empty((0, *forms[0].shape[1:]), dtype=forms[0].dtype, device=device)
    return [*state, *[empty] * (max(counts) - len(state))]
