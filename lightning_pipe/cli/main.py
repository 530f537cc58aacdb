"""The ``lightning-pipe`` command: Lightning's CLI with this project's strategies, and others for plans, checkpoints.

Training commands go to :class:`~lightning.pytorch.cli.LightningCLI` as they are; the rest is read here. Either way an
error of this project ends the process with one message and status 1, and any other exception keeps its traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed import is_torchelastic_launched

import lightning_pipe
from lightning_pipe.cli.plan import main as plan
from lightning_pipe.cli.training import Parser, PipelineCLI, count
from lightning_pipe.engine import PipelineError, SetupError
from lightning_pipe.engine.common.safe_text import printable
from lightning_pipe.strategies.registry import STRATEGIES

_TRAINING = {
    "fit": "train a model from YAML",
    "validate": "run its validation",
    "test": "run its test",
    "predict": "run its prediction",
}

_VERBOSE = "--verbose"

# How long a rank's error may take to be another rank's too: both come out of the same exchange.
_PATIENCE_SECONDS = 5.0

_EPILOG = """\
fit, validate, test and predict are a LightningCLI: model, data and trainer come from --config FILE, each value may be
given as an option, and --print_config writes a whole configuration. trainer.strategy takes a name that 'lightning-pipe
strategies' lists, or a class_path with init_args. --verbose logs details too, such as the names of tables.

examples:
  lightning-pipe fit --config examples/recsys_movielens/prefetch.yaml
  lightning-pipe fit --config FILE --trainer.max_epochs 1
  lightning-pipe plan show recsys_prefetch_pipeline
  lightning-pipe plan simulate serial base prefetch --costs profile.json
  lightning-pipe bubble --config examples/llm_text/1f1b.yaml
  lightning-pipe llm estimate --config examples/llm_text/1f1b.yaml --memory 80GB --compare
  lightning-pipe checkpoint export FOLDER FILE
"""

_BUBBLE = """\
Train a few steps of a configuration with an LLMPipelineStrategy, and print what its ranks did with their time: the
bubble that was measured, beside the one simulated from the schedule's actions and the durations of the same steps.
Nothing is validated, logged or saved, and the configuration's callbacks are left out. All options but these two are
those of 'lightning-pipe fit'.
"""


class _BubbleCLI(PipelineCLI):
    """Trains for a few steps with a monitor, and with nothing that writes."""

    def __init__(self, monitor: Callback, max_steps: int, **kwargs: Any) -> None:
        self._instead = {
            "callbacks": [monitor],
            "max_steps": max_steps,
            "max_epochs": -1,
            "max_time": None,
            "min_epochs": None,
            "min_steps": None,
            "accumulate_grad_batches": 1,
            "fast_dev_run": False,
            "limit_val_batches": 0,
            "logger": False,
            "profiler": None,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
        }
        super().__init__(save_config_callback=None, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # Lightning's warns of those of this process

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(**kwargs, **self._instead)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name, by default that of this process.

    Returns:
        The exit status: 0, or 1 for a model, data, plan or environment that this project refuses.

    Raises:
        SystemExit: after ``--help`` and the like, and with status 2 after arguments that cannot be parsed.
    """
    _import_from_the_current_folder()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _TRAINING and _VERBOSE in given:
        given.remove(_VERBOSE)
        if arguments is None:
            sys.argv.remove(_VERBOSE)  # which Lightning reads itself
        logging.getLogger("lightning.pytorch").setLevel(logging.DEBUG)
    try:
        if given and given[0] in _TRAINING:
            # Lightning reads this process's arguments itself, and warns of others beside them.
            _train(None if arguments is None else given)
        elif given and given[0] == "bubble":
            _bubble(given[1:])
        elif given and given[0] == "llm":
            from lightning_pipe.cli.llm import main as llm  # here, since it needs a newer torch than other commands

            llm(given[1:], _train)
        elif given and given[0] == "plan":
            plan(given[1:])
        else:
            _look(given)
    except PipelineError as error:
        sys.stderr.write(_message(error))  # at once: other ranks write too
        _wait_for_the_first_process()
        return 1
    return 0


def _import_from_the_current_folder() -> None:
    """Let a configuration name classes of the folder the command runs in, as under ``python -m``."""
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def _train(arguments: list[str] | None, cli: Callable[..., PipelineCLI] = PipelineCLI) -> None:
    if find_spec("jsonargparse") is None:
        raise SetupError(
            "jsonargparse is not installed, which Lightning reads configurations with; the commands"
            f" {', '.join(_TRAINING)} need it: pip install 'jsonargparse[signatures]'"
        )
    # Lightning's own usage names every one of some hundred options, before each error too.
    usage = {name: {"usage": f"lightning-pipe {name} --config FILE [--OPTION VALUE ...]"} for name in _TRAINING}
    try:
        # The configuration that it saves may overwrite that of an earlier run into the same folder.
        cli(parser_class=Parser, parser_kwargs=usage, save_config_kwargs={"overwrite": True}, args=arguments)
    except MisconfigurationException as error:
        raise SetupError(str(error)) from error


def _bubble(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe bubble",
        usage="lightning-pipe bubble --config FILE [--steps N] [--warmup N] [--OPTION VALUE ...]",
        description=_BUBBLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=count, default=20, help="how many to measure; default: 20")
    parser.add_argument("--warmup", type=count, default=3, help="how many to train before; default: 3")
    options, others = parser.parse_known_args(arguments)
    from lightning_pipe.callbacks import BubbleMonitor  # here, since it needs a newer torch than other commands

    monitor = BubbleMonitor(every_n_steps=1, warmup=options.warmup)
    # A checkpoint would bring the number of steps that it was made after.
    _train(["fit", *others, "--ckpt_path=null"], partial(_BubbleCLI, monitor, options.warmup + options.steps))


def _message(error: PipelineError) -> str:
    # Every rank writes its own, as PyTorch marks it: whether the others have the same to say is not known any more.
    rank = getattr(rank_zero_only, "rank", 0)
    lines = printable("\n".join([f"lightning-pipe: {error}", *getattr(error, "__notes__", ())]))
    return "".join(f"{f'[rank{rank}]: ' if rank else ''}{line}\n" for line in lines.splitlines())


def _wait_for_the_first_process() -> None:
    """In a process that Lightning's launcher started: let the one that started it say the same, and end, first.

    The launcher kills the first process at once when it sees that another one has failed, so that the message and the
    status of a command would be a matter of luck. An error that only this rank knows of ends it all the same, later.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" or is_torchelastic_launched():
        return
    first, deadline = os.getppid(), time.monotonic() + _PATIENCE_SECONDS
    while os.getppid() == first and time.monotonic() < deadline:
        time.sleep(0.05)


def _look(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe",
        description="Software-pipelined training for Lightning's Trainer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"lightning-pipe {lightning_pipe.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _TRAINING.items():
        commands.add_parser(name, help=text)
    commands.add_parser("bubble", help="train a few steps in stages, print how long ranks were idle")
    commands.add_parser("llm", help="say what a model in stages needs: llm estimate --config FILE --memory 80GB")
    commands.add_parser("strategies", help="list the registered strategies, one line each")
    commands.add_parser("plan", help="show plans, predict what they take: plan show NAME, plan simulate NAME ...")
    checkpoint = commands.add_parser("checkpoint", help="make one file of a folder: checkpoint export FOLDER FILE")
    export = checkpoint.add_subparsers(metavar="export", required=True).add_parser(
        "export",
        help="make one file of a checkpoint's folder",
        description="Make of a checkpoint that is a folder one file, as Lightning writes it for one device:"
        " load_from_checkpoint takes it, and so does load_state_dict of the unsharded module. Of sharded tables the"
        " states of optimisers are left out.",
    )
    export.add_argument("folder", metavar="FOLDER", help="that ModelCheckpoint or Trainer.save_checkpoint wrote")
    export.add_argument("file", metavar="FILE", help="a new file, unless --force is given")
    export.add_argument("--force", action="store_true", help="replace FILE where it exists")
    export.add_argument(
        "--any-class",
        action="store_true",
        help="allow classes other than tensors and plain types in it, which can run any code when they are read",
    )
    options = parser.parse_args(arguments)
    if options.command == "checkpoint":
        from lightning_pipe.checkpoints.export import export_checkpoint  # here, since few need it

        if os.path.lexists(options.file) and not options.force:
            raise SetupError(f"{options.file!r} exists; expected the name of a new file: give another, or --force")
        export_checkpoint(options.folder, options.file, weights_only=not options.any_class)
    else:
        width = max(len(entry.name) for entry in STRATEGIES)
        for entry in STRATEGIES:
            print(f"{entry.name:<{width}}  {entry.description}")
