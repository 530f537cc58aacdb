"""An exception in a user's code ends training on every rank, soon; each says what happened where; nothing is left."""

from __future__ import annotations

import itertools
import re
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_pipe.llm.schedules.timed_stage import TimedStage
from lightning_pipe.loops import interrupted_save
from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
from tests.scenarios.faults.forked_ranks import Here, Nursery, Raised, told
from tests.scenarios.faults.injected import PLACES, broken
from tests.scenarios.faults.left_behind import left_behind
from tests.scenarios.faults.training import BOUND, KINDS, TIMEOUT, WHERE, fit, module
from tests.strategies import llm_cases

# Each place once, and twice where strategies differ in which thread runs it.
CASES = [
    ("pipeline", "dataloader worker"),
    ("pipeline", "transfer hook"),
    ("recsys", "callback"),
    ("recsys", "forward"),
    ("recsys", "worker thread"),
    ("llm", "backward"),
    ("llm", "preparation"),
]
# What Gloo says where the rank at the other end is gone, and what this project says.
LOST = r"Connection (closed|reset) by peer|[Rr]ank 1 could not fetch|rank 1: .*UserError|rank\(s\) 1 could not use"


# ---------------------------------------------------------------------- one rank of two


def on_two_ranks(here: Here, kind: str, place: str) -> None:
    trained = module(kind)
    if here.rank == 1:
        with broken(kind, place, trained, here.note_fault) as (fault, data):
            fit(kind, 2, trained, data, callbacks=[fault])
    else:
        fit(kind, 2, trained)


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_an_exception_on_one_rank_ends_all_soon_and_each_says_what_happened_where(
    kind: str, place: str, ranks: Nursery
) -> None:
    ended = ranks.run(on_two_ranks, 2, kind, place)
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < BOUND, told(ended)
    assert not any(one.left for one in ended), told(ended)
    # A worker thread runs nothing of a user's: from there it is the task's error, which says this.
    assert ended[1].value.kind == ("TaskError" if place == "worker thread" else "UserError"), told(ended)
    assert f"the user's, in {place}" in ended[1].value.text, told(ended)
    assert re.search(LOST, str(ended[0].value)), told(ended)
    for rank in range(2):
        assert re.search(WHERE.format(rank=rank), str(ended[rank].value)), told(ended)


def saving_on_the_way_out(here: Here, kind: str, callback: str) -> None:
    trained = module(kind)
    folder = f"{here.folder}/{here.rank}"
    saves = (
        OnExceptionCheckpoint(folder) if callback == "on exception" else ModelCheckpoint(folder, save_on_exception=True)
    )
    # The other rank cannot come to the save before this one has given up waiting, however short the wait is.
    with mock.patch.object(interrupted_save, "_WAIT", timedelta(seconds=0.5)):
        if here.rank == 1:
            with broken(kind, "forward", trained, here.note_fault) as (fault, data):
                fit(kind, 2, trained, data, callbacks=[fault, saves], enable_checkpointing=True)
        else:
            fit(kind, 2, trained, callbacks=[saves], enable_checkpointing=True)


@pytest.mark.parametrize(("kind", "callback"), [("pipeline", "on exception"), ("recsys", "model checkpoint")])
def test_a_checkpoint_on_the_way_out_keeps_no_rank_waiting(kind: str, callback: str, ranks: Nursery) -> None:
    ended = ranks.run(saving_on_the_way_out, 2, kind, callback)
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < BOUND, told(ended)
    assert ended[1].value.kind == "UserError", told(ended)
    assert "no checkpoint was written after this error" in str(ended[1].value), told(ended)


def out_of_memory_in_a_trial(here: Here) -> None:
    perform, calls = TimedStage.backward_one_chunk, itertools.count()

    def backward(*args: Any, **kwargs: Any) -> Any:
        # The first trial's, in the middle of its step.
        if here.rank == 1 and next(calls) == 1:
            here.note_fault()
            raise torch.OutOfMemoryError("no 2 GiB")
        return perform(*args, **kwargs)

    with mock.patch.object(TimedStage, "backward_one_chunk", backward):
        strategy = AutoLLMPipelineStrategy(trials=2, num_microbatches=4, timeout=TIMEOUT)
        llm_cases.fit(llm_cases.Tiny(), strategy, llm_cases.row_batches(2), devices=2)


def test_a_rank_without_memory_in_a_trial_keeps_no_rank_waiting(ranks: Nursery) -> None:
    ended = ranks.run(out_of_memory_in_a_trial, 2)
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < BOUND, told(ended)
    assert ended[1].value.kind == "OutOfMemoryError", told(ended)
    assert re.search(LOST, str(ended[0].value)), told(ended)
    for one in ended:
        assert "A rank failed in the middle of a trial step of schedule" in str(one.value), told(ended)


# ---------------------------------------------------------------------- one process, which goes on


def one_after_another(here: Here, kind: str) -> dict[str, dict[str, Any]]:
    undisturbed = module(kind)
    fit(kind, 1, undisturbed)
    found: dict[str, dict[str, Any]] = {}
    for place in PLACES[kind]:
        failing, threads = module(kind), threading.enumerate()
        result = found[place] = {"raised": "nothing"}
        with broken(kind, place, failing) as (fault, data):
            try:
                fit(kind, 1, failing, data, callbacks=[fault])
            except Exception as error:
                result["raised"] = str(Raised.of(error))
        result["left"] = left_behind(failing, threads)
        before = len(failing.losses)
        fit(kind, 1, failing)
        result["trained again"] = len(failing.losses) - before
    other = module(kind)
    fit(kind, 1, other)
    assert other.losses == undisturbed.losses
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", PLACES)
def test_a_process_trains_again_after_an_exception(kind: str, ranks: Nursery) -> None:
    (ended,) = ranks.run(one_after_another, 1, kind)
    assert ended.code == 0, told([ended])
    for result in ended.value.values():
        assert result["raised"] != "nothing"
        assert result["left"] == []
        assert result["trained again"] == len(KINDS[kind].data["dataset"])
