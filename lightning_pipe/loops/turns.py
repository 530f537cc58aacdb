"""Batches of an evaluation that only some ranks have: the other ranks take part in their collectives.

Ranks work together inside a step: they look up rows in each other's shards, or sum a logged value. A rank that has no
more batches must not evaluate one again, since its metrics would count rows twice. It *joins* the others instead::

    rank 0 (has the batch)       step: ... call("lookup", ...) ── lookup ── ... ── end(what it logged)
    rank 1 (has none)                  waits ──────────────────── join: a lookup of no ids ── waits ── end

Before each collective, the ranks with a batch say what they are going to do; a rank without one does its part of that,
with nothing of its own. All of it goes over one process group on the CPU, so these batches take longer than others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from lightning_pipe.engine import InputError

__all__ = ["Logged", "Turn", "UnevenEvaluation", "align_metrics", "log_for_others", "recorded_logs"]

# What becomes of an evaluation in which some ranks have fewer batches.
UnevenEvaluation = Literal["join", "error"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values: values.mean(0),
    "avg": lambda values: values.mean(0),
    "sum": lambda values: values.sum(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


class Turn:
    """One batch of each rank that has one; every rank makes one of these together.

    Args:
        group: of all ranks, on the CPU, used by nothing else.
        have: for each rank, whether it has the batch.
        batch: which batch it is, for messages.

    Attributes:
        has: whether this rank has it.
        results: numbers of this batch that are the same on all ranks, those without it included.
    """

    def __init__(self, group: dist.ProcessGroup, have: Sequence[bool], batch: str) -> None:
        self._group = group
        self._have = list(have)
        self._batch = batch
        self._over = False
        self.has = self._have[group.rank()]
        self.results: list[Tensor] = []

    # ------------------------------------------------------------------ a rank with the batch

    def call(self, what: str, detail: Any = None) -> None:
        """Say what this rank is going to do together with all others; ranks with the batch call it alike.

        Args:
            what: it is.
            detail: what ranks without the batch need to know, on the CPU. Theirs is the first rank's.

        Raises:
            InputError: on every rank: one has failed, or ranks do different things.
        """
        self._hear(("call", what, detail))

    def end(self, logged: Sequence[Logged] = ()) -> None:
        """Say that the batch is done, and what was logged for it."""
        if not self._over:
            self._hear(("end", "", list(logged)))
            self._over = True

    def fail(self, error: Exception) -> None:
        """Say that the batch failed here, unless all know."""
        if not self._over:
            self._over = True
            self._gather(("error", "", f"{type(error).__name__}: {error}"))

    def reduce(self, tensor: Tensor, reduce_op: Any) -> Tensor:
        """The values of the ranks that have the batch, reduced; of one shape on all of them.

        Args:
            tensor: this rank's.
            reduce_op: ``mean``, ``sum``, ``max`` or ``min``, as a string or of PyTorch.

        Raises:
            InputError: on every rank: another operation.
        """
        name = str(reduce_op).rsplit(".", 1)[-1].lower()
        if name not in _REDUCTIONS:
            raise InputError(f"reduce_op is {reduce_op!r}; {self._advice}; expected one of {', '.join(_REDUCTIONS)}")
        self.call("reduce")
        values = [one for one in self._gather(tensor.detach().cpu()) if one is not None]
        return _REDUCTIONS[name](torch.stack(values)).to(tensor)

    def is_result(self, value: Tensor) -> bool:
        """Whether it is one of the results, to the bit."""
        return any(torch.equal(value, result.detach().cpu()) for result in self.results)

    def refuse(self, what: str) -> None:
        """Refuse something that all ranks would have to take part in with a value of their own.

        Raises:
            InputError: here, and on all other ranks as the step fails.
        """
        raise InputError(
            f"{what} was called in {self._advice}. Call it in the hook of the epoch's end, where all ranks are"
        )

    @property
    def _advice(self) -> str:
        without = ", ".join(str(rank) for rank, has in enumerate(self._have) if not has)
        return f"{self._batch}, which rank(s) {without} do not have"

    # ------------------------------------------------------------------ a rank without it

    def join(self, do: Callable[[str, Any], None]) -> list[Logged]:
        """Take part in what the others do, until their batch is done.

        Args:
            do: does this rank's part: of what, and the detail of the first rank that has the batch.

        Returns:
            What that rank logged.

        Raises:
            InputError: one of the others has failed, or they do different things.
        """
        while True:
            kind, what, detail = self._hear(None)
            if kind == "end":
                self._over = True
                return list(detail)
            if what == "reduce":
                self._gather(None)
            else:
                do(what, detail)

    # ------------------------------------------------------------------ both

    def _hear(self, said: tuple[str, str, Any] | None) -> tuple[str, str, Any]:
        """What the ranks with the batch say, which is the same but for its details."""
        all_said = self._gather(said)
        failed = [f"rank {rank}: {one[2]}" for rank, one in enumerate(all_said) if one and one[0] == "error"]
        if failed:
            self._over = True
            raise InputError(f"{self._batch} failed; {'; '.join(failed)}")
        of_ranks = {rank: one for rank, one in enumerate(all_said) if one is not None}
        if len({one[:2] for one in of_ranks.values()}) > 1:
            self._over = True
            found = ", ".join(f"{kind} {what!r} on rank {rank}" for rank, (kind, what, _) in of_ranks.items())
            raise InputError(
                f"ranks do different things in {self._batch}: {found}. Let the step make the same calls of sharded"
                " modules, run_batch and self.log(sync_dist=True) on every rank"
            )
        first: tuple[str, str, Any] = next(iter(of_ranks.values()))
        return first

    def _gather(self, said: Any) -> list[Any]:
        all_said: list[Any] = [None] * self._group.size()
        dist.all_gather_object(all_said, said, group=self._group)
        return all_said


# ---------------------------------------------------------------------- what is logged


@dataclasses.dataclass(frozen=True)
class Logged:
    """A call of ``self.log`` for a batch.

    Attributes:
        key: in Lightning's results.
        of: the fields of Lightning's metadata that can be sent.
        synced: whether ranks sum it up at the end of the epoch.
        shared: whether it is the same on all ranks, those without the batch included.
        value: on the CPU; None of a metric of torchmetrics, which keeps its own.
        batch_size: its weight in a mean.
    """

    key: str
    of: dict[str, Any]
    synced: bool
    shared: bool
    value: Tensor | None
    batch_size: int


@contextmanager
def recorded_logs(
    results: _ResultCollection, logged: list[Logged], is_shared: Callable[[Tensor], bool]
) -> Iterator[None]:
    """In the body, add what is logged to *logged*.

    Args:
        results: where Lightning puts it.
        logged: what was.
        is_shared: whether a value, on the CPU, is the same on all ranks.
    """
    update = results.update_metrics

    def update_and_record(key: str, value: Any, batch_size: int) -> None:
        meta = results[key].meta
        if not meta.sync.rank_zero_only and meta.on_epoch:
            of = {one.name: getattr(meta, one.name) for one in dataclasses.fields(meta) if one.name != "_sync"}
            kept = value.detach().cpu() if isinstance(value, Tensor) else None
            shared = kept is not None and is_shared(kept)
            logged.append(Logged(key, of, meta.sync.should, shared, kept, batch_size))
        update(key, value, batch_size)

    results.update_metrics = update_and_record
    try:
        yield
    finally:
        del results.update_metrics


def log_for_others(trainer: pl.Trainer, results: _ResultCollection, logged: Sequence[Logged], unsynced: bool) -> None:
    """Log on a rank without a batch what another one logged for it.

    A value that ranks sum up must be known on all of them, or those that know it would wait at the end of the epoch.

    Args:
        trainer: whose module logs.
        results: of its evaluation.
        logged: by the other.
        unsynced: whether values that ranks do not sum up count on this rank too. Those that they sum up do where they
            are shared; others are known here, and nothing is added to them.
    """
    device = trainer.strategy.root_device
    for one in logged:
        if one.key not in results:
            meta = _Metadata(**one.of)
            meta.sync = _Sync(_should=one.synced, fn=trainer.strategy.reduce)
            metric = _ResultMetric(meta, one.value is not None)
            if one.value is None:
                metric.value = trainer.lightning_module.get_submodule(one.of["metric_attribute"])
            results[one.key] = metric.to(device)
        metric = results[one.key]
        metric.has_reset = False
        if one.value is not None:
            # Lightning would warn that nothing was logged.
            metric._update_count += 1
            metric._computed = None
            if one.shared if one.synced else unsynced:
                _add(metric, one.value.to(device), one.batch_size)


def _add(metric: _ResultMetric, value: Tensor, batch_size: int) -> None:
    """As the metric's update, which would sum over ranks what is logged for each step."""
    value = value if value.is_floating_point() else value.to(metric.value.dtype)
    if metric.meta.is_mean_reduction:
        metric.value = metric.value + value * batch_size
        metric.cumulated_batch_size = metric.cumulated_batch_size + batch_size
    elif metric.meta.is_sum_reduction:
        metric.value = metric.value + value
    else:
        metric.value = (torch.maximum if metric.meta.is_max_reduction else torch.minimum)(metric.value, value)


def align_metrics(module: nn.Module) -> None:
    """Let metrics of torchmetrics gather alike on all ranks, whatever rows each has seen; every rank calls it.

    A metric that keeps all it has seen (an exact AUROC) has a list of tensors for each state. torchmetrics gathers
    nothing for an empty list, and the other ranks would wait. Found in torchmetrics 1.0; later versions put in an empty
    tensor, of float whatever the others are of. And a metric that has not changed since it was computed is not gathered
    again.

    Args:
        module: holds the metrics.
    """
    metrics: dict[str, Any] = {name: one for name, one in module.named_modules() if isinstance(one, Metric)}
    states = {
        (name, state): getattr(metric, state)
        for name, metric in metrics.items()
        for state, reduction in metric._reductions.items()
        if reduction is dim_zero_cat and isinstance(getattr(metric, state), list)
    }
    kinds = {key: (values[0].dtype, tuple(values[0].shape[1:])) for key, values in states.items() if values}
    changed = {name for name, metric in metrics.items() if metric._computed is None}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (kinds, changed))
    for name, metric in metrics.items():
        if any(name in of_rank for _, of_rank in ranks):
            metric._computed = None
    for key, values in states.items():
        found = next((of_rank[key] for of_rank, _ in ranks if key in of_rank), None)
        if not values and found is not None:
            name, state = key
            dtype, shape = found
            setattr(metrics[name], state, [torch.empty((0, *shape), dtype=dtype, device=metrics[name].device)])
