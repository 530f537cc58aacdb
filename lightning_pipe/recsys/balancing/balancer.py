"""Exchanges samples between ranks so that all have about as much to do: the slowest rank sets the pace of all.

    main      BalanceStart                  ... forward of another batch ...   BalanceFinish
              workloads ─► all-gather ┐                                    ┌─► exchange of samples
    worker                            └─► wait, partition (no lock held) ──┘

The two halves are what the tasks ``BalanceStart`` and ``BalanceFinish`` run; both are collectives of the main thread,
and what is between them is not.
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
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.together import communicating_device, raise_gathered
from lightning_pipe.engine.runtime.worker import Worker
from lightning_pipe.recsys.balancing.exchange import ExchangeKind, exchange
from lightning_pipe.recsys.balancing.gather import Gathered, Gathering, Room, check_workloads
from lightning_pipe.recsys.balancing.partition import Ranks, imbalance, loads_of, partition
from lightning_pipe.recsys.balancing.samples import Samples, take_apart

__all__ = ["Balance", "BalanceReport", "BatchBalancer", "make_balancer"]

Workload = Callable[[Any], torch.Tensor]

_SAME_FORM = ": pad rows to one width on all ranks, or make the part jagged (a KeyedJaggedTensor or JaggedTensor)"


@dataclass(frozen=True)
class BalanceReport:
    """How uneven ranks' work was; 1 is perfect, the number of ranks the worst.

    Args:
        batches: balanced so far.
        before: work of the slowest rank over the mean of all, in the batch balanced last, as it came.
        after: as it is trained.
        mean_before: of all batches so far.
        mean_after: of all batches so far.
        moved: which part of the last global batch's samples went to another rank.
    """

    batches: int = 0
    before: float = 1.0
    after: float = 1.0
    mean_before: float = 1.0
    mean_after: float = 1.0
    moved: float = 0.0

    def with_batch(self, before: float, after: float, moved: float) -> BalanceReport:
        """With one batch more."""
        count = self.batches + 1
        mean_before = self.mean_before + (before - self.mean_before) / count
        mean_after = self.mean_after + (after - self.mean_after) / count
        return BalanceReport(count, before, after, mean_before, mean_after, moved)


@dataclass(frozen=True)
class _Partition:
    """What the worker found."""

    gathered: Gathered
    assignment: Ranks | None = None  # where not all was told
    before: float = 1.0  # how uneven it was
    after: float = 1.0

    @property
    def moved(self) -> float:
        """Which part of the samples go to another rank."""
        if self.assignment is None or not len(self.assignment):
            return 0.0
        return float(np.mean(self.assignment != self.gathered.source))


@dataclass(frozen=True)
class Balance:
    """A batch whose samples are being distributed; ``BatchBalancer.start`` makes it.

    Args:
        samples: of this rank's batch; None where it failed.
        workloads: of these.
        error: why it failed.
        found: the partition, when it is there; None where there is one rank.
        keep: the balancer's.
    """

    samples: Samples | None
    workloads: torch.Tensor | None
    error: Exception | None
    found: Future[_Partition] | None
    keep: Collection[str]

    def around(self, batch: Any) -> Balance:
        """The same for another batch of the same samples."""
        return self if self.samples is None else replace(self, samples=take_apart(batch, self.samples.real, self.keep))


class BatchBalancer:
    """Exchanges samples between ranks, so that the workloads of their batches are about equal.

    The global batch stays the same set of samples, and every rank keeps its number of samples: only who has which
    changes. So do the losses of single ranks, but not the mean over ranks of their means, if all have as many samples
    (:func:`~lightning_pipe.recsys.batches.token_weighted_loss.token_weighted_mean` where they have not).

    Dense tensors, keyed and plain jagged ones are exchanged, weights included, at any depth of a batch. Tensors without
    dimensions, strings and numbers stay with the rank, and so does padding.

    Args:
        workload: called with the batch on the device, returns what each sample costs, in any unit: a tensor of one
            number a sample, 0 or more. Or its import path. By default the number of ids in all keyed jagged tensors.
        samples: how many rows of a padded batch are samples, those that come first: a function of the batch, or the
            name of an attribute or key of it. None: all of them.
        exchange: ``"all_to_all"``, or ``"all_gather"``, which sends all samples to all ranks.
        keep: parts of the batch that have no row a sample and stay with the rank, with all that is in them, as errors
            call them (``"batch.class_weights"``).

    Attributes:
        report: how uneven ranks' work was.

    Raises:
        SetupError: an argument is none of these.
    """

    def __init__(
        self,
        workload: Workload | str | None = None,
        *,
        samples: Callable[[Any], int] | str | None = None,
        exchange: ExchangeKind = "all_to_all",
        keep: Collection[str] = (),
    ) -> None:
        if exchange not in get_args(ExchangeKind):
            raise SetupError(f"the balancer's exchange is {exchange!r}; needed is one of {get_args(ExchangeKind)}")
        if isinstance(keep, str) or not isinstance(keep, Collection) or not all(isinstance(one, str) for one in keep):
            raise SetupError(
                f"the balancer's keep is {keep!r}; needed is a list of names such as 'batch.class_weights'"
            )
        self._workload = _imported(workload) if isinstance(workload, str) else workload
        for name, value in (("workload", self._workload), ("samples", samples)):
            if value is not None and not callable(value) and not (name == "samples" and isinstance(value, str)):
                raise SetupError(f"the balancer's {name} is {value!r}; needed is a function of the batch")
        self._samples = samples
        self._kind: ExchangeKind = exchange
        self._keep = tuple(keep)
        self.report = BalanceReport()
        self._group: dist.ProcessGroup | None = None
        self._is_open = False
        self._agree_group: dist.ProcessGroup | None = None
        self._worker: Worker | None = None
        self._device = torch.device("cpu")
        self._room = Room()

    def open(
        self, group: dist.ProcessGroup | None, agree_group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """Make ready for batches. Every rank calls it.

        Args:
            group: over all ranks, used for nothing else; None for one process.
            agree_group: over all ranks, for the texts of errors.
            device: where batches are.

        Raises:
            SetupError: ranks have balancers with different arguments, or it is open already.
        """
        if self._is_open:
            raise SetupError("this BatchBalancer is at work in another pipeline; give each pipeline one of its own")
        settings = [("exchange", self._kind), ("keep", str(sorted(self._keep)))]
        check_agreement(settings, "balancer", agree_group, error=SetupError)
        self._group = group if group is not None and group.size() > 1 else None
        self._agree_group = agree_group
        self._is_open = True
        self._device = device
        self._room = Room()

    def close(self) -> None:
        """End the worker. May be called again, and so may :meth:`open`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._is_open = False

    def start(self, batch: Any, error: Exception | None = None) -> Balance:
        """Submit this rank's workloads; the partition is made as soon as all ranks' are there, on another thread.

        Args:
            batch: on the device.
            error: what went wrong with it before, if anything did. :meth:`finish` raises it, on all ranks.
        """
        samples: Samples | None = None
        workloads: torch.Tensor | None = None
        try:
            if error is not None:
                raise error
            samples = take_apart(batch, self._real(batch), self._keep)
            workloads = self._workloads(batch, samples)
        except Exception as problem:
            error = problem
        if self._group is None:
            return Balance(samples, workloads, error, None, self._keep)
        gathering = self._gather(samples if error is None else None, workloads)
        found: Future[_Partition] = Future()
        ranks = self._group.size()

        def find() -> None:
            try:
                found.set_result(_partition(gathering.read(), ranks))
            except BaseException as problem:
                found.set_exception(problem)

        if self._worker is None:
            self._worker = Worker("balance")
        self._worker.submit(find)
        return Balance(samples, workloads, error, found, self._keep)

    def finish(self, batch: Any, balance: Balance) -> Any:
        """Exchange samples; returns the batch that this rank trains.

        Args:
            batch: the one that was given to :meth:`start`.
            balance: what that returned.

        Raises:
            InputError: on every rank, if the batch of any cannot be balanced: it has a wrong number of rows somewhere,
                another form than other ranks' batches, or workloads that are none.
        """
        assert self._is_open
        if self._group is None or balance.found is None:
            self._finish_alone(balance)
            return batch
        partition = balance.found.result()
        gathered = partition.gathered
        if gathered.failed:
            raise_gathered(balance.error, "", self._agree_group, InputError)
        assert balance.samples is not None
        if gathered.forms_differ:
            form = balance.samples.description
            check_agreement(form, "form of the batch", self._agree_group, error=InputError, advice=_SAME_FORM)
        if partition.assignment is None:
            self._room = Room(max(self._room.samples, gathered.needed.samples), gathered.needed.jagged)
            partition = _partition(self._gather(balance.samples, balance.workloads).read(), self._group.size())
            gathered = partition.gathered
        assert partition.assignment is not None
        self.report = self.report.with_batch(partition.before, partition.after, partition.moved)
        if not partition.moved:
            return batch
        return exchange(balance.samples, gathered, partition.assignment, self._group, self._kind)

    def _gather(self, samples: Samples | None, workloads: torch.Tensor | None) -> Gathering:
        assert self._group is not None
        device = communicating_device(self._group, self._device)
        return Gathering(samples, workloads, self._room, self._group, device)

    def _finish_alone(self, balance: Balance) -> None:
        """In one process there is nothing to exchange, but what is wrong is wrong here too."""
        if balance.error is not None:
            raise balance.error
        assert balance.workloads is not None
        workloads = balance.workloads.cpu().numpy()
        check_workloads(workloads, np.zeros(len(workloads), np.int32))
        self.report = self.report.with_batch(1.0, 1.0, 0.0)

    def _real(self, batch: Any) -> int | None:
        if self._samples is None:
            return None
        if isinstance(self._samples, str):
            try:
                found = batch[self._samples] if isinstance(batch, Mapping) else getattr(batch, self._samples)
            except (KeyError, AttributeError) as error:
                raise InputError(
                    f"the balancer's samples is {self._samples!r}, but the batch, a {type(batch).__name__}, has no such"
                    " key or attribute; needed is the name of the one with the number of its samples"
                ) from error
        else:
            found = self._samples(batch)
        try:
            return operator.index(found)
        except TypeError as error:
            raise InputError(
                f"the number of samples of the batch is {_described(found)}, as the balancer's samples says; needed"
                " is a whole number"
            ) from error

    def _workloads(self, batch: Any, samples: Samples) -> torch.Tensor:
        found = samples.ids() if self._workload is None else self._workload(batch)
        counts = isinstance(found, torch.Tensor) and found.dim() == 1 and not found.is_complex()
        if not counts or len(found) not in (samples.real, samples.rows):
            raise InputError(
                f"the balancer's workload function returned {_described(found)}; needed is a tensor of"
                f" [{samples.real}], one number for each sample of the batch"
            )
        return found[: samples.real].detach().to(torch.float64).contiguous()


def make_balancer(config: bool | Mapping[str, Any] | BatchBalancer | None) -> BatchBalancer | None:
    """What a strategy's or pipeline's argument ``balancer`` says.

    Args:
        config: a balancer; True for one with defaults; its arguments as a mapping; ``class_path`` and ``init_args``, as
            YAML gives them; None or False for none.

    Raises:
        SetupError: it is none of these.
    """
    if config is None or config is False:
        return None
    if isinstance(config, BatchBalancer):
        return config
    if config is True:
        return BatchBalancer()
    try:
        if not isinstance(config, Mapping):
            raise TypeError(f"it is a {type(config).__name__}")
        if "class_path" not in config:
            return BatchBalancer(**config)
        unknown = sorted(set(config) - {"class_path", "init_args"})
        made = _imported(config["class_path"])(**config.get("init_args") or {})
    except TypeError as error:
        raise SetupError(
            f"balancer is {config!r}; needed is true, a BatchBalancer, or a mapping of its arguments: {error}"
        ) from error
    if unknown or not isinstance(made, BatchBalancer):
        raise SetupError(
            f"balancer is {config!r}, which makes a {type(made).__name__}; needed is a mapping of class_path and"
            " init_args that makes a BatchBalancer"
        )
    return made


def _partition(gathered: Gathered, ranks: int) -> _Partition:
    if not gathered.complete:
        return _Partition(gathered)
    check_workloads(gathered.workloads, gathered.source)
    assignment = partition(gathered.workloads, gathered.source, ranks)
    before, after = (imbalance(loads_of(gathered.workloads, of, ranks)) for of in (gathered.source, assignment))
    return _Partition(gathered, assignment, before, after)


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of {list(value.shape)}"
    return f"a {type(value).__name__}" + (f", {value!r}" if isinstance(value, int | float | str) else "")


def _imported(path: Any) -> Any:
    try:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SetupError(
            f"the balancer names {path!r}, which cannot be imported ({error}); needed is the path of a function or"
            " class, as in 'my_package.costs.tokens'"
        ) from error
