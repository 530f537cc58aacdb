"""torchrun starts a job again in which a rank was killed, which goes on from its last checkpoint to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.patience import HANG
from tests.scenarios.faults.elastic_program import EVERY, KILLED_AT, train
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.scenarios.faults.launched import Launched
from tests.scenarios.faults.training import KINDS
from tests.strategies.cases import difference

pytestmark = pytest.mark.exhaustive


def undisturbed(here: Here, kind: str) -> dict[str, Tensor]:
    return train(kind, here.folder / kind)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that was killed and started again once for each strategy."""
    folder = tmp_path_factory.mktemp("elastic")
    # A start of all ranks for each strategy, and one more.
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={len(KINDS)}"]
    code, output = Launched(options, "tests.scenarios.faults.elastic_program", str(folder), *KINDS).wait(HANG)
    (folder / "output").write_text(output)
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def final(ranks: Nursery) -> dict[str, list[dict[str, Tensor]]]:
    """What training comes to, by strategy and rank, where nobody is killed."""
    found = {}
    for kind in KINDS:
        ended = ranks.run(undisturbed, 2, kind)
        assert [one.code for one in ended] == [0, 0], told(ended)
        found[kind] = [one.value for one in ended]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_to_the_same_parameters(kind: str, job: Path, final: dict[str, list[dict[str, Tensor]]]) -> None:
    for rank in range(2):
        found = torch.load(job / kind / f"final_{rank}")
        assert found
        assert difference(found, final[kind][rank]) == [], (job / "output").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_the_last_checkpoint(kind: str, job: Path) -> None:
    for rank in range(2):
        attempts: dict[int, list[int]] = {}
        for line in (job / kind / f"steps_{rank}").read_text().splitlines():
            attempt, step = map(int, line.split())
            attempts.setdefault(attempt, []).append(step)
        first, second = (attempts[number] for number in sorted(attempts))
        assert first in [list(range(KILLED_AT + more)) for more in ((1,) if rank == 1 else (0, 1, 2))]
        assert second == list(range(KILLED_AT - KILLED_AT % EVERY, 12))
