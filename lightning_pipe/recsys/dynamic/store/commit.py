"""All ranks' stores are at the same version, whatever happens to any of them: two-phase commit, and its recovery.

    rank 0   write ... prepare(v) ─┐             ┌─► commit(v) ─┐
                                   ├─ all have? ─┤              ├─ all have? ─► training goes on
    rank 1   write ... prepare(v) ─┘             └─► commit(v) ─┘

A rank that ends before the first question is answered leaves all at v - 1; after it, at v: see ``row_store``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from lightning_pipe.engine.plans.errors import PipelineError, SetupError
from lightning_pipe.recsys.batches.agreement import Agreement
from lightning_pipe.recsys.dynamic.store.row_store import RowStore, RunPart, StoreState

__all__ = ["commit_together", "open_together"]


def open_together(make: Callable[[], RowStore], agreement: Agreement) -> RowStore:
    """This rank's store, settled at the newest version that any rank has committed. All ranks call it together.

    Stores that have nothing committed on any rank become those of a new run.

    Args:
        make: opens this rank's store.
        agreement: over all ranks.

    Raises:
        SetupError: on every rank, where one of them cannot open its store, or the stores are not those of one run of
            as many ranks, or one of them does not have the version; names what was found, rank by rank.
    """
    store: RowStore | None = None
    try:
        error = None
        try:
            store = make()
        except Exception as raised:
            error = raised
        _raise_together(agreement, error)
        assert store is not None
        opened = store
        states = agreement.gather(opened.state)
        version = max(state.committed for state in states)
        if version == 0 and all(state.prepared is None for state in states):
            run = agreement.gather(secrets.token_hex(8))[0]
            _together(agreement, lambda: opened.join(RunPart(run, agreement.rank, len(states))))
        elif wrong := _wrong(states, version):
            raise SetupError(wrong)
        _together(agreement, lambda: opened.settle(version))
        return opened
    except BaseException:
        if store is not None:
            store.close()
        raise


def commit_together(
    store: RowStore, agreement: Agreement, version: int, notes: Mapping[str, str] | None = None
) -> None:
    """What was written on all ranks becomes *version*, or on none. All ranks call it together.

    Args:
        store: this rank's, with everything written that belongs to the version.
        agreement: over all ranks.
        version: the committed one's successor.
        notes: kept with the version.

    Raises:
        SetupError: on every rank, where one of them could not prepare, which leaves the version before; or could not
            commit: then the stores must be opened again, which makes it the present version on all.
    """
    _together(agreement, lambda: store.prepare(version, notes))
    _together(agreement, lambda: store.commit(version))


def _together(agreement: Agreement, step: Callable[[], None]) -> None:
    error = None
    try:
        step()
    except Exception as raised:
        error = raised
    _raise_together(agreement, error)


def _raise_together(agreement: Agreement, error: Exception | None) -> None:
    text = None if error is None else str(error) if isinstance(error, PipelineError) else repr(error)
    texts = agreement.gather(text)
    if any(texts):
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(texts) if one]
        raise SetupError("\n".join(failed)) from error


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
