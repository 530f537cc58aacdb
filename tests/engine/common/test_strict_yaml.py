"""Hand-written YAML is read, or refused in one error that says where and why."""

from __future__ import annotations

import pytest

from lightning_pipe.engine import PlanError
from lightning_pipe.engine.common.strict_yaml import load_mapping


def read(text: str) -> object:
    return load_mapping(text, "plan", ("name", "tasks"), compare="the docs")


def test_a_mapping_is_read() -> None:
    assert read("name: base\ntasks: {Copy: {stage: 1}, Train: }") == {
        "name": "base",
        "tasks": {"Copy": {"stage": 1}, "Train": None},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {a: 1, b: 2, a: 3}", "repeats the key 'a'; write it once\n.*line 1, column 8"),
        ("tasks: &x {a: *x}", r"has a reference \(\*name\); write the value out"),
        ("tasks: {<<: &x {a: 1}, b: *x}", "has a reference"),
        ("tasks: !!python/object/apply:os.system [exit 7]", "could not determine a constructor"),
        ("tasks: {2001-13-45: 1}", "not valid YAML: month must be in 1..12; compare it with the docs"),
        ("tasks: {[a, b]: 1}", "unhashable key"),
        ("tasks: " + "[" * 3000, "not valid YAML: .*recursion"),
        ("tasks: {\u202e", r"\\u202e"),
        ("tasks: {}\n---\ntasks: {}", "expected a single document"),
        ("name: " + "x" * 2**17, "expected at most 131072"),
        ("- a", r"the plan is \['a'\]; expected a mapping of name, tasks"),
        ("tasks: {}\nsong: 1", "the plan has the unknown key 'song'; known keys are name, tasks"),
    ],
)
def test_what_is_wrong_is_said_in_printable_words(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){message}") as refused:
        read(text)
    assert all(one.isprintable() or one == "\n" for one in str(refused.value))
