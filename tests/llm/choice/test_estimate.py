"""Whether something fits, and its bubble, from operations and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.llm.choice.estimate import Refused, compare, estimate
from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate, SchedulePrediction
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_profile import LayerWork
from lightning_pipe.llm.measure.rank_memory import Sharing
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.schedules.named import SCHEDULES
from tests.llm.measure.test_rank_memory import PIECES, STATES

LAYER = replace(PIECES.layers[0], operations=LayerWork(1e9, 2e9, 1e9, 1e9))
FOOTPRINTS = Pieces(PIECES.empty, PIECES.input, (LAYER,) * 4, PIECES.output)
CONFIG = ModuleConfig(4, "layers", ("embedding",), ("head",))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_even_stages_is_the_known_one(name: str) -> None:
    found = estimate(ScheduleCandidate(SCHEDULES[name], 1, 6, (2, 2)), 2, FOOTPRINTS, STATES)
    assert found.bubble == pytest.approx(1 / 7)
    assert [one.live for one in found.memory] == ([6, 6] if name == "gpipe" else [2, 1])


def test_ranks_share_the_work_of_layers_but_not_that_of_the_head() -> None:
    head = replace(PIECES.output, operations=LayerWork(1e9, 2e9, 1e9, 1e9))
    candidate = ScheduleCandidate(SCHEDULES["gpipe"], 1, 1, (2, 2))
    found = estimate(candidate, 2, replace(FOOTPRINTS, output=head), STATES, Sharing(tensor=4))
    assert found.seconds == pytest.approx(4 * 3e9 / 4 + 3e9)


def test_every_schedule_is_compared_or_refused() -> None:
    found = compare(CONFIG, 2, 3, FOOTPRINTS, STATES)
    refused = {one.schedule: one.reason for one in found if isinstance(one, Refused)}
    assert list(refused) == ["dualpipev"]
    assert "needs at least one for each of the 4 stages" in refused["dualpipev"]
    others = [one.candidate.spec.name for one in found if isinstance(one, SchedulePrediction)]
    assert [*others, "dualpipev"] == list(SCHEDULES)
