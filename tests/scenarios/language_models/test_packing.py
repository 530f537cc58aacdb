"""Packed documents train in stages as a plain loop over single documents does, and a run continues within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pipe.llm.batches.packing import PackedDocuments, split_packed_batch_by_row
from tests.distributed import run_ranks
from tests.strategies.llm_cases import MAX_LENGTH, SEED, VOCABULARY, Tiny, TinyHF, fit, hf_config, llm, trainer

STEPS, ROWS = 3, 4
# Float32 and four small layers: losses of about 3 differ by less than 1e-6 where only the order of sums does.
WITHIN = 1e-5


def documents(count: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, MAX_LENGTH + 1, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


def batches(method: str) -> list[dict[str, Tensor]]:
    return list(PackedDocuments(documents(), MAX_LENGTH, ROWS, method=method))[:STEPS]


class Own(Tiny):
    """A model in plain PyTorch, whose forward takes the boundaries of documents once."""

    def model_inputs(self, micro_batch: Any) -> Any:
        arguments, keywords = super().model_inputs(micro_batch)
        return arguments, {key: value for key, value in keywords.items() if not key.endswith("_k")}


def module_of(model: str) -> Any:
    return Own() if model == "own" else TinyHF(hf_config(model))


def plain_losses(model: str, method: str) -> list[float]:
    """Losses of a loop over the documents of each batch, one by one and without pads."""
    torch.manual_seed(SEED)
    module = module_of(model)
    module.configure_model()
    optimizer: Any = module.configure_optimizers()
    losses = []
    for batch in batches(method):
        total, tokens = 0.0, 0
        optimizer.zero_grad()
        for row in split_packed_batch_by_row(batch):
            cuts = row["cu_seq_lens_q"].diff().tolist()
            for ids, labels in zip(row["input_ids"].split(cuts, 1), row["labels"].split(cuts, 1), strict=True):
                one = {"input_ids": ids, "labels": labels}
                loss = module.summed_loss(module._compute_unsplit_output(one), one)
                loss.backward()
                total, tokens = total + loss.item(), tokens + int((labels != -100).sum())
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= tokens
        optimizer.step()
        losses.append(total / tokens)
    return losses


def with_boundaries(batch: dict[str, Tensor], together: bool) -> dict[str, Any]:
    """A batch with the boundaries of the documents in each row, or in all rows together."""
    rows = split_packed_batch_by_row(batch)
    ends: Any = [row["cu_seq_lens_q"] for row in rows]
    if together:
        starts = [ends_of_row[:-1] + number * MAX_LENGTH for number, ends_of_row in enumerate(ends)]
        ends = torch.cat([*starts, torch.tensor([ROWS * MAX_LENGTH], dtype=torch.int32)])
    longest = max(row["max_length_q"] for row in rows)
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return batch | boundaries


# How a loader tells where documents begin.
FORMS = {
    "positions": lambda batch: batch,
    "a list of rows": split_packed_batch_by_row,
    "boundaries by row": lambda batch: with_boundaries(batch, together=False),
    "boundaries together": lambda batch: with_boundaries(batch, together=True),
}


def trained(rank: int, world: int, model: str, method: str, schedule: str, form: str) -> list[float]:
    torch.manual_seed(SEED)
    module = module_of(model)
    data = [FORMS[form](batch) for batch in batches(method)]
    fit(module, "auto" if schedule == "auto" else llm(schedule, 2 if form == "positions" else ROWS), data)
    losses: list[float] = module.losses
    return losses


@pytest.mark.parametrize(
    ("model", "method", "schedule", "form"),
    [
        ("own", "best_fit", "zbv_zero_bubble", "a list of rows"),
        ("own", "best_fit", "1f1b", "boundaries by row"),
        ("llama", "sequential", "zbv_zero_bubble", "positions"),
        ("qwen3", "best_fit", "1f1b", "positions"),
        ("qwen3", "sequential", "gpipe", "boundaries together"),
    ],
)
def test_packed_documents_train_as_single_ones(model: str, method: str, schedule: str, form: str) -> None:
    expected = plain_losses(model, method)
    for losses in run_ranks(trained, 2, model, method, schedule, form):
        assert losses == pytest.approx(expected, abs=WITHIN)


@pytest.mark.parametrize(
    ("model", "form"),
    [("llama", form) for form in FORMS]
    + [("own", form) for form in FORMS if form != "positions"],  # from which it reads no documents
)
def test_one_device_trains_every_form_of_packed_documents_as_single_ones(model: str, form: str) -> None:
    assert trained(0, 1, model, "best_fit", "auto", form) == pytest.approx(plain_losses(model, "best_fit"), abs=WITHIN)


# ---------------------------------------------------------------------- resumption


class Packed(TinyHF):
    """Notes its batches, which its rank reads."""

    def __init__(self, workers: int) -> None:
        super().__init__(hf_config("llama", layers=1))
        self.workers, self.seen = workers, list[list[int]]()

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        share = strategy.distributed_sampler_kwargs
        data = PackedDocuments(
            documents(), MAX_LENGTH, 2, seed=1, window=16, rank=share["rank"], num_replicas=share["num_replicas"]
        )
        return StatefulDataLoader(data, batch_size=None, num_workers=self.workers, persistent_workers=self.workers > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch["input_ids"].flatten().tolist())
        return super().training_step(batch, batch_idx)


def runs(rank: int, world: int, workers: int, folder: Path) -> dict[int, Any]:
    """What is seen by a run of two epochs (0), and by runs from its checkpoints, by their steps."""
    found: dict[int, Any] = {}
    every = 3
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1, enable_version_counter=False)
    steps = [0]
    for step in steps:
        module = Packed(workers)
        callbacks = [] if step else [saves]
        used = trainer(
            llm("gpipe", 2, pp=1, dp_replicate=world), max_epochs=2, callbacks=callbacks, enable_checkpointing=step == 0
        )
        torch.manual_seed(SEED)
        used.fit(module, ckpt_path=folder / f"step={step}.ckpt" if step else None)
        found[step] = list(zip(module.seen, module.losses, strict=True))
        if step == 0:
            steps += range(every, used.global_step, every)
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_continues_within_an_epoch_to_the_bit(workers: int, tmp_path: Path) -> None:
    epochs: list[list[int]] = [[], []]
    for found in run_ranks(runs, 2, workers, tmp_path):
        whole = found.pop(0)
        assert len(found) >= 2
        for step, seen in found.items():
            assert seen == whole[step:], step
        half = len(whole) // 2
        for epoch, part in zip(epochs, (whole[:half], whole[half:]), strict=True):
            epoch += [token for ids, _ in part for token in ids if token]
    expected = [token for document in documents() for token in document if token]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
