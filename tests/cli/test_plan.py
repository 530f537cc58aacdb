"""``lightning-pipe plan simulate``: its figures against those worked out by hand, its words, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_pipe.cli.main import main
from lightning_pipe.cli.plan import find_plan_by_name
from lightning_pipe.engine import ProfileResult
from lightning_pipe.engine.profiling.profile import TaskProfile

WORK = {
    "H2DAndShuffle": 1,
    "EmbInputDistStart": 1,
    "EmbInputDistWait": 1,
    "EmbPrefetch": 1,
    "EmbForward": 2,
    "DenseForward": 3,
    "LossPostprocess": 0,
    "DenseBackward": 4,
    "EmbBackward": 2,
    "FinalizeGrads": 1,
    "OptimStep": 1,
}
ALL = sum(WORK.values())
# 4 MB at 1 GB/s: half of it goes to the other of two ranks, in 2 ms.
SENDS: dict[str, dict[str, Any]] = {"EmbInputDistWait": {"all_to_all": "4MB", "waited_by": "EmbPrefetch"}}
NETWORK = {"latency": "10us", "bandwidth": "1GB/s"}


def costs_file(folder: Path, **more: Any) -> str:
    tasks = {name: {"ms": work, **SENDS.get(name, {})} for name, work in WORK.items()}
    path = folder / "costs.yaml"
    path.write_text(yaml.safe_dump({"network": NETWORK, "tasks": tasks, **more}))
    return str(path)


def profile_file(folder: Path, plan: str = "serial", **more: float) -> str:
    tasks = {name: TaskProfile(seconds) for name, seconds in {**{n: w / 1e3 for n, w in WORK.items()}, **more}.items()}
    path = folder / "profile.json"
    path.write_text(ProfileResult(plan, 0.02, tasks, 7, 10).to_json())
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "simulate", *arguments, "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "simulate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("lightning-pipe: ")


# ---------------------------------------------------------------------- figures


def test_the_serial_plan_takes_the_sum_and_its_message_is_exposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = simulated(capsys, "serial", "--costs", costs_file(tmp_path), "--ranks", "2")["predictions"]
    assert one["seconds"] == pytest.approx((ALL + 2.01) / 1e3)
    assert one["exposed"] == {"compute": pytest.approx(ALL / 1e3), "network": pytest.approx(2.01e-3)}
    assert one["utilization"]["network"] == pytest.approx(2.01 / (ALL + 2.01))
    assert (one["plan"], one["ranks"], one["speedup_over_serial"]) == ("serial", 2, pytest.approx(1.0))


def test_options_stand_before_the_files_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = costs_file(tmp_path, cores=2, between_ms=3)
    options = ("--ranks", "2", "--latency", "1ms", "--bandwidth", "4GB/s")
    (serial,) = simulated(capsys, "serial", "--costs", path, *options)["predictions"]
    assert serial["seconds"] == pytest.approx((3 + ALL + 1.5) / 1e3)
    (two,) = simulated(capsys, "prefetch", "--costs", path, "--ranks", "2")["predictions"]
    assert two["seconds"] == pytest.approx((3 + ALL - WORK["EmbPrefetch"]) / 1e3)  # the prefetch has its own core


def test_a_profile_of_pipeline_profiler_is_taken_as_it_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(capsys, "serial", "prefetch", "--costs", profile_file(tmp_path))
    assert found["predictions"][0]["seconds"] == pytest.approx(ALL / 1e3)
    assert found["predictions"][0]["ranks"] is None
    assert found["predictions"][1]["speedup_over_serial"] > 1
    assert found["notes"] == []
    (note,) = simulated(capsys, "serial", "--costs", profile_file(tmp_path, "prefetch"))["notes"]
    assert "measured under plan prefetch" in note
    assert "recsys_serial_pipeline" in note


def test_a_saved_plan_and_plans_over_other_tasks_can_be_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(find_plan_by_name("prefetch").to_yaml().replace("name: prefetch", "name: mine"))
    first, second = simulated(
        capsys, "recsys_prefetch_pipeline", str(path), "--costs", costs_file(tmp_path), "--ranks", "2"
    )["predictions"]
    assert (first["plan"], second["plan"]) == ("prefetch", "mine")
    assert first["seconds"] == second["seconds"]
    costs = tmp_path / "copy.yaml"
    costs.write_text("tasks: {H2D: {ms: 2, resource: copy}, TrainBatch: 5}")
    (copies,) = simulated(capsys, "pipeline", "--costs", str(costs))["predictions"]
    assert copies["exposed"] == {"compute": pytest.approx(5e-3), "copy": pytest.approx(2e-3)}
    path.write_text(find_plan_by_name("copy_ahead").to_yaml())
    (saved,) = simulated(capsys, str(path), "--costs", str(costs))["predictions"]
    assert saved == copies


# ---------------------------------------------------------------------- the table


def test_the_table_has_a_row_a_plan_and_number_of_ranks_and_says_what_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", "simulate", "serial", "prefetch", "--costs", costs_file(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if line.startswith("plan "))
    assert heads.split() == ["plan", "ranks", "ms", "compute", "network", "serial", "busiest"]
    rows = [line.split() for line in lines if "%" in line and "latency" not in line]
    assert rows[0][1:3] == ["2", f"{ALL + 2.01:.2f}"]
    assert len(rows) == 8
    (words,) = [line for line in lines if line.startswith("serial: scaling breaks at ")]
    assert "because of EmbInputDistWait (all_to_all of 4 MB" in words


def test_without_ranks_the_table_says_what_costs_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", "simulate", "serial", "--costs", profile_file(tmp_path, "base")]) == 0
    out = capsys.readouterr().out
    assert "serial: most exposed tasks: DenseBackward" in out
    assert "The costs were measured under plan base" in out


# ---------------------------------------------------------------------- refusals


def test_a_file_that_cannot_be_read_or_is_no_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the costs 'gone.json' cannot be read" in refusal(capsys, "base", "--costs", "gone.json")
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    assert f"{path}: this is not a profile" in refusal(capsys, "base", "--costs", str(path))
    part = ProfileResult("serial", 0.02, {"EmbInputDistWait": TaskProfile(0.001)}, 7, 10)
    path.write_text(part.to_json())
    assert "no cost is given for H2DAndShuffle" in refusal(capsys, "base", "--costs", str(path))


def test_a_network_without_messages_and_messages_without_a_network_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "base", "--costs", profile_file(tmp_path), "--ranks", "8")
    assert "--ranks has no effect" in said
    assert "all_to_all:" in said
    said = refusal(capsys, "base", "--costs", costs_file(tmp_path, network={"latency": "5us"}))
    assert "the network's bandwidth is missing. Pass --latency 5us --bandwidth 25GB/s" in said


@pytest.mark.parametrize("ranks", ["0", "2;8"])
def test_numbers_of_ranks_that_are_none_end_with_a_usage(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "simulate", "base", f"--ranks={ranks}"])
    assert end.value.code == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "argument --ranks: expected a list of numbers from 1" in err
    assert f"got {ranks!r}" in err
