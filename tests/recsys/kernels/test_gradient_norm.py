"""Gradients of rows against what the kernels do with them, and the norm of all against the unsharded module's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.kernels.gradient_norm import clip_dense_grads_by_global_norm, row_gradients
from lightning_pipe.recsys.kernels.kernel_calls import (
    KernelCall,
    check_calls_can_be_captured,
    check_trainable_after_dense_step,
)
from lightning_pipe.recsys.modules.call_arguments import PostprocessResults
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, ModuleInputs
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.tasks.train_pipeline import TrainPipeline
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import PLANS, Case, Paired, sharded, train
from tests.recsys.rewrite_cases import Bags, Batch, Processed, Seeded, Sequences, batches, jagged, variable_batches
from tests.recsys.sharding_cases import ADAGRAD, ROW_WISE_ADAGRAD, SGD, tables_of
from tests.rounding import Reference

# ---------------------------------------------------------------------- rows


def kernel(pooling: PoolingMode, widths: list[int], features: list[int]) -> SplitTableBatchedEmbeddingBagsCodegen:
    """A fused kernel whose step subtracts the gradient."""
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(5 + table, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for table, width in enumerate(widths)],
        feature_table_map=features,
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=1.0,
        pooling_mode=pooling,
        device=torch.device("cpu"),
    )
    made.init_embedding_weights_uniform(-1.0, 1.0)
    return made


def call(made: SplitTableBatchedEmbeddingBagsCodegen, seed: int, weighted: bool, batch: int) -> KernelCall:
    """Bags of 0 to 4 ids, so that ids come again in one bag and in several."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(made.feature_table_map) * batch,), generator=generator)
    indices = torch.cat(
        [
            torch.randint(0, 5 + table, (int(lengths[feature * batch : (feature + 1) * batch].sum()),))
            for feature, table in enumerate(made.feature_table_map)
        ]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    weights = torch.rand(len(indices), generator=generator) if weighted else None
    output = made(indices, offsets, weights)
    return KernelCall(made, indices, offsets, weights, output, arguments={}, learning_rate=0.0, count=0)


@pytest.mark.parametrize(
    ("pooling", "widths", "features", "weighted"),
    [
        pytest.param(PoolingMode.SUM, [4, 4], [0, 1], True, id="weighted"),
        pytest.param(PoolingMode.SUM, [8, 4, 8], [0, 0, 1, 2], True, id="weighted, widths of several kinds"),
        pytest.param(PoolingMode.SUM, [4, 4], [0, 0, 1], False, id="two features of one table"),
        pytest.param(PoolingMode.MEAN, [8, 4, 8], [0, 0, 1, 2], False, id="widths of several kinds"),
        pytest.param(PoolingMode.NONE, [4, 4], [0, 0, 1, 1], False, id="sequences of two features of a table"),
    ],
)
def test_the_gradients_of_rows_are_what_the_kernel_steps_with(
    pooling: PoolingMode, widths: list[int], features: list[int], weighted: bool
) -> None:
    torch.manual_seed(1)
    made = kernel(pooling, widths, features)
    made_calls = [call(made, seed, weighted, batch=3 + seed) for seed in range(2)]
    gradients = [torch.randn_like(one.output) for one in made_calls]
    before = [table.clone() for table in made.split_embedding_weights()]
    found = row_gradients(list(zip(made_calls, gradients, strict=True)))
    absolute = row_gradients([(one, gradient.abs()) for one, gradient in zip(made_calls, gradients, strict=True)])
    # Of one row: so many gradients are added up, each times a weight or divided by a length.
    terms = int(torch.cat([one.indices for one in made_calls]).bincount().max()) + 1
    torch.autograd.backward([one.output for one in made_calls], gradients)
    starts = torch.tensor([0, *(len(table) for table in before)]).cumsum(0)
    for old, new, start in zip(before, made.split_embedding_weights(), starts, strict=False):
        moved, magnitude = torch.zeros_like(old), torch.zeros_like(old)
        for total, of_rows in ((moved, found), (magnitude, absolute)):
            for rows, sums in of_rows:
                if sums.shape[1] == old.shape[1]:
                    own = (rows >= start) & (rows < start + len(old))
                    total[rows[own] - start] += sums[own]
        # The kernel rounds the new value; a sum of n terms is off by n eps / 2 of their magnitude, here and there.
        within = torch.finfo(old.dtype).eps * (old.abs() + new.abs() + terms * magnitude)
        assert ((old - new - moved).abs() <= within).all()
        assert moved.any()


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_clipping_is_pytorchs_with_the_tables_as_one_more_parameter(largest: float) -> None:
    torch.manual_seed(0)
    dense, tables = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 2))
    dense.grad, tables.grad = torch.randn(3), torch.randn(4, 2)
    gradient, before = dense.grad.clone(), tables.grad.clone()

    def pytorchs() -> dict[str, Any]:
        dense.grad, tables.grad = gradient.clone(), before.clone()
        nn.utils.clip_grad_norm_([dense, tables], largest, foreach=False)
        return {"dense": dense.grad, "tables": tables.grad}

    expected = Reference.of(pytorchs)
    dense.grad = gradient.clone()
    scale = clip_dense_grads_by_global_norm([dense, nn.Parameter(torch.zeros(1))], before.norm().double(), largest)
    assert expected.differences({"dense": dense.grad, "tables": before * scale}) == []


# ---------------------------------------------------------------------- all ranks together


class Everything(Seeded):
    """Features shared by tables, a table of two features, a weighted module, sequences, means, other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=24, feature_names=["f0", "f1"]),
                EmbeddingBagConfig(
                    name="t1", embedding_dim=16, num_embeddings=24, feature_names=["f2"], pooling=PoolingType.MEAN
                ),
                EmbeddingBagConfig(name="t4", embedding_dim=4, num_embeddings=24, feature_names=["f1"]),
            ]
        )
        self.weighted = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t2", embedding_dim=8, num_embeddings=24, feature_names=["f2"])],
            is_weighted=True,
        )
        self.sequence = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t3", embedding_dim=8, num_embeddings=24, feature_names=["f2", "f0"])]
        )
        self.over = nn.Linear(3 + 44, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        plain = batch.sparse
        pooled, weighted = self.pooled(plain), self.weighted(batch.weighted)  # type: ignore[attr-defined]
        sequence = self.sequence(plain)
        lists = [sequence[name].values().sin().sum(1) for name in ("f2", "f0")]
        values = torch.cat([batch.dense, pooled.values(), weighted["f2"]], dim=1)
        # Sums over the batch, divided by its size, so that the loss of ranks is the mean of theirs.
        return self.over(values).square().mean() + sum(part.sum() for part in lists) / len(batch.dense)


def everything_batches(count: int) -> list[Any]:
    found = batches(count)
    generator = torch.Generator().manual_seed(50 + (dist.get_rank() if dist.is_initialized() else 0))
    for batch in found:
        batch.weighted = jagged(["f2"], generator, weighted=True)  # type: ignore[attr-defined]
    return found


class Half(Bags):
    """Rank 1 does not use the module ``b``, and no rank uses ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.c = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="c", embedding_dim=8, num_embeddings=24, feature_names=["f0"])]
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        self.c(batch.sparse)
        a, b = self.a(batch.sparse), self.b(batch.sparse)
        loss: torch.Tensor = a["f0"].sin().sum() / len(batch.dense)
        return loss if batch.label[0] < 0 else loss + b["f2"].sin().sum() / len(batch.dense)


def half_batches(count: int) -> list[Batch]:
    found = batches(count)
    for batch in found:
        batch.label = torch.full((4,), -1.0 if dist.get_rank() == 1 else 1.0)
    return found


class Twice(Bags):
    """Looks up twice in one step."""

    def forward(self, batch: Batch) -> torch.Tensor:
        first, second = self.a(batch.sparse), self.a(batch.sparse)
        return (first["f0"] * 2 + second["f0"].sin() + second["f1"].sin()).sum() / len(batch.dense)


@dataclass
class NormCase:
    build: Callable[[], nn.Module]
    kinds: Any = "table_wise"
    data: Callable[[int], list[Any]] = batches
    optimizer: dict[str, Any] = field(default_factory=lambda: SGD)
    agree_unused: bool = False


CASES: dict[str, NormCase] = {
    **{kind: NormCase(Bags, kind) for kind in ("table_wise", "column_wise", "table_row_wise")},
    **{
        f"mean, {kind}": NormCase(lambda: Bags(mean=True), kind)
        for kind in ("row_wise", "table_column_wise", "data_parallel")
    },
    "weighted, data_parallel": NormCase(
        lambda: Bags(weighted=True), "data_parallel", lambda count: batches(count, weighted=True), ADAGRAD
    ),
    **{
        f"sequences, {kind}": NormCase(Sequences, kind, optimizer=ROW_WISE_ADAGRAD)
        for kind in ("row_wise", "column_wise")
    },
    "everything": NormCase(
        Everything,
        {"t0": "column_wise", "t1": "table_wise", "t2": "data_parallel", "t3": "row_wise", "t4": "row_wise"},
        everything_batches,
        ADAGRAD,
    ),
    "outputs that not all ranks use": NormCase(Half, "row_wise", half_batches),
    "outputs that no rank uses, agreed": NormCase(Half, "row_wise", half_batches, agree_unused=True),
    "a module called twice": NormCase(Twice, "row_wise"),
}


def norms(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[list[float], list[str]]]:
    """Norms of three batches' table gradients, and what differs from the unsharded module on all ranks' batches."""
    return {name: _norms(CASES[name]) for name in names}


def _norms(case: NormCase) -> tuple[list[float], list[str]]:
    model = sharded(Case(case.build, case.data, case.kinds, case.optimizer))
    reference = case.build()
    for name, parameter in tables_of(reference).items():
        parameter.data.copy_(model.full_table(name))
    rewrite = ModelRewrite(model.module, split_backward=True)
    found: list[float] = []
    differences: list[str] = []
    for batch in case.data(3):
        splits = rewrite.start_input_dist(batch)
        embeddings = rewrite.look_up_embeddings(rewrite.wait_inputs(rewrite.wait_splits(splits)))
        with rewrite.using_looked_up_embeddings(embeddings, batch):
            loss = model.module(batch)
        loss.backward()
        before = {name: model.full_table(name) for name in model.tables}
        rewrite.tables_backward.run_to_kernels(embeddings, case.agree_unused)
        assert embeddings.kernel_gradients is not None
        assert not (case.agree_unused and len(embeddings.kernel_gradients.calls) != 2)  # of a and b, not c
        norm = model.table_gradient_norm(embeddings.kernel_gradients)
        assert all(torch.equal(values, model.full_table(name)) for name, values in before.items())
        again = model.table_gradient_norm(embeddings.kernel_gradients)
        assert torch.equal(norm, again)
        found.append(norm.item())
        expected = Reference.of(partial(_unsharded_step, reference, batch, case.optimizer is SGD))
        # Half a step, so that the next batch sees what a scaled one did; it must be that of the reference.
        rewrite.run_embedding_backward(embeddings, torch.tensor(0.5))
        model.step_data_parallel_tables()
        after = {name: model.full_table(name) for name in tables_of(reference)}
        differences += expected.differences({"norm": norm, **after})
        differences += [] if norm else ["a norm of 0"]
        for name, parameter in tables_of(reference).items():
            parameter.data.copy_(after[name])
    rewrite.restore()
    return found, differences


def _unsharded_step(reference: nn.Module, batch: Any, sgd: bool) -> dict[str, Any]:
    """For the mean over ranks of the gradients that the unsharded module has on each rank's batch.

    Returns:
        The norm; and what half a step of SGD makes of the tables.
    """
    reference.zero_grad()
    reference(batch).backward()
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in tables_of(reference).values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        squares += parameter.grad.double().square().sum()
    with torch.no_grad():
        tables = {
            name: one - 0.5 * 0.5 * one.grad for name, one in tables_of(reference).items() if one.grad is not None
        }
    return {"norm": squares.sqrt(), **(tables if sgd else {})}


def check(ranks: list[tuple[list[float], list[str]]], name: str) -> None:
    for found, differences in ranks:
        assert differences == [], name
        assert found == ranks[0][0], name


def test_the_norm_of_tables_on_two_ranks_is_the_unsharded_modules() -> None:
    ranks = run_ranks(norms, 2, list(CASES))
    for name in CASES:
        check([rank[name] for rank in ranks], name)


@pytest.mark.exhaustive
def test_the_norm_of_tables_on_four_ranks_is_the_unsharded_modules() -> None:
    names = ["table_wise", "table_row_wise", "sequences, row_wise", "everything", "outputs that not all ranks use"]
    ranks = run_ranks(norms, 4, names)
    for name in names:
        check([rank[name] for rank in ranks], name)


def test_the_norm_of_tables_on_one_rank_is_the_unsharded_modules(one_rank: dist.ProcessGroup) -> None:
    for name in ("everything", "mean, row_wise"):
        check([_norms(CASES[name])], name)


def test_a_discarded_batch_leaves_neither_gradients_nor_a_counted_step(one_rank: dist.ProcessGroup) -> None:
    kinds = {"af0": "row_wise", "af1": "data_parallel", "bf2": "data_parallel", "bf1": "table_wise"}
    model = sharded(Case(Bags, kinds=kinds, optimizer=ROW_WISE_ADAGRAD))
    rewrite = ModelRewrite(model.module, split_backward=True)
    batch = batches(1)[0]
    before = {name: model.full_table(name) for name in model.tables}
    with rewrite.recording(batch) as embeddings:
        model.module(batch).backward()
    rewrite.tables_backward.run_to_kernels(embeddings)
    assert embeddings.kernel_gradients is not None
    replicated = embeddings.kernel_gradients.replicated
    assert len(replicated) == 2
    model.table_gradient_norm(embeddings.kernel_gradients)
    rewrite.tables_backward.discard(embeddings)
    assert all(weights.grad is None for weights in replicated)
    model.step_data_parallel_tables()
    assert all(torch.equal(values, model.full_table(name)) for name, values in before.items())
    kernels = [one for module in model.sharded_modules.values() for one in find_fused_kernels(module)]
    assert [(int(one.iter), int(one.iter_cpu)) for one in kernels] == [(0, 0)] * len(kernels)
    # A batch that is trained counts, and one that is only evaluated has nothing to take back.
    with rewrite.using_looked_up_embeddings(
        Embeddings(ModuleInputs(batch, PostprocessResults({}))), batch
    ) as embeddings:
        model.module(batch).backward()
    rewrite.run_embedding_backward(embeddings)
    with (
        torch.no_grad(),
        rewrite.using_looked_up_embeddings(
            Embeddings(ModuleInputs(batch, PostprocessResults({}))), batch
        ) as embeddings,
    ):
        model.module(batch)
    rewrite.tables_backward.discard(embeddings)
    assert [(int(one.iter), int(one.iter_cpu)) for one in kernels] == [(1, 1)] * len(kernels)
    rewrite.restore()


# ---------------------------------------------------------------------- a train pipeline that clips


@pytest.mark.parametrize("plan", PLANS)
def test_a_train_pipeline_clips_as_a_loop_over_the_unsharded_module_does(
    plan: str, one_rank: dist.ProcessGroup
) -> None:
    model = sharded(
        Case(
            lambda: Paired(Bags()),
            kinds={"af0": "row_wise", "af1": "data_parallel", "bf2": "column_wise", "bf1": "table_wise"},
            optimizer=SGD,
        )
    )
    initial = {name: model.full_table(f"model.{name}") for name in tables_of(Bags())}
    dense = [parameter for _, parameter in model.dense_parameters()]
    pipeline = TrainPipeline(model, torch.optim.SGD(dense, lr=0.5), "cpu", plan, max_norm=0.05)
    train(pipeline, batches(6))
    pipeline.close()

    def unsharded() -> dict[str, Any]:
        reference = Bags()
        for name, parameter in tables_of(reference).items():
            parameter.data.copy_(initial[name])
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        clipped = 0
        for batch in batches(6):
            optimizer.zero_grad()
            reference(batch).backward()
            clipped += nn.utils.clip_grad_norm_(reference.parameters(), 0.05, foreach=False).item() > 0.05
            optimizer.step()
        assert clipped > 3
        return {**dict(reference.named_parameters())}

    found = {name: model.full_table(f"model.{name}") for name in initial}
    found |= {f"over.{name}": one for (name, _), one in zip(Bags().over.named_parameters(), dense, strict=True)}
    expected = Reference.of(unsharded)
    assert expected.differences(found) == []
    assert found.keys() == expected.values.keys()


def test_a_train_pipeline_refuses_to_clip_what_it_cannot(one_rank: dist.ProcessGroup) -> None:
    model = sharded(Case(lambda: Paired(Bags()), optimizer=SGD))
    optimizer = torch.optim.SGD([parameter for _, parameter in model.dense_parameters()], lr=0.5)
    with pytest.raises(SetupError, match="must be a number above 0"):
        TrainPipeline(model, optimizer, "cpu", max_norm=0.0)
    with pytest.raises(SetupError, match=r"Pass the model that shard_model\(\) returns"):
        TrainPipeline(model.dmp, optimizer, "cpu", max_norm=1.0)


# ---------------------------------------------------------------------- what is refused


def refused(rank: int, world_size: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model = sharded(Case(Bags, kinds="table_wise"))
    rewrite = ModelRewrite(model.module, split_backward=True, method="direct")
    try:
        batch = variable_batches(1)[0]
        rewrite.wait_splits(rewrite.start_input_dist(batch))
    except InputError as error:
        results["batch size per feature"] = str(error)
    rewrite.restore()
    rewrite = ModelRewrite(model.module, split_backward=True)
    try:
        with rewrite.recording(variable_batches(1)[0]):
            model.module(variable_batches(1)[0])
    except InputError as error:
        results["batch size per feature, recorded"] = str(error)
    rewrite.restore()
    processed = sharded(Case(Processed))
    for name, function in (
        ("processed", lambda: ModelRewrite(processed.module, split_backward=True)),
        ("processed, trained late", lambda: check_trainable_after_dense_step(processed.sharded_modules)),
    ):
        try:
            function()
        except SetupError as error:
            results[name] = str(error)
    return results


def test_what_has_no_norm_is_refused_by_name_on_every_rank() -> None:
    for results in run_ranks(refused, 2):
        for name in ("batch size per feature", "batch size per feature, recorded"):
            assert "'a' got features with a batch size per feature" in results[name]
            assert "without gradient clipping" in results[name]
        for name in ("processed", "processed, trained late"):
            assert "'a' is a ShardedFeatureProcessedEmbeddingBagCollection" in results[name]


def test_a_kernel_that_is_not_known_is_refused_by_name(one_rank: dist.ProcessGroup) -> None:
    class Other(nn.Module):
        pass

    model = sharded(Case(Bags))
    lookup = model.sharded_modules["a"]._lookups[0]
    next(iter(lookup._emb_modules))._emb_module = Other()
    with pytest.raises(SetupError, match="'a' looks up with a Other"):
        check_calls_can_be_captured(model.sharded_modules)
