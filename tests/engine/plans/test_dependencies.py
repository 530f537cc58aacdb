from __future__ import annotations

from hypothesis import given, settings

from lightning_pipe.engine import Dependency, PipelineTask, State
from lightning_pipe.engine.plans.dependencies import required_dependencies
from tests.engine.random_plans import Declared, World, conflicts, random_tasks

TABLES = State("tables")


def task(name: str, reads: list[str] | None = None, writes: list[str] | None = None) -> PipelineTask:
    return PipelineTask(name, lambda ctx: None, reads=reads or [], writes=writes or [])


def required(*tasks: PipelineTask) -> set[tuple[str, str, int]]:
    return {(d.upstream, d.downstream, d.distance) for d in required_dependencies(tasks)}


def test_a_reader_waits_for_the_writer_of_its_iteration() -> None:
    assert required(task("w", writes=["x"]), task("r", reads=["x"])) == {("w", "r", 0)}


def test_state_written_by_one_iteration_is_read_by_the_next() -> None:
    assert required(task("forward", [TABLES]), task("backward", writes=[TABLES])) == {
        ("forward", "backward", 0),
        ("backward", "forward", 1),
    }


def test_a_dependency_abandoned_comes_back_over_one_iteration_more() -> None:
    tasks = [task("forward", [TABLES]), task("backward", writes=[TABLES])]
    abandoned = [Dependency("backward", "forward", 1)]
    assert set(required_dependencies(tasks, abandoned)) == {
        Dependency("forward", "backward", 0),
        Dependency("backward", "forward", 2),
    }


def test_the_reason_names_both_tasks_and_the_thing() -> None:
    (dependency,) = required_dependencies([task("w", writes=["x"]), task("r", ["x"])])
    assert str(dependency) == "r after w (r reads field 'x' that w writes)"


@settings(max_examples=150, deadline=None, database=None)
@given(random_tasks())
def test_required_dependencies_imply_the_order_of_all_that_conflicts(tasks: list[Declared]) -> None:
    iterations = 4
    edges = required_dependencies([World().task(declared) for declared in tasks])
    before: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for iteration in range(iterations):
        for declared in tasks:
            work = (declared.name, iteration)
            # A task's own runs are in order anyway.
            waited = [(d.upstream, iteration - d.distance) for d in edges if d.downstream == declared.name]
            known = {run for run in [*waited, (declared.name, iteration - 1)] if run[1] >= 0}
            before[work] = known.union(*(before[run] for run in known))
    for earlier, later in conflicts(tasks, iterations):
        assert earlier in before[later] or earlier[0] == later[0]
    # And no more than that: every edge is a conflict.
    pairs = set(conflicts(tasks, 2))
    assert all(((d.upstream, 0), (d.downstream, d.distance)) in pairs for d in edges)
