"""The plans with a balancer: the same to the bit as the serial one with it, and in the mean as without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import InputError
from lightning_pipe.recsys import TrainPipeline, token_weighted_mean
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import CASES, Case, adam, difference, grouped, same_outputs, sharded, train, values_of
from tests.recsys.rewrite_cases import Bags, Batch, batches, jagged
from tests.recsys.sharding_cases import CPU, SGD
from tests.rounding import Reference
from tests.tiers import sampled

STEPS = 6
PLANS = ("base", "threaded_input")


class Weighted(nn.Module):
    """The mean over all ranks' samples, however many each has.

    Args:
        evenly: whether all have as many, so that a mean of each rank's own will do.
    """

    def __init__(self, evenly: bool) -> None:
        super().__init__()
        self.model = Bags()
        self.evenly = evenly

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.model(batch)
        loss = mean if self.evenly else token_weighted_mean(mean * len(batch.label), len(batch.label))
        return loss, torch.stack([loss.detach(), batch.dense.sum()])


def of_sizes(*sizes: int) -> Any:
    """Batches of so many samples, rank by rank; the last one has half as many, and long lists on rank 0."""

    def data(count: int) -> list[Batch]:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(20 + rank)
        made = []
        for index in range(count):
            size = sizes[rank] if index < count - 1 else max(1, sizes[rank] // 2)
            made.append(
                Batch(
                    torch.rand(size, 3, generator=generator),
                    jagged(["f0", "f1", "f2"], generator, size, longest=3 if rank else 9),
                    torch.randint(0, 2, (size,), generator=generator).float(),
                )
            )
        return made

    return data


# By the number of ranks: equally many samples, and means; uneven ones, and the mean over all ranks' samples.
TRAININGS: dict[int, dict[str, Case]] = {
    2: {
        "even": Case(lambda: Weighted(True), of_sizes(5, 5), optimizer=SGD),
        "uneven": Case(lambda: Weighted(False), of_sizes(7, 2), optimizer=SGD),
    },
    3: {
        "even": Case(lambda: Weighted(True), of_sizes(4, 4, 4), "row_wise", SGD),
        "uneven": Case(lambda: Weighted(False), of_sizes(5, 3, 1), optimizer=SGD),
    },
}


def trained(case: Case, plan: Any, **arguments: Any) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """Outputs, values and the report of a training."""
    model = sharded(case)
    if isinstance(model.module, Weighted):  # linear in the gradients: sums of another order stay close
        optimizer: torch.optim.Optimizer = torch.optim.SGD([one for _, one in model.dense_parameters()], lr=0.1)
    else:
        optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    pipeline = TrainPipeline(model, optimizer, CPU, plan, **grouped(arguments))
    outputs, _ = train(pipeline, case.data(STEPS))
    report = pipeline.balance_report if "balancer" in arguments else None
    pipeline.close()
    return outputs, values_of(model, optimizer), report


def results(outputs: list[Any], values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums of the ranks' losses, by step, and this rank's values."""
    losses = torch.stack([output[0] for output in outputs])
    dist.all_reduce(losses)
    return {"losses": losses, **values}


def without_balancer(case: Case) -> Reference:
    return Reference.of(lambda: results(*trained(case, "serial")[:2]))


def all_plans(rank: int, world_size: int) -> dict[str, dict[str, bool]]:
    """For each case, what is to be true of it."""
    found = {}
    cases = {**TRAININGS[world_size], **({"everything": CASES["everything"]} if world_size == 2 else {})}
    for name, case in cases.items():
        outputs, values, report = trained(case, "serial", balancer=True)
        holds = found[name] = {
            "trained": len(outputs) == STEPS,
            "evener": report.mean_after < report.mean_before,
        }
        for plan in ("base", "prefetch"):
            others, other_values, other_report = trained(case, plan, balancer={"exchange": "all_gather"})
            holds[f"{plan} is serial"] = same_outputs(outputs, others) and not difference(values, other_values)
            holds[f"{plan} reports alike"] = report == other_report
        if name == "everything":  # it draws random numbers by row
            continue
        without, values_without, _ = trained(case, "serial")
        holds["samples moved"] = not same_outputs([one[1] for one in outputs], [one[1] for one in without])
        problems = without_balancer(case).differences(results(outputs, values))
        holds["; ".join(["as without", *problems])] = not problems and values.keys() == values_without.keys()
    return found


@pytest.mark.parametrize("ranks", sampled([2, 3], lambda ranks: ranks == 2))
def test_plans_train_the_same_to_the_bit_and_in_the_mean_as_without_a_balancer(ranks: int) -> None:
    for found in run_ranks(all_plans, ranks):
        wrong = {name: [what for what, is_true in holds.items() if not is_true] for name, holds in found.items()}
        assert wrong == {name: [] for name in found}


def faults(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    """Rank 1's third batch is bad, in three ways; what each rank raises, and how many it has trained by then."""
    found = {}
    for plan in PLANS:
        for fault in ("rows", "moved", "workload"):
            model = sharded(CASES["pooled, table_wise"])

            def workload(batch: Any) -> torch.Tensor:
                lengths = batch.sparse.lengths().view(3, -1).sum(0)
                return torch.where(batch.dense[:, 0] == 77, -1, lengths)

            data: list[Any] = batches(STEPS)
            if rank == 1 and fault == "rows":
                data[2].label = data[2].label[:-1]
            elif rank == 1 and fault == "moved":
                data[2].label = object()
            elif rank == 1:
                data[2].dense[0, 0] = 77
            pipeline = TrainPipeline(model, adam(model), CPU, plan, balancer={"workload": workload})
            trained_before, feed = 0, iter(data)
            try:
                while True:
                    pipeline.progress(feed)
                    trained_before += 1
            except InputError as error:
                found[f"{plan} {fault}"] = str(error), trained_before
            pipeline.close()
    return found


def test_a_bad_batch_on_one_rank_is_an_error_on_all_under_every_plan() -> None:
    texts = {
        "rows": "rank 1: batch.label has 3 row(s), but batch.sparse has 4",
        "moved": "rank 1: batch.label is of type object",
        "workload": "sample 0 of rank 1 has the workload -1",
    }
    one, other = run_ranks(faults, 2)
    assert len(one) == 3 * len(PLANS)
    assert one.keys() == other.keys()
    for name, (message, trained_before) in one.items():
        assert texts[name.split()[1]] in message
        assert texts[name.split()[1]] in other[name][0]
        assert trained_before == other[name][1] <= 2


@pytest.mark.usefixtures("one_rank")
def test_one_rank_trains_as_without_a_balancer() -> None:
    case = CASES["everything"]
    with_one, without = trained(case, "prefetch", balancer=True), trained(case, "prefetch")
    assert same_outputs(with_one[0], without[0])
    assert not difference(with_one[1], without[1])
    assert with_one[2].batches == STEPS
