"""A recsys task that is replayed leaves what it left when it was captured, under every plan, on one rank and two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from lightning_pipe.engine import PlanError
from lightning_pipe.recsys import ShardedModel, TrainPipeline, recsys_tasks
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import CASES, Case, Feed, same_outputs, sharded, values_of
from tests.recsys.sharding_cases import CPU
from tests.tiers import sampled

TASKS = [task.name for task in recsys_tasks()]
# Case, plan, and whether gradients are clipped. Not plans that look batches up before it is their turn, which is not in
# the tables that are put back in between.
TRIALS = [
    ("pooled, row_wise", "serial", False),
    ("sequences, row_wise", "base", False),
    ("processed features, table_wise", "prefetch", False),
    ("everything", "prefetch", False),
    ("pooled, row_wise", "base", True),
    ("everything", "prefetch", True),
]


def parameters(clip: bool) -> list[Any]:
    return [(name, plan, task) for name, plan, clips in TRIALS if clips == clip for task in TASKS]


SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 1.0}}


class Again:
    """One batch, again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Again:
        return self

    def __next__(self) -> Any:
        return self._batch


class Trial:
    """A pipeline that trains one batch from one state, so that each iteration finds the same.

    Steps have a learning rate of one: what a value has changed by is its gradient.
    """

    def __init__(self, case: Case, plan: str, clip: bool = False) -> None:
        self.model: ShardedModel = sharded(Case(case.build, case.data, case.kinds, SGD))
        dense = [parameter for _, parameter in self.model.dense_parameters()]
        optimizer = torch.optim.SGD(dense, lr=1.0)
        self.pipeline = TrainPipeline(self.model, optimizer, CPU, plan, max_norm=0.1 if clip else None)
        self.feed = Feed(Again(case.data(1)[0]))
        self.initial = values_of(self.model)
        self.runs: dict[str, int] = dict.fromkeys(TASKS, 0)

    def iteration(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """Train one; returns its output, and what each value has changed by."""
        self._restore()
        torch.manual_seed(29)
        output = self.pipeline.progress(self.feed)
        after = values_of(self.model)
        return output, {name: after[name].float() - self.initial[name].float() for name in after}

    def count_runs(self) -> None:
        for name, task in self.pipeline.pipeline.plan.tasks.items():
            task.fn = self._counted(name, task.fn)

    def _counted(self, name: str, fn: Any) -> Any:
        def counted(ctx: Any) -> None:
            self.runs[name] += 1
            fn(ctx)

        return counted

    @torch.no_grad()
    def _restore(self) -> None:
        for name, value in self.model.dmp.state_dict().items():
            if isinstance(value, ShardedTensor):
                for index, part in enumerate(value.local_shards()):
                    part.tensor.copy_(self.initial[f"{name}/{index}"])
            elif isinstance(value, torch.Tensor):
                value.copy_(self.initial[name])


def is_dense(trial: Trial, name: str) -> bool:
    return name in dict(trial.model.dense_parameters())


def expected(trial: Trial, task: str, changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an iteration in which *task* is replayed changes, of what one changes in which all run."""
    buffers = {name for name, _ in trial.model.module.named_buffers()}
    processors = {name for name in changes if "_feature_processors" in name}

    def moved(name: str) -> bool:
        dense = is_dense(trial, name)
        if name in buffers:
            return True
        if task in ("DenseForward", "LossPostprocess"):  # gradients upstream are zeros
            return False
        if task == "EmbForward":
            return dense and name not in processors
        if task == "EmbBackward":  # tables step inside
            return dense
        return not dense if task == "OptimStep" else True

    return {name: change if moved(name) else torch.zeros_like(change) for name, change in changes.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in other if not torch.equal(one[name], other[name])]


def run_cases(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, plan, clip in TRIALS:
        trial = Trial(CASES[name], plan, clip)
        for _ in range(3):
            output, changes = trial.iteration()
        trial.count_runs()
        for task in TASKS:
            trial.runs[task] = 0
            trial.pipeline.pipeline.enable_shortcut(task)
            found = [trial.iteration() for _ in range(6)]
            ran = trial.runs[task]
            replayed, differences = found[-1]
            results[f"{name}, {plan}, {task}{', clipped' if clip else ''}"] = (
                same_outputs([replayed], [output]),
                differing(differences, expected(trial, task, changes)),
                ran,
            )
            trial.pipeline.pipeline.disable_shortcut()
        after = [trial.iteration() for _ in range(4)][-1]
        results[f"{name}, {plan}, clipped {clip}, run again"] = (
            same_outputs([after[0]], [output]),
            differing(after[1], changes),
        )
        trial.pipeline.close()
    if world_size > 1:
        trial = Trial(CASES["pooled, row_wise"], "prefetch")
        trial.iteration()
        try:
            trial.pipeline.pipeline.enable_shortcut(TASKS[rank])
        except PlanError as error:
            results["disagree"] = str(error)
        trial.pipeline.close()
    return results


@pytest.fixture(scope="module", params=sampled([1, 2], lambda ranks: ranks == 1, "{}_ranks".format))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(run_cases, request.param)


@pytest.mark.parametrize(("case", "plan", "task"), parameters(False))
def test_what_comes_later_finds_the_captured_values_and_other_gradients_are_the_same(
    ranks: list[dict[str, Any]], case: str, plan: str, task: str
) -> None:
    for results in ranks:
        same, different, runs = results[f"{case}, {plan}, {task}"]
        assert same
        assert different == []
        assert runs == 1  # the one that was captured


@pytest.mark.parametrize(("case", "plan", "task"), parameters(True))
def test_so_it_is_where_the_tables_wait_for_the_norm_of_all_gradients(
    ranks: list[dict[str, Any]], case: str, plan: str, task: str
) -> None:
    for results in ranks:
        same, different, runs = results[f"{case}, {plan}, {task}, clipped"]
        assert same
        assert runs == 1
        if task not in ("EmbForward", "EmbBackward", "DenseForward", "LossPostprocess"):  # others have another norm
            assert different == []


@pytest.mark.parametrize(("case", "plan"), [trial[:2] for trial in TRIALS if not trial[2]])
def test_tasks_that_run_again_do_what_they_did(ranks: list[dict[str, Any]], case: str, plan: str) -> None:
    assert [results[f"{case}, {plan}, clipped False, run again"] for results in ranks] == [(True, [])] * len(ranks)


def test_ranks_that_replay_different_tasks_are_told_so(ranks: list[dict[str, Any]]) -> None:
    for results in ranks[: 0 if len(ranks) == 1 else None]:
        assert "list of tasks to shortcut differs between ranks: rank 0 has 'H2DAndShuffle'" in results["disagree"]
