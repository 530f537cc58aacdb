"""The ``lightning-pipe`` command: Lightning's CLI with this project's strategies, and tools for plans and checkpoints.

Training commands are passed unchanged to :class:`~lightning.pytorch.cli.LightningCLI`; other commands are parsed here.
In both cases an error of this project ends the process with one message and status 1, and any other exception keeps its
traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
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
from lightning_pipe.cli.training import PipelineArgumentParser, PipelineCLI, positive_int
from lightning_pipe.engine import PipelineError, SetupError
from lightning_pipe.engine.common.safe_text import escape_unprintable
from lightning_pipe.strategies.registry import STRATEGIES

_LIGHTNING_COMMANDS = {
    "fit": "train a model from YAML",
    "validate": "validate a model from YAML",
    "test": "test a model from YAML",
    "predict": "predict with a model from YAML",
}

_VERBOSE = "--verbose"

# Longest delay after which another rank reports the same error, since both come from the same collective.
_PATIENCE_SECONDS = 5.0

_EPILOG = """\
fit, validate, test and predict are a LightningCLI: model, data and trainer are read from --config FILE, each value can
be overridden by an option, and --print_config prints the whole configuration. trainer.strategy accepts a name listed by
'lightning-pipe strategies', or a class_path with init_args. --verbose also logs details such as the names of tables.

examples:
  lightning-pipe fit --config examples/recsys_movielens/prefetch.yaml
  lightning-pipe fit --config FILE --trainer.max_epochs 1
  lightning-pipe plan show recsys_prefetch_pipeline
  lightning-pipe plan simulate serial base prefetch --costs profile.json
  lightning-pipe bubble --config examples/llm_text/1f1b.yaml
  lightning-pipe llm estimate --config examples/llm_text/1f1b.yaml --memory 80GB --compare
  lightning-pipe checkpoint export FOLDER FILE
  lightning-pipe export CHECKPOINT --to aoti --config FILE --out model.pt2
  lightning-pipe rows diff CHECKPOINT --since OLDER --out FOLDER
  lightning-pipe rows apply EXPORT --diff FOLDER --out NEW
"""

_BUBBLE = """\
Train a few steps of a configuration with an LLMPipelineStrategy, and print how its ranks spent their time: the measured
bubble, and the bubble simulated from the schedule's actions and their durations in the same steps. Validation, logging,
checkpoints and the configuration's callbacks are disabled. Apart from --steps and --warmup, all options are those of
'lightning-pipe fit'.
"""


class _BubbleCLI(PipelineCLI):
    """CLI that trains a few steps with a monitor and without loggers, checkpoints or other output files."""

    def __init__(self, monitor: Callback, max_steps: int, **kwargs: Any) -> None:
        self._trainer_overrides = {
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
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # Lightning's version warns about sys.argv

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(**kwargs, **self._trainer_overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    _add_cwd_to_sys_path()
    args = list(sys.argv[1:] if arguments is None else arguments)
    if args and args[0] in _LIGHTNING_COMMANDS and _VERBOSE in args:
        args.remove(_VERBOSE)
        if arguments is None:
            sys.argv.remove(_VERBOSE)  # Lightning reads sys.argv directly
        logging.getLogger("lightning.pytorch").setLevel(logging.DEBUG)
    try:
        if args and args[0] in _LIGHTNING_COMMANDS:
            # Lightning reads sys.argv directly, and warns if arguments are passed in addition.
            _run_lightning_cli(None if arguments is None else args)
        elif args and args[0] == "bubble":
            _run_bubble_command(args[1:])
        elif args and args[0] == "llm":
            from lightning_pipe.cli.llm import main as llm  # lazy: requires a newer torch than the other commands

            llm(args[1:], _run_lightning_cli)
        elif args and args[0] == "plan":
            plan(args[1:])
        elif args and args[0] == "export":
            from lightning_pipe.cli.export import export  # lazy: rarely needed

            export(args[1:])
        else:
            _parse_and_run_remaining_command(args)
    except PipelineError as error:
        sys.stderr.write(_message(error))  # a single write, because other ranks write too
        _wait_for_launcher_exit()
        return 1
    return 0


def _add_cwd_to_sys_path() -> None:
    """Allow a configuration to name classes in the current folder, as under ``python -m``."""
    if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def _run_lightning_cli(arguments: list[str] | None, cli: Callable[..., PipelineCLI] = PipelineCLI) -> None:
    if find_spec("jsonargparse") is None:
        raise SetupError(
            f"The commands {', '.join(_LIGHTNING_COMMANDS)} need jsonargparse, with which Lightning reads"
            " configurations, but it is not installed. Run: pip install 'jsonargparse[signatures]'"
        )
    # Lightning's default usage lists about a hundred options, also before each error.
    usage = {
        name: {"usage": f"lightning-pipe {name} --config FILE [--OPTION VALUE ...]"} for name in _LIGHTNING_COMMANDS
    }
    try:
        # The saved configuration may overwrite that of an earlier run in the same folder.
        cli(
            parser_class=PipelineArgumentParser,
            parser_kwargs=usage,
            save_config_kwargs={"overwrite": True},
            args=arguments,
        )
    except MisconfigurationException as error:
        raise SetupError(str(error)) from error


def _run_bubble_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe bubble",
        usage="lightning-pipe bubble --config FILE [--steps N] [--warmup N] [--OPTION VALUE ...]",
        description=_BUBBLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=positive_int, default=20, help="number of steps to measure; default: 20")
    parser.add_argument("--warmup", type=positive_int, default=3, help="number of steps to train before; default: 3")
    options, remaining_args = parser.parse_known_args(arguments)
    from lightning_pipe.callbacks import BubbleMonitor  # lazy: requires a newer torch than the other commands

    monitor = BubbleMonitor(every_n_steps=1, warmup=options.warmup)
    # A checkpoint would restore its step count, which counts towards max_steps.
    _run_lightning_cli(
        ["fit", *remaining_args, "--ckpt_path=null"], partial(_BubbleCLI, monitor, options.warmup + options.steps)
    )


def _message(error: PipelineError) -> str:
    # Every rank writes its own message with PyTorch's prefix, since ranks can no longer compare their errors.
    rank = getattr(rank_zero_only, "rank", 0)
    lines = escape_unprintable("\n".join([f"lightning-pipe: {error}", *getattr(error, "__notes__", ())]))
    return "".join(f"{f'[rank{rank}]: ' if rank else ''}{line}\n" for line in lines.splitlines())


def _wait_for_launcher_exit() -> None:
    """Wait, in a process started by Lightning's launcher, until the launching process has ended with the same error.

    The launcher kills the first process as soon as another process has failed, so without this wait the message and the
    exit status of a command would depend on a race. An error that occurs only on this rank ends it after a timeout.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" or is_torchelastic_launched():
        return
    first, deadline = os.getppid(), time.monotonic() + _PATIENCE_SECONDS
    while os.getppid() == first and time.monotonic() < deadline:
        time.sleep(0.05)


def _parse_and_run_remaining_command(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe",
        description="Software-pipelined training for Lightning's Trainer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"lightning-pipe {lightning_pipe.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _LIGHTNING_COMMANDS.items():
        commands.add_parser(name, help=text)
    commands.add_parser("bubble", help="train a few steps in stages and print the idle time of ranks")
    commands.add_parser(
        "llm", help="estimate the memory of a model in stages: llm estimate --config FILE --memory 80GB"
    )
    commands.add_parser("strategies", help="list the registered strategies, one line each")
    commands.add_parser("plan", help="show plans or predict their speed: plan show NAME, plan simulate NAME ...")
    checkpoint = commands.add_parser("checkpoint", help="convert checkpoints: checkpoint export FOLDER FILE")
    export = checkpoint.add_subparsers(metavar="export", required=True).add_parser(
        "export",
        help="convert a checkpoint folder to a single file",
        description="Convert a checkpoint folder to a single file in Lightning's format for one device, which"
        " load_from_checkpoint and, for the unsharded module, load_state_dict accept. Optimizer states of sharded"
        " tables are not exported.",
    )
    export.add_argument("folder", metavar="FOLDER", help="written by ModelCheckpoint or Trainer.save_checkpoint")
    export.add_argument("file", metavar="FILE", help="path of a new file; may exist if --force is given")
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    commands.add_parser(
        "export", help="make an artifact for a server: export CHECKPOINT --to aoti --config FILE --out FILE"
    )
    rows = commands.add_parser("rows", help="write changed rows: rows diff CHECKPOINT --since OLDER --out FOLDER")
    row_commands = rows.add_subparsers(dest="action", metavar="COMMAND", required=True)
    diff = row_commands.add_parser(
        "diff",
        help="write the rows of tables that changed since an older checkpoint",
        description="Write the rows of tables that changed since an older checkpoint, for a store or a server that has"
        " the older rows: NAME.parquet with the rows to insert or replace (id, vector), and NAME.removed.parquet with"
        " the ids to delete. After that, the store has exactly the rows of CHECKPOINT. dense.pt has the other values,"
        " and diff.json the steps of both checkpoints. If OLDER is the number of a batch, all tables must be dynamic,"
        " rows last seen in this batch or later are written, and removed ids are unknown.",
    )
    diff.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or its URL")
    diff.add_argument("--since", metavar="OLDER", required=True, help="older checkpoint, its URL, or a batch number")
    apply = row_commands.add_parser(
        "apply",
        help="write the newer export from an older one and the changed rows",
        description="Write the folder that 'lightning-pipe export --to rows' writes for the newer checkpoint, from that"
        " of the older one and the folder of 'rows diff'.",
    )
    apply.add_argument("export", metavar="EXPORT", help="folder written by export --to rows, or by rows apply")
    apply.add_argument("--diff", metavar="FOLDER", required=True, help="folder written by rows diff")
    for command in (diff, apply):
        command.add_argument("--out", metavar="FOLDER", required=True, help="folder to write; must not exist")
    options = parser.parse_args(arguments)
    if options.command == "rows":
        from lightning_pipe.recsys.serving.row_diff import apply_row_diff, write_row_diff  # lazy: needs pyarrow

        if options.action == "apply":
            written = apply_row_diff(options.export, options.diff, options.out)
        else:
            since = int(options.since) if re.fullmatch("[0-9]{1,18}", options.since) else options.since
            written = write_row_diff(options.checkpoint, since, options.out)
        for name, count in written.items():
            print(escape_unprintable(f"{options.out}/{name}: {count} rows"))
    elif options.command == "checkpoint":
        from lightning_pipe.checkpoints.export import export_checkpoint  # lazy: rarely needed

        if os.path.lexists(options.file) and not options.force:
            raise SetupError(f"FILE must be a new file, but {options.file!r} exists. Give another name, or --force.")
        export_checkpoint(options.folder, options.file, weights_only=True)
        print(escape_unprintable(f"Exported {options.folder} to {options.file}"))
    else:
        width = max(len(entry.name) for entry in STRATEGIES)
        for entry in STRATEGIES:
            print(f"{entry.name:<{width}}  {entry.description}")
