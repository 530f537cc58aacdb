"""Ids that are let go of once they are sent: when they are gone, what is left, and that nothing else changes.

One spawn of two ranks runs every case; each test looks at one of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.rewrite.early_release import ReleasedTensor
from tests.distributed import run_ranks
from tests.recsys.batch_memory_cases import Copying, LiveIds, copying
from tests.recsys.pipeline_cases import CASES, PLANS, STEPS, Case, Paired, outcome, sharded, train
from tests.recsys.rewrite_cases import Bags, Batch, batches
from tests.recsys.train_pipeline_cases import POOLED, error_of, pipeline_of

KINDS = ("everything", "processed features, table_wise", "batch size per feature")


class Shifted(Bags):
    """Its features are made by a module without parameters."""

    class Shift(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(features.keys(), (features.values() + 1) % 24, lengths=features.lengths())

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shifted.Shift()

    def forward(self, batch: Batch) -> torch.Tensor:
        features = self.shift(batch.sparse)
        a, b = self.a(features), self.b(features)
        return self.head(batch, a["f0"], a["f1"], b["f2"], b["f1"])


class CalledTwice(Bags):
    """The second module cannot be pipelined, and shares a feature with the first."""

    def forward(self, batch: Batch) -> torch.Tensor:
        a, b, again = self.a(batch.sparse), self.b(batch.sparse), self.b(batch.sparse)
        return self.head(batch, a["f0"], a["f1"], b["f2"], again["f1"])


class Lengths(Bags):
    """Reads of the features all that is left of them."""

    def forward(self, batch: Batch) -> torch.Tensor:
        features = batch.sparse
        found = features["f1"].lengths().float().mean() + features.to_dict()["f0"].lengths().float().mean()
        sizes = features.stride() + sum(features.length_per_key()) + features.offsets()[-1] + features.values().numel()
        return super().forward(batch) * (1 + found) + sizes + len(features.keys())


class ReadsIds(Bags):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) + batch.sparse["f0"].values().float().mean()


@dataclass
class Wrapping:
    """Makes its features anew at each access."""

    dense: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    label: torch.Tensor

    @property
    def sparse(self) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["f0", "f1", "f2"], self.values, lengths=self.lengths)


class Unmoved(Batch):
    """Is on the device already."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Unmoved:
        return self


def wrapping(count: int) -> list[Any]:
    return [Wrapping(one.dense, one.sparse.values(), one.sparse.lengths(), one.label) for one in batches(count)]


EARLY = {"free_features_early": True}
CORNERS = ("threaded_input", "prefetch", "fused_sparse_dist")
# name: a training, arguments of both pipelines
MODELS: dict[str, tuple[Case, dict[str, Any]]] = {
    **{name: (copying(CASES[name]), {}) for name in KINDS},
    "post-processing": (copying(Case(lambda: Paired(Shifted()))), {"rewrite": {"method": "fx"}}),
    "a module called twice": (copying(Case(lambda: Paired(CalledTwice()))), {}),
    "lengths": (copying(Case(lambda: Paired(Lengths()))), {}),
    "features made at each access": (replace(POOLED, data=wrapping), {"rewrite": {"method": "auto"}}),
    "clipping": (copying(POOLED), {"max_norm": 0.1}),
    "balancing": (copying(POOLED), {"balancer": True}),
}


def plans_of(name: str) -> tuple[str, ...]:
    """Feature processors cannot be looked up ahead of their turn."""
    return tuple(plan for plan in CORNERS if plan != "fused_sparse_dist" or not name.startswith("processed"))


def same(name: str) -> dict[str, bool]:
    case, arguments = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a module is not pipelined
        expected = outcome(case, "serial", **arguments)
        return {plan: outcome(case, plan, memory=EARLY, **arguments).same(expected) for plan in plans_of(name)}


def alive(build: Callable[[], nn.Module], plan: str, **arguments: Any) -> list[tuple[int, int]]:
    """At each batch's step, the bytes of its ids that are alive, and those of the batches behind it."""
    live = LiveIds()
    found: list[tuple[int, int]] = []
    case = copying(Case(build), live.moved)
    model = sharded(case)

    def step(batch: Any) -> Any:
        here = len(found)
        found.append((live.bytes_of(here), sum(live.bytes_of(later) for later in range(here + 1, live.batches))))
        return model.module(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pipeline_of(model, plan, custom_model_fwd=step, **arguments) as pipeline:
            train(pipeline, case.data(STEPS))
    return found


def evaluated(**arguments: Any) -> tuple[list[Any], list[int]]:
    live = LiveIds()
    case = copying(POOLED, live.moved)
    model = sharded(case)
    at_step: list[int] = []

    def step(batch: Any) -> Any:
        if not model.module.training:
            at_step.append(live.bytes_of(STEPS + len(at_step)))
        return model.module(batch)

    with pipeline_of(model, "prefetch", custom_model_fwd=step, **arguments) as pipeline:
        train(pipeline, case.data(STEPS))
        return list(pipeline.evaluate(iter(case.data(STEPS)))), at_step


def two_epochs() -> list[float]:
    """Over batches that the transfer hands on as they are: a second epoch has the same."""
    data = [Unmoved(one.dense, one.sparse, one.label) for one in batches(STEPS)]
    with pipeline_of(sharded(POOLED), "prefetch", memory=EARLY) as pipeline:
        return [float(loss) for _ in range(2) for loss in train(pipeline, data)[0]]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    reading = sharded(Case(lambda: Paired(ReadsIds())))
    with pipeline_of(reading, "prefetch", memory=EARLY) as pipeline:
        error = error_of(lambda: train(pipeline, [Copying(batch) for batch in batches(STEPS)]))
    return {
        "same": {name: same(name) for name in MODELS},
        "alive": {
            plan: [
                alive(lambda: Paired(Bags()), plan, memory={"free_features_early": early}) for early in (False, True)
            ]
            for plan in PLANS
        },
        "alive, post-processing": alive(lambda: Paired(Shifted()), "prefetch", rewrite={"method": "fx"}, memory=EARLY),
        "alive, unpipelined": alive(lambda: Paired(CalledTwice()), "prefetch", memory=EARLY),
        "evaluated": [evaluated(memory=memory) for memory in ({}, EARLY)],
        "two epochs": two_epochs(),
        "error": error,
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, 2)


@pytest.mark.parametrize("name", MODELS)
def test_every_plan_trains_as_the_serial_one_without_release_to_the_bit(ranks: list[dict[str, Any]], name: str) -> None:
    for of_rank in ranks:
        assert of_rank["same"][name] == dict.fromkeys(plans_of(name), True)


@pytest.mark.parametrize("plan", PLANS)
def test_the_ids_of_a_batch_are_gone_when_its_step_runs(ranks: list[dict[str, Any]], plan: str) -> None:
    for of_rank in ranks:
        kept, released = of_rank["alive"][plan]
        assert len(kept) == len(released) == STEPS
        assert all(own > 0 for own, _ in kept)
        # The first batch trains serially, and is watched: nothing is known to be pipelined yet.
        assert all(own == 0 for own, _ in released[1:])
        # How far a worker thread has come with the batches behind this one depends on its speed.
        if plan != "threaded_input":
            assert all(few <= many for (_, few), (_, many) in zip(released, kept, strict=True))


def test_features_behind_post_processing_are_gone_too(ranks: list[dict[str, Any]]) -> None:
    assert all(own == 0 for of_rank in ranks for own, _ in of_rank["alive, post-processing"])


def test_features_of_a_module_that_is_not_pipelined_stay(ranks: list[dict[str, Any]]) -> None:
    assert all(own > 0 for of_rank in ranks for own, _ in of_rank["alive, unpipelined"])


def test_evaluation_lets_go_of_ids_and_gives_the_same(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        (expected, kept), (outputs, released) = of_rank["evaluated"]
        assert len(outputs) == STEPS
        assert all(map(torch.equal, outputs, expected))
        assert all(kept)
        assert not any(released[1:])


def test_what_the_loader_holds_itself_stays_for_the_next_epoch(ranks: list[dict[str, Any]]) -> None:
    assert all(len(of_rank["two epochs"]) == 2 * STEPS for of_rank in ranks)


def test_a_step_that_reads_ids_is_an_error_that_names_the_fix(ranks: list[dict[str, Any]]) -> None:
    for of_rank in ranks:
        kinds, text = of_rank["error"]
        assert kinds[0] == "SetupError"
        assert "were released (free_features_early)" in text
        assert "turn free_features_early off" in text


# What stands where ids were.


def released() -> torch.Tensor:
    return torch.arange(6, device="meta").as_subclass(ReleasedTensor)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda gone: gone + 1,
    "an index": lambda gone: torch.arange(6)[gone],
    "an operator of FBGEMM": lambda gone: torch.ops.fbgemm.asynchronous_complete_cumsum(gone),
    "a function among others": lambda gone: torch.cat([torch.arange(2), gone]),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_what_is_gone_raises(use: str) -> None:
    with pytest.raises(SetupError, match="free_features_early off"):
        USES[use](released())


def test_the_form_of_what_is_gone_is_left() -> None:
    gone = released()
    assert (gone.shape, gone.dtype, gone.numel(), len(gone)) == ((6,), torch.int64, 6, 6)
    assert [len(part) for part in gone.split([2, 4])] == [2, 4]
    assert len(gone[1:3]) == 2
