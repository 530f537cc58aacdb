"""Exchange of samples between ranks, which gives all ranks about the same workload; every rank waits for the slowest.

    main      BalanceStart                  ... forward of another batch ...   BalanceFinish
              workloads ─► all-gather ┐                                    ┌─► exchange of samples
    worker                            └─► wait, partition (no lock held) ──┘

The tasks ``BalanceStart`` and ``BalanceFinish`` run the two halves. Both submit their collectives from the thread that
the plan gives them; the work between them runs on a worker thread of the balancer and submits no collectives.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.common.options import check_choice
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.object_collectives import collective_device, raise_gathered
from lightning_pipe.engine.runtime.worker import Worker
from lightning_pipe.recsys.balancing.exchange import ExchangeKind, exchange_samples
from lightning_pipe.recsys.balancing.partition import Ranks, imbalance, partition_samples, sum_workloads_by_rank
from lightning_pipe.recsys.balancing.samples import Samples, locate_sample_tensors
from lightning_pipe.recsys.balancing.workload_gather import (
    GatheredWorkloads,
    MessageCapacity,
    PendingWorkloadGather,
    check_workloads,
)

Workload = Callable[[Any], torch.Tensor]

_SAME_FORM = ": pad rows to one width on all ranks, or make the part jagged (a KeyedJaggedTensor or JaggedTensor)"


@dataclass(frozen=True)
class BalanceReport:
    """Imbalance of the ranks' workloads: the largest workload of a rank divided by the mean over ranks.

    1.0 is perfect balance; the worst value is the number of ranks.

    Args:
        batches: number of batches balanced so far.
        before: imbalance of the last batch as the loader delivered it.
        after: imbalance of the last batch after the exchange.
        mean_before: mean of ``before`` over all batches so far.
        mean_after: mean of ``after`` over all batches so far.
        moved: fraction of the last global batch's samples that moved to another rank.
    """

    batches: int = 0
    before: float = 1.0
    after: float = 1.0
    mean_before: float = 1.0
    mean_after: float = 1.0
    moved: float = 0.0

    def with_batch(self, before: float, after: float, moved: float) -> BalanceReport:
        """Return the report updated by one batch."""
        count = self.batches + 1
        mean_before = self.mean_before + (before - self.mean_before) / count
        mean_after = self.mean_after + (after - self.mean_after) / count
        return BalanceReport(count, before, after, mean_before, mean_after, moved)


@dataclass(frozen=True)
class _SampleToRankAssignment:
    """Partition that the worker has computed."""

    gathered: GatheredWorkloads
    assignment: Ranks | None = None  # None if the gathered data are incomplete
    before: float = 1.0  # imbalance, see BalanceReport
    after: float = 1.0

    @property
    def moved_fraction(self) -> float:
        """Fraction of the samples that move to another rank."""
        if self.assignment is None or not len(self.assignment):
            return 0.0
        return float(np.mean(self.assignment != self.gathered.source))


@dataclass(frozen=True)
class PendingSampleExchange:
    """Pending exchange of a batch's samples, returned by ``BatchBalancer.start``."""

    samples: Samples | None  # None if the batch failed, as are the workloads
    workloads: torch.Tensor | None
    error: Exception | None
    partition: Future[_SampleToRankAssignment] | None  # None if there is only one rank
    local_parts: Collection[str]

    def with_batch(self, batch: Any) -> PendingSampleExchange:
        """Return the same pending exchange for another batch object with the same samples."""
        return (
            self
            if self.samples is None
            else replace(self, samples=locate_sample_tensors(batch, self.samples.num_samples, self.local_parts))
        )


class BatchBalancer:
    """Exchanges samples between ranks so that the workloads of their batches are about equal.

    The global batch remains the same set of samples, and every rank keeps its number of samples; only the assignment of
    samples to ranks changes. The loss of a single rank therefore changes. The mean over ranks of their mean losses does
    not, if all ranks have the same number of samples. Otherwise use
    :func:`~lightning_pipe.recsys.batches.token_weighted_loss.token_weighted_mean`.

    Dense tensors, keyed tensors and jagged tensors (including their weights) are exchanged at any depth of the batch.
    Zero-dimensional tensors, strings, numbers and padding rows stay on their rank.

    Args:
        workload: function that maps the batch on the device to the cost of each sample, in any unit: a tensor [samples]
            of numbers >= 0; or the import path of such a function (default: number of ids of the sample in all
            KeyedJaggedTensors). Set it if the cost of a sample is not proportional to its ids.
        num_samples: number of real samples in a padded batch, whose padding rows come last: a function of the batch, or
            the name of one of its attributes or keys (default None: every row is a sample).
        exchange: collective of the exchange, ``"all_to_all"`` (default) or ``"all_gather"``. ``"all_gather"`` sends
            every sample to every rank; use it where the backend or network makes that faster.
        local_parts: paths of batch parts that have no row per sample and stay on their rank with all their contents,
            spelled as in error messages, for example ``"batch.class_weights"`` (default: none).

    Attributes:
        report: imbalance before and after the exchange.

    Raises:
        SetupError: An argument has a wrong type or value.
    """

    def __init__(
        self,
        workload: Workload | str | None = None,
        *,
        num_samples: Callable[[Any], int] | str | None = None,
        exchange: ExchangeKind = "all_to_all",
        local_parts: Collection[str] = (),
    ) -> None:
        check_choice("the balancer's exchange", exchange, get_args(ExchangeKind))
        if isinstance(local_parts, str):
            raise SetupError(
                f"the balancer's local_parts is {local_parts!r}; expected a list of names such as 'batch.class_weights'"
            )
        self._workload = _import_function(workload) if isinstance(workload, str) else workload
        self._num_samples = num_samples
        self._kind: ExchangeKind = exchange
        self._local_parts = tuple(local_parts)
        self.report = BalanceReport()
        self._group: dist.ProcessGroup | None = None
        self._is_open = False
        self._worker: Worker | None = None
        self._device = torch.device("cpu")
        self._capacity = MessageCapacity()

    def attach_to_process_group(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Prepare for batches. Collective: every rank calls it.

        Args:
            group: process group of all ranks, reserved for this balancer; None for a single process.
            device: device of the batches.

        Raises:
            SetupError: The arguments differ between ranks, or the balancer is already open.
        """
        if self._is_open:
            raise SetupError("this BatchBalancer is in use by another pipeline. Create one balancer for each pipeline")
        settings = [("exchange", self._kind), ("local_parts", str(sorted(self._local_parts)))]
        check_agreement(settings, "balancer", group, error_class=SetupError)
        self._group = group if group is not None and group.size() > 1 else None
        self._is_open = True
        self._device = device
        self._capacity = MessageCapacity()

    def close(self) -> None:
        """Stop the worker. Further calls have no effect; :meth:`open` may be called again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._is_open = False

    def start(self, batch: Any, error: Exception | None = None) -> PendingSampleExchange:
        """Start the all-gather of the workloads; a worker thread computes the partition once it has completed.

        Args:
            batch: the batch, on the device.
            error: earlier error of this batch; None (default) if there is none. :meth:`finish` raises it on all ranks.
        """
        samples: Samples | None = None
        workloads: torch.Tensor | None = None
        try:
            if error is not None:
                raise error
            samples = locate_sample_tensors(batch, self._count_real_samples(batch), self._local_parts)
            workloads = self._workloads(batch, samples)
        except Exception as problem:
            error = problem
        if self._group is None:
            return PendingSampleExchange(samples, workloads, error, None, self._local_parts)
        gathering = self._start_workload_gather(samples if error is None else None, workloads)
        partition_future: Future[_SampleToRankAssignment] = Future()
        ranks = self._group.size()

        def compute_partition() -> None:
            try:
                partition_future.set_result(_assign_samples_to_ranks(gathering.read(), ranks))
            except BaseException as problem:
                partition_future.set_exception(problem)

        if self._worker is None:
            self._worker = Worker("balance")
        self._worker.submit(compute_partition)
        return PendingSampleExchange(samples, workloads, error, partition_future, self._local_parts)

    def finish(self, batch: Any, balance: PendingSampleExchange) -> Any:
        """Exchange samples and return the batch that this rank trains.

        Args:
            batch: the batch given to :meth:`start`.
            balance: the return value of :meth:`start`.

        Raises:
            InputError: On every rank, if any rank's batch cannot be balanced: a part has a wrong number of rows, the
                structure differs from the other ranks' batches, or a workload is negative or not finite.
        """
        assert self._is_open
        if self._group is None or balance.partition is None:
            self._finish_without_exchange(balance)
            return batch
        partition = balance.partition.result()
        gathered = partition.gathered
        if gathered.failed:
            raise_gathered(balance.error, "", self._group, InputError)
        assert balance.samples is not None
        if gathered.forms_differ:
            form = balance.samples.description
            check_agreement(form, "form of the batch", self._group, error_class=InputError, advice=_SAME_FORM)
        if partition.assignment is None:
            self._capacity = MessageCapacity(
                max(self._capacity.samples, gathered.required_capacity.samples), gathered.required_capacity.jagged
            )
            partition = _assign_samples_to_ranks(
                self._start_workload_gather(balance.samples, balance.workloads).read(), self._group.size()
            )
            gathered = partition.gathered
        assert partition.assignment is not None
        self.report = self.report.with_batch(partition.before, partition.after, partition.moved_fraction)
        if not partition.moved_fraction:
            return batch
        return exchange_samples(balance.samples, gathered, partition.assignment, self._group, self._kind)

    def _start_workload_gather(self, samples: Samples | None, workloads: torch.Tensor | None) -> PendingWorkloadGather:
        assert self._group is not None
        device = collective_device(self._group, self._device)
        return PendingWorkloadGather(samples, workloads, self._capacity, self._group, device)

    def _finish_without_exchange(self, balance: PendingSampleExchange) -> None:
        """Raise the errors that several ranks would raise; a single process has no samples to exchange."""
        if balance.error is not None:
            raise balance.error
        assert balance.workloads is not None
        workloads = balance.workloads.cpu().numpy()
        check_workloads(workloads, np.zeros(len(workloads), np.int32))
        self.report = self.report.with_batch(1.0, 1.0, 0.0)

    def _count_real_samples(self, batch: Any) -> int | None:
        if self._num_samples is None:
            return None
        if isinstance(self._num_samples, str):
            try:
                num_samples = (
                    batch[self._num_samples] if isinstance(batch, Mapping) else getattr(batch, self._num_samples)
                )
            except (KeyError, AttributeError) as error:
                raise InputError(
                    f"the balancer's num_samples is {self._num_samples!r}, but the batch, a {type(batch).__name__}, has"
                    " no such key or attribute. Give the name of the key or attribute that holds the number of samples"
                ) from error
        else:
            num_samples = self._num_samples(batch)
        try:
            return operator.index(num_samples)
        except TypeError as error:
            raise InputError(
                f"the balancer's argument num_samples gave {_described(num_samples)} for the batch; expected a whole"
                " number of samples"
            ) from error

    def _workloads(self, batch: Any, samples: Samples) -> torch.Tensor:
        workloads = samples.count_ids_per_sample() if self._workload is None else self._workload(batch)
        counts = isinstance(workloads, torch.Tensor) and workloads.dim() == 1 and not workloads.is_complex()
        if not counts or len(workloads) not in (samples.num_samples, samples.num_rows):
            raise InputError(
                f"the balancer's workload function returned {_described(workloads)}; expected a tensor of"
                f" [{samples.num_samples}], one number for each sample of the batch"
            )
        return workloads[: samples.num_samples].detach().to(torch.float64).contiguous()


def _assign_samples_to_ranks(gathered: GatheredWorkloads, ranks: int) -> _SampleToRankAssignment:
    if not gathered.complete:
        return _SampleToRankAssignment(gathered)
    check_workloads(gathered.workloads, gathered.source)
    assignment = partition_samples(gathered.workloads, gathered.source, ranks)
    before, after = (
        imbalance(sum_workloads_by_rank(gathered.workloads, rank_of, ranks))
        for rank_of in (gathered.source, assignment)
    )
    return _SampleToRankAssignment(gathered, assignment, before, after)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of {list(value.shape)}"
    return f"a {type(value).__name__}" + (f", {value!r}" if isinstance(value, int | float | str) else "")


def _import_function(path: str) -> Any:
    try:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"the balancer names {path!r}, which cannot be imported ({error}); expected the import path of a function,"
            " such as 'my_package.costs.tokens'"
        ) from error
