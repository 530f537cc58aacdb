"""A run continued from any of its checkpoints trains the very samples that an undisturbed run trains, to the same bits.

Each family is continued from all checkpoints of three epochs over a few combinations of loaders, ranks, validations
and reloading.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.checkpoints.resuming import (
    EPOCHS,
    FAMILIES,
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
