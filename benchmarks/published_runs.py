"""Published training runs of other projects, predicted by the estimate of ``lightning-pipe llm estimate``.

``python -m benchmarks.published_runs`` prints a table for each source in ``published_runs.yaml``. It
needs no GPU and allocates no weights. Nothing is fitted: memory and operations follow from the configuration alone, and
a speed is predicted from the speed of another run of the same table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_pipe.llm.choice.schedule_choice import ScheduleCandidate, SchedulePrediction
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint, measure_footprints
from lightning_pipe.llm.measure.rank_memory import ShardCounts, estimate_memory
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.strategies import HFCausalLM, LLMPipelineStrategy
from lightning_pipe.strategies.language_model.stage_choice import get_or_derive_module_config, measure_pieces
from lightning_pipe.strategies.language_model.stage_estimate import (
    estimate_schedule_memory_and_bubble,
    make_precision_plugin,
)

DATA = Path(__file__).with_suffix(".yaml")
_WIDTH = 2  # bytes of a parameter of the measured model, in bfloat16
_PEAK = 312_000  # GFLOP/s of an A100, by which MFU is defined
_SPEEDS = ("tokens/s", "samples/s", "gain")  # proportional to speed; "seconds" are inversely


@dataclass(frozen=True)
class Run:
    """A run of a table.

    Attributes:
        options: its keys in the file, with the defaults of its table.
        model: its model's config.
        bytes_of: bytes for each parameter; None if no memory is predicted.
    """

    options: Mapping[str, Any]
    model: Mapping[str, Any]
    bytes_of: Mapping[str, Any] | None

    @property
    def ranks(self) -> int:
        """Ranks that share all tensors of a stage."""
        ranks: int = self.options.get("tp", 1) * self.options.get("cp", 1)
        return ranks

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        tokens: int = self.options["rows"] * self.options["length"]
        return tokens

    @functools.cached_property
    def footprints(self) -> ModelPieceResults[Footprint]:
        """Footprints of a micro-batch, not shared with other ranks."""
        return footprints(
            yaml.dump(self.model), *(self.options.get(option) for option in ("rows", "length", "recompute"))
        )

    @functools.cached_property
    def candidate(self) -> ScheduleCandidate:
        """Schedule, with the layers of its stages."""
        options = self.options
        layers = [count for count, stages in options.get("layers", [[self.model["layers"], 1]]) for _ in range(stages)]
        per_rank = options.get("stages", 1)
        assert len(layers) == per_rank * options.get("pp", 1) and sum(layers) == self.model["layers"]
        spec = SCHEDULES["1f1b" if per_rank == 1 else "interleaved_1f1b"]
        return ScheduleCandidate(spec, per_rank, options["microbatches"], tuple(layers))

    @functools.cached_property
    def prediction(self) -> SchedulePrediction:
        """Estimate of a step."""
        none = ModelPieceResults.map(lambda piece: 0, self.footprints)
        pieces = replace(self.footprints, layers=tuple(map(self._slowed, self.footprints.layers)))
        return estimate_schedule_memory_and_bubble(self.candidate, self.options.get("pp", 1), pieces, none)

    def _slowed(self, layer: Footprint) -> Footprint:
        """Layer whose causal attention counts ``attention`` times, as products in Float8 are faster."""
        work, factor = layer.operations, self.options.get("attention", 1)
        once = 2 * self.options["rows"] * self.options["length"] ** 2 * self.model["hidden_size"]
        more, again = (factor - 1) * once, bool(self.options.get("recompute"))
        changed = work._replace(forward=work.forward + more, backward=work.backward + (2.5 + again) * more)
        return replace(layer, operations=changed)

    @functools.cached_property
    def memory(self) -> int:
        """Bytes of the rank that needs most."""
        sizes, candidate = self.bytes_of, self.candidate
        assert sizes is not None
        layers = ModelPieceResults.map(lambda piece: self._share(piece, sizes["compute"]), self.footprints)
        ends = ModelPieceResults.map(lambda piece: self._share(piece, sizes["ends"]), self.footprints)
        size, keeps = self.options.get("pp", 1), sizes.get("messages", True)
        rank_memories = estimate_memory(
            list_compute_actions(candidate.spec, size, candidate.num_microbatches, candidate.stages_per_rank),
            candidate.layers_per_stage,
            ModelPieceResults(ends.empty, ends.input, layers.layers, ends.output),
            ModelPieceResults.map(lambda piece: self._states(piece, sizes["compute"]), self.footprints),
            sharing=ShardCounts(shard=self.options.get("shard", 1)),
            keeps_messages=keeps,
        )
        return max(rank_memory.total - (0 if keeps else rank_memory.messages) for rank_memory in rank_memories)

    def _share(self, piece: Footprint, compute: int) -> Footprint:
        """Footprint on one rank; tensors of all kinds are shared evenly, as with sequence parallelism."""
        assert self.bytes_of is not None
        names = [name for name in Footprint.__dataclass_fields__ if name != "operations"]
        count = self._parameters(piece)
        shared = {name: getattr(piece, name) // self.ranks for name in names}
        return replace(
            piece, **{**shared, "parameters": compute * count, "gradients": self.bytes_of["gradient"] * count}
        )

    def _states(self, piece: Footprint, compute: int) -> int:
        """Bytes that a rank keeps for its own share of parameters, without parameters to compute with and gradients."""
        assert self.bytes_of is not None
        each: int = self.bytes_of["own"] - self.bytes_of["gradient"] - compute
        return each * self._parameters(piece)

    def _parameters(self, piece: Footprint) -> int:
        parameters: int = piece.parameters // _WIDTH // self.options.get("tp", 1)
        return parameters

    def predict(self, figure: str, source: Run | None) -> float:
        """Predicted figure.

        Args:
            figure: name of the figure.
            source: run with the same figure, from which a speed is predicted; None for other figures.
        """
        if source is not None:
            published: float = source.options[figure]
            if figure in _SPEEDS:
                return published * self._speed / source._speed
            assert figure == "seconds"
            return published * self._step / source._step
        if figure == "bubble":
            return self.prediction.bubble
        if figure == "GFLOP/token":
            parts = [self.footprints.input, *self.footprints.layers, self.footprints.output]
            return 3e-9 * sum(part.operations.forward for part in parts if part is not None) / self.tokens
        assert figure == "GiB"
        return self.memory / 2**30

    def published(self, figure: str) -> float | None:
        """Published figure; None if there is no number."""
        if figure == "GFLOP/token" and "MFU" in self.options:
            used: float = self.options["MFU"] * _PEAK * self.options["seconds"]
            return used * self.ranks * self.options["pp"] / (self.tokens * self.options["microbatches"])
        if figure == "GFLOP/token":
            rate: float = self.options["TFLOP/s"] / self.options["tokens/s"]
            return 1000 * rate
        value: float | None = self.options[figure]
        return value

    @property
    def _step(self) -> float:
        """Operations of a rank in a step, with those it could run while it waits."""
        return self.prediction.seconds / self.ranks

    @property
    def _speed(self) -> float:
        """Tokens of a step for each operation of a rank, and for each rank."""
        return self.tokens * self.options["microbatches"] / (self._step * self.ranks * self.options.get("pp", 1))


@functools.cache
def footprints(model: str, rows: int, length: int, recompute: bool | None) -> ModelPieceResults[Footprint]:
    """Footprints of the pieces of a model, given as YAML, for one micro-batch on one rank."""
    config = yaml.safe_load(model)
    count, first = config.pop("layers"), config.get("first_k_dense_replace", 0)
    if config["model_type"] == "gpt":
        config = {
            "model_type": "gpt2",
            "vocab_size": 51200,
            "n_embd": config["hidden_size"],
            "n_head": config["heads"],
            "n_positions": length,
            "activation_function": "gelu_pytorch_tanh",
            "n_layer": 1,
            "tie_word_embeddings": False,
        }
    else:
        config |= {"num_hidden_layers": first + 1, "max_position_embeddings": length, "tie_word_embeddings": False}
    attention = "eager" if config["model_type"] == "gpt2" else None
    module, precision = (
        HFCausalLM(config, attention=attention, chunk_tokens=rows * length),
        make_precision_plugin("bf16-true"),
    )
    with precision.module_init_context(), parameters_on_meta():
        module.configure_model()
    checkpoint = {"mode": "full"} if recompute else None
    settings = LLMPipelineStrategy("gpipe", num_microbatches=1, activation_checkpoint=checkpoint).settings(1)
    tokens = torch.zeros(rows, length, dtype=torch.long)
    item = {"input_ids": tokens, "labels": tokens}
    measured = measure_pieces(
        measure_footprints, module, get_or_derive_module_config(module), settings, precision, item
    )
    last = measured.output.operations
    # The loss of HFCausalLM computes the head's product again in the backward; the published runs do not.
    output = replace(measured.output, operations=last._replace(backward=last.backward - last.forward))
    return replace(
        measured, layers=(*measured.layers[:first], *measured.layers[first:] * (count - first)), output=output
    )


def titles() -> list[str]:
    """Titles of all tables."""
    return [table["title"] for table in yaml.safe_load(DATA.read_text(encoding="utf-8"))["tables"]]


def tables(only: str = "") -> Iterator[str]:
    """Tables of predictions, in Markdown: all, or the one with this title."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    for table in data["tables"]:
        if only not in ("", table["title"]):
            continue
        runs = {
            name: Run({**table.get("defaults", {}), **run}, {}, table.get("bytes"))
            for name, run in table["runs"].items()
        }
        runs = {name: replace(run, model=data["models"][run.options["model"]]) for name, run in runs.items()}
        yield f"### {table['title']}\n"
        yield "| run | figure | published | predicted | from | error |\n| --- | --- | --- | --- | --- | --- |"
        for row in table["predictions"]:
            options = {key: value for key, value in row.items() if key not in ("run", "figure", "from")}
            changed = {name: replace(run, options={**run.options, **options}) for name, run in runs.items()}
            run, figure, source = changed[row["run"]], row["figure"], row.get("from")
            predicted, published = run.predict(figure, changed.get(source)), run.published(figure)
            error = "" if published is None else f"{100 * (predicted / published - 1):+.1f} %"
            if figure == "bubble" and published is not None:
                error = f"{100 * (predicted - published):+.1f} points"
            cell = "over 1.1" if published is None else _figure(published)
            note = "".join(f", {key}: {value}" for key, value in options.items())
            yield f"| {row['run']}{note} | {figure} | {cell} | {_figure(predicted)} | {source or ''} | {error} |"
        yield ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    print("\n".join(tables()))
