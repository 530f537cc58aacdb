"""What a kill leaves of a store: the committed version and perhaps a prepared one, each exactly as written."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from lightning_pipe.recsys.dynamic.store.row_store import StoreState
from tests.recsys.dynamic.killed_ranks import Kill, Seen, expected, make, noted, see, train_alone, was_killed
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.tiers import sampled

# How many of the lines to kill at, spread over all of them.
KILLS = 25
_KINDS = ("prepared", "committed")


def _look_alone(here: Here, folder: str, version: int | None) -> tuple[StoreState, Seen | None]:
    store = make(Path(folder), 0)
    state = store.state
    if version is None:
        version = state.committed
    store.settle(version)
    seen = see(store)
    store.close()
    return state, seen


def _lines(ranks: Nursery, folder: Path) -> int:
    (ended,) = ranks.run(train_alone, 1, str(folder), 2, None)
    assert isinstance(ended.value, int), told([ended])
    return ended.value


@pytest.mark.exhaustive
def test_killed_before_any_line_it_has_the_committed_version_and_perhaps_the_prepared_one(
    ranks: Nursery, tmp_path: Path
) -> None:
    lines = _lines(ranks, tmp_path / "whole")
    killed = 0
    for line in range(1, lines, max(1, lines // KILLS)):
        folder = tmp_path / str(line)
        (ended,) = ranks.run(train_alone, 1, str(folder), 2, Kill(0, line=line))
        killed += was_killed(ended, line)
        _check(ranks, folder)
    assert killed >= KILLS - 1


@pytest.mark.parametrize("seed", sampled(range(2), lambda seed: seed == 0))
def test_killed_at_any_time_again_and_again(ranks: Nursery, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    versions = 0
    for _ in range(8):
        versions += 2
        ranks.run(train_alone, 1, str(tmp_path), versions, Kill(0, seconds=rng.uniform(0, 0.3)))
        versions = _check(ranks, tmp_path, before=versions - 2)


def _check(ranks: Nursery, folder: Path, before: int = 0) -> int:
    """Both the version that is committed and the one that is prepared are exactly what was written.

    Who looks settles at a version, and so discards another that is prepared: each looks at a copy. The run's next part
    finds the folder as it was left.

    Args:
        ranks: to look with.
        folder: of the run that was killed.
        before: the version that it began with.
    """
    copies = [folder / "one", folder / "other"]
    for copy in copies:
        shutil.rmtree(copy, ignore_errors=True)
    if not (folder / "rank_0").exists():
        assert before == 0
        return 0
    for copy in copies:
        shutil.copytree(folder / "rank_0", copy / "rank_0")
    said = {kind: max((int(one.split()[1]) for one in noted(folder, 0) if kind in one), default=0) for kind in _KINDS}
    (ended,) = ranks.run(_look_alone, 1, str(copies[0]), None)
    assert ended.code == 0, told([ended])
    state, seen = ended.value
    done = max(said["committed"], before)
    assert state.committed in (done, done + 1)
    assert state.committed + (state.prepared is not None) >= said["prepared"]
    assert seen.rows == expected(state.committed, 0)
    if state.prepared is not None:
        (ended,) = ranks.run(_look_alone, 1, str(copies[1]), state.prepared)
        assert ended.code == 0, told([ended])
        assert ended.value[1].rows == expected(state.prepared, 0)
        assert ended.value[1].notes == {"step": str(state.prepared)}
    return int(state.committed)
