"""All ranks' stores are at the same version, whatever happens to any of them: two-phase commit, and its recovery.

    rank 0   write ... prepare(v) ─┐             ┌─► commit(v) ─┐
                                   ├─ all have? ─┤              ├─ all have? ─► training goes on
    rank 1   write ... prepare(v) ─┘             └─► commit(v) ─┘

A rank that ends before the first question is answered leaves all at v - 1; after it, at v: see ``row_store``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch.distributed as dist

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.together import gather, on_all_ranks
from lightning_pipe.recsys.dynamic.store.row_store import RowStore, RunPart, StoreState

__all__ = ["commit_together", "open_together"]

_NOT_OPENED = "the store of rows cannot be opened"


def open_together(make: Callable[[], RowStore], group: dist.ProcessGroup) -> RowStore:
    """This rank's store, settled at the newest version that any rank has committed. All ranks call it together.

    Stores that have nothing committed on any rank become those of a new run.

    Args:
        make: opens this rank's store.
        group: all ranks.

    Raises:
        SetupError: on every rank, where one of them cannot open its store, or the stores are not those of one run of
            as many ranks, or one of them does not have the version; names what was found, rank by rank.
    """
    store: RowStore | None = None

    def make_own() -> RowStore:
        nonlocal store
        store = make()
        return store

    try:
        opened = on_all_ranks(make_own, _NOT_OPENED, group)
        states = gather(opened.state, group)
        version = max(state.committed for state in states)
        if version == 0 and all(state.prepared is None for state in states):
            run = gather(secrets.token_hex(8), group)[0]
            on_all_ranks(lambda: opened.join(RunPart(run, group.rank(), len(states))), _NOT_OPENED, group)
        elif wrong := _wrong(states, version):
            raise SetupError(wrong)
        on_all_ranks(lambda: opened.settle(version), _NOT_OPENED, group)
        return opened
    except BaseException:
        if store is not None:
            store.close()
        raise


def commit_together(
    store: RowStore, group: dist.ProcessGroup, version: int, notes: Mapping[str, str] | None = None
) -> None:
    """What was written on all ranks becomes *version*, or on none. All ranks call it together.

    Args:
        store: this rank's, with everything written that belongs to the version.
        group: all ranks.
        version: the committed one's successor.
        notes: kept with the version.

    Raises:
        SetupError: on every rank, where one of them could not prepare, which leaves the version before; or could not
            commit: then the stores must be opened again, which makes it the present version on all.
    """
    failed = f"version {version} of the rows cannot be committed"
    on_all_ranks(lambda: store.prepare(version, notes), failed, group)
    on_all_ranks(lambda: store.commit(version), failed, group)


def _wrong(states: list[StoreState], version: int) -> str | None:
    """What keeps the stores from being opened at *version*, with what each of them is; None where nothing does."""
    # The one that has most: where no rank has committed anything, one that has prepared.
    known = max(states, key=lambda state: (state.committed, state.prepared or 0)).part
    problems = []
    if known is None or known.ranks != len(states):
        problems.append(f"they are of {known.ranks if known else 'an unknown number of'} ranks, not {len(states)}")
    for rank, state in enumerate(states):
        if state.part is None:
            problems.append(f"that of rank {rank} is missing: its folder is new")
        elif known is not None and state.part.run != known.run:
            problems.append(f"that of rank {rank} is of another run")
        elif state.part.rank != rank:
            problems.append(f"that of rank {rank} was rank {state.part.rank}'s")
        elif version not in (state.committed, state.prepared):
            problems.append(f"that of rank {rank} does not have version {version}")
    if not problems:
        return None
    found = "\n".join(f"  rank {rank}: {_described(state)}" for rank, state in enumerate(states))
    return (
        f"the stores of rows do not fit together: {'; '.join(problems)}. Found:\n{found}\nNeeded: of one run, of"
        f" {len(states)} ranks, each at version {version} or with it prepared. Start as many ranks as there were, bring"
        " the folders of all of them back as they were together, or start with empty folders"
    )


def _described(state: StoreState) -> str:
    part = "new" if state.part is None else f"run {state.part.run}, rank {state.part.rank} of {state.part.ranks}"
    prepared = "" if state.prepared is None else f", version {state.prepared} prepared"
    return f"{part}, version {state.committed} committed{prepared}"
