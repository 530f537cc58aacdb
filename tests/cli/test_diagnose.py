"""What ``diagnose`` says of dumps: of ranks that wait, of ranks that are missing, and of files that are no dumps."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.cli.main import main
from lightning_pipe.engine.ranks.flight_dump import FORMAT

# The analysis of PyTorch 2.11 knows NCCL's collectives only.
RECORDED = "nccl" if torch.__version__.startswith("2.11.") else "gloo"


def collective(kind: str, number: int, size: int = 4, **fields: Any) -> dict[str, Any]:
    """As PyTorch 2.14 records one."""
    found = {"process_group": ["0", "default_pg"], "profiling_name": f"{RECORDED}:{kind}", "collective_seq_id": number}
    found |= {"p2p_seq_id": 0, "is_p2p": False, "record_id": number, "state": "scheduled", "time_created_ns": number}
    found |= {"input_sizes": [[size]], "output_sizes": [[size]], "input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    return found | fields


def write(folder: Path, rank: int, collectives: list[Any], world_size: int = 2, **fields: Any) -> Path:
    dump: dict[str, Any] = {"format": FORMAT, "rank": rank, "world_size": world_size, "host": f"node{rank}"}
    dump |= {"began": 100.0, "written": 200.0, "error": None, "batch": "0, 3", "tasks": ["in Forward of iteration 3"]}
    dump |= {"stack": ["/lib/python3.11/threading.py:1 wait", f"/home/me/train.py:{rank} step"], "completed": {"0": 1}}
    dump |= {"groups": {"0": {"desc": "default_pg", "ranks": list(range(world_size))}}, "collectives": collectives}
    path = folder / f"flight_rank_{rank}.json"
    path.write_text(json.dumps(dump | fields))
    return path


def said(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    """All that is printed, on one line."""
    assert main(["diagnose", *map(str, paths)]) == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def test_the_rank_that_has_not_started_a_collective_is_named_with_its_task_and_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, [collective("all_reduce", 1), collective("broadcast", 2)])
    write(tmp_path, 1, [collective("all_reduce", 1)])
    found = said(capsys, tmp_path)
    assert "0 node0 0, 3 in Forward of iteration 3 broadcast 2 of 'default_pg', started train.py:0 step" in found
    assert "1 node1 0, 3 in Forward of iteration 3 all_reduce 1 of 'default_pg', completed train.py:1 step" in found
    assert "In group 'default_pg' (ranks 0, 1), rank 0 waits in broadcast 2 for rank 1." in found
    assert "Rank 1 is in Forward of iteration 3 at train.py:1 step." in found


def test_collectives_that_differ_are_named_with_their_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, kind in enumerate(["all_reduce", "broadcast", "all_reduce"]):
        write(tmp_path, rank, [collective(kind, 2)], world_size=3)
    found = said(capsys, tmp_path)
    assert "rank 0, 2 is in all_reduce 2 of sizes [[4]]; rank 1 is in broadcast 2 of sizes [[4]]." in found


def test_sizes_that_differ_matter_only_in_the_collective_that_ranks_are_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, [collective("all_reduce", 1, 4), collective("all_reduce", 2)])
    write(tmp_path, 1, [collective("all_reduce", 1, 5), collective("all_reduce", 2)])
    assert "The ranks above have started the same collectives." in said(capsys, tmp_path)
    write(tmp_path, 1, [collective("all_reduce", 1, 5)])
    assert "rank 1 is in all_reduce 1 of sizes [[5]]" in said(capsys, tmp_path)


def test_rings_that_begin_at_different_collectives_are_compared_where_they_overlap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, [collective("all_reduce", number) for number in (4, 5, 6)])
    write(tmp_path, 1, [collective("all_reduce", number) for number in (2, 3, 4, 5)])
    assert "rank 0 waits in all_reduce 6 for rank 1" in said(capsys, tmp_path)


def test_a_rank_without_a_dump_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [collective("all_reduce", 1)], world_size=4)
    found = said(capsys, tmp_path)
    assert "The ranks above have started the same collectives. Another rank may not have." in found
    assert "No dump of rank 1, 2, 3, which had ended or could not write it." in found


def test_ranks_are_compared_where_another_has_no_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, last in enumerate([5, 3]):
        write(tmp_path, rank, [collective("all_reduce", number) for number in range(1, last + 1)], world_size=3)
    found = said(capsys, tmp_path)
    assert "In group 'default_pg' (ranks 0, 1), rank 0 waits in all_reduce 4 for rank 1." in found
    assert "No dump of rank 2" in found
    write(tmp_path, 1, [collective("broadcast", 5)], world_size=3)
    assert "rank 0 is in all_reduce 5 of sizes [[4]]; rank 1 is in broadcast 5" in said(capsys, tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [collective("all_reduce", 1)])
    os.mkfifo(tmp_path / "flight_rank_1.json")
    assert "flight_rank_1.json is not used: it is no file." in said(capsys, tmp_path)


def test_where_nothing_is_recorded_tasks_are_shown_and_that_collectives_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        write(tmp_path, rank, [])
    found = said(capsys, tmp_path)
    assert "in Forward of iteration 3 not recorded train.py:1 step" in found
    assert "Collectives are missing" in found


def test_a_dump_of_an_earlier_run_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, [collective("all_reduce", 1)])
    write(tmp_path, 1, [collective("broadcast", 1)], began=10.0, written=20.0)
    found = said(capsys, tmp_path)
    assert "The dump of rank 1 is not used: it is from an earlier run." in found
    assert "node1" not in found


def test_records_that_pytorch_does_not_know_leave_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        write(tmp_path, rank, [collective("from_the_future", 1)])
    found = said(capsys, tmp_path)
    assert "from_the_future 1 of 'default_pg'" in found
    assert "PyTorch could not compare the collectives (AssertionError: from_the_future is not a supported" in found


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


BAD: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"format": "lightning_pipe flight dump 1", "rank": 0, "wor',
    "of another kind": b"[1, 2]",
    "a pickle that runs": pickle.dumps(Runs()),
    "deep": b"[" * 100_000,
    "of another format": json.dumps({"format": "other", "rank": 0}).encode(),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_dump_is_named_and_the_others_are_used(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 0, [collective("all_reduce", 1)])
    bad = tmp_path / "flight_rank_1.json"
    bad.write_bytes(BAD[kind])
    assert f"{bad} is not used: expected a flight dump" in said(capsys, tmp_path)
    assert main(["diagnose", str(bad)]) == 1
    assert f"got none. {bad} is not used" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "x"}, {"rank": 9}, {"rank": -1}, {"world_size": 10**9}, {"began": "now"}, {"groups": []}, {"stack": 3},
        {"groups": {"0": {"ranks": ["a"]}}}, {"tasks": [1]}, {"host": None}, {"collectives": [1]}, {"completed": 1},
        {"collectives": [collective("all_reduce", 1, collective_seq_id="x")]}, {"batch": {}},
        {"collectives": [collective("all_reduce", 1, process_group=["0"])]},
    ],
)  # fmt: skip
def test_a_dump_with_fields_of_other_types_is_refused(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, 0, [collective("all_reduce", 1)])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["diagnose", str(tmp_path)]) == 1
    assert "expected a flight dump, got a damaged or truncated file, or another one" in capsys.readouterr().err


def test_control_characters_of_a_dump_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b[2J"
    groups = {"0": {"desc": evil, "ranks": [0, 1]}}
    for rank in range(2):
        records = [collective(f"all_reduce{evil}", 1, process_group=["0", evil])]
        write(tmp_path, rank, records, host=evil, tasks=[evil], stack=[evil], batch=evil, groups=groups)
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["60", "100"])
def test_a_narrow_terminal_gets_a_list_without_lost_text(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for rank in range(2):
        write(tmp_path, rank, [collective("all_reduce", 1)])
    assert main(["diagnose", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert sum("all_reduce 1 of 'default_pg', completed" in line for line in lines) == 2


def test_a_folder_without_dumps_and_a_path_that_is_missing_are_errors_that_say_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(tmp_path)]) == 1
    assert f"There is no flight_rank_*.json in {tmp_path}. Give the default_root_dir" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "absent")]) == 1
    assert "absent is not used: No such file or directory" in capsys.readouterr().err
