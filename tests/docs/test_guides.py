"""Every block of the guides runs as it is written, in the order in which it stands on its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from tests.running_in import running_in

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "recsys_guide",
    "llm_guide",
    "in_process",
    "migration",
    "troubleshooting",
    "plans",
    "dynamic_embeddings",
    "balanced_batches",
    "wire",
    "replicas",
    "memory",
    "language_models",
)
_BLOCK = re.compile(r"(?:^<!-- (file|test): (.*?) -->\n)?^```(python|yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str, str]]:
    return _BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


def run(
    kind: str, argument: str, language: str, text: str, names: dict[str, object], environment: dict[str, str]
) -> None:
    if kind == "file":
        Path(argument).write_text(text, encoding="utf-8")
        if language == "python":
            invalidate_caches()
            import_module(Path(argument).stem)
    elif language == "python":
        exec(compile(text, "block", "exec"), names)
    elif language == "bash":
        done = subprocess.run(
            ["bash", "-e"], input=text, capture_output=True, text=True, timeout=240, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]


def is_skipped(kind: str, argument: str) -> bool:
    return kind == "test" and argument.startswith("skip ")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_the_blocks_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    # Of before the page: a Trainer in this process leaves its address behind. Commands find this package, and their own.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(DOCS.parent)}
    with running_in(tmp_path):
        sys.path.insert(0, str(tmp_path))
        names: dict[str, object] = {"__name__": "__main__"}
        for kind, argument, language, text in blocks(page):
            if not is_skipped(kind, argument):
                run(kind, argument, language, text, names, environment)


def test_a_block_in_yaml_says_which_file_it_is() -> None:
    without = [page for page in PAGES for kind, _, language, _ in blocks(page) if language == "yaml" and kind != "file"]
    assert without == []


def test_blocks_that_are_not_run_say_why() -> None:
    skipped = [(page, argument) for page in PAGES for kind, argument, *_ in blocks(page) if is_skipped(kind, argument)]
    assert skipped == [
        ("migration", "skip needs torchtnt"),
        ("migration", "skip needs torchtnt"),
        ("migration", "skip needs NeMo and GPUs"),
    ]
