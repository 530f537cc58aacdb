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

from lightning_pipe.cli.training import PipelineCLI, positive_int
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.quantities import parse_size
from lightning_pipe.engine.common.report_table import ReportTable, print_report
from lightning_pipe.llm.choice.schedule_choice import SchedulePrediction
from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
from lightning_pipe.strategies.language_model.choice_report import common_byte_unit, describe_candidate, format_bytes
from lightning_pipe.strategies.language_model.example_batch import example_batch
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.stage_estimate import (
    StageEstimate,
    UnsupportedScheduleReason,
    estimate_stages,
    make_precision_plugin,
)
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy, check_pipeline_module

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
        type=positive_int,
        help="number of rows of a pipeline's batch, over all its micro-batches; default: from the data",
    )
    estimate.add_argument("--length", type=positive_int, help="sequence length in tokens; default: from the data")
    options, remaining_args = parser.parse_known_args(arguments)
    memory = None if options.memory is None else parse_size(options.memory)
    instances: list[_EstimateCLI] = []

    def make_estimate_cli(**kwargs: Any) -> _EstimateCLI:
        instances.append(_EstimateCLI(**kwargs))
        return instances[-1]

    train(["fit", *remaining_args], make_estimate_cli)
    result = instances[0].estimate(options.rows, options.length, options.compare)
    print_report(format_stage_estimate(result, memory))


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
        strategy, module = _resolve_llm_strategy(trainer["strategy"]), check_pipeline_module(self.model, fitting=False)
        precision = make_precision_plugin(trainer.get("precision"))
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


def _resolve_llm_strategy(strategy: Any) -> LLMPipelineStrategy:
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if isinstance(strategy, AutoLLMPipelineStrategy):
        raise SetupError(
            "llm_auto_pipeline cannot be estimated, because it chooses its schedule when training begins. Give a"
            " strategy with a schedule: --trainer.strategy llm_1f1b_pipeline --compare"
        )
    if not isinstance(strategy, LLMPipelineStrategy):
        raise SetupError(
            "The strategy must be an LLMPipelineStrategy, got"
            f" {strategy if isinstance(strategy, str) else type(strategy).__name__}. Give its class, or the name of an"
            " llm_* strategy such as llm_1f1b_pipeline."
        )
    return strategy


def _world_size(trainer: Any) -> int:
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, str) and devices not in ("auto", "-1"):
        listed = [part for part in devices.split(",") if part]
        devices = listed if "," in devices else int(devices) if devices.isdecimal() else devices
    num_devices = len(devices) if isinstance(devices, (list, tuple)) else devices
    if not isinstance(num_devices, int) or num_devices < 1:
        raise SetupError(
            f"trainer.devices must be a number, got {devices!r}, which is resolved only on the machine that trains."
            " Give the number of devices: --trainer.devices 8"
        )
    return num_devices * int(nodes)


# ---------------------------------------------------------------------- output


def format_stage_estimate(estimate: StageEstimate, memory: int | None) -> Group:
    """Text form of an estimate, with one row for each rank and one for each schedule that it is compared with."""
    configured = estimate.configured
    unit, factor = common_byte_unit([configured.peak])
    ranks = _make_empty_memory_table(
        "rank", "params", "grads", "optimizer", "buffers", "messages", "activations", "all", memory=memory
    )
    for rank, rank_memory in enumerate(configured.memory):
        parts = (
            rank_memory.parameters,
            rank_memory.gradients,
            rank_memory.optimizer,
            rank_memory.buffers,
            rank_memory.messages,
            rank_memory.activations,
            rank_memory.total,
        )
        ranks.add_row(
            str(rank),
            *(f"{part / factor:.1f}" for part in parts),
            *_format_memory_share_cells(rank_memory.total, memory),
        )
    title = (
        f"{describe_candidate(configured.candidate)}, each of {estimate.rows} x {estimate.length} tokens:"
        f" {_describe_memory_fit(configured, memory)}"
    )
    live = ", ".join(str(entry.live_microbatches) for entry in configured.memory)
    lines = [
        Text(f"in {unit}; micro-batches with activations in memory at a time, by rank, counted once per stage: {live}"),
        Text(f"bubble, from floating-point operations: {100 * configured.bubble:.1f} %"),
        *(Text(note) for note in estimate.notes),
    ]
    comparison = (
        ["", _make_schedule_comparison(estimate, memory), *_format_unsupported_schedules(estimate)]
        if estimate.other_schedules
        else []
    )
    return Group(Text(title, style="bold"), "", ranks, "", *lines, *comparison)


def _make_schedule_comparison(estimate: StageEstimate, memory: int | None) -> ReportTable:
    _, factor = common_byte_unit([estimate.configured.peak])
    table = _make_empty_memory_table("schedule", "layers", "kept", "activations", "all", memory=memory, last="bubble")
    for entry in estimate.other_schedules:
        if isinstance(entry, UnsupportedScheduleReason):
            table.add_row(entry.schedule, "-", style="dim")
            continue
        worst = max(entry.memory, key=lambda rank: rank.total)
        table.add_row(
            entry.candidate.spec.name,
            "+".join(map(str, entry.candidate.layers_per_stage)),
            str(worst.live_microbatches),
            f"{worst.activations / factor:.1f}",
            f"{worst.total / factor:.1f}",
            *_format_memory_share_cells(worst.total, memory),
            f"{100 * entry.bubble:.1f} %",
        )
    return table


def _format_unsupported_schedules(estimate: StageEstimate) -> list[str | Text]:
    """Reasons for table rows without values, each once, because schedules with equally many stages share a reason."""
    schedules: dict[str, list[str]] = {}
    for entry in estimate.other_schedules:
        if isinstance(entry, UnsupportedScheduleReason):
            schedules.setdefault(entry.reason, []).append(entry.schedule)
    return ["", *(Text(f"{', '.join(names)}: {reason}") for reason, names in schedules.items())] if schedules else []


def _make_empty_memory_table(first: str, *columns: str, memory: int | None, last: str | None = None) -> ReportTable:
    optional = [*([] if memory is None else ["share"]), *([] if last is None else [last])]
    return ReportTable.create_with_number_columns(first, *columns, *optional, edge=False)


def _format_memory_share_cells(total: int, memory: int | None) -> list[str]:
    return [] if memory is None else [f"{100 * total / memory:.0f} %{'' if total <= memory else ' !'}"]


def _describe_memory_fit(prediction: SchedulePrediction, memory: int | None) -> str:
    if memory is None:
        return f"{format_bytes(prediction.peak)} on the rank that needs most"
    missing = prediction.peak - memory
    return (
        f"fits {format_bytes(memory)}"
        if missing <= 0
        else f"does not fit {format_bytes(memory)}: exceeds it by {format_bytes(missing)}"
    )
