"""What ``lightning_pipe.recsys`` gives, and when it needs TorchRec."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_pipe.recsys
from tests.patience import HANG

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", lightning_pipe.recsys.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lightning_pipe.recsys, name) is not None


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'TrainPipelines'"):
        lightning_pipe.recsys.TrainPipelines  # noqa: B018


# None in sys.modules is what Python itself takes for "not to be had".
BROKEN = """
import sys
sys.modules.update(dict.fromkeys(("torchrec", "fbgemm_gpu")))
from lightning_pipe.recsys import PLANS, recsys_plan
from lightning_pipe.engine import SetupError
try:
    from lightning_pipe.recsys import TrainPipeline
except SetupError as error:
    print(sorted(PLANS), error)
"""


def test_without_torchrec_there_are_plans_and_the_rest_says_what_mends_the_environment() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BROKEN], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (
        "['base', 'compute_ahead', 'early_prefetch', 'fused_sparse_dist', 'prefetch', 'semi_sync', 'serial',"
        " 'threaded_input'] The recsys strategies need torchrec and fbgemm, which cannot be imported" in result.stdout
    )
    assert "docs/stacks.md has the commands" in result.stdout
