"""The ``lightning-pipe llm`` commands, which estimate the needs of a pipeline-parallel configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Group
from rich.text import Text

from lightning_pipe.cli.training import PipelineCLI, count
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.fitted_table import FittedTable, print_report
from lightning_pipe.engine.common.quantities import parse_size
from lightning_pipe.llm.choice.schedule_choice import SchedulePrediction
from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
from lightning_pipe.strategies.language_model.choice_report import named, size, unit_of
from lightning_pipe.strategies.language_model.example_batch import example_batch
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_estimate import (
    Refused,
    StageEstimate,
    estimate_stages,
    precision_plugin,
)
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy, checked_module

_ESTIMATE = """\
Estimate whether a configuration with an LLMPipelineStrategy fits the memory of its ranks, and how large its bubble is,
without training, starting processes or allocating the model. Bytes are determined by running the layers on meta
tensors. The bubble assumes ranks of equal speed in floating-point operations per second. The data module is set up to
find the size of a batch, unless --rows and --length are given. All other options are those of 'lightning-pipe fit'.
"""


def main(arguments: list[str], train: Callable[[list[str], Callable[..., PipelineCLI]], None]) -> None:
    """Run ``lightning-pipe llm``."""
    parser = argparse.ArgumentParser(prog="lightning-pipe llm", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    estimate = commands.add_parser(
        "estimate",
        usage="lightning-pipe llm estimate --config FILE [--memory SIZE] [--compare] [--OPTION VALUE ...]",
        help="estimate memory per rank and bubble of a configuration",
        description=_ESTIMATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    estimate.add_argument("--memory", metavar="SIZE", help="memory of each rank's device, such as 80GB or 512MiB")
    estimate.add_argument("--compare", action="store_true", help="also show the other schedules")
    estimate.add_argument(
        "--rows",
        type=count,
        help="number of rows of a pipeline's batch, over all its micro-batches; default: from the data",
    )
    estimate.add_argument("--length", type=count, help="sequence length in tokens; default: from the data")
    options, others = parser.parse_known_args(arguments)
    memory = None if options.memory is None else parse_size(options.memory)
    made: list[_EstimateCLI] = []

    def cli(**kwargs: Any) -> _EstimateCLI:
        made.append(_EstimateCLI(**kwargs))
        return made[-1]

    train(["fit", *others], cli)
    found = made[0].estimate(options.rows, options.length, options.compare)
    print_report(estimate_table(found, memory))


class _EstimateCLI(PipelineCLI):
    """CLI that creates model, data and strategy of a configuration, but no trainer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(save_config_callback=None, **kwargs)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)  # type: ignore[arg-type]  # Lightning's version warns about sys.argv
        self.config.fit.trainer.logger, self.config.fit.trainer.callbacks = False, None  # they may open files

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def estimate(self, rows: int | None, length: int | None, compare: bool) -> StageEstimate:
        """Estimate of the configuration."""
        trainer = self._get(self.config_init, "trainer", default={})
        strategy, module = _strategy(trainer["strategy"]), checked_module(self.model, fitting=False)
        precision = precision_plugin(trainer.get("precision"))
        batch = self._batch(module, rows, length)
        return estimate_stages(strategy, module, batch, _world_size(trainer), precision, all_schedules=compare)

    def _batch(self, module: PipelineModule, rows: int | None, length: int | None) -> Any:
        if rows is not None and length is not None:
            tokens = torch.zeros(rows, length, dtype=torch.long)
            return {"input_ids": tokens, "labels": tokens}
        if length is not None:
            raise SetupError(
                f"--length needs --rows, got --length {length} alone. Give both, or neither to use the data's values."
            )
        data = self.datamodule
        if data is None:
            return example_batch(module, module.train_dataloader(), rows)
        data.prepare_data()
        data.setup("fit")
        return example_batch(module, data.train_dataloader(), rows)


def _strategy(given: Any) -> LLMPipelineStrategy:
    if isinstance(given, str) and given in StrategyRegistry:
        given = StrategyRegistry.get(given)
    if isinstance(given, AutoLLMPipelineStrategy):
        raise SetupError(
            "llm_auto_pipeline cannot be estimated, because it chooses its schedule when training begins. Give a"
            " strategy with a schedule: --trainer.strategy llm_1f1b_pipeline --compare"
        )
    if not isinstance(given, LLMPipelineStrategy):
        raise SetupError(
            "The strategy must be an LLMPipelineStrategy, got"
            f" {given if isinstance(given, str) else type(given).__name__}. Give its class, or the name of an llm_*"
            " strategy such as llm_1f1b_pipeline."
        )
    return given


def _world_size(trainer: Any) -> int:
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        named = [one for one in devices.split(",") if one]
        devices = named if "," in devices else int(devices) if devices.isdecimal() else devices
    count = len(devices) if isinstance(devices, (list, tuple)) else devices
    if not isinstance(count, int) or count < 1:
        raise SetupError(
            f"trainer.devices must be a number, got {devices!r}, which is resolved only on the machine that trains."
            " Give the number of devices: --trainer.devices 8"
        )
    return count * int(nodes)


# ---------------------------------------------------------------------- output


def estimate_table(found: StageEstimate, memory: int | None) -> Group:
    """Text form of an estimate, with one row for each rank and one for each schedule that it is compared with."""
    ours = found.configured
    unit, factor = unit_of([ours.peak])
    ranks = _table("rank", "params", "grads", "optimizer", "buffers", "messages", "activations", "all", memory=memory)
    for rank, one in enumerate(ours.memory):
        parts = (one.parameters, one.gradients, one.optimizer, one.buffers, one.messages, one.activations, one.total)
        ranks.add_row(str(rank), *(f"{part / factor:.1f}" for part in parts), *_share(one.total, memory))
    title = f"{named(ours.candidate)}, each of {found.rows} x {found.length} tokens: {_verdict(ours, memory)}"
    live = ", ".join(str(one.live) for one in ours.memory)
    lines = [
        Text(f"in {unit}; micro-batches with activations in memory at a time, by rank, counted once per stage: {live}"),
        Text(f"bubble, from floating-point operations: {100 * ours.bubble:.1f} %"),
        *(Text(note) for note in found.notes),
    ]
    others = ["", _comparison(found, memory), *_refusals(found)] if found.others else []
    return Group(Text(title, style="bold"), "", ranks, "", *lines, *others)


def _comparison(found: StageEstimate, memory: int | None) -> FittedTable:
    _, factor = unit_of([found.configured.peak])
    table = _table("schedule", "layers", "kept", "activations", "all", memory=memory, last="bubble")
    for one in found.others:
        if isinstance(one, Refused):
            table.add_row(one.schedule, "-", style="dim")
            continue
        worst = max(one.memory, key=lambda rank: rank.total)
        table.add_row(
            one.candidate.spec.name,
            "+".join(map(str, one.candidate.layers_per_stage)),
            str(worst.live),
            f"{worst.activations / factor:.1f}",
            f"{worst.total / factor:.1f}",
            *_share(worst.total, memory),
            f"{100 * one.bubble:.1f} %",
        )
    return table


def _refusals(found: StageEstimate) -> list[str | Text]:
    """Reasons for table rows without values, each once, because schedules with equally many stages share a reason."""
    schedules: dict[str, list[str]] = {}
    for one in found.others:
        if isinstance(one, Refused):
            schedules.setdefault(one.reason, []).append(one.schedule)
    return ["", *(Text(f"{', '.join(names)}: {reason}") for reason, names in schedules.items())] if schedules else []


def _table(first: str, *columns: str, memory: int | None, last: str | None = None) -> FittedTable:
    optional = [*([] if memory is None else ["share"]), *([] if last is None else [last])]
    return FittedTable.of_figures(first, *columns, *optional, edge=False)


def _share(total: int, memory: int | None) -> list[str]:
    return [] if memory is None else [f"{100 * total / memory:.0f} %{'' if total <= memory else ' !'}"]


def _verdict(one: SchedulePrediction, memory: int | None) -> str:
    if memory is None:
        return f"{size(one.peak)} on the rank that needs most"
    missing = one.peak - memory
    return f"fits {size(memory)}" if missing <= 0 else f"does not fit {size(memory)}: exceeds it by {size(missing)}"
