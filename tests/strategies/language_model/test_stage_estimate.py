"""What is estimated of ranks, beside what they hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch._subclasses.fake_tensor import FakeTensor

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate, SchedulePrediction
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import LayerWork
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.llm.measure.rank_memory import RankMemory, ShardCounts
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.strategies.language_model.stage_estimate import (
    StageEstimate,
    UnsupportedScheduleReason,
    compare_schedules,
    estimate_schedule_memory_and_bubble,
    estimate_stages,
    make_precision_plugin,
)
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.distributed import run_ranks
from tests.llm.measure.test_rank_memory import PIECES, STATES
from tests.strategies.llm_cases import Tiny, TinyHF, fit, hf_config, llm, row_batches
from tests.tiers import sampled, wanted

CASES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"activation_checkpoint": {"mode": "selective"}, "layers_per_stage": [3, 1]},
    "interleaved_1f1b": {"activation_checkpoint": {"mode": "full"}},
    "interleaved_zero_bubble": {},
    "zbv_zero_bubble": {"layer_ranges": [[0, 1], [1, 2], [2, 3], [3, 4]]},
}
# Long enough that activations outweigh what PyTorch and Lightning hold beside them.
HF = {**hf_config("llama"), "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}


def batches() -> list[dict[str, Any]]:
    return row_batches(2, lengths=(64,))


class RealBytes(LiveBytes):
    def _add_storage_bytes(self, tensor: torch.Tensor, key: int) -> None:
        if not isinstance(tensor, FakeTensor):
            super()._add_storage_bytes(tensor, key)


class Counting(pl.Callback):
    """Bytes of all tensors that training makes, at the worst moment."""

    def __init__(self) -> None:
        self.live = RealBytes()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.live.__enter__()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.live.__exit__(None, None, None)


def strategy_of(schedule: str, **options: Any) -> LLMPipelineStrategy:
    return llm(schedule, **{**CASES.get(schedule, {}), **options})


def estimated(schedule: str, precision: Precision | None = None, **options: Any) -> StageEstimate:
    given = Precision() if precision is None else precision
    return estimate_stages(strategy_of(schedule), Tiny(), row_batches(1)[0], 2, given, **options)


OFTEN = ("1f1b", "zbv_zero_bubble")


def train(rank: int, world: int, schedules: list[str]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for schedule in schedules:
        counting, module = Counting(), TinyHF(HF, optimizer="adamw")
        used = fit(module, strategy_of(schedule), batches(), callbacks=[counting])
        parameters = sum(one.nbytes for one in module.parameters())
        states = [one for state in used.optimizers[0].state.values() for one in state.values()]
        buffers = sum(one.nbytes for one in module.buffers())
        found[schedule] = parameters, sum(one.nbytes for one in states), counting.live.peak + parameters + buffers
    return found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> list[dict[str, tuple[int, int, int]]]:
    return run_ranks(train, 2, wanted(request.config, CASES, OFTEN.__contains__))


@cache
def said(schedule: str) -> list[RankMemory]:
    module = TinyHF(HF, optimizer="adamw")
    found = estimate_stages(strategy_of(schedule), module, batches()[0], 2, Precision())
    return list(found.configured.memory)


@pytest.mark.parametrize("schedule", sampled(CASES, OFTEN.__contains__))
def test_parameters_and_states_are_those_that_ranks_hold(schedule: str, measured: Any) -> None:
    found = [(one.parameters, one.optimizer) for one in said(schedule)]
    assert found == [one[schedule][:2] for one in measured]


@pytest.mark.parametrize("schedule", sampled(CASES, OFTEN.__contains__))
def test_all_is_what_training_holds_at_the_worst_moment_within_a_tenth(schedule: str, measured: Any) -> None:
    for expected, one in zip(said(schedule), measured, strict=True):
        assert expected.total == pytest.approx(one[schedule][2], rel=0.1)


def test_the_model_is_not_made_and_micro_batches_are_as_in_training() -> None:
    module = Tiny()
    found = estimate_stages(LLMPipelineStrategy("1f1b", num_microbatches=8), module, row_batches(1)[0], 2, Precision())
    assert (found.rows, found.length) == (2, 9)
    assert all(one.is_meta for one in module.parameters())


def test_states_on_the_host_do_not_count() -> None:
    strategy = LLMPipelineStrategy("1f1b", num_microbatches=4, offload_optimizer=True)
    found = estimate_stages(strategy, Tiny(optimizer="adamw"), row_batches(1)[0], 2, Precision())
    assert [one.optimizer for one in found.configured.memory] == [0, 0]


def test_an_optimizer_that_cannot_be_tried_is_taken_for_adam() -> None:
    class Needy(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.trainer.world_size)

    found = estimate_stages(strategy_of("gpipe"), Needy(), row_batches(1)[0], 2, Precision())
    assert [one.optimizer for one in found.configured.memory] == [2 * one.gradients for one in found.configured.memory]
    assert "assumed to be those of Adam" in found.notes[0]


def test_experts_on_other_ranks_are_neither_held_nor_gathered() -> None:
    config = {**HF, "model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}

    def found(ep: int) -> StageEstimate:
        strategy = llm(parallel={"dp_shard": 2, "ep": ep})
        return estimate_stages(strategy, TinyHF(config), batches()[0], 4, make_precision_plugin("bf16-mixed"))

    alone, spread = found(1), found(2)
    experts = 2 * 4 * 3 * 32 * 16 * 4  # of two layers, in float32
    for one, other in zip(alone.configured.memory, spread.configured.memory, strict=True):
        assert one.parameters - other.parameters == experts
        assert one.gradients - other.gradients == experts
        assert one.optimizer == other.optimizer
    assert spread.notes[-1] == "tokens are assumed to be spread evenly over the experts"


def test_what_is_not_known_or_refused_is_an_error() -> None:
    with pytest.raises(SetupError, match="The trainer's precision 'transformer-engine' has no estimate"):
        make_precision_plugin("transformer-engine")
    with pytest.raises(SetupError, match="num_microbatches is 1; schedule 1f1b needs at least one for each of the 2"):
        estimate_stages(LLMPipelineStrategy("1f1b", num_microbatches=1), Tiny(), row_batches(1)[0], 2, Precision())
    with pytest.raises(SetupError, match="do not make the 3 ranks"):
        estimate_stages(llm(pp=2), Tiny(), row_batches(1)[0], 3, Precision())


# ---------------------------------------------------------------------- schedules, from operations and bytes

LAYER = replace(PIECES.layers[0], operations=LayerWork(1e9, 2e9, 1e9, 1e9))
FOOTPRINTS = ModelPieceResults(PIECES.empty, PIECES.input, (LAYER,) * 4, PIECES.output)
CONFIG = PPModuleConfig(4, "layers", ("embedding",), ("head",))


def test_ranks_share_the_work_of_layers_but_not_that_of_the_head() -> None:
    head = replace(PIECES.output, operations=LayerWork(1e9, 2e9, 1e9, 1e9))
    candidate = ScheduleCandidate(SCHEDULES["gpipe"], 1, 1, (2, 2))
    found = estimate_schedule_memory_and_bubble(
        candidate, 2, replace(FOOTPRINTS, output=head), STATES, ShardCounts(tensor=4)
    )
    assert found.seconds == pytest.approx(4 * 3e9 / 4 + 3e9)


def test_every_schedule_is_compared_or_refused() -> None:
    found = compare_schedules(CONFIG, 2, 3, FOOTPRINTS, STATES)
    refused = {one.schedule: one.reason for one in found if isinstance(one, UnsupportedScheduleReason)}
    assert list(refused) == ["dualpipev"]
    assert "needs at least one for each of the 4 stages" in refused["dualpipev"]
    others = [one.candidate.spec.name for one in found if isinstance(one, SchedulePrediction)]
    assert sorted([*others, "dualpipev"]) == sorted(SCHEDULES)
