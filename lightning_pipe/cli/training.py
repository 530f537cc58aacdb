"""Lightning's CLI with readable messages for errors of this project's classes."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_pipe.engine import PipelineError, SetupError
from lightning_pipe.environment import import_torchrec
from lightning_pipe.strategies.registry import STRATEGIES


class PipelineArgumentParser(LightningArgumentParser):
    """Lightning's parser, whose errors explain how to pass options to a strategy."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if "trainer.strategy" in message and "NestedArg" in message:
            message += (
                "\nA strategy given by name accepts no options. Give its class and then its options:"
                " --trainer.strategy lightning_pipe.strategies.RecsysPipelineStrategy --trainer.strategy.plan base"
            )
        if re.search("No module named '(torchrec|fbgemm_gpu)", message):
            import_torchrec()  # raises an error that says which versions fit
        super().error(message, ex)


class PipelineCLI(LightningCLI):
    """LightningCLI that passes on errors raised by strategies, models, data modules and callbacks unchanged."""

    _refusal: PipelineError | None = None

    def before_instantiate_classes(self) -> None:
        # Modules are made by Lightning's instantiators, which take precedence and record hyperparameters.
        self.parser.add_instantiator(self._instantiate_class, object)

    def _instantiate_class(self, kind: type[Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind(*args, **kwargs)
        except PipelineError as error:
            self._refusal = error
            raise

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            refusal = error.__cause__ if isinstance(error.__cause__, PipelineError) else self._refusal
            if refusal is None:
                raise
            # jsonargparse tried other types too, and reports their messages together with this one.
            raise refusal from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:  # the arguments have valid types, but a value is invalid
            hint = self._strategies_hint() if "strategy" in str(error) else ""
            raise SetupError(f"The configuration of trainer is invalid: {error}{hint}") from error

    def _strategies_hint(self) -> str:
        hint = "\n'lightning-pipe strategies' lists this project's strategies."
        strategy = self.config_init[self.subcommand].trainer.strategy if self.subcommand else None
        names = [entry.name for entry in STRATEGIES]
        close = get_close_matches(strategy, names, n=1) if isinstance(strategy, str) else []
        return f"{hint} Did you mean {close[0]}?" if close else hint


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
