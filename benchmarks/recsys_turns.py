"""Alternating blocks of steps for benchmarks of recsys pipelines, timed by the slower rank.

No batch is in flight at the start and the end of a block. The steps that fill and drain a pipeline are not timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardingPlan

from benchmarks.recsys_model import Batch, Model, batches, ours, theirs
from lightning_pipe.engine import IterContext, PipelinePlan
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline

CPU = torch.device("cpu")
EXCHANGE = ("EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch")
# Steps of a block before and after the timed ones, which fill and drain the pipeline.
FILL, DRAIN = 2, 2
BATCHES = 4


class Arm:
    """One of the alternating ways to run a step.

    Args:
        block: function that runs a block and returns its seconds per step.

    Attributes:
        times: seconds per step, by round.
    """

    def __init__(self, block: Callable[[], float]) -> None:
        self._block = block
        self.times: list[float] = []

    def turn(self) -> None:
        """Run a block, and record the time of the slower rank."""
        dist.barrier()
        slower = torch.tensor([self._block()], dtype=torch.float64)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        self.times.append(slower.item())

    def median(self, rounds: Sequence[int] | None = None) -> float:
        """Median seconds per step over the given rounds (default: all)."""
        return statistics.median(self.times if rounds is None else (self.times[index] for index in rounds))


class Training(Arm):
    """A train pipeline.

    Args:
        model: model that the pipeline trains.
        progress: function that trains a batch and returns the model's second output.
        data: batches, which are repeated.
        steps: timed steps per block.
        reset: function to call at the end of the data (default: no action).

    Attributes:
        model: as in Args.
        losses: last loss of each block.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        progress: Callable[[Iterator[Batch]], Any],
        data: Sequence[Batch],
        steps: int,
        reset: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(self._trained)
        self.model = model
        self.losses: list[float] = []
        self._progress, self._data, self._steps, self._reset = progress, data, steps, reset
        # The dense optimizer has no state.
        self._tensors = [*_local(model.state_dict()), *_local(model.fused_optimizer.state_dict()["state"])]
        self._values = [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def restart(self) -> None:
        """Restore the initial values of the model, and clear times and losses."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            tensor.copy_(value)
        self.times.clear()
        self.losses.clear()

    def _trained(self) -> float:
        length = FILL + self._steps + DRAIN
        source = islice(cycle(self._data), length)
        marks = []
        for _ in range(length):
            loss = self._progress(source)[0]
            marks.append(time.perf_counter())
        with suppress(StopIteration):
            self._progress(source)
            raise AssertionError("a block trained more batches than it was given")
        self._reset()
        self.losses.append(float(loss))
        return (marks[FILL + self._steps - 1] - marks[FILL - 1]) / self._steps


def _local(value: Any) -> Iterator[Tensor]:
    """This rank's tensors in a nested value."""
    if isinstance(value, dict):
        for entry in value.values():
            yield from _local(entry)
    elif hasattr(value, "local_shards"):
        for shard in value.local_shards():
            yield shard.tensor
    elif isinstance(value, Tensor):
        yield value


class Ours(Training):
    """A pipeline of this project.

    Args:
        sharded: sharded model.
        pipeline: pipeline that trains the model.
        data: as in :class:`Training`.
        steps: as in :class:`Training`.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        pipeline: TrainPipeline,
        data: Sequence[Batch],
        steps: int,
    ) -> None:
        super().__init__(sharded.dmp, pipeline.progress, data, steps)
        self.pipeline = pipeline

    def own_times(self) -> tuple[dict[str, float], float]:
        """Seconds of each task in its thread, as means of the ranks, and seconds of a step outside all tasks."""
        self.pipeline.pipeline.start_trace()
        self.turn()
        times: dict[str, list[float]] = {name: [] for name in self.pipeline.pipeline.plan.tasks}
        for span in self.pipeline.pipeline.stop_trace():
            times[span.task].append(span.end - span.start)
        medians = {name: statistics.median(of_task) for name, of_task in times.items()}
        ranks: list[dict[str, float]] = [{}, {}]
        dist.all_gather_object(ranks, medians)
        task_seconds = {name: statistics.fmean(rank[name] for rank in ranks) for name in medians}
        return task_seconds, max(0.0, self.times[-1] - sum(task_seconds.values()))


class Deep(Model):
    """Model that applies one hidden layer many times, for much compute and few gradients to send."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        (width,) = options.mlp
        first, relu, last = self.mlp
        again = nn.Linear(width, width)
        self.mlp = nn.Sequential(first, relu, *[again, relu] * options.times, last)


class Workload:
    """The model, and batches with a variable number of ids.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: list[Batch] = []
        placed = {f"table{index}": table_wise(index % 2, compute_kernel="fused") for index in range(options.tables)}
        tables = construct_module_sharding_plan(
            Deep(options).tables, placed, world_size=2, local_size=1, device_type="cpu"
        )
        self._plan = ShardingPlan(plan={"tables": tables})

    def give(self, pooling: int) -> None:
        """Create batches with an average of *pooling* ids per table and sample."""
        self.options.pooling = pooling
        self.data[:] = batches(self.options, dist.get_rank(), False)[:BATCHES]

    def of_ours(self, plan: str | Path | PipelinePlan, ids: IdsOnWire | None = None) -> Ours:
        """Create a pipeline of this project.

        Args:
            plan: plan of the pipeline.
            ids: type in which it sends ids (default: that of the options).
        """
        sharded, optimizer = ours(self.options, CPU, self._plan, Deep)
        pipeline = TrainPipeline(sharded, optimizer, CPU, plan=plan, options={"wire": {"ids": ids or self.options.ids}})
        return Ours(sharded, pipeline, self.data, self.options.steps)

    def of_theirs(self, kind: Any) -> Training:
        """Create a pipeline of TorchRec."""
        model, optimizer = theirs(self.options, CPU, self._plan, Deep)
        pipeline = kind(model, optimizer, CPU)
        # The other pipelines detect new data without a reset.
        ended = [pipeline.reset] if kind is TrainPipelineBase else []
        return Training(model, pipeline.progress, self.data, self.options.steps, *ended)


def add_workload_options(parser: argparse.ArgumentParser, *, times: int, rounds: int) -> None:
    """Add the options of a workload over a slow link, with the defaults of ``--times`` and ``--rounds``."""
    parser.add_argument("--rate", default="200mbit", help="rate of the link per direction, in tc's format")
    parser.add_argument(
        "--ids", choices=("int64", "int32", "auto"), default="int64", help="type of ids that ours sends"
    )
    for name, default, help_text in (
        ("tables", 4, ""),
        ("rows", 2000, "rows per table"),
        ("width", 4, "width of the rows"),
        ("batch", 1024, "samples per rank"),
        ("dense", 16, "number of dense features"),
        ("times", times, "number of times that the hidden layer is applied"),
        ("steps", 5, "timed steps per block"),
        ("rounds", rounds, "rounds that count"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    parser.add_argument("--mlp", type=int, nargs=1, default=[64], help="width of the MLP")


class Parts:
    """The input exchange alone, and the rest of a step alone.

    Args:
        workload: model and batches.

    Attributes:
        exchange: arm of the input exchange.
        rest: arm of the rest of a step.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        serial = workload.of_ours("serial")
        serial.turn()  # the first step finds out the inputs of the tables
        serial.restart()
        self._tasks = serial.pipeline.pipeline.plan.tasks
        self._exchanged: dict[int, dict[str, Any]] = {}
        self.exchange = Arm(self._exchanges)
        self.forward_backward = Training(
            serial.model, self._train_forward_backward, workload.data, workload.options.steps
        )

    def give(self, pooling: int) -> tuple[float, float]:
        """Create new batches, and return the seconds of the exchange and of the rest with them."""
        self._workload.give(pooling)
        self._exchanged.clear()
        self.exchange.times.clear()
        self.forward_backward.times.clear()
        for _ in range(5):
            self.exchange.turn()
            self.forward_backward.turn()
        return self.exchange.median(), self.forward_backward.median()

    def _exchange(self, batch: Batch) -> IterContext:
        ctx = IterContext(batch)
        for name in ("H2DAndShuffle", *EXCHANGE):
            self._tasks[name].fn(ctx)
        return ctx

    def _exchanges(self) -> float:
        for batch in islice(cycle(self._workload.data), FILL):
            self._exchange(batch)
        begun = time.perf_counter()
        for batch in islice(cycle(self._workload.data), self._workload.options.steps):
            self._exchange(batch)
        return (time.perf_counter() - begun) / self._workload.options.steps

    def _train_forward_backward(self, source: Iterator[Batch]) -> Any:
        batch = next(source)
        if id(batch) not in self._exchanged:
            self._exchanged[id(batch)] = dict(vars(self._exchange(batch)))
        ctx = IterContext()
        vars(ctx).update(self._exchanged[id(batch)])
        for name, task in self._tasks.items():
            if name != "H2DAndShuffle" and name not in EXCHANGE:
                task.fn(ctx)
        return ctx.output[1]
