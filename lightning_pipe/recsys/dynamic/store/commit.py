"""Two-phase commit and recovery, which keep the stores of all ranks at the same version after any failure.

    rank 0   write ... prepare(v) ─┐             ┌─► commit(v) ─┐
                                   ├─ all have? ─┤              ├─ all have? ─► training continues
    rank 1   write ... prepare(v) ─┘             └─► commit(v) ─┘

If a rank ends before all ranks have prepared v, all reopen at v - 1. Once any rank has committed v, all reopen at v.
See ``row_store``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import torch.distributed as dist

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks
from lightning_pipe.recsys.dynamic.store.row_store import RankStoreIdentity, RowStore, StoreState

_NOT_OPENED = "the store of rows cannot be opened"


def open_store_at_newest_version(make: Callable[[], RowStore], group: dist.ProcessGroup) -> RowStore:
    """Open this rank's store at the newest version that any rank has committed. Collective.

    If no rank has committed or prepared a version, the stores start a new run.
    """
    store: RowStore | None = None

    def make_store() -> RowStore:
        nonlocal store
        store = make()
        return store

    try:
        opened = run_on_all_ranks(make_store, _NOT_OPENED, group)
        states = all_gather_objects(opened.current_state, group)
        version = max(state.committed for state in states)
        if version == 0 and all(state.prepared is None for state in states):
            run = all_gather_objects(secrets.token_hex(8), group)[0]
            run_on_all_ranks(
                lambda: opened.write_identity(RankStoreIdentity(run, group.rank(), len(states))), _NOT_OPENED, group
            )
        elif wrong := _describe_rank_store_mismatch(states, version):
            raise SetupError(wrong)
        run_on_all_ranks(lambda: opened.recover(version), _NOT_OPENED, group)
        return opened
    except BaseException:
        if store is not None:
            store.close()
        raise


def commit_on_all_ranks(store: RowStore, group: dist.ProcessGroup, notes: Mapping[str, str] | None = None) -> None:
    """Commit the writes of all ranks as the next version, on all ranks or on none. Collective."""
    newest = max(all_gather_objects(store.current_state.committed, group))
    failed = f"version {newest + 1} of the rows cannot be committed"

    def prepare_next_commit() -> None:
        if store.current_state.committed < newest:
            store.commit(newest)  # failed here before, but not on all ranks
        store.prepare_commit(newest + 1, notes)

    run_on_all_ranks(prepare_next_commit, failed, group)
    run_on_all_ranks(lambda: store.commit(newest + 1), failed, group)


def _describe_rank_store_mismatch(states: list[StoreState], version: int) -> str | None:
    """Message on why the stores cannot be opened at *version*, with the state of each store; None if they can."""
    # The most advanced store: if no rank has committed a version, one that has prepared.
    part = max(states, key=lambda state: (state.committed, state.prepared or 0)).part
    problems = []
    if part is None or part.ranks != len(states):
        problems.append(f"they belong to {part.ranks if part else 'an unknown number of'} ranks, not {len(states)}")
    for rank, state in enumerate(states):
        if state.part is None:
            problems.append(f"the store of rank {rank} is missing: its folder is new")
        elif part is not None and state.part.run != part.run:
            problems.append(f"the store of rank {rank} belongs to another run")
        elif state.part.rank != rank:
            problems.append(f"the store of rank {rank} was written by rank {state.part.rank}")
        elif version not in (state.committed, state.prepared):
            problems.append(f"the store of rank {rank} does not have version {version}")
    if not problems:
        return None
    listing = "\n".join(f"  rank {rank}: {_describe_store_state(state)}" for rank, state in enumerate(states))
    return (
        f"the stores of rows do not match: {'; '.join(problems)}. Found:\n{listing}\nExpected stores of one run with"
        f" {len(states)} ranks, each with version {version} committed or prepared. Start the original number of ranks,"
        " restore the folders of all ranks from copies made at the same time, or start with empty folders"
    )


def _describe_store_state(state: StoreState) -> str:
    part = "new" if state.part is None else f"run {state.part.run}, rank {state.part.rank} of {state.part.ranks}"
    prepared = "" if state.prepared is None else f", version {state.prepared} prepared"
    return f"{part}, version {state.committed} committed{prepared}"
