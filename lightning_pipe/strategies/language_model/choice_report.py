"""Table for a terminal with the chosen schedule and its alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from lightning_pipe.engine.common.report_table import ReportTable
from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate, SchedulePrediction
from lightning_pipe.strategies.language_model.stage_choice import StagePlanChoice

_ROWS = 8
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def choice_report(choice: StagePlanChoice) -> Group:
    """Return a report with the choice, the reason for it, and the best alternatives."""
    chosen, shown = choice.chosen, _select_schedule_predictions_to_show(choice)
    unit, factor = common_byte_unit([prediction.peak for prediction in shown])
    columns = ("schedule", "stages", "micro", "simulated", "measured", "bubble", unit)
    table = ReportTable.create_with_number_columns(*columns, edge=False)
    table.add_column("layers")
    for row in shown:
        table.add_row(*_row(row, factor), style="bold" if row is chosen else "")
    tried = [prediction for prediction in choice.predictions if prediction.measured_seconds is not None]
    simulated = len(choice.predictions) + choice.too_large
    of_those = f"{len(tried)} that ran, out of {simulated}" if tried else str(simulated)
    limit = ""
    if choice.memory_limit is not None:
        fit = f"{choice.too_large} do not fit" if choice.too_large else "all fit"
        limit = f"; {fit} into {format_bytes(choice.memory_limit)} per rank"
    explained = Text(
        "columns: stages per rank, micro-batches, simulated and measured ms per step, peak memory of the largest rank"
        f" in {unit}, layers of each stage",
        style="dim",
    )
    notes = [Text(f"  {note}") for note in choice.notes]
    title = f"{describe_candidate(chosen.candidate)}: the fastest of {of_those} simulated{limit}"
    return Group(Text(title, style="bold"), "", table, "", explained, *notes)


def _select_schedule_predictions_to_show(choice: StagePlanChoice) -> list[SchedulePrediction]:
    """Return the candidates that ran, fastest first, then the best candidate of each schedule that did not run."""
    tried = sorted(
        (entry for entry in choice.predictions if entry.measured_seconds is not None),
        key=lambda entry: entry.measured_seconds or 0.0,
    )
    names = {entry.candidate.spec.name for entry in tried}
    untried = []
    for prediction in sorted(choice.predictions, key=lambda entry: entry.seconds):
        if prediction.candidate.spec.name not in names:
            names.add(prediction.candidate.spec.name)
            untried.append(prediction)
    return [*tried, *untried][: max(_ROWS, len(tried))]


def _row(prediction: SchedulePrediction, factor: int) -> tuple[str, ...]:
    candidate = prediction.candidate
    return (
        candidate.spec.name,
        str(candidate.stages_per_rank),
        str(candidate.num_microbatches),
        f"{1e3 * prediction.seconds:.1f}",
        "" if prediction.measured_seconds is None else f"{1e3 * prediction.measured_seconds:.1f}",
        f"{100 * prediction.bubble:.0f} %",
        f"{prediction.peak / factor:.1f}",
        "+".join(map(str, candidate.layers_per_stage)),
    )


def describe_candidate(candidate: ScheduleCandidate) -> str:
    stages = f"{candidate.stages_per_rank} stage{'s' if candidate.stages_per_rank > 1 else ''} per rank"
    layers = "+".join(map(str, candidate.layers_per_stage))
    return f"{candidate.spec.name}, {stages}, {candidate.num_microbatches} micro-batches, layers {layers}"


def format_bytes(count: int) -> str:
    """Format bytes in the largest unit in which the number is at least 1."""
    return next((f"{count / factor:.1f} {unit}" for unit, factor in _UNITS if count >= factor), f"{count} B")


def common_byte_unit(counts: Sequence[int]) -> tuple[str, int]:
    """Return a common unit and its bytes for numbers in one table: the unit of the largest number."""
    return next(((unit, factor) for unit, factor in _UNITS if max(counts, default=0) >= factor), ("B", 1))
