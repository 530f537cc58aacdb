"""What holds for every test: the threads of a process, no thread left behind, and the process left as it was found."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest

from tests.distributed import THREADS, share_servers, threads_left
from tests.stack import is_lacking, lacking
from tests.tiers import TIERS, begin, left_out

TESTS = Path(__file__).parent
# Files that take longest with --exhaustive, longest first. Workers start with them, so that none is alone at the end.
LONGEST = [TESTS / f"{name}.py" for name in (TESTS / "longest.txt").read_text(encoding="utf-8").split()]

FAILED = pytest.StashKey[bool]()

# Read when the libraries are loaded, which the tests do after this.
os.environ["OMP_NUM_THREADS"] = str(THREADS)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A task that touches a field that it does not declare fails.
os.environ["LIGHTNING_PIPE_CHECK_CONTEXTS"] = "1"
# How long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    for marker, what in TIERS.items():
        parser.addoption(f"--{marker}", action="store_true", help=f"run tests that are {marker}, too: {what}")
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run test files, and the tests of each, in random order"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker, what in TIERS.items():
        config.addinivalue_line("markers", f"{marker}: {what}; run with --{marker}")
    begin(config)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        share_servers()
        config.option.loadscopereorder = False  # the files with most tests are not those that take longest
    else:
        gc.disable()  # until all tests are imported: what is imported stays


# Before pytest puts tests together that share a fixture's parameter: each is then made once, in any order.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = [item for item in items if any(item.get_closest_marker(marker) for marker in left_out(config))]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]
    for item in items:
        if (reason := lacking(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    if (seed := config.getoption("--shuffle")) is not None:
        _shuffle(items, random.Random(seed))
    else:
        place = {path: number for number, path in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and (reason := is_lacking(str(report.longrepr))) is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {reason}")
    return report


def pytest_collection_finish() -> None:
    # A collection would visit all modules and tests: half a second each time.
    gc.freeze()
    gc.enable()


def _shuffle(items: list[pytest.Item], order: random.Random) -> None:
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    # A fixture of a module is made once, since its tests stay together.
    shuffled = order.sample(list(files.values()), len(files))
    items[:] = [item for tests in shuffled for item in order.sample(tests, len(tests))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = threading.enumerate()
    yield
    if request.node.stash.get(FAILED, False):
        return  # what the test did not close is kept by the traceback, and its threads would be waited for in vain
    left = threads_left(before)
    assert not left, f"the test left threads behind: {', '.join(left)}"


@pytest.fixture(autouse=True)
def _the_environment_and_the_world_are_as_they_were() -> Iterator[None]:
    # Lightning leaves PL_GLOBAL_SEED, LOCAL_RANK, MASTER_PORT and the like behind, and a process group: a later test
    # would start its random streams from another seed, or its processes would ask for a port in use.
    import torch.distributed as dist  # not above: the number of threads is not set there yet

    in_a_world = dist.is_initialized()
    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized() and not in_a_world:
            dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _a_module_leaves_them_as_they_were() -> Iterator[None]:
    # A module's own fixtures may train in this process: what they leave is there before its first test begins.
    import torch.distributed as dist

    with mock.patch.dict(os.environ):
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
