"""Runs benchmarks one after the other and prints one table of their figures: ``make bench`` and ``make bench-all``.

``python -m benchmarks.table`` runs the benchmarks in :data:`QUOTED`, whose figures the docs quote. ``--all`` also runs
those in :data:`REST`, and ``--only WORD`` runs those of both lists whose titles contain the word. Each benchmark runs
in separate processes with ``--json``. After each one, all figures so far are written to
``benchmarks/results/latest.json`` as a list of {name, value, unit, spread, target, met, of}. If a benchmark fails, it
is listed below the table and the exit status is 1. A missed target is not a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# Environment variable that marks all processes of a benchmark.
MARK = "LIGHTNING_PIPE_BENCHMARK"
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"


@dataclass(frozen=True)
class Run:
    """A benchmark with its arguments for the table. It takes about a minute on two idle cores.

    Attributes:
        title: title in the table.
        module: name of the module in ``benchmarks/``.
        arguments: arguments of the command line.
        ranks: number of processes that torchrun starts (default 0: the script starts its own).
        root: True if it creates network namespaces (default False).
    """

    title: str
    module: str
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    root: bool = False

    def command(self, path: Path) -> list[str]:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}"] if self.ranks else []
        port = ["--standalone"] if self.ranks else []
        module = ["-m", f"benchmarks.{self.module}"]
        return [sys.executable, *launcher, *port, *module, *self.arguments, "--json", str(path)]


_STEP = ("--length", "64", "--steps", "6")
_SLOW = ("--times", "60", "--rounds", "4")

# Together these should take 12 minutes on two idle cores.
QUOTED: tuple[Run, ...] = (
    Run("engine cost", "engine_cost"),
    Run("trace cost", "trace_cost"),
    Run("framework cost", "loop_cost"),
    Run("start-up", "start_up", ("--rounds", "4", "--import-rounds", "4")),
    Run("recsys step", "recsys_step", ("--sizes", "tiny", "large", "--plans", "base", "--rounds", "8"), ranks=2),
    Run(
        "recsys, slow link of 200 Mbit/s",
        "recsys_slow_link",
        ("--rate", "200mbit", "--exchange", "1", *_SLOW),
        root=True,
    ),
    Run(
        "recsys wire, slow link of 200 Mbit/s",
        "slow_link",
        ("--rate", "200mbit", "benchmarks.recsys_wire", "--rounds", "6", "--steps", "2"),
        root=True,
    ),
    Run("recsys live bytes", "recsys_live_bytes", ranks=2),
    Run("recsys collation", "jagged_collator"),
    Run("recsys balancing", "balancing", ("--hidden", "256", "--batch", "128", "--rounds", "4")),
    Run("dynamic tables, plans", "dynamic_embeddings", ("--rows", "200000", "--rounds", "5")),
    Run("LLM step", "llm_step_time", (*_STEP, "--micro-batches", "8"), ranks=2),
    Run("LLM bounds", "llm_bounds", ("--repetitions", "3"), ranks=2),
    Run("LLM efficiency", "llm_efficiency", ("--rounds", "4"), ranks=2),
    Run("in-process pipe", "pipe_speed", ("--rounds", "8", "--chunks", "4")),
)

# Benchmarks that are not in QUOTED: other sizes, links and numbers of micro-batches, and figures that no page quotes.
REST: tuple[Run, ...] = (
    Run("recsys step, serial", "recsys_step", ("--sizes", "tiny", "large", "--plans", "serial"), ranks=2),
    Run("recsys step, other sizes", "recsys_step", ("--sizes", "small", "medium"), ranks=2),
    Run(
        "recsys, slow link of 200 Mbit/s, other exchanges",
        "recsys_slow_link",
        ("--rate", "200mbit", "--exchange", "0.5", "2", *_SLOW),
        root=True,
    ),
    Run("recsys, slow link of 1 Gbit/s", "recsys_slow_link", ("--rate", "1gbit", *_SLOW), root=True),
    Run("recsys, input in a worker thread", "recsys_threaded_input", root=True),
    Run(
        "recsys wire, slow link of 1 Gbit/s",
        "slow_link",
        ("--rate", "1gbit", "benchmarks.recsys_wire"),
        root=True,
    ),
    Run(
        "recsys wire, sequences, slow link of 200 Mbit/s",
        "slow_link",
        ("--rate", "200mbit", "benchmarks.recsys_wire", "--sequences"),
        root=True,
    ),
    Run("recsys simulated", "simulated_recsys"),
    Run(
        "recsys simulated, slow link",
        "simulated_recsys",
        ("--link", "200mbit", "--sizes", "small", "medium"),
        root=True,
    ),
    Run("dynamic tables, saves", "row_dumps", ("--rounds", "4")),
    Run("dynamic tables, lookup", "dynamic_embeddings", ("--part", "lookup")),
    Run("dynamic tables, id map", "id_map", ("--batches", "8")),
    Run("differences of checkpoints", "row_diffs"),
    Run("growth", "growth"),
    Run("planner graphs", "planner_graphs", ("--seconds", "30", "--iterations", "5")),
    Run("profiler accuracy", "profiler_accuracy", ("--graphs", "8")),
    Run(
        "LLM step, 4 micro-batches",
        "llm_step_time",
        (*_STEP, "--micro-batches", "4"),
        ranks=2,
    ),
    Run("LLM schedule chosen", "llm_auto", ranks=2),
    Run("LLM lengths that vary", "llm_variable_lengths", ranks=2),
    Run("LLM packed documents", "llm_packing", ranks=2),
    Run("LLM estimate", "llm_estimate", ranks=2),
    Run("LLM live bytes", "llm_live_bytes", ranks=2),
    Run("experts of a mixture", "grouped_experts"),
    Run("experts, slow link", "expert_overlap", ("--rounds", "5"), root=True),
    Run("in-process pipe, 8 micro-batches", "pipe_speed", ("--rounds", "8", "--chunks", "8")),
    Run("soak", "soak"),
)


def main() -> int:
    """Run the benchmarks, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="also run benchmarks that no page quotes")
    parser.add_argument("--only", default="", help="run all benchmarks whose titles contain this word")
    parser.add_argument("--limit", type=float, default=600.0, help="time limit of a benchmark in seconds")
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    figures: list[dict[str, object]] = []
    failed: list[str] = []
    everything = options.all or options.only
    started = time.monotonic()
    for run in (*QUOTED, *REST) if everything else QUOTED:
        if options.only not in run.title:
            continue
        if run.root and os.geteuid():
            failed.append(f"{run.title}: needs root to create network namespaces")
            continue
        begun = time.monotonic()
        error = _run(run, options.limit, figures)
        console.print(f"{run.title}: {time.monotonic() - begun:.0f} s{'' if error is None else ', failed'}")
        if error is not None:
            failed.append(f"{run.title}: {error}")
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    console.print(_table(figures))
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes")
    if not everything:
        console.print(f"make bench-all also runs: {'; '.join(run.title for run in REST)}")
    for line in failed:
        console.print(line, style="red", markup=False)
    return 1 if failed else 0


def _run(run: Run, limit: float, figures: list[dict[str, object]]) -> str | None:
    """Run a benchmark and add its figures to *figures*. Returns the reason of a failure, or None."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        with (Path(folder) / "output").open("w+") as output:
            process = subprocess.Popen(
                run.command(path), cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process, mark)
            output.seek(0)
            last = "\n".join(output.read().splitlines()[-15:])
        new_figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    figures.extend({**figure, "of": run.title} for figure in new_figures)
    if code is None:
        return f"took more than {limit:g} s\n{last}"
    if code:
        return f"exit status {code}\n{last}"
    return None if new_figures else f"wrote no figures\n{last}"


def end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Terminate all processes of a benchmark, in any session, and remove its network namespaces."""
    if process.poll() is None:
        process.terminate()  # slow_link then removes its namespaces
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    sought = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        # The process may belong to another user or have ended.
        with suppress(OSError):
            if sought in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
    process.wait()
    if shutil.which("ip") is not None:
        for name in (f"lp{process.pid}a", f"lp{process.pid}b"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _table(figures: list[dict[str, object]]) -> Table:
    """Table with a row for each figure and a column for each device type among them."""
    devices = ["cpu", *sorted({_device(figure) for figure in figures} - {"cpu"})]
    cores = len(os.sched_getaffinity(0))
    table = Table(
        title=f"{cores} cores of {platform.machine()}, torch {torch.__version__}",
        caption="medians, with quartiles or the 95 % interval in parentheses",
    )
    table.add_column("figure")
    for device in devices:
        table.add_column(device, justify="right")
    table.add_column("unit")
    table.add_column("target")
    table.add_column("met")
    rows: dict[tuple[str, str], dict[str, dict[str, object]]] = {}
    for figure in figures:
        name = str(figure["name"]).removesuffix(f" ({_device(figure)})")
        rows.setdefault((str(figure["of"]), name), {})[_device(figure)] = figure
    titled = ""
    for (title, name), by_device in rows.items():
        if title != titled:
            table.add_section()
            table.add_row(f"[bold]{title}[/]")
            titled = title
        sample = next(iter(by_device.values()))
        met = [figure["met"] for figure in by_device.values() if figure["met"] is not None]
        table.add_row(
            name,
            *(_cell(by_device.get(device)) for device in devices),
            str(sample["unit"]),
            str(sample["target"] or ""),
            "" if not met else "[green]yes[/]" if all(met) else "[red]no[/]",
        )
    return table


def _device(figure: dict[str, object]) -> str:
    return "cuda" if str(figure["name"]).endswith(" (cuda)") else "cpu"


def _cell(figure: dict[str, object] | None) -> str:
    if figure is None:
        return ""
    value, spread = figure["value"], figure["spread"]
    assert isinstance(value, float | int)
    assert isinstance(spread, list)
    return f"{value:.3g} ({spread[0]:.3g} .. {spread[1]:.3g})"


if __name__ == "__main__":
    sys.exit(main())
