"""Trainings of recommenders on two ranks, whose streams are watched (`tests.engine.race_detector`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule
from torchrec.streamable import Pipelineable

from lightning_pipe.engine import PipelinePlan
from lightning_pipe.engine.profiling.profiler import TaskProfiler
from lightning_pipe.recsys import PLANS, ShardedModel, TrainPipeline, recsys_plan, recsys_tasks
from lightning_pipe.recsys.dynamic.tables.sharded_tables import ShardedDynamicModule
from lightning_pipe.recsys.kernels import native
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection
from lightning_pipe.recsys.plans.recsys_plans import ON_WORKERS
from lightning_pipe.recsys.rewrite.sharded_modules import ShardedModuleEntry
from lightning_pipe.recsys.sharding.replicas import make_replica_groups
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans
from lightning_pipe.recsys.tasks.model_snapshot import ModelSnapshotter
from tests.engine.device_tensors import Accelerator, watched
from tests.engine.findings import PAGEABLE, Sync, span_of
from tests.recsys.dynamic import dynamic_cases
from tests.recsys.pipeline_cases import CASES, Case, adam, grouped, sharded, train
from tests.recsys.rewrite_cases import Bags, Batch, batches
from tests.recsys.stream_faults import FAULTS
from tests.recsys.train_pipeline_cases import torchrec_model

CUDA = torch.device("cuda")
# The first batch is recorded, and the next ones fill the pipeline. All steps from the fifth one on are alike.
WARM, COUNTED, STEPS = 4, 2, 10
EVERYTHING = CASES["everything"]


@dataclass
class Seen:
    """Observations on a rank.

    Attributes:
        findings: all findings, as text.
        syncs: host synchronizations of `COUNTED` steps.
        all_syncs: those of all steps but the first.
        operators: number of operators.
    """

    findings: list[str]
    syncs: list[Sync]
    all_syncs: list[Sync]
    operators: int


@dataclass
class Training:
    """One training under the detector.

    Attributes:
        case: model and data.
        arguments: of the pipeline.
        middle: called with the pipeline, the model and the accelerator after some steps.
        replicated: True if each rank has all tables.
    """

    case: Case = field(default_factory=lambda: EVERYTHING)
    arguments: dict[str, Any] = field(default_factory=dict)
    middle: Callable[[TrainPipeline, ShardedModel, Accelerator], None] | None = None
    replicated: bool = False


def evaluation(pipeline: TrainPipeline, model: ShardedModel, accelerator: Accelerator) -> None:
    list(pipeline.evaluate(iter(accelerator.on_host(EVERYTHING.data(4)))))


def profile(pipeline: TrainPipeline, model: ShardedModel, accelerator: Accelerator) -> None:
    """Each task replayed in its turn."""
    pipeline.pipeline.drain()
    data = accelerator.on_host(EVERYTHING.data(2))
    TaskProfiler(pipeline.pipeline, data, ModelSnapshotter(model, []), rounds=1, iterations=2).profile_many(
        ["EmbInputDistStart", "EmbPrefetch", "EmbForward"], check=False
    )


def replay(pipeline: TrainPipeline, model: ShardedModel, accelerator: Accelerator) -> None:
    """Everything before the lookup replayed at once, and then run again."""
    pipeline.pipeline.drain()
    pipeline.pipeline.enable_shortcut("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch")
    train(pipeline, accelerator.on_host(EVERYTHING.data(5)))
    pipeline.pipeline.disable_shortcut()


TRAININGS: dict[str, Training] = {
    "": Training(),
    # Nothing in its step reads on the host, which would order more than the plan does.
    "pooled": Training(CASES["pooled, table_wise"]),
    "balanced": Training(CASES["pooled, table_wise"], {"balancer": True}),
    "clipped": Training(arguments={"max_norm": 0.1}),
    "evaluated": Training(middle=evaluation),
    "profiled": Training(middle=profile),
    "replayed": Training(middle=replay),
    "replicated": Training(CASES["pooled, table_wise"], replicated=True),
    "dynamic": Training(),
    "dynamic bags": Training(),
}


class DynamicBags(nn.Module):
    """Bags of dynamic tables alone."""

    def __init__(self, store: Path, cache_rows: int) -> None:
        super().__init__()
        tables = dynamic_cases.tables(cache_rows=cache_rows)
        self.bags = DynamicEmbeddingBagCollection(tables, store / "bags")
        self.over = nn.Linear(2 + 3 * dynamic_cases.WIDTH, 1)

    def forward(self, batch: dynamic_cases.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.over(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores.detach()


def found_plans() -> list[PipelinePlan]:
    """Plans that the planner makes for a GPU, from made-up times in which input takes longest."""
    tasks = recsys_tasks()
    own = {task.name: 5e-3 if task.name in ON_WORKERS else 1e-3 for task in tasks}
    return propose_plans(hand_written_plans(tasks), own, 0.0, max_in_flight=5, peers=True, device=CUDA, max_plans=20)


# The streams of `prefetch` and no thread: what is freed when does not depend on how fast a worker is.
ONE_THREAD = "prefetch in one thread"


def plan_named(name: str) -> Any:
    """A named plan, `ONE_THREAD`, or a plan of the planner that has streams: 'found 0', 'found 1' and so on."""
    if name in PLANS:
        return name
    if name == ONE_THREAD:
        plan = recsys_plan("prefetch", recsys_tasks())
        schedule = {task: replace(where, thread_group="main") for task, where in plan.spec.schedule.items()}
        return PipelinePlan.from_spec(replace(plan.spec, schedule=schedule), plan.tasks.values())
    found = [one for one in found_plans() if one.name not in PLANS and one.streams]
    return found[int(name.removeprefix("found "))]


@contextmanager
def built_for_gpu() -> Iterator[None]:
    """Let libraries that are built for the CPU answer the package as libraries for a GPU do."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardedModuleEntry, "device", CUDA))
        # Compiled functions take CPU tensors, and would run unseen.
        stack.enter_context(mock.patch.dict("os.environ", LIGHTNING_PIPE_NATIVE="0"))
        native.load_native_library.cache_clear()
        stack.callback(native.load_native_library.cache_clear)
        yield


def place(accelerator: Accelerator, model: ShardedModel, optimizers: list[torch.optim.Optimizer]) -> None:
    """Place tensors that are on the host of a GPU too, and correct devices that were stored earlier."""
    place_on_host(accelerator, model.sharded_modules.values(), (*optimizers, *model.data_parallel_table_optimizers))
    for module in model.sharded_modules.values():
        if isinstance(module, ShardedDynamicModule):
            for cache in module.row_tables.caches.values():
                cache._columns.device = CUDA
            # Rows of a batch are pinned, and other rows are replaced meanwhile: they are not one memory.
            for _, features, columns in module.table_columns():
                for column in columns:
                    storage = accelerator.storage(column)
                    assert storage is not None
                    start, _ = span_of(column)
                    storage.rows += [(start, column[:1].numel() * column.element_size())] * len(features)


def place_on_host(
    accelerator: Accelerator, modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    """Place the tensors of kernels and optimizers that are on the host of a GPU too."""
    for module in modules:
        for kernel in find_fused_kernels(module):
            for name in ("learning_rate_tensor", "iter_cpu"):  # FBGEMM's, made for device="cpu" in every build
                accelerator.put(getattr(kernel, name), PAGEABLE)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):  # of PyTorch's optimizers, unless fused or capturable
                accelerator.put(state["step"], PAGEABLE)


def watch(rank: int, world_size: int, plan: str, name: str = "", fault: str = "") -> Seen:
    """Trains on this rank; *fault* is planted by `tests.recsys.stream_faults`."""
    training = TRAININGS[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if name.startswith("dynamic"):
            stack.callback(dist.barrier)  # the other rank writes to the folder, too
            module = DynamicBags if name == "dynamic bags" else dynamic_cases.Model
            model = dynamic_cases.shard(module(shared(folder), cache_rows=64))
            data: Callable[[int], list[Any]] = lambda count: [  # noqa: E731
                dynamic_cases.batch(step, rank) for step in range(count)
            ]
            stack.callback(model.close)
        else:
            groups = {"replicas": make_replica_groups(2, 1)} if training.replicated else {}
            model, data = sharded(training.case, **groups), training.case.data
        optimizer = adam(model)
        stack.enter_context(built_for_gpu())
        if fault:
            stack.enter_context(FAULTS[fault]())
        accelerator = stack.enter_context(watched())
        place(accelerator, model, [optimizer])
        pipeline = TrainPipeline(model, optimizer, CUDA, plan_named(plan), **grouped(training.arguments))
        feed = iter(accelerator.on_host(data(STEPS)))
        for _ in range(WARM):
            pipeline.progress(feed)
        accelerator.syncs.clear()
        for _ in range(COUNTED):
            pipeline.progress(feed)
        syncs = list(accelerator.syncs)
        if training.middle is not None:
            training.middle(pipeline, model, accelerator)
        train(pipeline, feed)
        pipeline.close()
        findings = list(map(str, accelerator.findings))
        return Seen(findings, syncs, list(accelerator.syncs), accelerator.handler.seq_num)


@dataclass
class StreamedBatch(Batch, Pipelineable):
    """What TorchRec asks of a batch on a GPU."""

    def to(self, device: torch.device, non_blocking: bool = False) -> StreamedBatch:
        return StreamedBatch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> tuple[Any, ...]:
        return self.dense, self.sparse, self.label


def watch_torchrec(rank: int, world_size: int) -> list[Sync]:
    """Host synchronizations of `COUNTED` steps of TorchRec's own pipeline, with the model and data of "pooled"."""
    model, optimizer = torchrec_model(Bags, "table_wise")
    with built_for_gpu(), watched() as accelerator:
        modules = [module for module in model.modules() if isinstance(module, ShardedModule)]
        place_on_host(accelerator, modules, [optimizer])
        pipeline = TrainPipelineSparseDist(model, optimizer, CUDA)
        feed = iter(accelerator.on_host([StreamedBatch(*vars(batch).values()) for batch in batches(STEPS)]))
        for _ in range(WARM):
            pipeline.progress(feed)
        accelerator.syncs.clear()
        for _ in range(COUNTED):
            pipeline.progress(feed)
        return list(accelerator.syncs)


def shared(folder: str) -> Path:
    """The first rank's folder."""
    found = [folder]
    dist.broadcast_object_list(found)
    return Path(found[0])
