"""Ids that travel as int32: the same lookups to the bit, half the bytes, and no id that wraps to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from benchmarks.traffic import recorded_traffic
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.modules.ids_on_wire import narrow_ids, sends_int32
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import CASES as TRAINED
from tests.recsys.pipeline_cases import sharded
from tests.recsys.rewrite_cases import (
    Bags,
    Managed,
    Sequences,
    batches,
    groups,
    pipelined_losses,
    same_values,
    shard,
    table_values,
    variable_batches,
)
from tests.recsys.train_pipeline_cases import pipeline_of

MIXED = {"af0": "table_wise", "af1": "row_wise", "bf1": "data_parallel", "bf2": "column_wise"}
CASES: dict[str, tuple[Any, Any, Any]] = {
    "pooled": (Bags, lambda: batches(4), MIXED),
    "weighted": (lambda: Bags(weighted=True), lambda: batches(4, weighted=True), "row_wise"),
    "sequences": (Sequences, lambda: batches(4), "row_wise"),
    "a batch size per feature": (Bags, lambda: variable_batches(4), "table_wise"),
}
LARGEST, LEAST = torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min


# ---------------------------------------------------------------------- what an id becomes


@pytest.mark.parametrize(
    ("before", "after"),
    [(2**31, LARGEST), (2**32 + 5, LARGEST), (2**63 - 1, LARGEST), (-(2**31) - 1, LEAST), (-1, -1), (LEAST, LEAST)],
)
def test_an_id_outside_of_int32_stays_outside_of_every_table(before: int, after: int) -> None:
    for ids in (torch.tensor([0, before]), torch.tensor([0, before]).repeat(2**16)):  # at once, and in pieces
        sent = narrow_ids(ids)
        assert sent.dtype == torch.int32
        assert sent[:2].tolist() == [0, after]
        assert torch.equal(sent, sent[:2].repeat(len(ids) // 2))


# ---------------------------------------------------------------------- which modules


def table(rows: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=f"of_{rows}", embedding_dim=8, num_embeddings=rows, feature_names=["f"])


def test_a_module_sends_int32_if_no_table_of_it_has_more_rows_than_that() -> None:
    small, large = table(LARGEST), table(LARGEST + 1)
    assert sends_int32("bags", [small, small], False, "auto")
    assert not sends_int32("bags", [small, large], False, "auto")
    assert not sends_int32("bags", [small], True, "auto")  # ids of any size, not mapped to rows yet
    assert not sends_int32("bags", [small], False, "int64")
    assert sends_int32("bags", [small], False, "int32")


def test_what_cannot_be_sent_as_int32_is_named() -> None:
    with pytest.raises(SetupError, match="in sharded module 'bags' of_2147483648 has 2147483648 rows"):
        sends_int32("bags", [table(24), table(LARGEST + 1)], False, "int32")
    with pytest.raises(SetupError, match="'bags' maps ids to rows"):
        sends_int32("bags", [table(24)], True, "int32")


# ---------------------------------------------------------------------- two ranks


def trained(case: str, ids_on_wire: Any, used: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, values, and the bytes of all input dists but the first, which is recorded."""
    build, data, kinds = CASES[case]
    model = shard(build(), kinds)
    rewrite = ModelRewrite(model, ids_on_wire=ids_on_wire, **used)
    losses = pipelined_losses(rewrite, model, data())
    features = rewrite.wait_splits(rewrite.start_input_dist(data()[0]))
    rewrite.wait_inputs(features)
    with recorded_traffic() as sent:
        splits = rewrite.start_input_dist(data()[1])
        before = len(sent)
        rewrite.wait_inputs(rewrite.wait_splits(splits))
    rewrite.restore()
    return losses, table_values(model), sum(one.bytes for one in sent[before:])


def loss_of_wrong_ids(ids_on_wire: Any, validate: bool, rank: int, used: dict[str, Any]) -> float | str:
    """The loss of a batch where no id of rank 1 is in its table, or what is said of it."""
    model = shard(Bags(), "table_wise")
    rewrite = ModelRewrite(model, ids_on_wire=ids_on_wire, validate_ids=validate, **used)
    first, wrong = batches(2)
    if rank == 1:
        wrong.sparse.values()[:] = 2**32 + 1  # a row of the table, if it wrapped
    pipelined_losses(rewrite, model, [first])
    try:
        features = rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(wrong)))
        with torch.no_grad(), rewrite.using_looked_up_embeddings(rewrite.look_up_embeddings(features), wrong):
            return float(model(wrong))
    except InputError as error:
        return str(error)
    finally:
        rewrite.restore()


def refused(used: dict[str, Any]) -> str:
    try:
        ModelRewrite(shard(Managed(pooled=True), "row_wise"), ids_on_wire="int32", **used)
    except SetupError as error:
        return str(error)
    return ""


def evaluated(ids_on_wire: Any) -> int:
    """The bytes of an evaluation by a pipeline that was asked so."""
    case = TRAINED["pooled, table_wise"]
    with pipeline_of(sharded(case), "base", wire={"ids": ids_on_wire}) as pipeline, recorded_traffic() as sent:
        assert len(list(pipeline.evaluate(iter(case.data(3))))) == 3
    return sum(one.bytes for one in sent)


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    used = groups()
    return {
        "trained": {case: {asked: trained(case, asked, used) for asked in ("int64", "int32")} for case in CASES},
        "wrong": {
            (asked, validate): loss_of_wrong_ids(asked, validate, rank, used)
            for asked in ("int64", "int32")
            for validate in (False, True)
        },
        "evaluated": {asked: evaluated(asked) for asked in ("auto", "int32", "int64")},
        "refused": refused(used),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("case", CASES)
def test_ids_that_travel_as_int32_train_the_same_to_the_bit(two_ranks: list[dict[str, Any]], case: str) -> None:
    for found in two_ranks:
        (losses, values, _), (expected, exact, _) = (found["trained"][case][asked] for asked in ("int32", "int64"))
        assert losses == expected
        assert same_values(values, exact)


@pytest.mark.parametrize("case", ["pooled", "sequences"])
def test_the_input_dist_sends_half_the_bytes(two_ranks: list[dict[str, Any]], case: str) -> None:
    for found in two_ranks:
        half, full = (found["trained"][case][asked][2] for asked in ("int32", "int64"))
        print(f"{case}: {full} bytes as int64, {half} as int32")
        assert 0 < full == 2 * half


def test_an_evaluation_sends_ids_as_its_pipeline_was_asked_to(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        sent = found["evaluated"]
        assert sent["auto"] == sent["int32"] < sent["int64"]


def test_an_id_without_a_row_is_looked_up_as_if_it_had_travelled_as_int64(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert isinstance(found["wrong"]["int32", False], float)
        assert found["wrong"]["int32", False] == found["wrong"]["int64", False]


def test_where_ids_are_validated_every_rank_says_which_has_no_row(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        for asked in ("int32", "int64"):
            assert "rank 1: feature 'f0' has the id 4294967297, but ids must be" in found["wrong"][asked, True]


def test_a_module_whose_ids_are_mapped_where_they_arrive_is_refused_by_name(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert "sharded module 'a' maps ids to rows after they are sent" in found["refused"]
