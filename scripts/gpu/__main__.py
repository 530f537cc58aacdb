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

from lightning_pipe.engine.common.atomic_file import atomic_write
from scripts.gpu.parts import parts
from scripts.gpu.report import report
from scripts.gpu.runner import BAD, machine, read, run_parts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="folder of results (gpu_results)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, without parts that need a GPU")
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="time for all parts (10)")
    parser.add_argument("--only", default="", help="run parts whose names contain this word")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result")
    parser.add_argument("--list", action="store_true", help="print the parts and exit")
    options = parser.parse_args(arguments)
    every = parts(options.dry_run)
    chosen = [part for part in every if options.only in part.name]
    if not chosen:
        parser.error(f"--only is {options.only!r}; expected a part of one of {', '.join(part.name for part in every)}")
    if options.list:
        print("\n".join(f"{part.name}: {part.shows}" for part in chosen))
        return 0
    if not (options.dry_run or torch.cuda.is_available()):
        print("no GPU: torch.cuda.is_available() is False. Use --dry-run to try the parts on the CPU", file=sys.stderr)
        return 2
    out: Path = options.out.resolve()
    about = {**machine(), "dry": options.dry_run}
    # A polite kill ends the running program too, and leaves the results so far.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    left = run_parts(chosen, out, about, options.minutes, options.again, lambda line: print(line, flush=True))
    stored = {part.name: read(out / f"{part.name}.json") for part in every}
    results = {
        name: result for name, result in stored.items() if result is not None and about.items() <= result.items()
    }
    with atomic_write(out / "report.md") as file:
        file.write_text(report(every, results, about, options.dry_run, left), encoding="utf-8")
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
