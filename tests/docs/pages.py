"""The code blocks of a page, and how each of them is run.

A comment in front of a block says how, where running it as it is would not do:

- nothing: ``python`` is run in the page's namespace, ``bash`` by ``bash -e``, both in the page's temporary folder;
- ``<!-- file: NAME -->``: the block is written there; a Python module is imported too, so that the names are there;
- ``<!-- test: WAY -->``: one of :data:`WAYS`;
- ``<!-- test: skip REASON -->``: it is not run;
- ``<!-- output -->`` in front of ``text``: the block before printed it (or what it raised says so);
- ``<!-- output: COMMAND -->`` in front of ``text``: the command prints it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy

from lightning_pipe.cli.main import main
from tests.patience import HANG

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
LANGUAGES = ("python", "yaml", "bash", "text")
_BLOCK = re.compile(
    rf"^(?:<!--[ ]*(?P<key>file|test|output)(?::[ ]*(?P<value>[^\n]*?))?[ ]*-->\n+)?"
    rf"^```(?P<language>{'|'.join(LANGUAGES)})\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_OF_A_RANK = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
WIDTH = "120"  # of what commands print


@dataclass(frozen=True)
class Block:
    """A fenced block, and the comment in front of it."""

    page: Path
    line: int  # of its first line of code, counted from 1
    language: str
    code: str
    key: str  # of the comment: ``file``, ``test``, ``output``, or nothing
    value: str

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def reason_to_skip(self) -> str | None:
        return self.value.removeprefix("skip").strip() if self.key == "test" and self.value.startswith("skip") else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            found["language"],
            found["code"],
            found["key"] or "",
            found["value"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def fences_of(page: Path) -> int:
    """How many fenced blocks of these languages there are, whatever is in front of them, indented ones too."""
    return len(re.findall(rf"^[ ]*```(?:{'|'.join(LANGUAGES)})\b", page.read_text(encoding="utf-8"), re.MULTILINE))


@dataclass
class PageRun:
    """A page that is being run, block by block, in the current folder."""

    module: types.ModuleType
    said: str = ""
    files: list[str] = field(default_factory=list)

    def run(self, block: Block) -> None:
        """Run one block; an AssertionError says that it cannot be run, or does not print what the page says."""
        if block.reason_to_skip is not None:
            return
        if block.language == "text":
            self._compare(block)
        elif block.key == "file":
            self._write(block)
        elif block.key == "test":
            way, *arguments = shlex.split(block.value)
            assert way in WAYS, f"{block.where} asks for the way {way!r} of running it; there are {', '.join(WAYS)}"
            WAYS[way](self, block, *arguments)
        elif block.language == "bash":
            self.said = run_command(["bash", "-e", "-o", "pipefail", "-c", block.code], block.where)
        elif block.language == "python":
            self.execute(block)
        else:
            raise AssertionError(f"{block.where}: say what a block of {block.language} is for: <!-- file: NAME -->")

    def execute(self, block: Block) -> None:
        """Run it in the page's namespace; tracebacks and ``inspect.getsource`` find it in the page itself."""
        assert "__main__" not in block.code, f"{block.where} is no program: give it a <!-- file: NAME --> and start it"
        code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
        with self._listening():
            exec(code, self.module.__dict__)

    def _write(self, block: Block) -> None:
        path = Path(block.value)
        assert not path.is_absolute(), f"{block.where}: the file is to be in the page's folder"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")
        if path.suffix == ".py":
            importing = f"from {'.'.join(path.with_suffix('').parts)} import *"
            with self._listening():
                exec(importing, self.module.__dict__)

    def _compare(self, block: Block) -> None:
        if block.key != "output":
            return  # a drawing, a tree of folders, a formula
        said = printed_by(block.value, block.where) if block.value else self.said
        assert _trimmed(block.code) in _trimmed(said), f"{block.where} is not what is printed:\n{said}"

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        heard = io.StringIO()
        try:
            with contextlib.redirect_stdout(heard):
                yield
        finally:
            self.said = heard.getvalue()
            print(self.said, end="")


def printed_by(command: str, where: str) -> str:
    """What a command of this project prints, through the filters behind it; in this process, which is quicker."""
    own, _, filters = command.partition("|")
    name, *arguments = shlex.split(own)
    assert name == "lightning-pipe", f"{where}: only this project's command is known here, not {name!r}"
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), mock.patch.dict(os.environ, COLUMNS=WIDTH):
        try:
            status: object = main(arguments)
        except SystemExit as end:  # --help
            status = end.code or 0
    assert status == 0, f"{where}: {command} ended with status {status}"
    return run_command(["bash", "-e", "-c", filters], where, heard.getvalue()) if filters else heard.getvalue()


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def run_command(command: list[str], where: str, given: str | None = None) -> str:
    """What it prints, in the current folder, with this interpreter's commands first, and *given* as its input."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Not the address of a process group that Lightning has made for the page's own process.
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment = {**inherited, "PATH": path, "PYTHONPATH": python_path.rstrip(os.pathsep), "COLUMNS": WIDTH}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=HANG, check=False, env=environment
    )
    assert done.returncode == 0, f"{where} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@contextlib.contextmanager
def page_run(page: Path) -> Iterator[PageRun]:
    """A namespace for *page*: a module, so that what it defines can be pickled."""
    module = types.ModuleType(f"page_{page.stem}")
    module.__file__ = str(page)
    sys.modules[module.__name__] = module
    sys.path.insert(0, os.getcwd())
    try:
        yield PageRun(module)
    finally:
        sys.path.remove(os.getcwd())
        del sys.modules[module.__name__]


# ---------------------------------------------------------------------- named ways


def _torchrun(run: PageRun, block: Block, ranks: str) -> None:
    """``torchrun N``: a program, started by torchrun with so many processes."""
    path = Path(f"torchrun_{block.line}.py")
    path.write_text(block.code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(path)]
    run.said = run_command(command, block.where)


def _program(run: PageRun, block: Block) -> None:
    """``program``: started in a process of its own."""
    path = Path(f"program_{block.line}.py")
    path.write_text(block.code, encoding="utf-8")
    run.said = run_command([sys.executable, str(path)], block.where)


def _raises(run: PageRun, block: Block, error: str) -> None:
    """``raises ERROR``: a Python block that ends with this error; its message counts as what was printed."""
    raised: Exception | None = None
    try:
        run.execute(block)
    except Exception as found:
        raised = found
    names = [cls.__name__ for cls in type(raised).__mro__]
    assert error in names, f"{block.where} raised {raised!r} and not {error}"
    run.said = "\n".join([str(raised), *getattr(raised, "__notes__", ())])


def _fails(run: PageRun, block: Block, status: str) -> None:
    """``fails STATUS``: commands that end with this status."""
    code = f"set +e\n( set -e\n{block.code})\ntest $? -eq {status}"
    run.said = run_command(["bash", "-c", code], block.where)


def _plan(run: PageRun, block: Block) -> None:
    """``plan``: YAML of a plan, read as a strategy reads it, and as ``plan show`` does."""
    from lightning_pipe.cli.plan import find_plan_by_name

    path = Path(f"{yaml.safe_load(block.code)['name']}.yaml")
    path.write_text(block.code, encoding="utf-8")
    run.said = str(find_plan_by_name(str(path)))


def _strategy(run: PageRun, block: Block) -> None:
    """``strategy``: YAML of a trainer's strategy, made as the command line makes it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    parser.instantiate_classes(parser.parse_object(yaml.safe_load(block.code)))


WAYS: dict[str, Callable[..., None]] = {
    "torchrun": _torchrun,
    "program": _program,
    "raises": _raises,
    "fails": _fails,
    "plan": _plan,
    "strategy": _strategy,
}
