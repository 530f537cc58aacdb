"""A run continued from any of its checkpoints trains the very samples that an undisturbed run trains, to the same bits.

In the suite each family is continued from all checkpoints of three epochs over a few combinations of loaders, ranks,
validations and reloading; with ``--long`` every pair of such options meets in some run, under every family.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.scenarios.checkpoints.resuming import (
    EPOCHS,
    FAMILIES,
    LOADERS,
    Setting,
    from_every_checkpoint,
    missed_or_twice,
)
from tests.scenarios.faults.forked_ranks import Here, Nursery, nursery, told

pytestmark = pytest.mark.exhaustive

# For hangs.
TIMEOUT = 1800.0

FEW = [
    (Setting("recsys", "1 worker", validates=2), 2),
    (Setting("threaded", "2 persistent workers", reloads=1), 1),
    (Setting("pipeline", "1 worker", validates=2, reloads=2), 2),
    (Setting("pipeline", "1 worker, own sampler"), 3),
    (Setting("pipeline", "no workers", validates=2, reloads=1), 1),
    (Setting("llm", "1 persistent worker", validates=2), 2),
    (Setting("in_process", "2 workers", validates=2), 1),
]


def _every_pair() -> list[tuple[Setting, int]]:
    """Settings in which any two values of two options meet; taken greedily, always in the same order."""
    kinds = itertools.product(FAMILIES, LOADERS, (0, 2), (0, 1, 2), (1, 2, 3))
    left = [kind for kind in kinds if kind[0] != "in_process" or kind[-1] == 1]
    chosen: list[tuple[Setting, int]] = []
    met: set[tuple[int, object, int, object]] = set()

    def pairs(kind: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
        return {(i, kind[i], j, kind[j]) for i, j in itertools.combinations(range(len(kind)), 2)} - met

    while (best := max(left, key=lambda kind: len(pairs(kind)))) and (new := pairs(best)):
        met |= new
        family, loader, validates, reloads, world = best
        chosen.append((Setting(family, loader, validates, reloads), world))
    return chosen


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.scenarios.checkpoints.resuming"]) as made:
        yield made


def continued(here: Here, setting: Setting) -> object:
    return from_every_checkpoint(here.rank, here.world_size, setting, here.folder)


def check(ranks: Nursery, setting: Setting, world: int) -> None:
    ended = ranks.run(continued, world, setting, timeout=TIMEOUT)
    assert all(one.code == 0 for one in ended), told(ended)
    found = [one.value for one in ended]
    assert not missed_or_twice([whole for whole, _ in found], FAMILIES[setting.family].shares_data)
    assert all(len(differing) > 4 * EPOCHS for _, differing in found)  # that there were checkpoints
    differing = {
        f"rank {rank}, from {name}": differences
        for rank, (_, of_rank) in enumerate(found)
        for name, differences in of_rank.items()
        if differences
    }
    assert not differing, "\n".join(f"{where}: {what}" for where, what in differing.items())


@pytest.mark.parametrize(("setting", "world"), FEW, ids=str)
def test_every_checkpoint_leads_where_the_undisturbed_run_ends(setting: Setting, world: int, ranks: Nursery) -> None:
    check(ranks, setting, world)


@pytest.mark.long
@pytest.mark.parametrize(("setting", "world"), _every_pair(), ids=str)
def test_it_does_with_every_pair_of_options(setting: Setting, world: int, ranks: Nursery) -> None:
    check(ranks, setting, world)
