"""Modules with parts that ``torch.compile`` compiles: the same values under every plan, and no graph per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe.recsys.modules.output_order import OrderedKeyedTensor
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    ADAGRAD,
    IDS,
    PLANS,
    WIDTH,
    Batch,
    Clicks,
    Dlrm,
    Pooled,
    Sequenced,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)
from tests.tiers import sampled, wanted


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


# ---------------------------------------------------------------------- models


class Scores(nn.Module):
    """A dense part that gets the objects of a batch and the outputs of tables, of changing numbers of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 + 4 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, pooled: KeyedTensor, recent: JaggedTensor) -> Tensor:
        sums = recent.to_padded_dense(4).sum(1) * features["past"].lengths()[:, None]
        return self.layers(torch.cat([dense, sums, pooled.values()], dim=1)) + pooled["item"].sum(1, keepdim=True)


class Objects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=WIDTH, num_embeddings=IDS, feature_names=[feature])
            for name, feature in (("people", "user"), ("things", "item"), ("friends", "friend"))
        ]
        self.bags, self.history = EmbeddingBagCollection(tables=tables), Sequenced().history
        self.over = Scores()
        self.permuted = False

    def forward(self, batch: Batch) -> Tensor:
        pooled = self.bags(batch.sparse)
        self.permuted = isinstance(pooled, OrderedKeyedTensor)
        return self.over(batch.dense, batch.sparse, pooled, self.history(batch.sparse)["past"])[:, 0]


class Copied(nn.Module):
    """Makes features from those of the batch."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=features.keys(), values=features.values() * 1, lengths=features.lengths())


class Prepared(Pooled):
    """A dense part runs before the lookup, and a part without parameters makes its features."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare, self.bottom = Copied(), nn.Linear(3, 3)

    def forward(self, batch: Batch) -> Tensor:
        dense = self.bottom(batch.dense)
        return self.over(torch.cat([dense, self.bags(self.prepare(batch.sparse)).values()], dim=1))[:, 0]


class Inside(nn.Module):
    """Everything is in the part that is compiled: tables, and the module that makes their features."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Sequential(Prepared())

    def forward(self, batch: Batch) -> Tensor:
        return self.all(batch)


Network = Callable[[], nn.Module]
COMPILED: dict[Network, tuple[str, ...]] = {
    Objects: ("over",),
    Prepared: ("prepare", "bottom", "over"),
    Inside: ("all",),
    Dlrm: ("dlrm.dense_arch", "dlrm.inter_arch", "dlrm.over_arch"),
}


class Counted(Clicks):
    """Its parts are compiled by a backend that counts graphs; records their number before each batch."""

    def __init__(self, network: Network, backend: str | None, in_place: bool = False, **options: Any) -> None:
        torch.compiler.reset()
        self.counter = CompileCounterWithBackend(backend or "eager")
        super().__init__(network, **options)
        self.graphs: list[int] = []
        self.in_place = COMPILED[network] if backend is not None and in_place else ()
        for name in COMPILED[network] if backend is not None and not in_place else ():
            compiled: Any = torch.compile(self.network.get_submodule(name), backend=self.counter)
            self.network.set_submodule(name, compiled)

    def configure_model(self) -> None:
        for name in self.in_place:
            self.network.get_submodule(name).compile(backend=self.counter)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.graphs.append(self.counter.frame_count)
        return super().training_step(batch, batch_idx)


def values_after(module: Counted, strategy: Any, world: int = 1, **options: Any) -> dict[str, Any]:
    """What training leaves, under the names of the module that is not compiled. The last batch is smaller."""
    options = {"max_epochs": 3, **options}
    used = fit(module, strategy, loader(22 * world), loader(10 * world), **options)
    return {name.replace("_orig_mod.", ""): value for name, value in state_of(used).items()}


# ---------------------------------------------------------------------- plans and methods

Case = tuple[Network, str, str, bool]
ALL: list[Case] = [
    (network, plan, method, in_place)
    for network in COMPILED
    for plan in (*PLANS, "semi_sync")
    for method in ("auto", "record", "direct", "fx")
    for in_place in (False, True)
    if not in_place or (plan, method) == ("prefetch", "auto")
    if method in ("auto", "fx") or network not in (Prepared, Inside)  # no other method finds their features
]


def often(case: Case) -> bool:
    network, plan, method, in_place = case
    return in_place or (plan, method) == ("compute_ahead" if network is Objects else "threaded_input", "auto")


def compared(rank: int, world: int, cases: list[Case]) -> list[str]:
    """What differs from the module that is not compiled, where graphs were added late, and what was not as meant."""
    kinds = {"people": "row_wise", "things": "column_wise"}
    expected: dict[Any, dict[str, Any]] = {}
    wrong = []
    for network, plan, method, in_place in cases:
        as_plan = (plan, method) if plan == "semi_sync" else ("serial", "auto")  # a recorded batch has no stale lookup
        placed = None if world == 1 else kinds | ({"friends": "row_wise"} if network is Objects else {})
        if (network, as_plan) not in expected:
            strategy = recsys(as_plan[0], placed, rewrite={"method": as_plan[1]})
            expected[network, as_plan] = values_after(Counted(network, None), strategy, world)
        module = Counted(network, "eager", in_place)
        found = values_after(module, recsys(plan, placed, rewrite={"method": method}), world)
        different = difference(found, expected[network, as_plan])
        late = len(set(module.graphs[-12:])) > 1  # the first epoch has all shapes, and its validation the other mode
        if different or late or (network is Objects and world > 1 and not module.network.permuted):
            wrong.append(f"{network} {plan} {method} {in_place}: {different[:3]}, graphs {module.graphs}")
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("network", COMPILED)
def test_values_are_those_of_the_uncompiled_module_and_later_batches_add_no_graph(request: Any, network: Any) -> None:
    cases = [case for case in wanted(request.config, ALL, often) if case[0] is network]
    for world in (1, 2):
        for wrong in run_ranks(compared, world, cases, timeout=60 + 15 * len(cases)):
            assert wrong == []


# ---------------------------------------------------------------------- options of a training


class Profiled(pl.Callback):
    """Replays tasks in the first epoch, and counts the steps of the replays."""

    def __init__(self) -> None:
        self.batches = list(loader(12))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            before = len(module.graphs)
            trainer.strategy.profile(self.batches, rounds=1, iterations=2)  # type: ignore[attr-defined]
            del module.graphs[before:]


OPTIONS: dict[str, dict[str, Any]] = {
    "a profile": {"callbacks": lambda: [Profiled()]},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"precision": "16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2},
    "windows of tables": {"accumulate_grad_batches": 2, "accumulate_tables": "window"},
    "early release": {"free_features_early": True},
    "a plan that is found": {"plan": "auto", "max_epochs": 30},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sampled(OPTIONS, {"a profile", "accumulation", "early release"}.__contains__))
def test_options_train_as_under_the_serial_plan_and_add_no_graph(name: str) -> None:
    def run(plan: str) -> tuple[dict[str, Any], list[int]]:
        options = {"plan": plan, **OPTIONS[name]} if plan != "serial" else {**OPTIONS[name], "plan": plan}
        of_strategy = {
            key: options.pop(key) for key in ("plan", "accumulate_tables", "free_features_early") if key in options
        }
        callbacks = options.pop("callbacks", list)
        module = Counted(Objects, "aot_eager")
        return values_after(
            module, recsys(**of_strategy), callbacks=callbacks() if plan != "serial" else [], **options
        ), module.graphs

    expected, _ = run("serial")
    found, graphs = run("prefetch")
    assert difference(found, expected) == []
    assert len(set(graphs[6:])) == 1


@inductor_config.patch(compile_threads=1)  # in this process, so that no thread or process is left behind
def test_inductor_trains_the_same_under_plans_and_what_lightnings_loop_trains() -> None:
    def run(plan: str | None, backend: str | None) -> dict[str, Any]:
        module = Counted(Dlrm, backend, in_backward=ADAGRAD)
        return values_after(module, "auto" if plan is None else recsys(plan, optimizer=None), max_epochs=2)

    found = run("compute_ahead", "inductor")
    assert difference(found, run("serial", "inductor")) == []
    reference = Reference.of(lambda: run(None, None))
    assert reference.differences(found, partly=True) == []


# ---------------------------------------------------------------------- modules that are compiled whole


class Called(Clicks):
    """Its step calls the module, which ``module.compile()`` compiles."""

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.network(batch), batch.label)

    def loss_of(self, batch: Batch) -> Tensor:
        loss: Tensor = self(batch)
        return loss


def test_a_module_compiled_in_place_trains_as_the_uncompiled_one() -> None:
    module, counter = Called(), CompileCounterWithBackend("eager")
    module.compile(backend=counter)
    found = state_of(fit(module, recsys(), max_epochs=2))
    assert difference(found, state_of(fit(Called(), recsys("serial"), max_epochs=2))) == []
    assert 0 < counter.frame_count < 8  # the sharded modules are not traced


def compiled_whole(rank: int, world: int) -> tuple[list[str], int]:
    """What differs from the module that is not compiled, and how many numbers of graphs the last epoch has."""
    module = Counted(Dlrm, None)
    whole: Any = torch.compile(module, backend=module.counter)
    found = values_after(whole, recsys(), world)
    return difference(found, values_after(Counted(Dlrm, None), recsys("serial"), world)), len(set(module.graphs[-6:]))


def test_the_result_of_torch_compile_for_the_whole_module_trains_as_the_module() -> None:
    """Lightning then compiles the module's steps."""
    for world in (1, 2):
        assert run_ranks(compiled_whole, world) == [([], 1)] * world
