"""Tables sharded by rows and pooled by mean, beside others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.recsys.sharding_cases import shard
from tests.rounding import Reference

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
# Per case: pooling and sharding type of each table; the first two share a feature.
CASES = {
    "mean by rows beside sum and mean of whole tables": [
        (MEAN, "row_wise"),
        (SUM, "table_wise"),
        (MEAN, "table_wise"),
    ],
    "sum and mean by rows share a feature": [(SUM, "row_wise"), (MEAN, "row_wise"), (SUM, "table_wise")],
    "sum by rows shares a feature with a mean elsewhere": [
        (SUM, "row_wise"),
        (MEAN, "column_wise"),
        (MEAN, "row_wise"),
    ],
    "means only, by rows in a host": [(MEAN, "table_row_wise"), (MEAN, "row_wise"), (MEAN, "data_parallel")],
}
FEATURES = ["shared", "shared", "own"]


class Model(nn.Module):
    def __init__(self, kinds: list[tuple[PoolingType, str]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{index}",
                    embedding_dim=4 * (index + 1),
                    num_embeddings=16,
                    feature_names=[feature],
                    pooling=pooling,
                )
                for index, ((pooling, _), feature) in enumerate(zip(kinds, FEATURES, strict=True))
            ]
        )


def features(rank: int) -> KeyedJaggedTensor:
    """Two features in the other order, four samples; empty bags and long ones."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor([1, 0, 3, 5, 2, 4, 0, 1])
    return KeyedJaggedTensor(["own", "shared"], torch.randint(0, 16, (16,), generator=generator), lengths=lengths)


def constraints(kinds: list[tuple[PoolingType, str]]) -> dict[str, Any]:
    return {f"t{index}": {"sharding_types": [sharding]} for index, (_, sharding) in enumerate(kinds)}


def unsharded(rank: int, world: int, kinds: list[tuple[PoolingType, str]]) -> Reference:
    """Outputs of one rank's features, and tables after a step of the mean over all ranks."""

    def run() -> dict[str, Any]:
        model = Model(kinds)
        outputs = model.inner(features(rank))
        torch.stack([model.inner(features(other)).values().square().sum() for other in range(world)]).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()  # the rate of the test's
        return outputs.to_dict() | dict(model.named_parameters())

    return Reference.of(run)


def differences(rank: int, world: int, kinds: list[tuple[PoolingType, str]]) -> list[str]:
    """What a sharded module gives and trains that is not the unsharded one's."""
    model = Model(kinds)
    sharded = shard(model, constraints=constraints(kinds))
    outputs = model.inner(features(rank)).wait()
    outputs.values().square().sum().backward()
    sharded.step_data_parallel_tables()
    tables = {name: sharded.full_table(name) for name in sharded.tables}
    return unsharded(rank, world, kinds).differences(outputs.to_dict() | tables)


def on_ranks(rank: int, world: int) -> dict[str, list[str]]:
    return {name: differences(rank, world, kinds) for name, kinds in CASES.items()}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_and_train_what_the_unsharded_module_does(
    name: str, two_ranks: list[dict[str, list[str]]]
) -> None:
    assert [of_rank[name] for of_rank in two_ranks] == [[], []]


@pytest.mark.usefixtures("one_rank")
def test_a_batch_size_per_feature_divides_by_the_lengths_of_each_samples_own_bag() -> None:
    # All alike: FBGEMM's CPU kernels cannot write one output together, as they would have to here.
    kinds = [(MEAN, "row_wise")] * 3
    model = Model(kinds)
    plain = Model(kinds)
    shard(model, constraints=constraints(kinds))
    # "own" has two different bags for four samples, "shared" three.
    variable = KeyedJaggedTensor(
        ["own", "shared"],
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]),
        lengths=torch.tensor([2, 1, 3, 0, 2]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["own", "shared"], torch.tensor([[0, 1, 1, 0], [2, 1, 0, 0]])),
    )
    whole = KeyedJaggedTensor(
        ["own", "shared"],
        torch.tensor([1, 2, 3, 3, 1, 2, 7, 8, 4, 5, 6, 4, 5, 6]),
        lengths=torch.tensor([2, 1, 1, 2, 2, 0, 3, 3]),
    )
    expected = Reference.of(lambda: {"outputs": plain.inner(whole).values()})
    assert expected.differences({"outputs": model.inner(variable).wait().values()}) == []


@pytest.mark.usefixtures("one_rank")
def test_weighted_features_pooled_by_mean_are_refused_by_table() -> None:
    model = nn.Module()
    model.inner = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=16, feature_names=["f"], pooling=MEAN)],
        is_weighted=True,
    )
    with pytest.raises(SetupError, match=r"inner\.embedding_bags\.t\.weight.*mean.*weighted"):
        shard(model)
