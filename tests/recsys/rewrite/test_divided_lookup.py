"""Lookups in two parts: random batches train to the bits of the serial plan, whatever share of rows waits."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import TrainPipeline, shard_model
from lightning_pipe.recsys.rewrite.divided_lookup import NewestBatchRows, RowDivision
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import adam, difference, grouped, same_outputs, train, values_of
from tests.recsys.sharding_cases import ADAGRAD, CPU, ROW_WISE_ADAGRAD, SGD

OPTIMIZERS = {"SGD": SGD, "Adagrad": ADAGRAD, "row-wise Adagrad": ROW_WISE_ADAGRAD}
KINDS = ("table_wise", "row_wise", "column_wise")
FEATURES = ("user", "friend", "item", "past")
STEPS = 7


@dataclass
class Batch:
    sparse: KeyedJaggedTensor
    weighted: KeyedJaggedTensor
    label: Tensor


class Towers(nn.Module):
    """Sequences and pooled tables, with and without weights, of several widths; one table has two features."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(2)

        def bags(name: str, width: int, features: list[str], pooling: PoolingType) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(
                name=name, embedding_dim=width, num_embeddings=rows, feature_names=features, pooling=pooling
            )

        self.pooled = EmbeddingBagCollection(
            tables=[
                bags("people", 8, ["user", "friend"], PoolingType.MEAN),
                bags("things", 16, ["item"], PoolingType.SUM),
            ]
        )
        self.tagged = EmbeddingBagCollection(tables=[bags("tags", 8, ["tag"], PoolingType.SUM)], is_weighted=True)
        self.history = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name="seen", embedding_dim=8, num_embeddings=rows, feature_names=["past", "item"]),
                EmbeddingConfig(name="met", embedding_dim=8, num_embeddings=rows, feature_names=["friend"]),
            ]
        )
        self.layer = nn.Linear(8 + 8 + 16 + 8 + 24, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts = self.history(batch.sparse)
        sums = [torch.stack([row.sum(0) for row in parts[name].to_dense()]) for name in ("past", "item", "friend")]
        rows = torch.cat([self.pooled(batch.sparse).values(), self.tagged(batch.weighted).values(), *sums], dim=1)
        scores = self.layer(rows)[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores.detach()


@dataclass
class Draw:
    """One random training, equal on all ranks except for the batches.

    Attributes:
        number: seed.
        kinds: sharding type of each table.
        optimizer: name in :data:`OPTIMIZERS`.
        rows: rows of each table.
        overlap: share of the ids that are drawn from those of the batch before.
        sizes: batch size of each step; the same on every rank.
        options: further arguments of the pipeline or of ``shard_model``.
    """

    number: int
    kinds: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.number)
        pooled, seen = draw.choice(KINDS), draw.choice(KINDS)
        self.kinds = {"people": pooled, "things": pooled, "tags": draw.choice(KINDS), "seen": seen, "met": seen}
        if draw.random() < 0.3:  # a module of several kinds
            self.kinds["met"] = draw.choice(KINDS)
        self.optimizer = draw.choice(list(OPTIMIZERS))
        self.rows = draw.choice((6, 24, 400))
        self.overlap = draw.choice((0.0, 0.1, 0.5, 1.0))
        self.sizes = [draw.choice((1, 4, 5)) for _ in range(STEPS)]
        self.clip = draw.random() < 0.3
        self.ids = draw.choice(("int32", "int64"))
        self.quantized = draw.choice((None, None, {"forward": "bf16", "backward": "fp16"}))
        self.dedup = draw.random() < 0.3
        self.method = draw.choice(("auto", "direct", "fx"))

    def batches(self, rank: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(100 * self.number + rank)
        made: list[Batch] = []
        for size in self.sizes:
            before = made[-1] if made else None
            made.append(
                Batch(
                    self._features(FEATURES, size, generator, before and before.sparse),
                    self._features(("tag",), size, generator, before and before.weighted, weighted=True),
                    torch.randint(0, 2, (size,), generator=generator).float(),
                )
            )
        return made

    def _features(
        self,
        keys: tuple[str, ...],
        size: int,
        generator: torch.Generator,
        before: KeyedJaggedTensor | None,
        weighted: bool = False,
    ) -> KeyedJaggedTensor:
        longest = int(torch.randint(0, 5, (1,), generator=generator))
        lengths = torch.randint(0, longest + 1, (len(keys) * size,), generator=generator)
        ids = torch.randint(0, self.rows, (int(lengths.sum()),), generator=generator)
        if before is not None and len(before.values()):
            again = before.values()[torch.randint(0, len(before.values()), ids.shape, generator=generator)]
            ids = torch.where(torch.rand(ids.shape, generator=generator) < self.overlap, again, ids)
        weights = torch.rand(ids.shape, generator=generator) if weighted else None
        return KeyedJaggedTensor(list(keys), ids, weights, lengths=lengths)

    def train(self, plan: str) -> tuple[list[Any], dict[str, Tensor]]:
        assert dist.group.WORLD is not None
        model = shard_model(
            Towers(self.rows),
            device=CPU,
            group=dist.group.WORLD,
            sparse_optimizer=OPTIMIZERS[self.optimizer],
            constraints={
                name: {"sharding_types": [kind], "min_partition": 4, "compute_kernels": ["fused"]}
                for name, kind in self.kinds.items()
            },
            quantized_comms=self.quantized,
            dedup=self.dedup,
        )
        optimizer = adam(model)
        arguments = grouped(
            {"wire": {"ids": self.ids}, "rewrite": {"method": self.method}, "max_norm": 0.5 if self.clip else None}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of modules that are not divided
            pipeline = TrainPipeline(model, optimizer, CPU, plan, **arguments)
            outputs, _ = train(pipeline, self.batches(dist.get_rank()))
        pipeline.close()
        return outputs, values_of(model, optimizer)


def compare(rank: int, world_size: int, numbers: range) -> tuple[list[str], int, int]:
    """What differs from the serial plan, and how many rows came ahead and late."""
    wrong: list[str] = []
    counts = [0, 0]

    class Counted(RowDivision):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            late = int(self.late.sum())
            counts[0] += len(self.late) - late
            counts[1] += late

    for number in numbers:
        draw = Draw(number)
        outputs, values = draw.train("serial")
        with mock.patch("lightning_pipe.recsys.rewrite.divided_lookup.RowDivision", Counted):
            found_outputs, found = draw.train("compute_ahead")
        names = difference(values, found)
        if names or not same_outputs(outputs, found_outputs):
            wrong.append(f"{vars(draw)}: {names}")
    return wrong, counts[0], counts[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_batches_train_to_the_bit_whatever_share_of_their_rows_waits(world_size: int) -> None:
    found = run_ranks(compare, world_size, range(10 * world_size, 10 * world_size + 10))
    assert [wrong for wrong, _, _ in found] == [[]] * world_size
    assert sum(ahead for _, ahead, _ in found) > 1000
    assert sum(late for _, _, late in found) > 1000


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_random_batches_do(world_size: int) -> None:
    found = run_ranks(compare, world_size, range(1000 * world_size, 1000 * world_size + 60))
    assert [wrong for wrong, _, _ in found] == [[]] * world_size


def without_late_rows(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a training is the serial one if no row waits, with and without rows in common of successive batches."""
    same = []
    for overlap, rows in ((0.0, 100_000), (1.0, 24)):
        draw = Draw(1)
        draw.kinds = dict.fromkeys(draw.kinds, "table_wise")
        draw.overlap, draw.rows, draw.quantized = overlap, rows, None
        with mock.patch.object(NewestBatchRows, "replace", lambda _, features: torch.zeros_like(features.values()) > 0):
            _, values = draw.train("compute_ahead")
        same.append(not difference(draw.train("serial")[1], values))
    return same[0], same[1]


def test_rows_in_common_must_wait_and_others_need_not() -> None:
    assert run_ranks(without_late_rows, 2) == [(True, False)] * 2


def test_ids_in_common_are_found_per_table_and_an_id_outside_counts_as_the_first_row() -> None:
    newest = NewestBatchRows([("a", 4, 2), ("b", 3, 1)], CPU)

    def shared(ids: list[int], lengths: list[int]) -> list[bool]:
        features = KeyedJaggedTensor(["x", "y", "z"], torch.tensor(ids), lengths=torch.tensor(lengths))
        return newest.replace(features).tolist()

    assert shared([3, 1, 2], [1, 1, 1]) == [True] * 3  # the batch before is not known
    # "x" and "y" look up the same table; 2 was an id of another table.
    assert shared([1, 2, 3, 2], [2, 1, 1]) == [True, False, True, True]
    assert shared([9, 0, -1], [1, 1, 1]) == [False] * 3
    assert shared([0, 9, 0], [1, 1, 1]) == [True] * 3
    assert shared([], [0, 0, 0]) == []
    assert shared([0, 9, 0], [1, 1, 1]) == [False] * 3
