"""What the tests of the train pipeline try on each of two ranks, and the helpers for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

from lightning_pipe.engine import PipelineTask
from lightning_pipe.engine.plans.checked_context import CHECK
from lightning_pipe.engine.ranks import object_collectives
from lightning_pipe.recsys import ShardedModel, TrainPipeline, recsys_tasks
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from tests.recsys.pipeline_cases import (
    CASES,
    DEPTHS,
    STEPS,
    Case,
    Feed,
    Outcome,
    Paired,
    adam,
    difference,
    grouped,
    outcome,
    same_outputs,
    sharded,
    train,
    values_of,
)
from tests.recsys.rewrite_cases import Bags, Batch, Processed, Sequences, batches, jagged, shard, table_values
from tests.recsys.sharding_cases import CPU

POOLED = CASES["pooled, table_wise"]
EVERYTHING = CASES["everything"]


@contextmanager
def pipeline_of(
    model: ShardedModel, plan: str = "prefetch", optimizer: torch.optim.Optimizer | None = None, **arguments: Any
) -> Iterator[TrainPipeline]:
    pipeline = TrainPipeline(model, optimizer or adam(model), CPU, plan, **grouped(arguments))
    try:
        yield pipeline
    finally:
        pipeline.close()


def replaced(model: nn.Module) -> list[str]:
    """The modules, and input dists inside sharded ones, whose forward is not their class's."""
    found = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    for name, module in model.named_modules():
        for part in getattr(module, "_input_dists", ()):
            if "forward" in getattr(part, "_dist", part).__dict__:
                found.append(f"{name}: input dist")
    return found


def hooks(model: ShardedModel) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for _, parameter in model.dense_parameters())


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe")]


# The same as TorchRec's pipeline over TorchRec's own model.


@dataclass
class DeviceBatch(Batch, Pipelineable):
    """What TorchRec asks of a batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> DeviceBatch:
        return DeviceBatch(
            self.dense.to(device), self.sparse.to(device, non_blocking=non_blocking), self.label.to(device)
        )

    def record_stream(self, stream: torch.Stream) -> None:
        raise AssertionError("there are no streams here")


def device_batches(count: int) -> list[Any]:
    return [DeviceBatch(batch.dense, batch.sparse, batch.label) for batch in batches(count)]


def torchrec_model(build: Callable[[], nn.Module], kinds: str) -> tuple[DistributedModelParallel, Any]:
    model = shard(Paired(build()), kinds, torch.optim.Adagrad, eps=1e-8)
    model.init_data_parallel()
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    )
    return model, CombinedOptimizer([("tables", model.fused_optimizer), ("dense", dense)])


def run_with_changing_rates(pipeline: Any, optimizer: Any) -> list[torch.Tensor]:
    """Every batch, the learning rate of all groups halved after the third."""
    feed = iter(device_batches(STEPS))
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(feed))
        except StopIteration:
            return outputs
        if len(outputs) == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def like_torchrec(build: Callable[[], nn.Module], kinds: str) -> dict[str, bool]:
    model, optimizer = torchrec_model(build, kinds)
    expected = run_with_changing_rates(TrainPipelineSparseDist(model, optimizer, CPU), optimizer)
    values = table_values(model)
    found = {"ran": len(expected) == STEPS}
    for plan in DEPTHS:
        model, optimizer = torchrec_model(build, kinds)
        pipeline = TrainPipeline(model, optimizer, CPU, plan)
        outputs = run_with_changing_rates(pipeline, optimizer)
        pipeline.close()
        found[f"{plan} losses"] = same_outputs(outputs, expected)
        found[f"{plan} values"] = not difference(table_values(model), values)
    return found


# detach, attach, reset, close, and the end of the data.


@cache
def whole_run() -> Outcome:
    """An undisturbed training: every plan leaves what the serial one leaves, so that it is run once for all of them."""
    return outcome(EVERYTHING, "serial")


def detached(plan: str) -> dict[str, bool]:
    whole = whole_run()
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    feed = Feed(EVERYTHING.data(STEPS))
    pipeline = TrainPipeline(model, optimizer, CPU, plan)
    outputs = []
    for _ in range(3):
        outputs.append(pipeline.progress(feed))
        feed.trained += 1
    in_flight = len(pipeline.pipeline.in_flight)
    given_back = pipeline.detach()
    clean = replaced(model.module)
    before = values_of(model)
    extra = EVERYTHING.data(STEPS + 1)[-1]
    model.module.eval()
    with torch.no_grad():
        one, again = model.module(extra)[1], given_back(extra)[1]
    model.module.train()
    untouched = difference(before, values_of(model))
    pipeline.attach(given_back)
    rest, _ = train(pipeline, feed)
    pipeline.close()
    return {
        "the model itself": given_back is model.module,
        "nothing is replaced": clean == [],
        "batches are in flight": in_flight == DEPTHS[plan] - 1,
        "it can be called": torch.equal(one, again),
        "evaluation changes nothing": untouched == [],
        "goes on": same_outputs([*outputs, *rest], whole.outputs),
        "ends the same": not difference(values_of(model, optimizer), whole.values),
        "depth": feed.most_in_flight <= DEPTHS[plan],
    }


def reset(plan: str) -> dict[str, bool]:
    """Three batches, a reset, then other data: what was in flight was never trained."""
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    data = EVERYTHING.data(2 * STEPS)
    torch.manual_seed(13)
    with pipeline_of(model, plan, optimizer) as pipeline:
        feed = iter(data[:STEPS])
        outputs = [pipeline.progress(feed) for _ in range(3)]
        lost = len(pipeline.pipeline.in_flight)
        pipeline.reset()
        nothing = len(pipeline.pipeline.in_flight)
        rest, _ = train(pipeline, data[STEPS:])
    expected, values = without_what_was_lost()
    return {
        "gives up": (lost, nothing) == (DEPTHS[plan] - 1, 0),
        "goes on": same_outputs([*outputs, *rest], expected),
        "ends the same": not difference(values_of(model, optimizer), values),
    }


@cache
def without_what_was_lost() -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The serial training of those batches that a reset after the third one leaves."""
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    data = EVERYTHING.data(2 * STEPS)
    torch.manual_seed(13)
    with pipeline_of(model, "serial", optimizer) as pipeline:
        outputs, _ = train(pipeline, [*data[:3], *data[STEPS:]])
    return outputs, values_of(model, optimizer)


def closed(plan: str) -> dict[str, bool]:
    model = sharded(POOLED)
    with pipeline_of(model, plan) as pipeline:
        feed = iter(POOLED.data(STEPS))
        pipeline.progress(feed)
        pipeline.progress(feed)
        at_work = (
            bool(replaced(model.module))
            and bool(hooks(model))
            and bool(workers()) == (plan in ("prefetch", "threaded_input"))
        )
        pipeline.close()
        pipeline.close()
    clean = not replaced(model.module) and not hooks(model) and not workers()
    refused = [error_of(lambda: pipeline.progress(feed)), error_of(pipeline.attach)]
    unpatched = not replaced(model.module)
    with pipeline_of(model, plan) as successor:
        rest, _ = train(successor, feed)
    return {
        "at work": at_work,
        "clean": clean,
        "refused": all("SetupError" in kinds and "is closed" in text for kinds, text in refused),
        "still clean": unpatched,
        "a successor": len(rest) == STEPS - 1 - DEPTHS[plan],
    }


def end_of_data(plan: str) -> dict[str, bool]:
    data = POOLED.data(STEPS)
    model = sharded(POOLED)
    with pipeline_of(model, plan) as pipeline:
        epochs, stops = [], []
        for part in (data[:3], [], data[3:]):
            feed = Feed(part)
            outputs, _ = train(pipeline, feed)
            epochs += outputs
            stops.append("StopIteration" in error_of(lambda: pipeline.progress(feed))[0])  # noqa: B023
    expected, values = one_epoch()
    return {
        "stops each time": stops == [True] * 3,
        "epochs": same_outputs(epochs, expected) and not difference(values_of(model), values),
    }


@cache
def one_epoch() -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The serial training of all batches at once."""
    model = sharded(POOLED)
    with pipeline_of(model, "serial") as pipeline:
        outputs, _ = train(pipeline, POOLED.data(STEPS))
    return outputs, values_of(model)


# What goes wrong on one rank.


def error_of(call: Callable[[], Any]) -> tuple[list[str], str]:
    """Names of the classes of what it raised and of the causes; and all messages."""
    try:
        call()
    except Exception as raised:
        error: BaseException | None = raised
        names, texts = [], []
        while error is not None:
            names += [kind.__name__ for kind in type(error).__mro__]
            texts.append(str(error))
            error = error.__cause__
        return names, "\n".join(texts)
    return [], "no error"


class Opaque:
    """Nobody knows how to move this."""


def without_features(batch: Batch) -> Any:
    return Batch(batch.dense, batch.dense, batch.label)


def other_keys(batch: Batch) -> Any:
    generator = torch.Generator().manual_seed(0)
    return Batch(batch.dense, jagged(["f0", "f1", "f9"], generator), batch.label)


def beyond_the_table(batch: Batch) -> Any:
    batch.sparse.values()[0] = 24
    return batch


def immovable(batch: Batch) -> Any:
    return Batch(batch.dense, batch.sparse, Opaque())  # type: ignore[arg-type]


def not_a_number(batch: Batch) -> Any:
    return Batch(batch.dense * float("nan"), batch.sparse, batch.label)


# name: what is made of one batch of one rank, an argument of the pipeline, what the error says on every rank
WRONG: dict[str, tuple[Callable[[Batch], Any], dict[str, Any], str]] = {
    "no features": (without_features, {}, "KeyedJaggedTensor"),
    "other keys": (other_keys, {}, "f9"),
    "an id beyond the table": (beyond_the_table, {"checks": {"validate_ids": True}}, "has the id 24"),
    "a part that cannot be moved": (immovable, {}, "batch.label is of type Opaque"),
    "a loss that is no number": (not_a_number, {"checks": {"detect_nan": True}}, "not finite on rank(s) [1]"),
}


def wrong(name: str, plan: str, at: int, rewrite: str) -> tuple[list[str], str, bool]:
    spoil, arguments, _ = WRONG[name]
    model = sharded(POOLED)
    data = POOLED.data(STEPS)
    if dist.get_rank() == 1:
        data[at] = spoil(data[at])
    with pipeline_of(model, plan, rewrite={"method": rewrite}, **arguments) as pipeline:
        names, text = error_of(lambda: train(pipeline, data))
        clean = not replaced(model.module) and not hooks(model) and not workers()
    return names, text, clean


PLACES = [("prefetch", 0, "auto"), ("prefetch", 3, "auto"), ("prefetch", 0, "direct"), ("base", 3, "auto")]


def differing_plans(*of_ranks: str) -> tuple[list[str], str]:
    def trained() -> None:
        with pipeline_of(sharded(POOLED), of_ranks[dist.get_rank()]) as pipeline:
            train(pipeline, POOLED.data(2))

    return error_of(trained)


class Failing(Bags):
    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.dense.shape[1] == 0:
            raise KeyError("boom")
        return super().forward(batch)


def failed_step(plan: str) -> dict[str, bool]:
    model = sharded(Case(lambda: Paired(Failing())))
    data = POOLED.data(STEPS)
    data[3] = Batch(data[3].dense[:, :0], data[3].sparse, data[3].label)
    with pipeline_of(model, plan) as pipeline:
        names, text = error_of(lambda: train(pipeline, data))
        clean = not replaced(model.module) and not hooks(model) and not workers()
        later = error_of(lambda: pipeline.progress(iter(data)))
        pipeline.close()
    with pipeline_of(model, plan) as pipeline:
        outputs, _ = train(pipeline, data[4:])
    return {
        "names the task": "TaskError" in names and "KeyError" in names and "'DenseForward' of iteration 3" in text,
        "clean": clean,
        "stays closed": "PipelineError" in later[0],
        "a successor": len(outputs) == STEPS - 4,
    }


# A loss on some ranks only; evaluation; learning rates.


class SometimesNone(nn.Module):
    """No loss for a batch whose labels are all negative; nor, but for the first batch, any call of its modules."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.model = Bags()

    def forward(self, batch: Batch) -> Any:
        self.steps += 1
        without = bool((batch.label < 0).all())
        loss = self.model(batch) if self.steps == 1 or not without else None
        return None if without else (loss, torch.tensor(1.0))


class ZeroInstead(SometimesNone):
    def forward(self, batch: Batch) -> Any:
        weight = 0.0 if bool((batch.label < 0).all()) else 1.0
        return self.model(batch) * weight, torch.tensor(1.0)


def without_losses(batches_without: dict[int, tuple[int, ...]], skip: bool = False) -> list[Any]:
    """Batches that have no loss on the given ranks; or all but those that have none anywhere."""
    data = POOLED.data(STEPS)
    for index, ranks in batches_without.items():
        if dist.get_rank() in ranks:
            data[index].label.fill_(-1.0)
    return [batch for index, batch in enumerate(data) if not (skip and len(batches_without.get(index, ())) == 2)]


# Ranks that have no loss, by batch.
WITHOUT = {0: (1,), 2: (0,), 3: (0, 1), 5: (1,)}


def missing_losses(plan: str) -> dict[str, bool]:
    """Losses missing on one rank, on the other and on both, against losses of zero and one batch fewer."""
    found = {}
    for kind in ("table_wise", "data_parallel"):
        model = sharded(Case(SometimesNone, kinds=kind))
        with pipeline_of(model, plan, checks={"detect_nan": True}) as pipeline:
            outputs, _ = train(pipeline, without_losses(WITHOUT))
        missing = [output is None for output in outputs]
        found[f"{kind} outputs"] = missing == [dist.get_rank() in WITHOUT.get(index, ()) for index in range(STEPS)]
        found[f"{kind} values"] = not difference(values_of(model), with_losses_of_zero(kind))
    return found


@cache
def with_losses_of_zero(kind: str) -> dict[str, torch.Tensor]:
    """What a serial training leaves in which the missing losses are zeros."""
    model = sharded(Case(ZeroInstead, kinds=kind))
    with pipeline_of(model, "serial") as pipeline:
        train(pipeline, without_losses(WITHOUT, skip=True))
    return values_of(model)


def evaluated_in_between(plan: str) -> dict[str, bool]:
    whole = whole_run()
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    pipeline = TrainPipeline(model, optimizer, CPU, plan)
    data = EVERYTHING.data(STEPS)
    outputs, _ = train(pipeline, data[:4])
    before, counts = values_of(model, optimizer), steps_of(model)
    model.module.eval()
    evaluated, _ = train(pipeline, data[4:])
    pipeline.detach()
    direct = []
    with torch.no_grad():
        direct = [model.module(batch)[1] for batch in data[4:]]
    unchanged = not difference(before, values_of(model, optimizer)) and counts == steps_of(model)
    model.module.train()
    rest, _ = train(pipeline, data[4:])
    pipeline.close()
    return {
        "outputs": same_outputs(evaluated, direct),
        "nothing is trained": unchanged,
        "training goes on": same_outputs([*outputs, *rest], whole.outputs),
        "to the same end": not difference(values_of(model, optimizer), whole.values),
    }


def steps_of(model: ShardedModel) -> list[int]:
    return [
        int(kernel.iter.item()) for module in model.sharded_modules.values() for kernel in find_fused_kernels(module)
    ]


def learning_rates(plan: str, combined: bool) -> dict[str, torch.Tensor]:
    """Halved after the third batch, in one of the two ways."""
    model = sharded(EVERYTHING)
    optimizer: Any = adam(model)
    if combined:
        dense = KeyedOptimizerWrapper(dict(model.dense_parameters()), lambda parameters: torch.optim.Adam(parameters))
        optimizer = CombinedOptimizer([("dense", dense), ("tables", model.fused_optimizer)])
        for group in dense.param_groups:
            group["lr"] = 0.05
    torch.manual_seed(13)
    pipeline = TrainPipeline(model, optimizer, CPU, plan)
    feed = iter(EVERYTHING.data(STEPS))
    for step in range(STEPS):
        pipeline.progress(feed)
        if step == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            if not combined:
                model.set_learning_rate_factor(0.5)
    pipeline.close()
    return values_of(model)


def schedules() -> dict[str, bool]:
    serial = learning_rates("serial", combined=False)
    unchanged = outcome(EVERYTHING, "serial").values
    return {
        "base": not difference(learning_rates("base", combined=False), serial),
        "prefetch": not difference(learning_rates("prefetch", combined=False), serial),
        "fused_sparse_dist": not difference(learning_rates("fused_sparse_dist", combined=False), serial),
        "combined, fused_sparse_dist": not difference(
            learning_rates("fused_sparse_dist", combined=True), learning_rates("serial", combined=True)
        ),
        "combined, prefetch": not difference(
            learning_rates("prefetch", combined=True), learning_rates("serial", combined=True)
        ),
        "the tables saw it": bool([n for n in difference(serial, unchanged) if "embedding" in n]),
    }


# Several batches in one step of the optimizer.


def accumulated(plan: str) -> dict[str, torch.Tensor]:
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    with pipeline_of(model, plan, optimizer, accumulate=3) as pipeline:
        train(pipeline, EVERYTHING.data(10))
    return values_of(model, optimizer)


@cache
def accumulated_by_hand() -> dict[str, torch.Tensor]:
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    dense = [parameter for _, parameter in model.dense_parameters()]
    torch.manual_seed(13 + dist.get_rank())
    for index, batch in enumerate(EVERYTHING.data(10)):
        if index % 3 == 0:
            optimizer.zero_grad()
        (model.module(batch)[0] / 3).backward()
        model.step_data_parallel_tables()
        if index % 3 == 2:
            for parameter in dense:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
    return values_of(model, optimizer)


def accumulation(plan: str) -> bool:
    return not difference(accumulated(plan), accumulated_by_hand())


# Evaluation with training batches in flight.

AFTER = (1, 3, 5)  # batches trained


def held_out() -> list[Any]:
    return EVERYTHING.data(2 * STEPS)[STEPS:]


def trained_and_evaluated(plan: str, drains: bool) -> tuple[list[Any], list[list[Any]], dict[str, torch.Tensor]]:
    """What training and each evaluation returned, and what is left.

    Args:
        plan: of the training.
        drains: whether nothing is in flight when the model is evaluated, by calling it.
    """
    model = sharded(EVERYTHING)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    data, evaluated, outputs = EVERYTHING.data(STEPS), [], []
    with pipeline_of(model, plan, optimizer) as pipeline:
        feed = iter(data)
        for trained in range(1, STEPS + 1):
            outputs.append(pipeline.progress(iter(data[trained - 1 : trained]) if drains else feed))
            if trained not in AFTER:
                continue
            if not drains:
                in_flight = len(pipeline.pipeline.in_flight)
                assert in_flight == min(DEPTHS.get(plan, 4) - 1, STEPS - trained) or trained == 1
                evaluated.append(list(pipeline.evaluate(iter(held_out()))))
                assert len(pipeline.pipeline.in_flight) == in_flight
                assert model.module.training
                assert torch.is_grad_enabled()
                continue
            model.module.eval()
            pipeline.detach()
            with torch.no_grad():
                evaluated.append([model.module(batch)[1] for batch in held_out()])
            model.module.train()
    assert not workers()
    assert not replaced(model.module)
    return outputs, evaluated, {**values_of(model, optimizer), "steps": torch.tensor(steps_of(model))}


@cache
def drained_and_evaluated() -> tuple[list[Any], list[list[Any]], dict[str, torch.Tensor]]:
    return trained_and_evaluated("serial", drains=True)


def evaluated(plan: str) -> dict[str, bool]:
    if plan == "semi_sync":
        return stale_evaluated()
    drained, ours = drained_and_evaluated(), trained_and_evaluated(plan, drains=False)
    return {
        "training": same_outputs(drained[0], ours[0]),
        "evaluations": len(ours[1]) == len(AFTER) and all(map(same_outputs, drained[1], ours[1])),
        "all batches": [len(outputs) for outputs in ours[1]] == [STEPS] * len(AFTER),
        "what is left": not difference(drained[2], ours[2]),
    }


def stale_evaluated() -> dict[str, bool]:
    """Rows looked up before an evaluation are still those that the next batch is trained on."""
    whole, ours = outcome(EVERYTHING, "semi_sync"), trained_and_evaluated("semi_sync", drains=False)
    return {
        "training": same_outputs(whole.outputs, ours[0]),
        "what is left": not difference(whole.values, {name: ours[2][name] for name in whole.values}),
    }


# What EmbForward waits for.


@contextmanager
def around_tasks(run: Callable[[PipelineTask, Any], None]) -> Iterator[None]:
    """Pipelines built in the body call ``run(task, ctx)`` where they would call ``task.fn(ctx)``.

    ``run`` may look at the whole context; ``task.fn`` is checked as always.
    """

    def tasks(*args: Any, **kwargs: Any) -> list[PipelineTask]:
        made = recsys_tasks(*args, **kwargs)
        with mock.patch.dict(os.environ, {CHECK: "0"}):
            return [PipelineTask(task.name, partial(run, task), reads=task.reads, writes=task.writes) for task in made]

    with mock.patch("lightning_pipe.recsys.tasks.session.recsys_tasks", tasks):
        yield


# What holds on two ranks.


def processors_under_ddp() -> str:
    model, optimizer = torchrec_model(Processed, "table_wise")
    _, text = error_of(lambda: TrainPipeline(model, optimizer, CPU))
    return text if not replaced(model) else "still replaced"


# Parts that are tried as a whole.
PARTS: dict[str, Callable[[], Any]] = {
    "like torchrec": lambda: {
        f"{build.__name__}, {kinds}": like_torchrec(build, kinds)
        for build, kinds in ((Bags, "table_wise"), (Bags, "column_wise"), (Sequences, "row_wise"))
    },
    "processors": processors_under_ddp,
    # Of the second two, one sends ids in a process group more than the other.
    "differing plans": lambda: {plans: differing_plans(*plans) for plans in (("base", "prefetch"), ("serial", "base"))},
    "schedules": schedules,
}
# Parts of a case for each plan; of bad batches, for each name and place.
OF_CASES: dict[str, Callable[[Any], Any]] = {
    "detached": detached,
    "reset": reset,
    "closed": closed,
    "end of data": end_of_data,
    "wrong": lambda case: wrong(case[0], *case[1]),
    "failed step": failed_step,
    "missing losses": missing_losses,
    "evaluated": evaluated_in_between,
    "evaluation": evaluated,
    "accumulation": accumulation,
}


def on_rank(rank: int, world_size: int, part: str, cases: Sequence[Any], apart: bool) -> Any:
    """A part and these of its cases, with both ranks on one machine or each on one of its own."""

    def run() -> Any:
        return PARTS[part]() if part in PARTS else {case: OF_CASES[part](case) for case in cases}

    if not apart:
        return run()
    with mock.patch.object(object_collectives, "host_id", return_value=(f"machine {rank}", 0)):
        return run()
