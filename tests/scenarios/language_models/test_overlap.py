"""DualPipeV with experts on several ranks: a forward and a backward take turns, and results stay the same."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.schedules.specs import SCHEDULES, _PlaceholderStage, instantiate_schedule, list_actions
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from tests.distributed import run_ranks
from tests.strategies.llm_cases import WIDTH, Noted, TinyLM, fit, llm, row_batches

COUNT, LAYERS = 5, 8
EXPERTS, HIDDEN = 4, 16


class ExpertBlock(nn.Module):
    """A layer whose experts may be on several ranks, with dropout before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = MoE(WIDTH, HIDDEN, EXPERTS, 2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x + self.dropout(self.mixture(self.dropout(self.norm(x))))


class Experts(Noted, PipelineModule):
    """A model with mixtures of experts in all layers, or in the first two only."""

    def __init__(self, mixtures: int = LAYERS) -> None:
        super().__init__()
        self.mixtures = mixtures
        self.bars: list[Bar] = []

    def build_model(self) -> nn.Module:
        model = TinyLM(LAYERS)
        for index in range(self.mixtures):
            model.layers[index] = ExpertBlock()
        return model

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        strategy.runner.record_events = True
        self.bars = strategy.runner.events


def parted(path: Path, ranks: int) -> Path:
    """A file of DualPipeV's actions, with its overlapped ones one after the other."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(list_actions(SCHEDULES["dualpipev"], ranks, COUNT).values())
    return path


def whole(path: Path, ranks: int) -> Path:
    """A file of DualPipeV's actions, with its overlapped ones whole."""
    stages = [_PlaceholderStage(index, 2 * ranks, ranks) for index in (0, 2 * ranks - 1)]
    schedule: Any = instantiate_schedule(SCHEDULES["dualpipev"], stages, COUNT, overlap=True)
    schedule._dump_csv(str(path), "compute_only")
    return path


def trained(
    rank: int, world: int, schedule: str, options: dict[str, Any], mixtures: int
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], list[Bar]]:
    module = Experts(mixtures)
    batches = [{key: value[rank % 2 :: 2] for key, value in batch.items()} for batch in row_batches(2, 4 * COUNT)]
    precision = options.pop("precision", "32-true")
    fit(module, llm(schedule, COUNT, **options), batches, use_distributed_sampler=False, precision=precision)
    assert module.model is not None
    values = {name: local(one).detach().clone() for name, one in module.model.named_parameters()}
    gradients = [{name: local(one) for name, one in step.items()} for step in module.gradients]
    return module.losses, gradients, values, module.bars


def local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


CASES: dict[str, dict[str, Any]] = {
    "kept": {"dp_shard": 2},
    "recomputed": {"dp_shard": 2, "activation_checkpoint": {"mode": "full"}},
    "mixed": {"dp_shard": 2, "precision": "bf16-mixed"},
}


@pytest.mark.parametrize(
    ("case", "mixtures", "from_file"),
    [
        ("kept", LAYERS, False),
        pytest.param("recomputed", LAYERS, True, marks=pytest.mark.exhaustive),
        pytest.param("kept", 2, False, marks=pytest.mark.exhaustive),
        pytest.param("mixed", LAYERS, False, marks=pytest.mark.exhaustive),
    ],
)
def test_results_are_those_of_one_after_the_other(case: str, mixtures: int, from_file: bool, tmp_path: Path) -> None:
    schedule = str(whole(tmp_path / "whole.csv", 2)) if from_file else "dualpipev"
    options = {"pp": 2, "ep": 2, **CASES[case]}
    apart = run_ranks(trained, 4, str(parted(tmp_path / "parted.csv", 2)), options, mixtures)
    together = run_ranks(trained, 4, schedule, options, mixtures)
    for one, other in zip(apart, together, strict=True):
        assert one[0] == other[0]
        for step, same in zip([*one[1], one[2]], [*other[1], other[2]], strict=True):
            assert step.keys() == same.keys()
            assert [name for name in step if not torch.equal(step[name], same[name])] == []
    assert not any(turns_of(bars) for *_, bars in apart)
    if mixtures == LAYERS:
        for *_, bars in together:
            assert {three[0].kind for three in turns_of(bars)} == {"forward", "backward"}


OWN = """
0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,(0F4;0B2)OVERLAP_F_B,0B3,0B4
1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,(1F4;1B3)OVERLAP_F_B,1B4
"""


@pytest.mark.exhaustive
def test_a_stages_own_forward_and_backward_run_one_after_the_other(tmp_path: Path) -> None:
    files = [tmp_path / "own.csv", tmp_path / "parted.csv"]
    files[0].write_text(OWN.strip())
    files[1].write_text(re.sub(r"\((\w+);(\w+)\)OVERLAP_F_B", r"\1,\2", OWN.strip()))
    options = {"pp": 2, "ep": 2, "dp_shard": 2, "reshard_after_forward": True}
    one, other = (run_ranks(trained, 4, str(file), options, LAYERS) for file in files)
    assert [losses for losses, *_ in one] == [losses for losses, *_ in other]
    assert not any(turns_of(bars) for *_, bars in one)


def turns_of(bars: list[Bar]) -> list[tuple[Bar, ...]]:
    """Three consecutive bars of which the outer ones are the same work."""
    found = zip(bars, bars[1:], bars[2:], strict=False)
    return [three for three in found if three[0][6:] == three[2][6:] and three[0].kind == three[2].kind]
