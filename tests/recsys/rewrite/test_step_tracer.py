"""Finding what feeds a module by a trace of the step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchrec.distributed.types import ShardedModule

from lightning_pipe.recsys.modules.call_arguments import CallArguments, PostprocessResults
from lightning_pipe.recsys.rewrite.step_tracer import find_arguments_by_trace


class Table(ShardedModule):
    """A sharded module in name: a trace does not run it."""

    def __init__(self) -> None:
        super().__init__()

    def create_context(self) -> Any: ...

    def input_dist(self, ctx: Any, *input: Any, **kwargs: Any) -> Any: ...

    def compute(self, ctx: Any, dist_input: Any) -> Any: ...

    def output_dist(self, ctx: Any, output: Any) -> Any: ...

    @property
    def unsharded_module_type(self) -> Any: ...


class Shift(nn.Module):
    """Post-processing without parameters."""

    def forward(self, ids: torch.Tensor, by: int = 1) -> dict[str, torch.Tensor]:
        return {"ids": ids + by}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.other = Table()
        self.shift = Shift()
        self.scale = nn.Linear(1, 1)
        self.drop = nn.Dropout(0.5)


def found(model: nn.Module, step: str = "forward") -> dict[str, str]:
    return {name: str(what) for name, what in find_arguments_by_trace(model, step, ["table", "other"]).items()}


def test_attributes_items_and_get_lead_back_to_the_batch() -> None:
    class Step(Model):
        def forward(self, batch: Any) -> Any:
            return self.table(batch.sparse[1]), self.other(features=batch.get("ids"), weights=None)

    assert found(Step()) == {"table": "batch.sparse[1]", "other": "features=batch['ids'], weights=None"}


def test_what_follows_the_last_sharded_call_need_not_be_traceable() -> None:
    class Step(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.other, self.scale = Table(), Table(), nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            dense, sparse = batch["dense"], batch["sparse"]
            embeddings = self.table(sparse), self.other(sparse)
            loss = self.scale(dense) + embeddings[0].values()
            self.log("loss", loss)
            if loss > 0 and len(embeddings[1]) > batch_idx:
                return None
            return loss

    assert found(Step(), "training_step") == {"table": "batch['sparse']", "other": "batch['sparse']"}


def test_post_processing_without_trainable_parameters_is_found_and_run_once_for_a_batch() -> None:
    class Step(Model):
        def forward(self, batch: Any) -> Any:
            shifted = self.shift(batch["raw"], by=2)
            return self.table(shifted["ids"]), self.other(shifted["ids"])

    model = Step()
    results = find_arguments_by_trace(model, "forward", ["table", "other"])
    arguments = results["table"]
    assert isinstance(arguments, CallArguments)
    assert str(arguments) == str(results["other"]) == "shift(batch['raw'], by=2)['ids']"
    assert list(arguments.collect_postprocess_calls()) == ["shift"]
    calls = []

    def shift(ids: torch.Tensor, by: int) -> dict[str, torch.Tensor]:
        calls.append(by)
        return {"ids": ids + by}

    batch = {"raw": torch.tensor([1, 2])}
    kept = PostprocessResults({"shift": shift})
    (first,), _ = arguments.resolve(batch, kept)
    other = results["other"]
    assert isinstance(other, CallArguments)
    (second,), _ = other.resolve(batch, kept)
    assert first.tolist() == [3, 4]
    assert second is first
    assert calls == [2]
    assert kept.matches("shift", (batch["raw"],), {"by": 2})
    assert not kept.matches("shift", (batch["raw"].clone(),), {"by": 2})


def test_post_processing_may_take_collections_and_other_post_processing() -> None:
    class Join(nn.Module):
        def forward(self, parts: list[torch.Tensor], named: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.cat([*parts, *named.values()])

    class Step(Model):
        def __init__(self) -> None:
            super().__init__()
            self.join = Join()

        def forward(self, batch: Any) -> Any:
            ids = self.shift(batch.a)["ids"]
            return self.table(self.join([ids, batch.b], {"c": batch.c})), self.other(batch.b)

    results = find_arguments_by_trace(Step(), "forward", ["table", "other"])
    arguments = results["table"]
    assert isinstance(arguments, CallArguments)
    assert str(arguments) == "join(list(shift(batch.a)['ids'], batch.b), dict(batch.c))"
    assert list(arguments.collect_postprocess_calls()) == ["shift", "join"]


def test_arguments_that_need_the_step_itself_are_told_apart() -> None:
    class Step(Model):
        def forward(self, batch: Any) -> Any:
            return self.table(self.scale(batch.x)), self.other(batch.ids + 1)

    class Dependent(Model):
        def forward(self, batch: Any) -> Any:
            return self.other(self.table(self.drop(batch.ids)))

    assert found(Step()) == {
        "table": "its argument depends on the module 'scale', which has trainable parameters",
        "other": "its argument is computed in the step, by call_function <built-in function add>",
    }
    assert found(Dependent()) == {
        "table": "its argument depends on the module 'drop', which draws random numbers (dropout)",
        "other": "its argument depends on the output of the sharded module 'table'",
    }
