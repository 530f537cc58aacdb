"""``make gpu``, without a GPU: order, resuming, time, results and report. ``.ci/run`` makes a dry run of all parts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.gpu import probe
from scripts.gpu.comparison import Rule, compare
from scripts.gpu.devices import recorded_kernels
from scripts.gpu.parts import Command, Part, parts
from scripts.gpu.report import report
from scripts.gpu.runner import read, run_parts
from tests.patience import HANG

ABOUT: dict[str, Any] = {"versions": {"torch": "2.14"}, "commit": "0123456789abcdef", "code": "abc", "dry": True}
EQUAL = (Rule("serial", ("base",)),)
MINUTES = HANG / 60  # for parts that end by themselves


def does(*words: str) -> Command:
    return Command("tests.scripts.small_program", words)


def saves(*ways: str) -> Command:
    return does("save", "{folder}/values.pt", *ways)


def part(name: str, *commands: Command, **more: Any) -> Part:
    return Part(name, f"shows {name}", commands, **more)


def measures(name: str, *words: str) -> Part:
    return part(name, does(*words, "figures", "{folder}/figures.json"))


def result(out: Path, one: Part) -> dict[str, Any]:
    """The result of a part that has time to run."""
    assert run_parts([one], out, ABOUT, MINUTES) == []
    found: dict[str, Any] = read(out / f"{one.name}.json")
    return found


# The list of parts.


@pytest.mark.parametrize("dry", [True, False])
def test_each_rule_compares_ways_that_a_program_of_its_part_saves(dry: bool) -> None:
    for one in parts(dry):
        saved = {}
        for command in one.commands:
            assert importlib.util.find_spec(command.module) is not None
            if "--save" in command.arguments:
                file = command.arguments[command.arguments.index("--save") + 1].removeprefix("{folder}/")
                saved[file] = command.arguments[command.arguments.index("--ways") + 1 :]
        for rule in one.rules:
            assert rule.reference in saved[rule.reference_file or rule.file], (one.name, rule)
            assert set(rule.compared_ways) <= set(saved[rule.file]), (one.name, rule)
        compared = {way for rule in one.rules for way in (*rule.compared_ways, rule.reference)}
        assert not one.rules or compared == {way for ways in saved.values() for way in ways}, one.name


# Runs.


def test_parts_run_in_order_and_each_result_is_written_before_the_next_part(tmp_path: Path) -> None:
    first = measures("first", "run", str(tmp_path / "runs"))
    second = part("second", does("print", "written: {folder}/../first.json"), saves("serial=1", "base=1"), rules=EQUAL)
    seen = []
    left = run_parts(
        [first, second], tmp_path / "out", ABOUT, MINUTES, tell=lambda line: seen.append(line.split(",")[0])
    )
    assert left == []
    assert seen == ["first: passed", "second: passed"]
    found = read(tmp_path / "out/first.json")
    assert found["status"] == "passed"
    assert found["figures"][0]["name"] == "step"
    assert {"versions", "commit", "seconds", "why"} <= found.keys()
    assert read(tmp_path / "out/second.json")["peaks"] == {"serial": 8_000_000, "base": 8_000_000}


@pytest.mark.parametrize(
    ("one", "status", "why"),
    [
        (part("a", does("print", "no such plan", "exit", "3")), "failed", "exit status 3\nno such plan"),
        (part("a", saves("serial=1", "base=1")), "failed", "nothing was compared or measured"),
        (part("a", does(), rules=EQUAL), "differed", "1 of 1 comparisons"),
        (part("a", saves("serial=1", "base=2"), rules=EQUAL), "differed", "1 of 1 comparisons"),
        (part("a", does(), needs=("no-such-tool",)), "not possible", "needs no-such-tool on PATH"),
        (part("a", does(), needs=("package no_such_package",)), "not possible", "needs the package no_such_package"),
        (part("a", does(), possible=does("print", "no send", "exit", "1")), "not possible", "no send"),
        (
            part("a", Command("tests.scripts.small_program", ("print", "3 errors"), marks=("0 errors",))),
            "failed",
            "the output has no '0 errors'\n3 errors",
        ),
    ],
)
def test_a_part_that_differs_fails_or_is_not_possible_says_why(
    one: Part, status: str, why: str, tmp_path: Path
) -> None:
    found = result(tmp_path, one)
    assert (found["status"], found["why"]) == (status, why)


# Comparisons.


def way(losses: list[float], kernels: tuple[str, ...] = (), **values: list[float]) -> dict[str, Any]:
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    return {"losses": torch.tensor(losses), "values": tensors, "peak": [], "kernels": list(kernels)}


NEAR = 1 + 2.0**-20
CASES: dict[str, tuple[Any, dict[str, Any], bool, str]] = {
    "equal": (way([1.0], w=[2.0]), {}, True, "equal to the bit, 2 tensors"),
    "one bit": (way([1.0], w=[2 + 2.0**-22]), {}, False, "w: absolute 2.4e-07, relative 1.2e-07, 2 tensors"),
    "not finite": (way([float("nan")], w=[2.0]), {}, False, "not finite: losses"),
    "a tensor less": (way([1.0]), {}, False, "other tensors: w"),
    "failed": ({"error": "no memory"}, {}, False, "the way failed: no memory"),
    "within the tolerance": (way([NEAR], w=[2.0]), {"how": "close", "terms": 16}, True, "losses"),
    "within the stated tolerance": (way([NEAR], w=[2.0]), {"how": "close", "within": 1e-6}, True, "losses"),
    "outside of the stated tolerance": (way([NEAR], w=[2.0]), {"how": "close", "within": 1e-7}, False, "losses"),
    "kernels of any order": (way([NEAR], ("scatter",), w=[2.0]), {}, True, "losses"),
    "no effect": (way([1.0], w=[2.0]), {"how": "different"}, False, "equal losses"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_finds(case: str, tmp_path: Path) -> None:
    other, more, right, found = CASES[case]
    torch.save({"serial": way([1.0], w=[2.0]), "base": other}, tmp_path / "values.pt")
    (compared,) = compare(tmp_path, Rule("serial", ("base",), **more))
    assert compared.right is right
    assert compared.difference.startswith(found)


# Devices.


def test_compared_values_have_float32_products_without_tf32() -> None:
    torch.set_float32_matmul_precision("high")  # as in some containers
    try:
        with recorded_kernels():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has two GPUs")
def test_ranks_that_would_share_a_gpu_are_told_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["probe", "--device", "cuda", "all_to_all", "--own-devices"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        probe.main()
    assert f"needs a GPU for each of 2 ranks, found {torch.cuda.device_count()}" in capsys.readouterr().out


# The report and the command.


def test_the_report_tells_what_passed_differed_and_was_not_run(tmp_path: Path) -> None:
    chosen = [
        measures("speed"),
        part("exact", saves("serial=1", "base=1", "prefetch=2"), rules=(Rule("serial", ("base", "prefetch")),)),
        part("cached", does("print", "no memory", "exit", "1"), look_at="the order of EmbPrefetch"),
        part("two", does(), needs=("no-such-tool",)),
        part("last", does()),
    ]
    run_parts(chosen[:4], tmp_path, ABOUT, 1.0, tell=lambda _: None)
    results = {one.name: found for one in chosen if (found := read(tmp_path / f"{one.name}.json"))}
    text = report(chosen, results, ABOUT, True, ["last"])
    assert "**A dry run on the CPU. Nothing here is about a GPU.**" in text
    assert "Commit 0123456789ab, code abc. torch 2.14." in text
    assert "1 passed, 1 differed, 1 failed, 1 not possible, 1 not run of 5 parts." in text
    assert "| two | not possible: needs no-such-tool on PATH |" in text
    assert "| last | not run, no time left |" in text
    found = "weight: absolute 1.0e+00, relative 1.0e+00, 2 tensors"
    assert f"## exact differed\n\n- prefetch / serial: expected equal to the bit, found {found}\n" in text
    assert "## cached failed\n\n```text\nexit status 1\nno memory\n```\n\nLook at: the order of EmbPrefetch\n" in text
    assert "| exact: base / serial | equal to the bit | equal to the bit, 2 tensors |" in text
    assert "| speed | step | 2 ms | 1 .. 3 | <= 3 |" in text
    assert "| speed | step | 2 ms | 1 .. 3 | <= 3, met |" in report(chosen, results, ABOUT, False, ["last"])
    assert "| exact | prefetch | 8.00 |" in text
