"""Files of plans, costs, profiles and schedules that are made to harm: read, or refused in one message, within bounds.

The cases found so far are kept here and replayed in every run; ``--long`` looks for more of them for a minute.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import reprlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.cli.main import main
from lightning_pipe.engine import PipelinePlan, PlanError, SetupError
from lightning_pipe.llm.schedules.named import read_actions
from lightning_pipe.loops.programs.default_program import default_plan
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from tests.scenarios.fuzzing.bounded import open_bounded
from tests.tiers import examples, sampled_rows

PLAN = recsys_plan("semi_sync", recsys_tasks()).to_yaml()
OWN_PLAN = "name: own\ntasks: {H2D: {stage: 1, stream: copies}, TrainBatch: {}}\n"
TASKS = [task.name for task in recsys_tasks()]
COSTS = """\
between_ms: 0.2
cores: 2
device_streams: true
network: {latency: 30us, bandwidth: 1GB/s}
tasks:
""" + "".join(f"  {task}: {{ms: 0.4, launch_ms: 0.01, all_reduce: 2MB, waited_by: {task}}}\n" for task in TASKS)
PROFILE = json.dumps(
    {"plan": "serial", "seconds": 0.1, "tasks": {task: {"own": 0.01, "exposed": 0.0} for task in TASKS}}
)
ACTIONS = "0F0,,0B0\n,1F0,1B0\n"


def _as_plan(path: str) -> None:
    print(default_plan(lambda batch: batch, Path(path)))


def _as_tables_plan(path: str) -> None:
    for balanced in (False, True):
        print(recsys_plan(path, recsys_tasks(balanced=balanced, replicated=balanced)))


def _shown(path: str) -> None:
    _command("plan", "show", path)


def _simulated(path: str) -> None:
    _command("plan", "simulate", "base", "--costs", path, "--ranks", "2")


def _as_profile(path: str) -> None:
    _command("plan", "simulate", "serial", "base", "--costs", path)


def _as_actions(path: str) -> None:
    read_actions(Path(path))


def _command(*arguments: str) -> None:
    """Run a command; what it refuses has one message, status 1 and no control character."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = main(list(arguments))
    text = said.getvalue()
    assert all(one.isprintable() or one == "\n" for one in text), repr(text)
    assert status in (0, 1), text
    if status:
        assert text.startswith("lightning-pipe: "), text
        assert len(text) < 5_000, f"a message of {len(text)} characters"
        raise PlanError(text)


READERS: dict[str, tuple[Callable[[str], None], str]] = {
    "plan": (_as_plan, OWN_PLAN),
    "plan of tables": (_as_tables_plan, PLAN),
    "plan shown": (_shown, PLAN),
    "costs": (_simulated, COSTS),
    "profile": (_as_profile, PROFILE),
    "actions": (_as_actions, ACTIONS),
}


def open_as(kind: str, path: Path) -> str:
    """Open a file, check that it ends as it may, and return what was said of it."""
    size = path.stat().st_size if path.is_file() else 0
    outcome = open_bounded(_quietly, READERS[kind][0], str(path))
    outcome.check(PlanError, SetupError, size=size)
    return outcome.message


def _quietly(reader: Callable[[str], None], path: str) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        reader(path)


# ---------------------------------------------------------------------- the corpus


def _aliases(key: str = "tasks") -> str:
    """431 bytes that stand for 10**20 values."""
    rows = [f"x0: &x0 [{', '.join('o' * 10)}]"]
    rows += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 20)]
    return "\n".join(rows) + f"\n{key}: *x19\n"


def _merges(key: str = "tasks") -> str:
    """Merges of merges: 2**30 keys."""
    rows = ["- &x0 {a: 1, b: 2}"]
    rows += [f"- &x{i} {{<<: [*x{i - 1}, *x{i - 1}]}}" for i in range(1, 30)]
    return f"{key}:\n" + "\n".join(rows)


def _levels(count: int, begin: str = "[", end: str = "]") -> str:
    return f"tasks: {begin * count}{end * count}"


ALL = ["plan", "plan of tables", "plan shown", "costs"]
TEXTS: dict[str, str | bytes] = {
    "aliases": _aliases(),
    "aliases in the name": _aliases("name"),
    "aliases in the order": _aliases("order"),
    "aliases in deps": _aliases("deps"),
    "aliases in the network": _aliases("network"),
    "an alias of itself": "tasks: &x {a: *x}",
    "merges": _merges(),
    "a merge of itself": "tasks: &x {<<: *x}",
    "a chain of merges": "tasks:\n  t0: &x0 {stage: 1}\n"
    + "".join(f"  t{i}: &x{i} {{<<: *x{i - 1}}}\n" for i in range(1, 3000)),
    "30,000 keys": "tasks:\n" + "".join(f"  k{i}: {{}}\n" for i in range(30_000)),
    "30,000 keys at the top": "".join(f"k{i}: 1\n" for i in range(30_000)),
    "9,000 names in the order": PLAN.split("order:")[0] + f"order: [{', '.join(TASKS * 800)}]\n",
    "9,000 other names in the order": PLAN.split("order:")[0] + f"order: [{', '.join(f'n{i}' for i in range(9000))}]\n",
    "6,000 times stale": f"{PLAN}\nstale: [{', '.join(['[EmbBackward, EmbForward, 1]'] * 6000)}]\n",
    "stale over many iterations": PLAN.split("stale:")[0]
    + f"stale: [{', '.join(f'[EmbBackward, EmbForward, {i}]' for i in range(1, 4000))}]\n",
    "6,000 deps": OWN_PLAN + f"deps: [{', '.join(['[H2D, TrainBatch]'] * 4000)}]\n",
    "5,000 levels": _levels(5000),
    "5,000 levels of mappings": _levels(5000, "{a: ", "}"),
    "5,000 levels of blocks": "".join(" " * i + "a:\n" for i in range(600)),
    "5,000 digits": f"pipeline_depth: {'9' * 5000}\ntasks: {{}}",
    "5,000 digits as a stage": OWN_PLAN.replace("stage: 1", f"stage: {'9' * 5000}"),
    "5,000 digits as a distance": OWN_PLAN + f"cross_iter_deps: [[TrainBatch, TrainBatch, {'9' * 5000}]]",
    "5,000 digits to the base of 16": f"tasks: {{Train: 0x{'f' * 5000}}}",
    "5,000 digits to the base of 60": f"tasks: {{Train: 1{':1' * 2500}}}",
    "10**400": f"tasks: {{Train: 1{'0' * 400}}}\nbetween_ms: 1{'0' * 400}",
    "10**400 as a depth": OWN_PLAN + f"pipeline_depth: 1{'0' * 400}",
    "10**30 as a depth": OWN_PLAN + f"pipeline_depth: 1{'0' * 30}",
    "10**30 as a distance": OWN_PLAN + f"cross_iter_deps: [[TrainBatch, H2D, 1{'0' * 30}]]",
    "10**9 as a stage": OWN_PLAN.replace("stage: 1", "stage: 1000000000"),
    "1,000 as a stage": "tasks: {" + ", ".join(f"{task}: {{stage: 1000}}" for task in TASKS) + "}",
    "a number that is none": "tasks: {Train: 0x_}",
    "a date that is none": "tasks: {Train: 2001-13-45}",
    "a date as the name": "name: 2001-13-45\n" + OWN_PLAN.split("\n", 1)[1],
    "binary": "tasks: {Train: !!binary '*'}",
    "a set": "tasks: !!set {Train, Copy}",
    "an ordered mapping": "tasks: !!omap [Train: 1]",
    "a timestamp": "tasks: {Train: !!timestamp 2001-13-45}",
    "a wrong tag": "tasks: {Train: !!int much}",
    "a tag of Python's": "tasks: !!python/object/apply:os.system [exit 7]",
    "a key twice": "tasks: {}\ntasks: {}",
    "a list as a key": "tasks: {[a, b]: 1}",
    "a mapping as a key": "tasks: {? {a: b} : 1}",
    "a null as a key": "tasks: {~: 1, null: 2}",
    "true as a key": "tasks: {yes: 1}",
    "a NUL byte": b"tasks: {Tr\0ain: 1}",
    "not UTF-8": b"tasks: {\xff\xfe: 1}",
    "UTF-16": "tasks: {Train: 1}".encode("utf-16"),
    "UTF-32": "tasks: {Train: 1}".encode("utf-32"),
    "UTF-8 with a mark": "\ufefftasks: {Train: 1}",
    "a mark that reverses text": 'tasks: {"\u202eniarT": 1}',
    "an escape code": 'tasks: {"\\e[31mTrain": 1}\nname: "\\e]0;title\\a"',
    "an escape code as a thread": OWN_PLAN.replace("stream: copies", 'thread_group: "\\e[2J"'),
    "an escape code as a stream": OWN_PLAN.replace("copies", '"\\e[2J\\u202e"'),
    "an escape code as the name": OWN_PLAN.replace("own", '"\\e[2J\\n"'),
    "an escape code in a known plan": PLAN.replace("name: semi_sync", 'name: "semi_sync\\e[2J"'),
    "a mark in what is not YAML": "tasks: {\u202e",
    "a text of 200,000 characters": f"name: {'x' * 200_000}",
    "a text of 200,000 words": f"name: {'x ' * 100_000}",
    "a text of 5 MB": f"name: {'x' * 5_000_000}",
    "100,000 lines of one text": "a\n" * 100_000,
    "100,000 opened lists": "[" * 100_000,
    "an anchor of 200,000 characters": f"tasks: *{'x' * 200_000}",
    "two documents": "tasks: {}\n---\ntasks: {}",
    "1,000 documents": "--- {}\n" * 1000,
    "20,000 directives": "".join(f"%TAG !x{i}! tag:x,2000:\n" for i in range(10_000)) + "--- {}",
    "nothing": "",
    "only a comment": "# nothing",
}
COST_TEXTS: dict[str, str] = {
    what: COSTS.replace("ms: 0.4", new, 1)
    for what, new in {
        "infinity": "ms: .inf",
        "not a number": "ms: .nan",
        "1e400": "ms: 1e400",
        "1.0e+400": "ms: 1.0e+400",
        "the largest number": "ms: 1.7e+308",
        "the smallest number": "ms: 5.0e-324",
        "a small number": "ms: 1.0e-12",
        "a large number": "ms: 999999999",
        "minus one": "ms: -1",
        "a list": "ms: [1]",
    }.items()
} | {
    "no bandwidth": COSTS.replace("1GB/s", "1bit"),
    "latency without end": COSTS.replace("30us", "1e400s"),
    "much latency": COSTS.replace("30us", "1e308s"),
    "a size of 5,000 digits": COSTS.replace("2MB", f"{'9' * 900}", 1),
    "the largest size": COSTS.replace("2MB", f"{2**63 - 1}B", 1),
    "1e-300 cores": COSTS.replace("cores: 2", "cores: 1.0e-300"),
    "1e300 cores": COSTS.replace("cores: 2", "cores: 1.0e+300"),
    "0 cores": COSTS.replace("cores: 2", "cores: 0"),
    "1e300 between": COSTS.replace("between_ms: 0.2", "between_ms: 1.0e+300"),
    "1e-300 between": COSTS.replace("between_ms: 0.2", "between_ms: 1.0e-300"),
}
PROFILE_TEXTS: dict[str, str] = {
    "100,000 levels": '{"tasks": ' + "[" * 100_000,
    "5,000 digits": f'{{"seconds": {"9" * 5000}}}',
    "infinity": PROFILE.replace("0.01", "Infinity", 1),
    "not a number": PROFILE.replace("0.01", "NaN", 1),
    "1e308 seconds": PROFILE.replace("0.01", "1e308", 1),
    "1e-300 seconds": PROFILE.replace("0.01", "1e-300", 1),
    "a list of tasks": '{"plan": "serial", "seconds": 1, "tasks": [1]}',
    "a text of seconds": PROFILE.replace('"seconds": 0.1', '"seconds": "long"'),
    "a number as the plan": PROFILE.replace('"serial"', "3"),
    "an escape code as the plan": PROFILE.replace("serial", "\\u001b[2J\\u202e"),
    "an escape code as a task": PROFILE.replace(TASKS[0], "\\u001b[2J"),
    "100,000 tasks": json.dumps({"plan": "p", "seconds": 1, "tasks": {f"t{i}": {"own": 1} for i in range(100_000)}}),
    "a number in with_it": PROFILE.replace('"exposed": 0.0', '"exposed": 0.0, "with_it": [1]', 1),
    "5 MB": '{"tasks":' + " " * 5_000_000 + "{}}",
    "empty lists": '{"tasks": [' + "[]," * 1_300_000 + "[]]}",
}
ACTION_TEXTS: dict[str, str | bytes] = {
    "a stage of 10**9": "0F0,0B0\n1000000000F0\n",
    "a stage of 5,000 digits": f"{'9' * 5000}F0\n",
    "a micro-batch of 10**12": "0F1000000000000\n",
    "a NUL byte": b"0F0\0,0B0\n",
    "not UTF-8": b"0F0,\xff\n",
    "a field of 200,000 characters": "0" * 200_000,
    "100,000 ranks": "0F0\n" * 100_000,
    "nested actions": "(" * 10_000,
    "2,000,000 fields": "," * 2_000_000,
}


@cache
def _usual(what: str) -> str:
    """The kind of file that a default run takes a text for: costs where it is about these, else one after another."""
    plans = ALL[: ALL.index("costs")]
    if "network" in what or "between_ms" in str(TEXTS[what]):
        return "costs"
    number = list(TEXTS).index(what)
    of_plans = any(key in str(TEXTS[what]) for key in ("order:", "deps", "stale:", "stage", "stream:", "thread_group"))
    return plans[number % len(plans)] if of_plans else ALL[number % len(ALL)]


@pytest.mark.parametrize(
    ("what", "kind"),
    sampled_rows(
        [(what, kind) for kind in ALL for what in TEXTS],
        lambda case: case[1] == _usual(case[0]),
        "{0[0]}-{0[1]}".format,
    ),
)
def test_a_file_made_to_harm_is_read_or_refused(what: str, kind: str, tmp_path: Path) -> None:
    open_as(kind, _written(tmp_path, TEXTS[what]))


@pytest.mark.parametrize("what", COST_TEXTS)
def test_costs_made_to_harm_are_read_or_refused(what: str, tmp_path: Path) -> None:
    open_as("costs", _written(tmp_path, COST_TEXTS[what]))


@pytest.mark.parametrize("what", PROFILE_TEXTS)
def test_profiles_made_to_harm_are_read_or_refused(what: str, tmp_path: Path) -> None:
    open_as("profile", _written(tmp_path, PROFILE_TEXTS[what]))


@pytest.mark.parametrize("what", ACTION_TEXTS)
def test_schedules_made_to_harm_are_read_or_refused(what: str, tmp_path: Path) -> None:
    open_as("actions", _written(tmp_path, ACTION_TEXTS[what]))


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_file_is_refused_by_its_path(kind: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (Path("/dev/zero"), pipe, tmp_path):
        assert str(path) in open_as(kind, path)


@pytest.mark.parametrize("kind", ["plan", "plan of tables", "plan shown", "costs", "profile"])
def test_a_refusal_names_the_file_and_what_is_wrong_in_it(kind: str, tmp_path: Path) -> None:
    valid = READERS[kind][1]
    path = _written(tmp_path, valid.replace('"seconds"', '"sceonds"') if kind == "profile" else f"{valid}\nsong: 1\n")
    said = open_as(kind, path)
    assert str(path) in said
    assert "song" in said or "sceonds" in said


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_meant_well_is_read(kind: str, tmp_path: Path) -> None:
    assert not open_as(kind, _written(tmp_path, READERS[kind][1]))


def _written(folder: Path, text: str | bytes) -> Path:
    path = folder / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return path


# ---------------------------------------------------------------------- looking for more

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    10**9,
    10**39,
    10**400,
    10**5000 // 7,
    1e308,
    5e-324,
    float("inf"),
    float("nan"),
    "",
    "\x1b[2J",
    "\u202e",
    "$x^$",
    "2001-13-45",
    "x" * 2000,
    [],
    {},
    [[]],
    {"<<": {}},
    [["EmbBackward", "EmbForward", 1]],
    [TASKS[0]] * 3000,
    "9" * 500,
    "1e400s",
    b"\xff",
]


def _places(value: Any) -> list[tuple[Any, ...]]:
    """The first places in a value, which may hold itself more often than can be counted."""
    return list(itertools.islice(_all_places(value, ()), 200))


def _all_places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        yield from _all_places(one, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> bytes:
    """A valid file with a few of its values replaced, repeated, moved or renamed, and then a few of its bytes."""
    valid = READERS[kind][1]
    if kind == "actions":
        text = valid.encode()
    else:
        content = yaml.safe_load(valid)
        for _ in range(draw(st.integers(1, 4))):
            content = _changed(draw, content, repeats=kind != "profile")
        try:
            with _digits():
                written = json.dumps(content, default=repr) if kind == "profile" else yaml.safe_dump(content)
            text = written.encode()
        except (TypeError, ValueError, yaml.YAMLError):
            text = reprlib.repr(content).encode()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        piece = draw(st.sampled_from(PIECES)) * draw(st.sampled_from([1, 2, 5000]))
        text = text[:at] + piece + text[at + draw(st.integers(0, 20)) :]
    return text


def _changed(draw: st.DrawFn, content: Any, repeats: bool) -> Any:
    """One change. *repeats*: whether the format has aliases, for lists that hold the same list twice."""
    place = draw(st.sampled_from(_places(content)))
    value: Any = draw(st.one_of(st.sampled_from(HOSTILE), st.integers(), st.floats(), st.text(max_size=20)))
    if not place:
        return value if draw(st.integers(0, 9)) == 0 else content
    content = copy.deepcopy(content)
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    how = draw(st.sampled_from(["value", "value", "nested", "key", "gone", "elsewhere"]))
    if how == "value":
        holder[place[-1]] = value
    elif how == "nested":
        for _ in range(draw(st.sampled_from([1, 10, 60]))):
            holder[place[-1]] = [holder[place[-1]]] * draw(st.sampled_from([1, 2] if repeats else [1]))
    elif how == "key" and isinstance(holder, dict):
        key = value if isinstance(value, str | int | float) else str(value)
        holder[key] = holder.pop(place[-1])
    elif how == "gone":
        del holder[place[-1]]
    else:
        other = content
        for key in draw(st.sampled_from(_places(content))):
            other = other[key]
        holder[place[-1]] = copy.deepcopy(other)
    return content


@contextlib.contextmanager
def _digits() -> Iterator[None]:
    """Numbers as long as a hostile file has them."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


PIECES = [b"[", b"{", b"&a ", b"*a", b"<<: *a, ", b"!!set ", b"\n---\n", b"\0", b"\xff", b"- ", b"? ", b"\t", b"%"]
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=examples(6, 15), deadline=None, database=None, derandomize=True, suppress_health_check=QUIET)
@given(data=st.data())
def test_a_changed_file_is_read_or_refused(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    open_as(kind, _written(tmp_path, data.draw(mutated(kind))))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=600, deadline=None, suppress_health_check=QUIET)
@given(data=st.data())
def test_many_changed_files_are_read_or_refused(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    open_as(kind, _written(tmp_path, data.draw(mutated(kind))))


@pytest.mark.long
@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(text=st.one_of(st.binary(max_size=4000), st.text(max_size=4000).map(str.encode)))
def test_any_text_is_read_or_refused(kind: str, text: bytes, tmp_path: Path) -> None:
    open_as(kind, _written(tmp_path, text))


@given(st.text(max_size=30))
@settings(max_examples=50, database=None)
def test_a_name_that_a_plan_takes_can_be_printed(name: str) -> None:
    tasks = recsys_tasks()
    content = yaml.safe_load(PLAN)
    content["name"] = f"semi_sync {name}"
    try:
        plan = PipelinePlan.from_yaml(yaml.safe_dump(content), tasks)
    except PlanError:
        assert not name.isprintable()
        return
    assert all(one.isprintable() or one == "\n" for one in str(plan))
