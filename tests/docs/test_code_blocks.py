"""Every code block of the docs runs as it is written, page by page, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks_of, fences_of, page_run
from tests.running_in import running_in

PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)

# Blocks that no test runs: how many a page has. The reason is in front of each of them, and is one of these.
SKIPPED = {
    "checkpoints.md": 2,
    "cluster.md": 5,
    "performance.md": 1,
    "serving.md": 9,
    "stacks.md": 2,
    "start.md": 3,
}
REASONS = (
    "needs CUDA",
    "needs a second machine",
    "needs a network",
    "installs packages",
    "takes minutes",
    "run by tests/",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    with running_in(tmp_path), page_run(page) as run:
        for block in blocks_of(page):
            run.run(block)


def test_every_block_is_seen() -> None:
    assert {page.name: fences_of(page) for page in PAGES} == {page.name: len(blocks_of(page)) for page in PAGES}


def test_no_block_is_skipped_but_those_that_are_counted_here() -> None:
    skipped = {page.name: [one for one in blocks_of(page) if one.reason_to_skip is not None] for page in PAGES}
    assert {name: len(blocks) for name, blocks in skipped.items() if blocks} == SKIPPED
    for blocks in skipped.values():
        for block in blocks:
            assert block.reason_to_skip is not None
            assert block.reason_to_skip.startswith(REASONS), f"{block.where} is skipped for another reason"
