"""A step makes few Python calls: fewer than TorchRec's pipeline, and few more under a Trainer."""

from __future__ import annotations

import re

import pytest

from tests.patience import HANG
from tests.scenarios.faults.launched import Launched

# Most calls a step of TrainPipeline and under a Trainer, at the size "tiny" with two ranks.
MOST = {"base": (1_500, 1_900), "prefetch": (1_500, 1_900)}
MOST_FRAMES = 10  # of this project, from Trainer.fit to training_step


@pytest.fixture(scope="module")
def printed() -> str:
    options = ["--standalone", "--nproc-per-node=2"]
    arguments = ["--sizes", "tiny", "--plans", *MOST]
    unchecked = {"LIGHTNING_PIPE_CHECK_CONTEXTS": ""}  # as users run it; checks are calls too
    code, output = Launched(options, "benchmarks.step_calls", *arguments, environment=unchecked).wait(HANG)
    assert code == 0, output
    return output


@pytest.mark.parametrize("plan", MOST)
def test_a_step_makes_few_python_calls(plan: str, printed: str) -> None:
    rows = re.findall(rf"^tiny +{plan} +(\w+) +([\d.]+)", printed, re.MULTILINE)
    calls = {way: float(count) for way, count in rows}
    assert calls["TrainPipeline"] <= min(MOST[plan][0], calls["TorchRec"]), printed
    assert calls["Trainer"] <= MOST[plan][1], printed


@pytest.mark.parametrize("plan", MOST)
def test_few_frames_lie_between_fit_and_training_step(plan: str, printed: str) -> None:
    (frames,) = re.findall(rf"^tiny +{plan} +(\d+) frames", printed, re.MULTILINE)
    assert 0 < int(frames) <= MOST_FRAMES, printed
