"""What a user may do over the rewrite, on one rank and on two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.rewrite.sharded_modules import ShardedModuleEntry
from tests.distributed import run_ranks
from tests.recsys.rewrite_cases import (
    FEATURES,
    ROWS,
    Bags,
    Batch,
    bags,
    batches,
    groups,
    pipelined_losses,
    reference_losses,
    same_values,
    sequences,
    shard,
    table_values,
    trained_values,
)


class Shift(nn.Module):
    """Post-processing without parameters: counts its calls."""

    calls = 0

    def forward(self, sparse: Any) -> Any:
        Shift.calls += 1
        return type(sparse)(
            keys=sparse.keys(), values=(sparse.values() + 1) % ROWS, lengths=sparse.lengths(), stride=sparse.stride()
        )


class Shifted(Bags):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, batch: Batch) -> torch.Tensor:
        sparse = self.shift(batch.sparse)
        a, b = self.a(sparse), self.b(batch.sparse)
        return self.head(batch, a["f0"], a["f1"], b["f2"], b["f1"])


class Twice(Bags):
    def forward(self, batch: Batch) -> torch.Tensor:
        a, b, again = self.a(batch.sparse), self.b(batch.sparse), self.a(batch.sparse)
        return self.head(batch, a["f0"], again["f1"], b["f2"], b["f1"])


class TwiceLater(Bags):
    steps = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.steps += 1
        return Twice.forward(self, batch) if self.steps > 1 else Bags.forward(self, batch)  # type: ignore[arg-type]


class Made(Bags):
    """The step makes one module's argument."""

    def forward(self, batch: Batch) -> torch.Tensor:
        made = batch.sparse.permute([1, 0, 2])
        a, b = self.a(made), self.b(batch.sparse)
        return self.head(batch, a["f0"], a["f1"], b["f2"], b["f1"])


class MadeOnOneRank(Made):
    def forward(self, batch: Batch) -> torch.Tensor:
        return Made.forward(self, batch) if dist.get_rank() == 0 else Bags.forward(self, batch)


class Partial(Bags):
    """Rank 0 has no use for one module's output; every rank's step calls both."""

    def forward(self, batch: Batch) -> torch.Tensor:
        a, b = self.a(batch.sparse), self.b(batch.sparse)
        unused = dist.get_rank() == 0
        second = (torch.zeros(4, 8), torch.zeros(4, 8)) if unused else (b["f2"], b["f1"])
        return self.head(batch, a["f0"], a["f1"], *second)


class PartialWithZeros(Bags):
    """The same with a gradient of zeros, which stock TorchRec needs in order not to hang."""

    def forward(self, batch: Batch) -> torch.Tensor:
        a, b = self.a(batch.sparse), self.b(batch.sparse)
        factor = 0.0 if dist.get_rank() == 0 else 1.0
        return self.head(batch, a["f0"], a["f1"], b["f2"] * factor, b["f1"] * factor)


class InPlace(Bags):
    def forward(self, batch: Batch) -> torch.Tensor:
        a, b = self.a(batch.sparse), self.b(batch.sparse)
        a.values().mul_(2.0)
        return self.head(batch, a["f0"], a["f1"], b["f2"], b["f1"])


class Structure(nn.Module):
    """Keeps what its modules returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = bags("a", FEATURES), sequences("b", FEATURES)
        self.seen: list[Any] = []

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled, items = self.a(batch.sparse), self.b(batch.sparse)
        self.seen.append((pooled, items))
        columns = pooled.values() * torch.arange(pooled.values().shape[1])
        return columns.sum() + sum(items[name].values().sum() for name in FEATURES)


def compare(
    build: Callable[[], nn.Module],
    used: dict[str, Any],
    plainly: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = shard((plainly or build)())
        expected = reference_losses(plain, batches(4))
        model = shard(build())
        rewrite = ModelRewrite(model, **used, **options)
        losses = pipelined_losses(rewrite, model, batches(4))
    rewrite.restore()
    return {
        "losses": losses == expected,
        "values": same_values(trained_values(model), trained_values(plain)),
        "pipelined": {name: str(arguments) for name, arguments in rewrite.pipelined.items()},
        "unpipelined": rewrite.unpipelined_reasons,
        "warnings": [str(one.message) for one in caught if "not pipelined" in str(one.message)],
    }


def behaviors(rank: int, world: int) -> dict[str, Any]:
    used = groups()
    results: dict[str, Any] = {
        "twice": compare(Twice, used),
        "twice later": compare(TwiceLater, used),
        "made": compare(Made, used),
        "in place": compare(InPlace, used),
        "shifted, record": compare(Shifted, used, method="record"),
        "direct": compare(Bags, used, method="direct"),
        "fx": compare(Bags, used, method="fx"),
    }
    Shift.calls = 0
    results["shifted"] = compare(Shifted, used)
    results["shift calls"] = Shift.calls
    if world > 1:
        results["made on one rank"] = compare(MadeOnOneRank, used)
        results["partial"] = compare(Partial, used, plainly=PartialWithZeros)
    results["structure"] = structure(used)
    results["evaluation"] = evaluation(used)
    results["scale"] = scaled(used)
    results["unused"] = unused(used)
    results["restore"] = restored(used)
    results["wrong piece"] = wrong_piece(used)
    return results


def structure(used: dict[str, Any]) -> list[Any]:
    """Types, keys and values of what the step saw, beside what the sharded and the unsharded modules return."""
    seen = []
    for batch in batches(3):
        model = shard(Structure(), "table_wise")
        with torch.no_grad():
            model(batch)  # not rewritten yet
        rewrite = ModelRewrite(model, **used, method="direct")
        pipelined_losses(rewrite, model, [batch])
        with torch.no_grad():
            model(batch)  # not served
        rewrite.restore()
        plain = Structure()
        with torch.no_grad():
            for name, table in plain.named_parameters():
                row, column = torch.arange(ROWS)[:, None], torch.arange(table.shape[1])[None, :]
                table.copy_(torch.sin(row * 1.3 + column * 0.7 + len(name)))
        plain(batch)
        served: Any = model.module
        (itself, _), (pooled, items), (evaluated, _), (expected, expected_items) = [*list(served.seen), *plain.seen]
        seen.append(type(pooled) is KeyedTensor and all(type(item) is JaggedTensor for item in items.values()))
        # Evaluated with and without the rewrite it must be the same: in TorchRec's order, whatever that is.
        seen.append(pooled.keys() == evaluated.keys() == itself.keys())
        seen.append(torch.equal(pooled.values(), itself.values()))
        seen.append(all(torch.equal(pooled[name], expected[name]) for name in FEATURES))
        seen.append(all(torch.equal(items[name].values(), expected_items[name].values()) for name in FEATURES))
    return seen


def evaluation(used: dict[str, Any]) -> dict[str, bool]:
    """Evaluates in mid-training, with a batch in flight, in every mode; training must not notice."""
    options: dict[str, Any] = {"optimizer": torchrec.optim.RowWiseAdagrad, "eps": 1e-8}
    plain = shard(Bags(), **options)
    expected = reference_losses(plain, batches(4))
    model = shard(Bags(), **options)
    rewrite = ModelRewrite(model, **used)
    data = batches(4)
    with torch.inference_mode():
        before_training = float(model(data[0]))  # as Lightning's sanity check does
    losses = pipelined_losses(rewrite, model, data[:2])
    ahead = rewrite.start_input_dist(data[2])
    steps = [int(kernel.iter_cpu) for entry in rewrite.sharded_modules.values() for kernel in find_fused_kernels(entry)]
    with torch.no_grad():
        plainly = float(model(data[0]))
    with torch.inference_mode():
        inferred = float(model(data[0]))
        ahead_too = rewrite.look_up_embeddings(
            rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(data[0])))
        )
        with rewrite.using_looked_up_embeddings(ahead_too, data[0]):
            pipelined = float(model(data[0]))
    after = [int(kernel.iter_cpu) for entry in rewrite.sharded_modules.values() for kernel in find_fused_kernels(entry)]
    embeddings = rewrite.look_up_embeddings(rewrite.wait_inputs(rewrite.wait_splits(ahead)))
    with rewrite.using_looked_up_embeddings(embeddings, data[2]):
        loss = model(data[2])
    loss.backward()
    rewrite.run_embedding_backward(embeddings)
    losses += [float(loss), *pipelined_losses(rewrite, model, data[3:])]
    return {
        "same before training": before_training == expected[0],
        "same in every mode": plainly == inferred == pipelined,
        "steps": steps == after and max(steps, default=2) == 2,
        "training": losses == expected and same_values(trained_values(model), trained_values(plain)),
    }


def scaled(used: dict[str, Any]) -> dict[str, bool]:
    """Half of every gradient is half of the learning rate; no backward is no step."""
    results = []
    for rate, scale in ((0.1, torch.tensor(0.5)), (0.1, 0.5), (0.05, None)):
        model = shard(Bags(), lr=rate)
        rewrite = ModelRewrite(model, **used, method="direct")
        (batch,) = batches(1)
        embeddings = rewrite.look_up_embeddings(
            rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(batch)))
        )
        with rewrite.using_looked_up_embeddings(embeddings, batch):
            loss = model(batch)
        loss.backward()
        assert len(embeddings.gradient_tensors()) == 2
        before = table_values(model)
        rewrite.run_embedding_backward(embeddings, scale)
        assert embeddings.gradient_tensors() == []
        results.append(table_values(model))
    return {
        "same": same_values(results[0], results[2]) and same_values(results[1], results[2]),
        "stepped": not same_values(before, results[2]),
        "untouched": same_values(before, table_values(shard(Bags()))),
    }


def unused(used: dict[str, Any]) -> list[bool]:
    """Adagrad without eps makes NaN of a row at a gradient of zeros: with agreement it gets none."""
    found = []
    for agree in (True, False):
        model = shard(Bags(), optimizer=torch.optim.Adagrad, eps=0.0)
        rewrite = ModelRewrite(model, **used, method="direct")
        (batch,) = batches(1)
        embeddings = rewrite.look_up_embeddings(
            rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(batch)))
        )
        with rewrite.using_looked_up_embeddings(embeddings, batch):
            model(batch)
        rewrite.run_embedding_backward(embeddings, agree_unused=agree)
        found.append(any(bool(value.isnan().any()) for value in table_values(model).values()))
    return found


def restored(used: dict[str, Any]) -> dict[str, bool]:
    data = batches(4)
    plain = shard(Shifted())
    expected = reference_losses(plain, data)
    model = shard(Shifted())
    rewrite = ModelRewrite(model, **used)
    losses = pipelined_losses(rewrite, model, data[:2])
    ahead = rewrite.start_input_dist(data[2])
    refused = ""
    try:
        ModelRewrite(model, **used)
    except SetupError as error:
        refused = str(error)
    rewrite.detach()
    clean = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    for module in rewrite.sharded_modules.values():
        for child in module.modules():
            clean += ["dist" for part in getattr(child, "_input_dists", ()) if "forward" in part._dist.__dict__]
    with torch.no_grad():
        model(data[0])
    rewrite.attach()
    embeddings = rewrite.look_up_embeddings(rewrite.wait_inputs(rewrite.wait_splits(ahead)))
    with rewrite.using_looked_up_embeddings(embeddings, data[2]):
        loss = model(data[2])
    loss.backward()
    rewrite.run_embedding_backward(embeddings)
    losses.append(float(loss))
    rewrite.restore()
    again = ModelRewrite(model, **used)
    losses += pipelined_losses(again, model, data[3:])
    return {
        "refused": "replaced already" in refused,
        "clean": clean == [],
        "training": losses == expected and same_values(trained_values(model), trained_values(plain)),
    }


def wrong_piece(used: dict[str, Any]) -> str:
    model = shard(Bags())
    rewrite = ModelRewrite(model, **used, method="direct")
    first, second = batches(2)
    embeddings = rewrite.look_up_embeddings(rewrite.wait_inputs(rewrite.wait_splits(rewrite.start_input_dist(first))))
    try:
        with rewrite.using_looked_up_embeddings(embeddings, first):
            model(second)
    except InputError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module", params=[1, 2])
def behavior(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(behaviors, request.param)


def both(results: list[dict[str, Any]], name: str) -> None:
    for of_rank in results:
        assert of_rank[name]["losses"], name
        assert of_rank[name]["values"], name


def test_a_module_called_twice_in_the_first_step_runs_unpipelined(behavior: list[dict[str, Any]]) -> None:
    both(behavior, "twice")
    assert behavior[0]["twice"]["pipelined"] == {"b": "batch.sparse"}
    assert behavior[0]["twice"]["unpipelined"] == {"a": "was called 2 times in the first step"}
    assert behavior[0]["twice"]["warnings"] == [
        "These sharded modules are not pipelined and do all their work inside the step: 'a' was called 2 times in the"
        " first step"
    ]
    assert [of_rank["twice"]["warnings"] for of_rank in behavior[1:]] == [[]] * (len(behavior) - 1)


def test_a_second_call_in_a_later_step_looks_up_anew(behavior: list[dict[str, Any]]) -> None:
    both(behavior, "twice later")
    assert behavior[0]["twice later"]["unpipelined"] == {}


def test_a_module_whose_argument_the_step_makes_runs_unpipelined(behavior: list[dict[str, Any]]) -> None:
    both(behavior, "made")
    reason = behavior[0]["made"]["unpipelined"]["a"]
    assert "is not an object of the batch: the step made it, by call_" in reason
    assert reason.count("its argument") == 1, "the same is said twice"
    assert behavior[0]["made"]["warnings"][0].count("its argument") == 1
    assert behavior[0]["made"]["pipelined"] == {"b": "batch.sparse"}


def test_a_module_fed_otherwise_on_one_rank_runs_unpipelined_on_all(behavior: list[dict[str, Any]]) -> None:
    if len(behavior) == 1:
        pytest.skip("needs two ranks")
    both(behavior, "made on one rank")
    for of_rank in behavior:
        assert list(of_rank["made on one rank"]["pipelined"]) == ["b"]
        assert of_rank["made on one rank"]["unpipelined"]["a"].endswith("(rank 0)")


def test_an_output_unused_on_one_rank_sends_zeros_and_no_rank_waits(behavior: list[dict[str, Any]]) -> None:
    if len(behavior) == 1:
        pytest.skip("needs two ranks")
    both(behavior, "partial")


def test_changes_in_place_of_an_output_train_as_without_a_rewrite(behavior: list[dict[str, Any]]) -> None:
    both(behavior, "in place")


def test_direct_and_fx_train_from_the_first_batch_on_as_recording_does(behavior: list[dict[str, Any]]) -> None:
    for method in ("direct", "fx"):
        both(behavior, method)
        assert behavior[0][method]["pipelined"] == {"a": "batch.sparse", "b": "batch.sparse"}


def test_post_processing_runs_ahead_once_for_a_batch(behavior: list[dict[str, Any]]) -> None:
    both(behavior, "shifted")
    assert behavior[0]["shifted"]["pipelined"] == {"a": "shift(batch.sparse)", "b": "batch.sparse"}
    assert behavior[0]["shift calls"] == 4 + 4, "four batches each, plain and pipelined"
    both(behavior, "shifted, record")
    assert list(behavior[0]["shifted, record"]["pipelined"]) == ["b"]


def test_outputs_are_what_the_modules_return_without_the_rewrite(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert all(of_rank["structure"])


def test_evaluation_in_mid_training_leaves_no_trace(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert of_rank["evaluation"] == dict.fromkeys(of_rank["evaluation"], True)


def test_a_scale_multiplies_gradients_and_without_backward_nothing_steps(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert of_rank["scale"] == {"same": True, "stepped": True, "untouched": True}


def test_a_module_that_no_rank_used_can_be_left_out_of_backward(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert of_rank["unused"] == [False, True]


def test_what_is_replaced_is_put_back_and_can_be_replaced_again(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert of_rank["restore"] == {"refused": True, "clean": True, "training": True}


def test_another_piece_than_was_distributed_is_an_error_that_names_the_module(behavior: list[dict[str, Any]]) -> None:
    for of_rank in behavior:
        assert "'a' must be called with the objects that were distributed for it" in of_rank["wrong piece"]
        assert "batch.sparse" in of_rank["wrong piece"]


def test_a_model_without_sharded_modules_and_a_tower_are_refused() -> None:
    class Tower(ShardedEmbeddingTower):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(SetupError, match="Linear must hold a sharded module"):
        ModelRewrite(nn.Linear(1, 1))
    with pytest.raises(SetupError, match="'0' is a Tower, whose interaction layers"):
        ModelRewrite(nn.Sequential(Tower()))


# Tables with a cache of rows on a GPU. Only there do kernels have one, so it is put in by hand.


class Prefetches:
    """Calls of a sharded module's ``prefetch``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefetch_pipeline: bool, has_cache: bool = True) -> None:
        self.count = 0
        module: Any = shard(Bags()).module.a
        (kernel,) = find_fused_kernels(module)
        kernel.prefetch_pipeline = prefetch_pipeline
        if has_cache:
            kernel.lxu_cache_weights = torch.ones(2, 8)

        def prefetch(_: Any, **arguments: Any) -> None:
            self.count += 1

        monkeypatch.setattr(type(module), "prefetch", prefetch)
        monkeypatch.setattr(ShardedModuleEntry, "device", torch.device("cuda"))
        self.entry = ShardedModuleEntry("a", module, False, "auto")

    def called(self, splits_backward: bool = False) -> int:
        self.entry.prefetch(None, None, None, splits_backward)
        return self.count


@pytest.mark.usefixtures("one_rank")
def test_rows_are_prefetched_only_into_a_cache_that_keeps_those_of_batches_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Prefetches(monkeypatch, prefetch_pipeline=True).called() == 1
    assert Prefetches(monkeypatch, prefetch_pipeline=False).called() == 0
    assert Prefetches(monkeypatch, prefetch_pipeline=False, has_cache=False).called() == 1


@pytest.mark.usefixtures("one_rank")
def test_the_lookup_loads_cached_rows_if_the_backward_stops_before_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Prefetches(monkeypatch, prefetch_pipeline=True).called(splits_backward=True) == 0
    assert Prefetches(monkeypatch, prefetch_pipeline=True, has_cache=False).called(splits_backward=True) == 1
