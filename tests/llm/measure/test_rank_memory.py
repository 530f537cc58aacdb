"""What ranks need, from pieces whose bytes are round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint, LayerWork
from lightning_pipe.llm.measure.rank_memory import RankMemory, ShardCounts, estimate_memory
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES

NO_WORK = LayerWork(0, 0, 0, 0)


def footprint(**bytes_of: int) -> Footprint:
    names = [name for name in Footprint.__dataclass_fields__ if name != "operations"]
    return Footprint(**{**dict.fromkeys(names, 0), **bytes_of}, operations=NO_WORK)


LAYER = footprint(parameters=1000, gradients=1000, output=1, after_forward=100, after_input_backward=160,
                  in_forward=130, in_backward=40, in_input_backward=70, in_weight_backward=20)  # fmt: skip
PIECES = ModelPieceResults(
    footprint(output=1), footprint(parameters=500, gradients=500, output=1), (LAYER,) * 4, footprint()
)


STATES = ModelPieceResults(0, 7, (2000,) * 4, 9)


def memory_of(
    schedule: str, layers: tuple[int, ...], m: int = 4, keeps_messages: bool = True, **options: Any
) -> list[RankMemory]:
    actions = list_compute_actions(SCHEDULES[schedule], 2, m)
    return estimate_memory(actions, layers, PIECES, STATES, keeps_messages=keeps_messages, **options)


def test_parameters_gradients_and_states_are_those_of_a_ranks_pieces() -> None:
    first, last = memory_of("1f1b", (1, 3))
    assert (first.parameters, first.gradients, first.optimizer) == (1500, 1500, 2007)
    assert (last.parameters, last.gradients, last.optimizer) == (3000, 3000, 6009)


def test_what_needs_most_is_the_first_backward_after_all_forwards_that_come_before_it() -> None:
    gpipe, one_f_one_b = memory_of("gpipe", (2, 2)), memory_of("1f1b", (2, 2))
    # A stage keeps 200 of a micro-batch; its last layer's backward needs 40 more.
    assert [(one.activations, one.live_microbatches) for one in gpipe] == [(4 * 200 + 40, 4)] * 2
    assert [(one.activations, one.live_microbatches) for one in one_f_one_b] == [(2 * 200 + 40, 2), (1 * 200 + 40, 1)]


def test_between_the_parts_of_a_backward_other_bytes_are_held() -> None:
    """Of the last stage, where the input backward comes right after the forward."""
    row = list_compute_actions(SCHEDULES["interleaved_zero_bubble"], 2, 4, 1)
    found = estimate_memory(row, (2, 2), PIECES, STATES)
    kinds = [str(action)[1] for action in row[1]]
    ahead = max(kinds[:end].count("I") - kinds[:end].count("W") for end in range(len(kinds) + 1))
    assert ahead >= 1
    # Held are 320 of a micro-batch whose weights' backward is still to come.
    assert found[1].activations >= ahead * 320


def test_buffers_of_messages_are_there_for_every_micro_batch() -> None:
    first, last = memory_of("1f1b", (2, 2))
    # A gradient that is received; hidden states that are received, and their gradients.
    assert (first.messages, last.messages) == (4 * 1, 4 * 2)
    several = memory_of("interleaved_1f1b", (1, 1, 1, 1))
    # The middle stages receive two tensors, and keep what they send: a gradient and hidden states.
    assert [one.messages for one in several] == [4 * (2 + 4), 4 * (4 + 2)]


def test_hidden_states_may_belong_to_their_micro_batch() -> None:
    first, last = memory_of("1f1b", (2, 2), keeps_messages=False)
    before, before_last = memory_of("1f1b", (2, 2))
    # Gradients are there for every micro-batch, hidden states for the one that the last stage has in its backward.
    assert (first.messages, last.messages) == (4 * 1, 4 * 1)
    assert (first.activations, last.activations) == (before.activations, before_last.activations + 1)


@pytest.mark.parametrize("gathered", [True, False])
def test_shards_are_parts_beside_what_is_gathered(gathered: bool) -> None:
    (_, last) = memory_of("1f1b", (2, 2), sharing=ShardCounts(shard=4, gathers_whole_stage=gathered))
    assert last.parameters == 2000 / 4 + (2000 if gathered else 1000)
    assert last.gradients == 2000 / 4 + 2000
    assert last.optimizer == 4000 / 4 + 3  # 9 of the head, rounded up


def test_gradients_wait_for_their_reduction_from_the_first_to_the_last_backward_of_their_stage() -> None:
    both = memory_of(
        "interleaved_1f1b", (1, 1, 1, 1), m=2, sharing=ShardCounts(shard=4, unreduced_to_reduced_bytes=2.0)
    )
    # The second rank has done all of stage 3 when the backward of stage 1 begins.
    assert both[1].gradients == 2 * 1000 / 4 + 2 * 1000
    (_, last) = memory_of("1f1b", (2, 2), m=2, sharing=ShardCounts(shard=4, unreduced_to_reduced_bytes=2.0))
    assert last.gradients == 2 * 1000 / 4 + 2 * 2000


@pytest.mark.parametrize(("expert", "gathered"), [(1, 1000), (2, 600), (4, 200)])
def test_ranks_share_experts_and_gather_those_that_other_ranks_hold_too(expert: int, gathered: int) -> None:
    pieces = replace(PIECES, layers=(replace(LAYER, experts=800),) * 4)
    actions = list_compute_actions(SCHEDULES["1f1b"], 2, 4)
    (_, last) = estimate_memory(actions, (2, 2), pieces, STATES, sharing=ShardCounts(shard=4, expert=expert))
    assert last.parameters == 2 * (1000 / 4 + gathered)
    assert last.gradients == 2 * (1000 / 4 + gathered)
    assert last.optimizer == 2 * 2000 / 4 + 3


def test_ranks_share_matrices_of_layers_and_sequences() -> None:
    first, _ = memory_of("1f1b", (2, 2), sharing=ShardCounts(tensor=2, context=4))
    assert first.parameters == 500 + 2 * 500
    assert first.activations == (2 * 200 + 40) / 4
