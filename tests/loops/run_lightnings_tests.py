"""Runs Lightning's own tests of its loops against this project's.

    python -m tests.loops.run_lightnings_tests PATH_OF_A_LIGHTNING_CHECKOUT [-- PYTEST_OPTIONS]

They are in no package, so they come from a checkout of Lightning (https://github.com/Lightning-AI/pytorch-lightning);
the Lightning that runs is the installed one. They run twice, with Lightning's loops, and with this project's under
their names (``CLASSES``). The exit status is 1 if a test that
passes with the first fails with the second, unless ``DIFFERENT`` says why it must.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

TESTS = "tests/tests_pytorch/loops"

# Tests that pass with Lightning's loops and cannot with these, and why.
_GENERATORS = (
    "compares the loops' states of two runs that are not seeded; where the random generators were is one of them here"
)
DIFFERENT: dict[str, str] = {
    f"{TESTS}/test_loops.py::test_fit_loop_reset": (
        "expects that an epoch counts as completed when a checkpoint of its last batch's end is loaded, so that its"
        " validation and its end are left out; here they are made up for first"
    ),
    f"{TESTS}/test_loops.py::test_restart_from_last_parity": _GENERATORS,
    f"{TESTS}/test_loops.py::test_restart_from_last_with_val_parity": _GENERATORS,
}

# Where Lightning looks the classes up, and where tests may.
MODULES = (
    *("loops.training_epoch_loop", "loops.fit_loop", "loops.evaluation_loop", "loops.prediction_loop"),
    *("loops", "trainer.trainer"),
)
CLASSES = {
    "_TrainingEpochLoop": "training_epoch_loop.PipelineTrainingEpochLoop",
    "_FitLoop": "fit_loop.PipelineFitLoop",
    "_EvaluationLoop": "evaluation_loop.PipelineEvaluationLoop",
    "_PredictionLoop": "evaluation_loop.PipelinePredictionLoop",
}


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Outcomes:
    """What became of each test; a pytest plugin."""

    tests: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    not_imported: list[str] = field(default_factory=list)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_imported.append(report.nodeid)
            self.reasons[report.nodeid] = _error(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has passed if its call did, and neither its set-up nor its end failed.
        if report.failed or report.when == "call" or report.skipped:
            if self.tests.get(report.nodeid) != "failed":
                self.tests[report.nodeid] = report.outcome
            if report.failed:
                self.reasons[report.nodeid] = _error(report.longreprtext)

    def names(self, outcome: str) -> set[str]:
        """Tests with this outcome."""
        return {name for name, found in self.tests.items() if found == outcome}


def _error(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return errors[0] if errors else lines[-1] if lines else "no reason given"


class _TorchFlags:
    """Answers for flags like ``_TORCH_GREATER_EQUAL_2_11`` that newer tests import and this Lightning lacks."""

    def __init__(self) -> None:
        self.given: set[str] = set()

    def __call__(self, name: str) -> bool:
        found = re.fullmatch(r"_TORCH_GREATER_EQUAL_(\d+)_(\d+)", name)
        if found is None:
            raise AttributeError(name)
        import torch

        self.given.add(name)
        major, minor = torch.__version__.split(".")[:2]
        return (int(major), int(minor)) >= (int(found[1]), int(found[2]))


def run_tests(folder: Path, options: Sequence[str], pipelined: bool) -> tuple[Outcomes, list[str]]:
    """Run the tests in this process, which is for nothing else."""
    sys.dont_write_bytecode = True  # the checkout is the user's
    imports: Any = importlib.import_module("lightning.pytorch.utilities.imports")
    imports.__getattr__ = flags = _TorchFlags()
    if pipelined:
        _swap()
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        pytest.main(
            [str(folder), "-q", "--color=no", "-p", "no:cacheprovider", "--continue-on-collection-errors", *options],
            plugins=[outcomes],
        )
        os.chdir("/")
    return outcomes, sorted(flags.given)


def _swap() -> None:
    from lightning.pytorch import Trainer

    modules = [importlib.import_module(f"lightning.pytorch.{name}") for name in MODULES]
    swapped = set()
    for theirs, ours in CLASSES.items():
        place, _, name = ours.partition(".")
        swapped.add(loop := getattr(importlib.import_module(f"lightning_pipe.loops.{place}"), name))
        for module in modules:
            if hasattr(module, theirs):
                setattr(module, theirs, loop)
    used = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    fit_loop = used.fit_loop
    found = {
        type(one)
        for one in (fit_loop, fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop, used.test_loop, used.predict_loop)
    }
    assert found == swapped, "Lightning finds its loops elsewhere"


def in_a_process(folder: Path, options: Sequence[str], pipelined: bool) -> tuple[Outcomes, list[str]]:
    """:func:`run_tests` in a fresh process; tests leave much behind."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run_tests, folder, options, pipelined).result()


def report(theirs: Outcomes, ours: Outcomes, different: Mapping[str, str] = DIFFERENT) -> list[str]:
    """Print what differs."""
    for what, found in (("Lightning's loops", theirs), ("the pipelined loops", ours)):
        counts = ", ".join(f"{len(found.names(one))} {one}" for one in ("passed", "failed", "skipped"))
        print(f"\nWith {what}: {counts}.")
    _list("Left out, since the installed Lightning is another than the tests'", theirs.not_imported, theirs.reasons)
    _list("Fail with Lightning's own loops, in this environment", sorted(theirs.names("failed")), theirs.reasons)
    lost = theirs.names("passed") - ours.names("passed")
    _list("Differ, as they must", sorted(lost & different.keys()), different)
    # The list is kept short: what passes has no place in it.
    stale = ours.names("passed") & different.keys()
    _list("Are said to differ, and pass", sorted(stale), different)
    bad = sorted(lost - different.keys())
    _list("Pass with Lightning's loops only", bad, ours.reasons)
    return [*bad, *sorted(stale)]


def _list(title: str, names: Sequence[str], reasons: Mapping[str, str]) -> None:
    if names:
        print(f"\n{title}: {len(names)}")
    for name in names:
        print(f"  {name}\n      {reasons.get(name, 'did not run')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests with both and say what differs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.loops.run_lightnings_tests", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning")
    parser.add_argument("options", nargs="*", help="options of pytest, behind --")
    given = parser.parse_args(arguments)
    folder = (given.checkout / TESTS).resolve()
    if not folder.is_dir():
        parser.error(f"{given.checkout} has no folder {TESTS}: give the root of a checkout of Lightning")
    theirs, flags = in_a_process(folder, given.options, pipelined=False)
    ours, _ = in_a_process(folder, given.options, pipelined=True)
    if flags:
        print(f"\nFlags of a newer Lightning, given by this script: {', '.join(flags)}.")
    if not theirs.tests:
        print("\nNo test ran.")
        return 1
    bad = report(theirs, ours)
    print(f"\n{'Not as it should be: ' + str(len(bad)) if bad else 'As it should be.'}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
