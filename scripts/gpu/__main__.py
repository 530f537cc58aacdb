"""``python -m scripts.gpu``: run all parts on a GPU, and write ``OUT/*.json`` and ``OUT/report.md``.

The exit status is 1 if a part differed, failed or had no time left, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_pipe.engine.common.whole_file import whole_file
from scripts.gpu.parts import parts
from scripts.gpu.report import report
from scripts.gpu.runner import BAD, machine, read, run_parts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write the report, and return the exit status."""
    options = argparse.ArgumentParser(prog="python -m scripts.gpu", description=(__doc__ or "").split("\n")[0])
    options.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results (gpu_results)")
    options.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, without parts that need a GPU")
    options.add_argument("--minutes", type=_minutes, default=10.0, help="time for all parts (10)")
    options.add_argument("--only", default="", help="run parts whose names contain this word")
    options.add_argument("--again", action="store_true", help="also run parts that have a result")
    options.add_argument("--list", action="store_true", help="print the parts and exit")
    given = options.parse_args(arguments)
    every = parts(given.dry_run)
    chosen = [part for part in every if given.only in part.name]
    if not chosen:
        options.error(f"--only is {given.only!r}; expected a part of one of {', '.join(one.name for one in every)}")
    if given.list:
        print("\n".join(f"{part.name}: {part.shows}" for part in chosen))
        return 0
    if not (given.dry_run or torch.cuda.is_available()):
        print("no GPU: torch.cuda.is_available() is False. Use --dry-run to try the parts on the CPU", file=sys.stderr)
        return 2
    out: Path = given.out.resolve()
    about = {**machine(), "dry": given.dry_run}
    # A polite kill ends the running program too, and leaves the results so far.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    left = run_parts(chosen, out, about, given.minutes, given.again, lambda line: print(line, flush=True))
    found = {part.name: read(out / f"{part.name}.json") for part in every}
    results = {name: one for name, one in found.items() if one is not None and about.items() <= one.items()}
    with whole_file(out / "report.md") as file:
        file.write_text(report(every, results, about, given.dry_run, left), encoding="utf-8")
    print(f"{out / 'report.md'}{f'; no time left for {chr(44).join(left)}: call it again' if left else ''}")
    bad = [part.name for part in chosen if results.get(part.name, {}).get("status") in BAD]
    return 1 if bad or left else 0


def _minutes(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of minutes, got {text}")
    return number


if __name__ == "__main__":
    sys.exit(main())
