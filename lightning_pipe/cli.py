"""The ``lightning-pipe`` command: Lightning's CLI with this project's strategies, and commands that show plans."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import lightning_pipe
from lightning_pipe.engine import PipelineError
from lightning_pipe.strategies.registry import STRATEGIES

_TRAINING = ("fit", "validate", "test", "predict")

_USAGE = f"""usage: lightning-pipe COMMAND ...

training (a LightningCLI; each takes --help)
  {{{",".join(_TRAINING)}}} --config FILE
                        model, data and trainer from YAML; trainer.strategy takes a name
                        of 'lightning-pipe strategies', or a class_path with init_args

looking
  strategies            the registered strategies, one line each
  plan show NAME        a plan as a table and a timeline (--format yaml: as YAML);
                        NAME is a strategy's, a plan's, or the path of a plan in YAML
  --version             the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name, by default that of this process.

    Returns:
        The exit status: 0, or 2 for arguments or plans that are wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given else "--help"
    if command in _TRAINING:
        run_lightning_cli(given)
        return 0
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if command == "--version":
        print(f"lightning-pipe {lightning_pipe.__version__}")
        return 0
    try:
        return _look(given)
    except PipelineError as error:
        print(f"lightning-pipe: {error}", file=sys.stderr)
        return 2


def run_lightning_cli(arguments: list[str] | None = None) -> Any:
    """Lightning's CLI, where model and data are any class named in the configuration.

    Args:
        arguments: command and options, by default those of this process.
    """
    from lightning.pytorch.cli import LightningCLI

    return LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=arguments,
    )


def _look(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lightning-pipe", usage=_USAGE.removeprefix("usage: "))
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("strategies")
    plan = commands.add_parser("plan").add_subparsers(dest="plan_command", required=True)
    show = plan.add_parser("show", prog="lightning-pipe plan show")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--format", choices=("table", "yaml"), default="table")
    options = parser.parse_args(arguments)
    if options.command == "strategies":
        width = max(len(entry.name) for entry in STRATEGIES)
        for entry in STRATEGIES:
            print(f"{entry.name:<{width}}  {entry.description}")
    else:
        print(_plan(options.name, options.format), end="")
    return 0


def _plan(name: str, form: str) -> str:
    # TorchRec is imported here, not for commands that do without it.
    from lightning_pipe.recsys.plans import recsys_plan
    from lightning_pipe.recsys.tasks import recsys_tasks

    plans = {entry.name: entry.plan for entry in STRATEGIES if entry.plan}
    plan = recsys_plan(plans.get(name, name), recsys_tasks())
    return plan.to_yaml() if form == "yaml" else f"{plan}\n"


if __name__ == "__main__":
    sys.exit(main())
