from __future__ import annotations

from itertools import pairwise

import pytest

from lightning_pipe.engine import Dependency, PlanError
from lightning_pipe.engine.plans.order import check_order, derive_order, find_cycle


def test_higher_stages_come_first_and_then_program_order() -> None:
    assert derive_order(["a", "b", "c", "d"], {"a": 0, "b": 1, "c": 0, "d": 1}, []) == ("b", "d", "a", "c")


def test_a_dependency_of_the_same_period_comes_before_the_stages() -> None:
    assert derive_order(["a", "b"], {"a": 0, "b": 1}, [Dependency("a", "b", 1)]) == ("a", "b")


def test_an_order_that_the_dependencies_allow_passes() -> None:
    check_order("p", ["b", "a"], ["a", "b"], [Dependency("b", "a")])


def test_an_order_against_a_dependency_is_refused_and_names_it() -> None:
    with pytest.raises(PlanError, match=r"plan 'p' has no common order.*submits a before b.*a after b"):
        check_order("p", ["a", "b"], ["a", "b"], [Dependency("b", "a")])


def test_an_order_that_leaves_out_and_repeats_names_both() -> None:
    with pytest.raises(PlanError, match=r"missing: b, repeated: a"):
        check_order("p", ["a", "a", "c"], ["a", "b", "c"], [])


def test_a_cycle_is_found_along_its_direction() -> None:
    edges = [Dependency("a", "b"), Dependency("b", "c"), Dependency("c", "a"), Dependency("c", "d")]
    cycle = find_cycle(["a", "b", "c", "d"], edges)
    assert cycle[0] == cycle[-1]
    assert sorted(cycle[1:]) == ["a", "b", "c"]
    assert all(Dependency(*pair) in edges for pair in pairwise(cycle))


def test_a_task_that_waits_for_itself_is_a_cycle() -> None:
    assert find_cycle(["a"], [Dependency("a", "a")]) == ["a", "a"]


def test_without_a_cycle_nothing_is_found() -> None:
    assert find_cycle(["a", "b", "c"], [Dependency("a", "b"), Dependency("a", "c"), Dependency("b", "c")]) == []
