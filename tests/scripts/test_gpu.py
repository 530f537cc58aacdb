"""``make gpu``, without a GPU: order, resuming, time, results and report. ``.ci/run`` makes a dry run of all parts."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.gpu import __main__ as program
from scripts.gpu import runner
from scripts.gpu.comparison import Rule, compare
from scripts.gpu.parts import Command, Part, parts
from scripts.gpu.report import report
from scripts.gpu.runner import ROOT, read, run_parts
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
            assert rule.reference in saved[rule.of or rule.file], (one.name, rule)
            assert set(rule.others) <= set(saved[rule.file]), (one.name, rule)
        compared = {way for rule in one.rules for way in (*rule.others, rule.reference)}
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


def test_a_result_of_the_same_code_is_used_again_and_another_is_not(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    one = measures("one", "run", str(runs))

    def count(about: dict[str, Any], one: Part = one, **more: Any) -> int:
        run_parts([one], out, about, MINUTES, tell=lambda _: None, **more)
        return len(runs.read_text().splitlines())

    assert count(ABOUT) == 1
    assert count(ABOUT) == 1
    assert count(ABOUT, again=True) == 2
    assert count({**ABOUT, "code": "changed"}) == 3
    assert count({**ABOUT, "code": "changed"}, measures("one", "run", str(runs), "print", "other arguments")) == 4


def test_parts_that_do_not_fit_into_the_time_are_left_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    hangs, after = part("hangs", does("wait", str(tmp_path / "fifo"))), measures("after")
    assert run_parts([hangs, after], tmp_path / "out", ABOUT, 0.1) == ["hangs", "after"]
    monkeypatch.setattr(runner, "_LEAST", 0.1)
    assert run_parts([hangs, after], tmp_path / "out", ABOUT, 0.05) == ["hangs", "after"]
    assert list((tmp_path / "out").glob("*.json")) == []


@pytest.mark.parametrize(
    ("one", "status", "why"),
    [
        (part("a", does("print", "no such plan", "exit", "3")), "failed", "exit status 3\nno such plan"),
        (part("a", does("print", "3 errors")), "failed", "nothing was compared or measured"),
        (part("a", saves("serial=1", "base=1")), "failed", "nothing was compared or measured"),
        (part("a", does(), rules=EQUAL), "differed", "1 of 1 comparisons"),
        (part("a", saves("serial=1", "base=2"), rules=EQUAL), "differed", "1 of 1 comparisons"),
        (part("a", does(), needs=("no-such-tool",)), "not possible", "needs no-such-tool on PATH"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_part_that_needs_a_gpu_is_not_possible_without_one_and_does_not_run(tmp_path: Path) -> None:
    found = result(tmp_path, part("a", does("run", str(tmp_path / "runs")), needs=("gpu",)))
    assert (found["status"], found["why"]) == ("not possible", "needs a GPU")
    assert not (tmp_path / "runs").exists()


# Comparisons.


def way(losses: list[float], kernels: tuple[str, ...] = (), **values: list[float]) -> dict[str, Any]:
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    return {"losses": torch.tensor(losses), "values": tensors, "peak": [], "kernels": list(kernels)}


NEAR = 1 + 2.0**-20
CASES: dict[str, tuple[Any, dict[str, Any], bool, str]] = {
    "equal": (way([1.0], w=[2.0]), {}, True, "equal to the bit, 2 tensors"),
    "one bit": (way([1.0], w=[2 + 2.0**-22]), {}, False, "w: absolute 2.4e-07, relative 1.2e-07, 2 tensors"),
    "another loss": (way([1.5], w=[2.0]), {}, False, "losses: absolute 5.0e-01, relative 5.0e-01, 2 tensors"),
    "not finite": (way([float("nan")], w=[2.0]), {}, False, "not finite: losses"),
    "a tensor more": (way([1.0], w=[2.0], v=[2.0]), {}, False, "other tensors: v"),
    "a tensor less": (way([1.0]), {}, False, "other tensors: w"),
    "another shape": (way([1.0], w=[2.0, 2.0]), {}, False, "other shapes: w"),
    "failed": ({"error": "no memory"}, {}, False, "the way failed: no memory"),
    "within the tolerance": (way([NEAR], w=[2.0]), {"how": "close", "terms": 16}, True, "losses"),
    "outside of the tolerance": (way([NEAR], w=[2.0]), {"how": "close", "terms": 15}, False, "losses"),
    "kernels of any order": (way([NEAR], ("scatter",), w=[2.0]), {}, True, "losses"),
    "no effect": (way([1.0], w=[2.0]), {"how": "different"}, False, "equal losses"),
    "an effect": (way([1.5], w=[2.0]), {"how": "different"}, True, "different losses"),
    "a part": (way([1.0]), {"part": True}, False, "no values"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_finds(case: str, tmp_path: Path) -> None:
    other, more, right, found = CASES[case]
    torch.save({"serial": way([1.0], w=[2.0]), "base": other}, tmp_path / "values.pt")
    (compared,) = compare(tmp_path, Rule("serial", ("base",), **more))
    assert compared.right is right
    assert compared.found.startswith(found)


def test_each_rank_and_each_missing_way_is_compared(tmp_path: Path) -> None:
    torch.save({"serial": way([1.0], w=[2.0])}, tmp_path / "values.pt")
    torch.save({"serial": way([1.0], w=[3.0]), "base": way([1.0], w=[4.0])}, tmp_path / "values.pt.rank1")
    first, second = compare(tmp_path, Rule("serial", ("base",)))
    assert (first.right, first.found) == (False, "the way was not saved")
    assert (second.what, second.right) == ("base / serial, rank1", False)
    (of,) = compare(tmp_path / "none", Rule("serial", ("serial",), of="cpu.pt"))
    assert (of.right, of.found) == (False, "no file values.pt, cpu.pt")


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
    assert "| speed | step | 2 ms | 1 .. 3 | <= 3, met |" in text
    assert "| exact | prefetch | 8.00 |" in text


@pytest.mark.parametrize(("second", "status"), [("base=1", 0), ("base=2", 1)])
def test_the_exit_status_tells_whether_a_part_differed(
    second: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [part("one", saves("serial=1", second), rules=EQUAL), part("two", does(), needs=("no-such-tool",))]
    monkeypatch.setattr(program, "parts", lambda dry: chosen)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert program.main(["--dry-run", "--out", str(tmp_path)]) == status
        assert program.main(["--dry-run", "--out", str(tmp_path), "--minutes", "0"]) == status  # earlier results
        assert program.main(["--dry-run", "--out", str(tmp_path), "--minutes", "0", "--again"]) == 1  # no time
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "| one | not run, no time left |" in (tmp_path / "report.md").read_text()


def test_arguments_that_cannot_be_met_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(["--only", "nothing"])
    assert raised.value.code == 2
    assert "--only is 'nothing'; expected a part of one of recsys, recsys_fits" in capsys.readouterr().err
    assert program.main(["--list", "--only", "pipe"]) == 0
    assert capsys.readouterr().out.startswith("pipe: in_process_pipeline")
    if not torch.cuda.is_available():
        assert program.main(["--out", str(tmp_path)]) == 2
        assert "Use --dry-run" in capsys.readouterr().err


def script(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/gpu.sh"), "--list", "--only", "recsys_cached"],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.exhaustive
def test_the_script_installs_wheels_and_those_cut_into_parts_without_a_network(tmp_path: Path) -> None:
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    for name in ("whole", "cut"):
        path = wheels / f"{name}_one-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{name}_one.py", "VALUE = 1\n")
            folder = f"{name}_one-1.0.dist-info"
            wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}-one\nVersion: 1.0\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    content = path.read_bytes()
    path.unlink()
    for number in range(11):  # part10 comes after part9
        piece = content[number * 60 : (number + 1) * 60 if number < 10 else None]
        Path(f"{path}.part{number}").write_bytes(piece)
    done = script(WHEELS=str(wheels), OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("recsys_cached: ")
    assert {"whole_one.py", "cut_one.py"} <= {one.name for one in (out / "site").iterdir()}


def test_the_script_refuses_a_folder_without_wheels(tmp_path: Path) -> None:
    done = script(WHEELS=str(tmp_path), OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no wheels in" in done.stderr


def test_a_part_whose_programs_saved_what_cannot_be_read_failed(tmp_path: Path) -> None:
    found = result(tmp_path, part("one", does("run", "{folder}/values.pt"), rules=EQUAL))
    assert found["status"] == "failed"
    assert found["why"].startswith("what the programs saved cannot be compared")
