"""Pipelines with uneven numbers of batches evaluate each once, and find what one device finds over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.scenarios.language_models.test_llm_dimensions import Experts
from tests.strategies.llm_cases import SEED, Tiny, TinyHF, hf_config, llm, loader, row_batches, trainer
from tests.tiers import sampled_rows, wanted

# Batches of the two parts of the data.
PARTS = [(3, 0), (0, 1), (1, 4), (2, 5)]
DIMENSIONS: dict[str, dict[str, Any]] = {
    "replicated": {"dp_replicate": 2},
    "one stage, sharded": {"dp_shard": 2, "dp_replicate": 2},
    "tensor": {"dp_replicate": 2, "tp": 2},
    "ring": {"dp_shard": 2, "cp": 2, "cp_method": "ring"},
    "experts": {"dp_shard": 2, "ep": 2},
}
# Batches of the parts in each case; the others take longer, and count batches in the same way.
COUNTED = [("replicated", counts) for counts in PARTS] + [(case, (1, 4)) for case in DIMENSIONS if case != "replicated"]
# Models that these dimensions can share; the others train `Tiny`.
OF_HUGGING_FACE = ("tensor", "ring")


class Scores(PipelineModule):
    """Logs the loss of all pipelines, which some sum up once more, and what is this pipeline's alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        result = self.run_batch(batch)
        self.log("val_loss", result.loss, batch_size=result.tokens)
        self.log("summed", result.loss, batch_size=result.tokens, sync_dist=True, on_step=True)
        self.log("tokens", float((batch["labels"] != -100).sum()), reduce_fx="sum", sync_dist=True)


class Scored(Scores, Tiny): ...


class ScoredHF(Scores, TinyHF): ...


class ScoredExperts(Scores, Experts): ...


def module_of(case: str) -> Any:
    if case in OF_HUGGING_FACE:
        return ScoredHF(hf_config("llama") | {"num_key_value_heads": 2})
    return ScoredExperts() if case == "experts" else Scored()


def part_of(case: str, rank: int) -> int:
    """Which part of the data a rank of four has."""
    if case == "one stage, sharded":
        return rank
    return rank // 2 if case in OF_HUGGING_FACE else rank % 2


def batches_of(count: int) -> list[dict[str, torch.Tensor]]:
    return row_batches(count, rows=3)


def evaluated(used: pl.Trainer, module: Any, counts: tuple[int, ...], part: int) -> dict[str, Any]:
    first = sum(counts[:part])
    mine = loader(batches_of(sum(counts))[first : first + counts[part]])
    (metrics,) = used.validate(module, mine, verbose=False)
    return {"metrics": metrics, "predicted": used.predict(module, mine)}


def run_cases(rank: int, world_size: int, cases: Sequence[str]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in cases:
        torch.manual_seed(SEED)
        used, module = trainer(llm("1f1b", 2, **DIMENSIONS[case]), use_distributed_sampler=False), module_of(case)
        for counts in [counts for one, counts in COUNTED if one == case]:
            # As many parts of the data as dimensions, of which the others have none.
            parts = 4 if case == "one stage, sharded" else 2
            found[case, counts] = evaluated(used, module, (*counts, *(0,) * (parts - 2)), part_of(case, rank))
    used = trainer(llm("1f1b", 2, dp_replicate=2), use_distributed_sampler=False)
    try:
        used.validate(Scored(), loader(batches_of(rank)), verbose=False)
    except Exception as error:
        found["other data in one pipeline"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_ranks(run_cases, 4, wanted(request.config, DIMENSIONS, lambda case: case == "replicated"))


def alone(case: str, count: int) -> dict[str, Any]:
    torch.manual_seed(SEED)
    used, module = trainer("auto"), module_of(case)
    (metrics,) = used.validate(module, loader(batches_of(count)), verbose=False)
    predicted = used.predict(module, loader(batches_of(count))) or []
    return {**numbers(metrics), **{f"predicted {index}": one for index, one in enumerate(predicted)}}


def numbers(metrics: Any) -> dict[str, Any]:
    return {name: torch.tensor(value) for name, value in metrics.items()}


@pytest.mark.parametrize(("case", "counts"), sampled_rows(COUNTED, lambda case: case[0] == "replicated"))
def test_losses_and_predictions_are_those_of_one_device_over_all_batches(
    ranks: Any, case: str, counts: tuple[int, int]
) -> None:
    reference = Reference.of(lambda: alone(case, sum(counts)))
    # The ranks of one pipeline have the same.
    first_ranks = [next(rank for rank in range(4) if part_of(case, rank) == part) for part in (0, 1)]
    predicted = [one for rank in first_ranks for one in ranks[rank][case, counts]["predicted"]]
    for rank, found in enumerate(ranks):
        of_parts = 4 if case == "one stage, sharded" else 2
        of_part = found[case, counts]["predicted"]
        assert len(of_part) == (*counts, 0, 0)[part_of(case, rank)]
        metrics = numbers(found[case, counts]["metrics"])
        # Of the data parts of one process each, three are of ranks that hold the same stage.
        metrics["tokens"] = metrics["tokens"] / (4 // of_parts)
        results = {**metrics, **{f"predicted {index}": one for index, one in enumerate(predicted)}}
        assert reference.differences(results) == []


def test_ranks_of_one_pipeline_need_the_same_batches(ranks: Any) -> None:
    for found in ranks:
        assert "have no more batches in validation" in found["other data in one pipeline"]
