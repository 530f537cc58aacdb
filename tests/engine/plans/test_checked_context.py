"""A task sees of its context what it declares, where the environment asks for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_pipe.engine import IterContext, PipelineTask, PlanError, State
from lightning_pipe.engine.plans.checked_context import CHECK, CheckedTask


def task(fn: Callable[[Any], Any], *, reads: Any = (), writes: Any = ()) -> PipelineTask:
    return PipelineTask("t", fn, reads=reads, writes=writes)


def test_declared_fields_are_read_written_and_deleted_in_the_context_itself() -> None:
    ctx = IterContext("batch", 3)
    ctx.old = 1

    def work(ctx: Any) -> None:
        ctx.new = (ctx.batch, ctx.iter_idx, ctx.pop("old"), ctx.has("old"))
        ctx.gone = 1
        del ctx.gone

    task(work, reads=["batch", "old"], writes=["old", "new", "gone"]).fn(ctx)
    assert ctx.new == ("batch", 3, 1, False)
    assert sorted(vars(ctx)) == ["batch", "iter_idx", "new"]


@pytest.mark.parametrize(
    ("touch", "verb"),
    [
        (lambda ctx: ctx.other, "reads"),
        (lambda ctx: ctx.has("other"), "reads"),
        (lambda ctx: setattr(ctx, "other", 1), "writes"),
        (lambda ctx: delattr(ctx, "other"), "writes"),
        (lambda ctx: ctx.pop("other"), "writes"),
    ],
)
@pytest.mark.parametrize("declared", [[], [State("other")]])
def test_another_field_is_refused_by_name(touch: Callable[[Any], Any], verb: str, declared: list[str]) -> None:
    ctx = IterContext()
    ctx.other = 0
    with pytest.raises(PlanError, match=f"task 't' {verb} the context field 'other'.*Add 'other' to its {verb}"):
        task(touch, reads=["batch", *declared], writes=["batch", *declared]).fn(ctx)
    assert ctx.other == 0


@pytest.mark.parametrize("value", ["", "0", None])
def test_nothing_is_checked_unless_the_environment_asks(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(CHECK)
    else:
        monkeypatch.setenv(CHECK, value)
    plain = task(lambda ctx: setattr(ctx, "other", 1))
    assert not isinstance(plain.fn, CheckedTask)
    ctx = IterContext()
    plain.fn(ctx)
    assert ctx.other == 1
