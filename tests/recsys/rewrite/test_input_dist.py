"""The fused input dist, and one rank's bad batch as every rank's error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.rewrite.sharded_modules import sum_lengths_on_host
from tests.distributed import run_ranks
from tests.recsys.rewrite_cases import (
    Bags,
    Batch,
    batches,
    pipelined_losses,
    reference_losses,
    same_values,
    shard,
    table_values,
    trained_values,
    variable_batches,
)


def raised(action: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        action(*args, **kwargs)
    except (InputError, SetupError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def start_and_wait(rewrite: ModelRewrite, batch: Any) -> None:
    rewrite.wait_splits(rewrite.start_input_dist(batch))


def with_features(batch: Batch, sparse: Any) -> Batch:
    return Batch(batch.dense, sparse, batch.label)


def without_key(batch: Batch) -> Batch:
    return with_features(batch, batch.sparse.permute([0, 1]))


def with_large_id(batch: Batch) -> Batch:
    batch.sparse.values()[0] = 1000
    return batch


def with_trained_weights(batch: Batch) -> Batch:
    sparse = batch.sparse
    weights = torch.ones(sparse.values().numel(), requires_grad=True)
    return with_features(batch, KeyedJaggedTensor(sparse.keys(), sparse.values(), weights, lengths=sparse.lengths()))


def without_features(batch: Batch) -> Batch:
    return with_features(batch, None)


BAD = {
    "missing key": without_key,
    "id beyond its table": with_large_id,
    "trained weights": with_trained_weights,
    "no features": without_features,
}


def bad_batches(rank: int, world: int) -> dict[str, Any]:
    """The third of five batches is bad on the last rank; the other four train as if it had not been there."""
    used: dict[str, Any] = {"input_group": dist.new_group(), "agree_group": dist.new_group()}
    good = batches(5)
    plain = shard(Bags())
    expected = reference_losses(plain, [*good[:2], *good[3:]])
    results: dict[str, Any] = {}
    for name, spoil in BAD.items():
        model = shard(Bags())
        rewrite = ModelRewrite(model, **used, validate_ids=True)
        data = batches(5)
        losses = pipelined_losses(rewrite, model, data[:2])
        bad = spoil(data[2]) if rank == world - 1 else data[2]
        results[name] = raised(start_and_wait, rewrite, bad)
        losses += pipelined_losses(rewrite, model, data[3:])
        results[f"{name}, afterwards"] = losses == expected and same_values(
            trained_values(model), trained_values(plain)
        )
        rewrite.restore()
    results.update(bad_first_batches(rank, world, used))
    results["inline"] = inline(rank, world, used)
    return results


def bad_first_batches(rank: int, world: int, used: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for method in ("auto", "record", "direct", "fx"):
        rewrite = ModelRewrite(shard(Bags()), **used, method=method)
        nothing = {"dense": torch.zeros(2, 3)}
        results[f"first batch, {method}"] = raised(rewrite.start_input_dist, nothing)
        if world > 1:
            (batch,) = batches(1)
            other = without_key(batch) if rank == 1 else batch
            results[f"forms, {method}"] = raised(rewrite.start_input_dist, other)
    model = shard(Bags())
    rewrite = ModelRewrite(model, **used, method="direct", validate_ids=True)
    (batch,) = batches(1)
    bad = with_large_id(batch) if rank == world - 1 else batch
    results["first ids, direct"] = raised(rewrite.start_input_dist, bad)
    rows = shard(Bags(), "row_wise")
    over_rows = ModelRewrite(rows, **used, method="direct")
    results["variable sizes over rows"] = raised(pipelined_losses, over_rows, rows, variable_batches(1))
    return results


def recorded_step(rewrite: ModelRewrite, model: nn.Module, batch: Any) -> None:
    with rewrite.recording(batch):
        model(batch)


def inline(rank: int, world: int, used: dict[str, Any]) -> list[str]:
    """A bad batch in evaluation and in the recorded first step, where modules do all their work at once."""
    model = shard(Bags())
    rewrite = ModelRewrite(model, **used, validate_ids=True)
    found = []
    for train in (False, True):
        (batch,) = batches(1)
        bad = with_large_id(batch) if rank == world - 1 else batch
        if train:
            found.append(raised(recorded_step, rewrite, model, bad))
        else:
            with torch.no_grad():
                found.append(raised(model, bad))
    found.append(str(rewrite.is_resolved))
    return found


def fused(rank: int, world: int) -> dict[str, Any]:
    """Counts collectives by process group."""
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    input_group, agree_group = groups
    model = shard(Bags(), {"af0": "table_wise", "af1": "row_wise", "bf1": "row_wise", "bf2": "column_wise"})
    rewrite = ModelRewrite(model, input_group=input_group, agree_group=agree_group)
    data = batches(3)
    pipelined_losses(rewrite, model, data[:1])
    sent: list[tuple[str, bool]] = []
    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce

    def note_all_to_all(*args: Any, **kwargs: Any) -> Any:
        sent.append(("all_to_all", kwargs["group"] is input_group))
        return all_to_all(*args, **kwargs)

    def note_all_reduce(*args: Any, **kwargs: Any) -> Any:
        sent.append(("all_reduce", kwargs["group"] is input_group))
        return all_reduce(*args, **kwargs)

    counts: dict[str, Any] = {}
    with (
        mock.patch.object(dist, "all_to_all_single", note_all_to_all),
        mock.patch.object(dist, "all_reduce", note_all_reduce),
    ):
        splits = rewrite.start_input_dist(data[1])
        counts["start"], sent = sent.copy(), []
        requests = rewrite.wait_splits(splits)
        counts["tensors on the input group"], sent = all(on_input for _, on_input in sent) and bool(sent), []
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append(rewrite.wait_inputs(requests)))
        worker.start()
        with torch.no_grad():
            model(data[0])  # on the modules' own group, while another batch's input dist is in flight
        worker.join()
        counts["evaluation on the input group"], sent = any(on_input for _, on_input in sent), []
        embeddings = rewrite.look_up_embeddings(found[0])
        counts["lookup on the input group"] = any(on_input for _, on_input in sent)
    with rewrite.using_looked_up_embeddings(embeddings, data[1]):
        loss = model(data[1])
    loss.backward()
    rewrite.run_embedding_backward(embeddings)
    plain = shard(Bags(), {"af0": "table_wise", "af1": "row_wise", "bf1": "row_wise", "bf2": "column_wise"})
    reference_losses(plain, data[:2])
    counts["trained"] = same_values(table_values(model), table_values(plain))
    return counts


def other_ranks(rank: int, world: int) -> tuple[dict[str, str], bool]:
    """Modules sharded over both ranks, and an input group of one."""
    alone: list[Any] = [dist.new_group([0]), dist.new_group([1])]
    model, plain = shard(Bags()), shard(Bags())
    together: Any = dist.new_group()
    rewrite = ModelRewrite(model, input_group=alone[rank], agree_group=together)
    losses = pipelined_losses(rewrite, model, batches(3))
    return rewrite.unpipelined_reasons, losses == reference_losses(plain, batches(3))


@pytest.fixture(scope="module", params=[1, 2])
def errors(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(bad_batches, request.param)


EXPECTED = {
    "missing key": "'a' expected the features of its first batch, ['f0', 'f1', 'f2'], got ['f0', 'f1']: missing",
    "id beyond its table": "has the id 1000, but ids must be",
    "trained weights": "FeatureProcessedEmbeddingBagCollection",
    "no features": "'a' expected a KeyedJaggedTensor with the keys ['f0', 'f1', 'f2'], as in its first batch, got a"
    " NoneType",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_on_one_rank_is_the_same_error_on_every_rank(errors: list[dict[str, Any]], name: str) -> None:
    for of_rank in errors:
        assert of_rank[name].startswith("InputError: ")
        assert EXPECTED[name] in of_rank[name]
        if len(errors) > 1:
            assert of_rank[name].startswith("InputError: rank 1: ")
            assert of_rank[name] == errors[0][name]


@pytest.mark.parametrize("name", BAD)
def test_batches_after_a_bad_one_train_on_the_same_groups(errors: list[dict[str, Any]], name: str) -> None:
    for of_rank in errors:
        assert of_rank[f"{name}, afterwards"]


def test_a_first_batch_without_features_says_what_it_holds(errors: list[dict[str, Any]]) -> None:
    for of_rank in errors:
        for method in ("direct", "fx"):
            text = of_rank[f"first batch, {method}"]
            assert text.startswith("InputError: ")
            assert "a batch must hold a KeyedJaggedTensor for the sharded modules a, b, got a dict" in text
            assert "batch['dense'] (Tensor)" in text


def test_first_batches_that_do_not_go_together_are_an_error_before_anything_is_sent(
    errors: list[dict[str, Any]],
) -> None:
    if len(errors) == 1:
        pytest.skip("needs two ranks")
    for of_rank in errors:
        for method in ("direct", "fx"):
            text = of_rank[f"forms, {method}"]
            assert (
                "form of the KeyedJaggedTensors differs between ranks: rank 0 has 'batch.sparse' = \"keys ['f0', 'f1',"
                in text
            )
            assert "rank 1 has 'batch.sparse' = \"keys ['f0', 'f1']" in text


def test_variable_batch_sizes_over_rows_are_refused_on_gloo_by_name(errors: list[dict[str, Any]]) -> None:
    for of_rank in errors:
        if len(errors) == 1:
            assert of_rank["variable sizes over rows"] == "nothing", "one rank has nobody to exchange with"
        else:
            assert "'a' got features with a batch size per feature" in of_rank["variable sizes over rows"]
            assert "row_wise" in of_rank["variable sizes over rows"]


def test_a_bad_batch_is_every_ranks_error_in_evaluation_and_in_the_recorded_step_too(
    errors: list[dict[str, Any]],
) -> None:
    for of_rank in errors:
        evaluated, recorded, resolved = of_rank["inline"]
        assert "has the id 1000" in evaluated
        assert "has the id 1000" in recorded
        assert resolved == "False"


def test_the_splits_of_all_modules_go_in_one_all_to_all_on_the_input_group() -> None:
    for counts in run_ranks(fused, 2):
        assert counts == {
            "start": [("all_to_all", True)],
            "tensors on the input group": True,
            "evaluation on the input group": False,
            "lookup on the input group": False,
            "trained": True,
        }


def test_a_module_sharded_over_other_ranks_than_the_input_group_s_runs_unpipelined() -> None:
    for unpipelined, same in run_ranks(other_ranks, 2):
        assert unpipelined["a"] == (
            "exchanges its inputs among the ranks [0, 1], but the input group has the ranks [0] (rank 0)"
        )
        assert same


@dataclass
class Named:
    """What is asked of a sharded module."""

    name: str
    feature_names: list[str]


def test_a_copy_takes_sums_of_lengths_along_that_the_loaders_batch_does_not_keep() -> None:
    lengths = torch.tensor([1, 2, 0, 1])
    used, other = (KeyedJaggedTensor(keys, torch.arange(4), lengths=lengths) for keys in (["f", "g"], ["x", "y"]))
    stated = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=lengths, length_per_key=[3, 1])
    sharded: Any = [Named("bags", ["f", "g"])]
    with sum_lengths_on_host(sharded, {"used": used, "other": other, "stated": stated}):
        copies = [features.to(torch.device("cpu")) for features in (used, other, stated)]
    assert [copy.length_per_key_or_none() for copy in copies] == [[3, 1], None, [3, 1]]
    assert used.length_per_key_or_none() is None
    assert stated.length_per_key_or_none() == [3, 1]
    wrong = KeyedJaggedTensor(["f", "g"], torch.arange(3), lengths=lengths)
    with (
        pytest.raises(InputError, match="'bags' have 3 ids, but their lengths add up to 4"),
        sum_lengths_on_host(sharded, wrong),
    ):
        pass
    assert wrong.length_per_key_or_none() is None
