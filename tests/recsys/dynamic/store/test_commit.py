"""Ranks commit together and open together, whenever one of them is killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recsys.dynamic.killed_ranks import (
    Kill,
    Seen,
    expected,
    look,
    moments,
    noted,
    train,
    train_behind,
    train_on_after_a_failed_commit,
    was_killed,
)
from tests.scenarios.faults.forked_ranks import Ended, Here, Nursery, told
from tests.tiers import sampled

RANKS = 2
VERSIONS = 2
# How many of the lines to kill at, spread over all of them.
KILLS = 12

Train = Callable[[Here, str, int, Kill | None], int]
COMMITS = pytest.mark.parametrize("train", [train, train_behind], ids=["foreground", "background"])


def _all_look(ranks: Nursery, folder: Path) -> list[Seen]:
    ended = ranks.run(look, RANKS, str(folder))
    assert all(one.code == 0 for one in ended), told(ended)
    return [one.value for one in ended]


def _check(ranks: Nursery, folder: Path, before: int = 0) -> int:
    """All ranks have what they had at one version: the last that any rank took for committed, or the one after it.

    Args:
        ranks: to look with.
        folder: of the run that was killed.
        before: the version that it began with.
    """
    seen = _all_look(ranks, folder)
    versions = {one.version for one in seen}
    assert len(versions) == 1, versions
    version = versions.pop()
    done = max((int(line.split()[1]) for rank in range(RANKS) for line in noted(folder, rank)), default=0)
    done = max(done, before)
    assert version in (done, done + 1)
    for rank, one in enumerate(seen):
        assert one.rows == expected(version, rank)
        assert one.notes.get("step") == (str(version) if version else None)
    return version


def _refusals(ended: list[Ended]) -> list[str]:
    assert all(one.value.kind == "SetupError" for one in ended), told(ended)
    return [one.value.text for one in ended]


@pytest.fixture
def trained(ranks: Nursery, tmp_path: Path) -> Path:
    """The folder of a run that ended well."""
    ended = ranks.run(train, RANKS, str(tmp_path), VERSIONS, None)
    assert all(one.code == 0 for one in ended), told(ended)
    return tmp_path


def test_without_a_kill_all_ranks_open_at_the_last_commit(ranks: Nursery, trained: Path) -> None:
    assert _check(ranks, trained) == VERSIONS


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", range(RANKS))
@COMMITS
def test_killed_before_any_line_all_ranks_open_at_one_commit_and_go_on(
    ranks: Nursery, tmp_path: Path, rank: int, train: Train
) -> None:
    whole = ranks.run(train, RANKS, str(tmp_path / "whole"), VERSIONS, None)
    lines = whole[rank].value
    assert isinstance(lines, int), told(whole)
    found, killed = set(), 0
    for line in range(1 + rank, lines, lines // KILLS):
        folder = tmp_path / str(line)
        ended = ranks.run(train, RANKS, str(folder), VERSIONS, Kill(rank, line=line))
        killed += was_killed(ended[rank], line)
        found.add(_check(ranks, folder))
        again = ranks.run(train, RANKS, str(folder), VERSIONS, None)
        assert all(one.code == 0 for one in again), told(again)
        assert _check(ranks, folder) == VERSIONS
        shutil.rmtree(folder)
    assert found == set(range(VERSIONS + 1))
    assert killed >= KILLS - 1


@pytest.mark.parametrize("seed", sampled(range(3), lambda seed: seed == 0))
@COMMITS
def test_killed_at_any_time_several_times_over(ranks: Nursery, tmp_path: Path, seed: int, train: Train) -> None:
    versions = 0
    for time in moments(seed, 6, longest=0.6):
        versions += VERSIONS
        ranks.run(train, RANKS, str(tmp_path), versions, Kill(seed % RANKS, seconds=time))
        versions = _check(ranks, tmp_path, before=versions - VERSIONS)
    ended = ranks.run(train, RANKS, str(tmp_path), versions + 1, None)
    assert all(one.code == 0 for one in ended), told(ended)
    assert _check(ranks, tmp_path) == versions + 1


def test_a_commit_that_failed_on_one_rank_alone_is_completed_by_the_next(ranks: Nursery, tmp_path: Path) -> None:
    ended = ranks.run(train_on_after_a_failed_commit, RANKS, str(tmp_path))
    assert all(one.code == 0 and "no room" in one.value for one in ended), told(ended)
    assert _check(ranks, tmp_path) == 2


def test_another_number_of_ranks_is_refused_on_all(ranks: Nursery, trained: Path) -> None:
    for text in _refusals(ranks.run(look, RANKS + 1, str(trained))):
        assert "they belong to 2 ranks, not 3" in text
        assert "rank 2 is missing" in text
    (text,) = _refusals(ranks.run(look, 1, str(trained)))
    assert "they belong to 2 ranks, not 1" in text
    assert _check(ranks, trained) == VERSIONS


def test_a_missing_folder_is_refused_on_all(ranks: Nursery, trained: Path) -> None:
    shutil.rmtree(trained / "rank_1")
    for text in _refusals(ranks.run(look, RANKS, str(trained))):
        assert "the store of rank 1 is missing" in text
        assert "rank 0: run" in text


def test_a_folder_of_another_run_is_refused_on_all(ranks: Nursery, trained: Path, tmp_path: Path) -> None:
    ended = ranks.run(train, RANKS, str(tmp_path / "other"), VERSIONS, None)
    assert all(one.code == 0 for one in ended), told(ended)
    shutil.rmtree(trained / "rank_1")
    shutil.copytree(tmp_path / "other" / "rank_1", trained / "rank_1")
    for text in _refusals(ranks.run(look, RANKS, str(trained))):
        assert "the store of rank 1 belongs to another run" in text


def test_folders_that_changed_places_are_refused_on_all(ranks: Nursery, trained: Path) -> None:
    for source, target in (("rank_0", "rank_x"), ("rank_1", "rank_0"), ("rank_x", "rank_1")):
        (trained / source).rename(trained / target)
    for text in _refusals(ranks.run(look, RANKS, str(trained))):
        assert "the store of rank 0 was written by rank 1" in text


def test_an_older_copy_of_one_folder_is_refused_on_all(ranks: Nursery, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "rank_1", tmp_path / "copy")
    ended = ranks.run(train, RANKS, str(trained), VERSIONS + 2, None)
    assert all(one.code == 0 for one in ended), told(ended)
    shutil.rmtree(trained / "rank_1")
    (tmp_path / "copy").rename(trained / "rank_1")
    for text in _refusals(ranks.run(look, RANKS, str(trained))):
        assert f"the store of rank 1 does not have version {VERSIONS + 2}" in text


def test_one_rank_that_cannot_open_its_store_is_an_error_on_all(ranks: Nursery, trained: Path) -> None:
    (trained / "rank_1" / "store.json").write_text("{}")
    for text in _refusals(ranks.run(look, RANKS, str(trained))):
        assert text.startswith("rank 1: the store of rows in")
        assert "damaged" in text
