"""Step time under the Trainer against a bare loop over the same PyTorch schedule, alternating in one run.

``torchrun --nproc-per-node 2 -m benchmarks.llm_step_time`` splits a small transformer into stages. For each schedule
and number of micro-batches it prints the fastest and the median step time of both, and their ratios, with the 95 %
interval of the median's ratio over rounds (aim: 1.03). The bare loop uses ``torch.distributed.pipelining`` directly:
stages with known shapes, ``schedule.step``, and the optimizer. With one rank, the figures also have the ratio to a
plain loop over the micro-batches of the unsplit model, and tokens a second. All train the same model from the same seed
on the same batches, and the benchmark fails if their losses differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.data import DataLoader

from benchmarks.figures import Figure, add_options, at_most, median_ratio, save
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.stage_module import make_stage_module
from lightning_pipe.llm.schedules.specs import count_stages_per_rank, resolve_schedule_spec, stages_of_rank
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly
from lightning_pipe.strategies import LLMPipelineStrategy, PipelineModule

VOCABULARY = 256
_TITLES = {"bare": "bare PyTorch loop", "trainer": "Trainer", "plain": "plain loop"}


class Decoder(nn.Module):
    """A causal transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def get_pp_module_config(self) -> dict[str, Any]:
        """Structure of the model, for splitting it."""
        names = {"layer_prefix": "layers", "input_fqns": ["embed"], "output_fqns": ["head"]}
        return {"num_layers": len(self.layers), **names}

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        hidden = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class Language(PipelineModule):
    """The model under a Trainer. Records the start times and losses of its batches."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.size = (width, layers)
        self.began: list[float] = []
        self.losses: list[float] = []

    def build_model(self) -> nn.Module:
        return Decoder(*self.size)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(time.perf_counter())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self.run_batch(batch)
        self.losses.append(result.loss.item())
        return result.loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches_of(options: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Random batches, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.length + 1)
    tokens = [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(options.steps + 1)]
    return [{"input_ids": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()} for batch in tokens]


def device_of(options: argparse.Namespace) -> torch.device:
    """Device of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")


def plain(name: str, micro_batches: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Step times in seconds and losses of a plain loop over the micro-batches, without a schedule."""
    device = device_of(options)
    torch.manual_seed(1)
    model = Decoder(options.width, options.layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    times, step_losses = [], []
    for batch in batches_of(options):
        start = time.perf_counter()
        optimizer.zero_grad()
        tokens, labels = (batch[key].to(device).chunk(micro_batches) for key in ("input_ids", "labels"))
        losses = []
        for piece, targets in zip(tokens, labels, strict=True):
            loss = summed_cross_entropy(model(piece), targets)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / batch["labels"].numel())
        optimizer.step()
        step_losses.append(torch.stack(losses).sum().item() / batch["labels"].numel())
        times.append(time.perf_counter() - start)
    return times[1:], step_losses


def bare(name: str, micro_batches: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Step times in seconds and losses of the bare loop."""
    spec, ranks, device = resolve_schedule_spec(name), dist.get_world_size(), device_of(options)
    count = ranks * count_stages_per_rank(spec, ranks)
    torch.manual_seed(1)
    model = Decoder(options.width, options.layers)
    config = derive_pp_module_config(model)
    names = split_layers_evenly(config, count)
    rows = options.rows // micro_batches
    tokens = torch.empty(rows, options.length, dtype=torch.long, device="meta")
    hidden = torch.empty(rows, options.length, options.width, device="meta", requires_grad=True)
    logits = torch.empty(rows, options.length, VOCABULARY, device="meta", requires_grad=True)
    stages = []
    for index in stages_of_rank(spec, dist.get_rank(), ranks):
        torch.manual_seed(1)
        part = make_stage_module(Decoder(options.width, options.layers), config, names[index], index, count).to(device)
        stages.append(
            PipelineStage(
                part,
                index,
                count,
                device,
                input_args=tokens if index == 0 else hidden,
                output_args=logits if index == count - 1 else hidden,
            )
        )
    schedule_stages: Any = stages[0] if spec.placement == "single" else stages
    make: Any = spec.schedule_class
    schedule = make(schedule_stages, micro_batches, loss_fn=summed_cross_entropy, scale_grads=False)
    parameters = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    times, step_losses = [], []
    for batch in batches_of(options):
        start = time.perf_counter()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        tokens, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        schedule.step(*([tokens] if stages[0].is_first else []), target=labels, losses=losses, return_outputs=False)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        dist.all_reduce(total)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / batch["labels"].numel())
        optimizer.step()
        step_losses.append(total.item() / batch["labels"].numel())
        times.append(time.perf_counter() - start)
    return times[1:], step_losses


def trained(name: str, micro_batches: int, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Times in seconds from the start of one batch to the start of the next, and losses, under the Trainer."""
    module = Language(options.width, options.layers)
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    strategy = LLMPipelineStrategy(name, num_microbatches=micro_batches, timeout=timedelta(minutes=5))
    trainer = pl.Trainer(accelerator=options.device, devices=dist.get_world_size(), strategy=strategy, **quiet)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(batches_of(options), batch_size=None))  # type: ignore[arg-type]
    return [later - earlier for earlier, later in pairwise(module.began[1:])], module.losses


def measure(name: str, micro_batches: int, options: argparse.Namespace) -> list[Figure]:
    """Measure all, alternating, and print the result on rank 0."""
    kinds = [("bare", bare), ("trainer", trained)] + ([("plain", plain)] if dist.get_world_size() == 1 else [])
    times: dict[str, list[list[float]]] = {kind: [] for kind, _ in kinds}
    first: list[float] = []
    for turn in range(options.rounds):
        for kind, run in kinds if turn % 2 else kinds[::-1]:
            spent, losses = run(name, micro_batches, options)
            times[kind].append(spent)
            first = first or losses
            torch.testing.assert_close(losses, first, rtol=1e-5, atol=1e-5)
    medians = {kind: [statistics.median(spent) for spent in rounds] for kind, rounds in times.items()}
    ratio, spread = median_ratio(medians["trainer"], medians["bare"])
    if dist.get_rank() == 0:
        fastest = {kind: min(map(min, rounds)) for kind, rounds in times.items()}
        middle = {kind: statistics.median(medians[kind]) for kind in medians}
        print(
            f"{name}, {micro_batches} micro-batches: bare {1e3 * fastest['bare']:.1f} / {1e3 * middle['bare']:.1f} ms,"
            f" Trainer {1e3 * fastest['trainer']:.1f} / {1e3 * middle['trainer']:.1f} ms (fastest / median); ratio"
            f" {fastest['trainer'] / fastest['bare']:.3f} / {ratio:.3f} ({spread[0]:.3f} .. {spread[1]:.3f})",
            flush=True,
        )
    where = f"{name}, m = {micro_batches}{' (cuda)' if options.device == 'cuda' else ''}"
    figures = [at_most(f"LLM step, {where} / bare PyTorch loop", ratio, 1.03, spread)]
    if "plain" in times:
        ratio, spread = median_ratio(medians["trainer"], medians["plain"])
        figures.append(Figure(f"LLM step, {where} / plain loop", ratio, "ratio", spread))
        for kind, of_rounds in medians.items():
            speeds = [options.rows * options.length / seconds for seconds in of_rounds]
            title = f"tokens of LLM steps, {where}, {_TITLES[kind]} (all rounds)"
            figures.append(Figure(title, statistics.median(speeds), "tokens/s", (min(speeds), max(speeds))))
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    for option, default in (
        ("width", 256), ("layers", 4), ("rows", 16), ("length", 128), ("steps", 8), ("rounds", 6)
    ):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    pairs = [(name, count) for count in options.micro_batches for name in options.schedules]
    figures = [figure for pair in pairs for figure in measure(*pair, options)]
    if dist.get_rank() == 0:
        save(figures, options.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
