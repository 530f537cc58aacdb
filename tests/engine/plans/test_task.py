from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import IterContext, PipelineTask, PlanError, State


def nothing(ctx: IterContext) -> None:
    pass


def test_tasks_are_equal_and_hashed_by_name() -> None:
    first, second = PipelineTask("a", nothing, reads=["x"]), PipelineTask("a", lambda ctx: None)
    assert first == second
    assert {first: 1}[second] == 1
    assert first != PipelineTask("b", nothing)
    assert first != "a"


@pytest.mark.parametrize("arguments", [{"reads": "batch"}, {"writes": State("tables")}])
def test_one_name_instead_of_a_list_of_names_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"single name .* give a list"):
        PipelineTask("a", nothing, **arguments)


def test_a_context_holds_whatever_tasks_put_on_it() -> None:
    ctx = IterContext("batch", 3)
    ctx.features = 1
    assert (ctx.batch, ctx.iter_idx, ctx.features) == ("batch", 3, 1)
    assert repr(ctx) == "IterContext(iter_idx=3, fields=['batch', 'features', 'iter_idx'])"


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    ctx = IterContext("batch", 3)
    with pytest.raises(AttributeError, match=r"iteration 3 has no field 'features'.*\['batch', 'iter_idx'\]"):
        _ = ctx.features
    assert not hasattr(ctx, "features")
