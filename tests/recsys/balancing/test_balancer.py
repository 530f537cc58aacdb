"""The balancer: who has which sample afterwards, in batches of every kind, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.recsys import BatchBalancer
from lightning_pipe.recsys.balancing.balancer import BalanceReport
from lightning_pipe.recsys.balancing.samples import locate_sample_tensors
from lightning_pipe.recsys.tasks.options import make_balancer
from tests.distributed import run_ranks
from tests.recsys.balancing_cases import COUNTS, batch_of, every_kind, faults, padded, samples_of
from tests.recsys.sharding_cases import CPU

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(every_kind, 2)


@pytest.fixture(scope="module")
def three_ranks() -> Results:
    return run_ranks(every_kind, 3)


CASES = [(ranks, name) for ranks, cases in COUNTS.items() for name in cases]


@pytest.fixture
def results(request: pytest.FixtureRequest, ranks: int, name: str) -> Results:
    found: Results = request.getfixturevalue({2: "two_ranks", 3: "three_ranks"}[ranks])
    return [of_rank[name] for of_rank in found]


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_every_sample_is_on_one_rank_with_all_its_parts_and_ranks_keep_their_numbers_of_samples(
    results: Results, ranks: int, name: str
) -> None:
    counts = COUNTS[ranks][name]
    assert [len(found["numbers"]) for found in results] == counts
    assert sorted(number for found in results for number in found["numbers"]) == list(range(sum(counts)))
    assert all(found["right"] and found["alike"] for found in results)


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_report_says_how_uneven_work_was_on_every_rank(results: Results, ranks: int, name: str) -> None:
    report = results[0]["report"]
    assert all(found["report"] == report for found in results)
    assert report.batches == 3
    assert report.after <= report.before
    assert report.mean_after == pytest.approx(report.after)
    counts = COUNTS[ranks][name]
    own = [set(samples_of(counts, rank)) for rank in range(ranks)]
    left = sum(len(own[rank] - set(found["numbers"])) for rank, found in enumerate(results))
    assert report.moved == pytest.approx(left / max(1, sum(counts)))


def test_work_is_even_where_it_can_be(two_ranks: Results) -> None:
    report = two_ranks[0]["even"]["report"]
    assert report.before > report.after
    assert report.after < 1.1


def test_padding_stays_at_the_end_and_is_not_exchanged() -> None:
    for found in zip(*(of_rank.items() for of_rank in run_ranks(padded, 2)), strict=True):
        (_, one), (_, other) = found
        assert one[4:] == [900, 901]
        assert sorted(one[:4] + other) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15]
        assert one[:4] != [0, 1, 2, 3]


def test_what_is_in_a_part_that_stays_stays_too() -> None:
    batch = {"number": torch.arange(3), "stats": {"mean": torch.zeros(3), "names": ["x", "y", "z"]}}
    samples = locate_sample_tensors(batch, keep=["batch['stats']"])
    assert [name for name, _ in samples.description] == ["batch['number']"]


@pytest.fixture(scope="module")
def errors() -> Results:
    return run_ranks(faults, 2)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("negative", "rank 1 has the workload -2.0; expected finite numbers >= 0, but 2 of 6 sample(s)"),
        ("nan", "sample 0 of rank 1 has the workload nan"),
        ("too short", "rank 1: the balancer's workload function returned a tensor of [2]; expected a tensor of [3]"),
        ("no tensor", "rank 1: the balancer's workload function returned a int"),
        ("rows differ", "rank 1: batch['extra'] has 2 row(s), but batch['ids'] has 3"),
        ("form differs", "pad rows to one width on all ranks, or make the part jagged"),
        ("keys differ", "the form of the batch differs between ranks"),
        ("not moved", "rank 1: not moved"),
        ("list", "batch['names'] is a list with one entry for each of 3 samples"),
        ("too many", "rank 1: the balancer's argument num_samples gave 9 samples"),
        ("complex", "rank 1: the balancer's workload function returned a complex tensor of [3]"),
        ("no such name", "rank 1: the balancer's num_samples is 'real', but the batch, a dict, has no such key"),
        ("no number", "rank 1: the balancer's argument num_samples gave a float, 2.5 for the batch; expected a whole"),
        (
            "nothing to keep",
            "rank 1: the balancer's local_parts names batch['stats'], which the batch, a dict",
        ),
    ],
)
def test_a_bad_batch_on_one_rank_is_an_error_on_all(errors: Results, fault: str, text: str) -> None:
    for found in errors:
        assert found[fault].startswith("InputError: ")
        assert text in found[fault]


def test_the_users_own_error_is_raised_where_it_was_and_told_elsewhere(errors: Results) -> None:
    assert errors[0]["own error"] == "InputError: rank 1: KeyError: 'nothing'"
    assert errors[1]["own error"] == "KeyError: 'nothing'"


@pytest.mark.parametrize("argument", ["exchange", "local_parts"])
def test_balancers_of_different_arguments_are_an_error_on_all_ranks(errors: Results, argument: str) -> None:
    for found in errors:
        assert found[f"other {argument}"].startswith("SetupError: the balancer differs between ranks: ")


# In one process.


def alone(balancer: BatchBalancer, batch: Any) -> Any:
    balancer.attach_to_process_group(None, CPU)
    try:
        return balancer.finish(batch, balancer.start(batch))
    finally:
        balancer.close()


@pytest.mark.usefixtures("one_rank")
def test_one_process_keeps_the_batch_as_it_is_and_still_finds_what_is_wrong() -> None:
    batch, balancer = batch_of([3, 4]), BatchBalancer()
    assert alone(balancer, batch) is batch
    assert balancer.report == BalanceReport(batches=1)
    with pytest.raises(InputError, match="sample 0 of rank 0 has the workload -1"):
        alone(BatchBalancer(lambda batch: -torch.ones(2)), batch)
    with pytest.raises(InputError, match="returned a tensor of \\[3\\]"):
        alone(BatchBalancer(lambda batch: torch.ones(3)), batch)


@pytest.mark.usefixtures("one_rank")
def test_a_balancer_serves_one_pipeline_at_a_time() -> None:
    balancer = BatchBalancer()
    balancer.attach_to_process_group(dist.group.WORLD, CPU)
    with pytest.raises(SetupError, match="in use by another pipeline"):
        balancer.attach_to_process_group(dist.group.WORLD, CPU)
    balancer.close()
    balancer.attach_to_process_group(dist.group.WORLD, CPU)
    balancer.close()


def ones(batch: Any) -> torch.Tensor:
    return torch.ones(2)


def test_the_argument_says_a_balancer_in_several_ways() -> None:
    balancer = BatchBalancer()
    assert make_balancer(balancer) is balancer
    assert make_balancer(None) is None
    assert make_balancer(False) is None
    configs: tuple[Any, ...] = (
        True,
        {},
        {"exchange": "all_gather", "workload": f"{__name__}.ones"},
    )
    for config in configs:
        assert isinstance(make_balancer(config), BatchBalancer)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"exchange": "broadcast"}, "exchange is 'broadcast'"),
        ({"local_parts": "batch.x"}, "local_parts is 'batch.x'"),
        ({"workload": "no_module.costs"}, "cannot be imported"),
        ({"pace": 3}, "pace"),
        (3, "balancer is 3"),
    ],
)
def test_an_argument_that_says_none_is_refused(config: Any, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        make_balancer(config)
