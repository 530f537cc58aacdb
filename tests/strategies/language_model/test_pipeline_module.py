"""A PipelineModule trains on one device with Lightning's default strategy, from what it says for a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import InputError
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.schedules.specs import SCHEDULES
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    SEED,
    WIDTH,
    Tiny,
    as_one,
    fit,
    llm,
    loader,
    packed_batches,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_alone,
    train_with_lightning,
    trainer,
)
from tests.tiers import sampled_rows


def built() -> Tiny:
    torch.manual_seed(SEED)
    module = Tiny()
    module.configure_model()
    return module


def test_it_trains_on_the_mean_over_the_tokens_of_a_batch() -> None:
    found = results_of(train_with_lightning(Tiny(optimizer="adamw"), row_batches(3)), steps=0)
    reference = Reference.of(lambda: results_of(train_alone(Tiny(), "adamw", row_batches(3), 1), steps=0))
    assert not ranks_beyond_rounding([found], reference)


def test_a_list_of_micro_batches_is_one_batch() -> None:
    module = built()
    (batch,) = packed_batches(4, 1)
    result, whole = module.run_batch(batch), module.run_batch(as_one(batch))
    assert result.tokens == whole.tokens == sum(int((one["labels"] != -100).sum()) for one in batch)
    expected = Reference.of(lambda: {"loss": module.run_batch(as_one(batch)).loss})
    assert expected.differences({"loss": result.loss}) == []


def test_a_batch_without_loss_tokens_has_a_loss_of_zero() -> None:
    batch = row_batches(1)[0]
    result = built().run_batch(batch | {"labels": torch.full_like(batch["labels"], -100)})
    assert (result.tokens, float(result.loss)) == (0, 0.0)


def test_metrics_are_logged_as_means_over_tokens() -> None:
    module, data = Tiny(), row_batches(3, 5)
    used = fit(module, "auto", row_batches(1), loader(data))
    model = module.model
    assert model is not None
    tokens = sum(int((one["labels"] != -100).sum()) for one in data)

    @torch.no_grad()
    def mean() -> dict[str, Tensor]:
        sums = [summed_cross_entropy(model(one["input_ids"]), one["labels"]) for one in data]
        return {"val_loss": torch.stack(sums).sum() / tokens}

    assert Reference.of(mean).differences(used.callback_metrics) == []


def counting(tokens: Sequence[int]) -> list[dict[str, Tensor]]:
    """Batches of four rows with these numbers of labels that count."""
    batches = row_batches(len(tokens), 4, (5,))
    for batch, count in zip(batches, tokens, strict=True):
        labels = batch["input_ids"].roll(-1, 1).flatten()
        labels[count:] = -100
        batch["labels"] = labels.view(4, 5)
    return batches


class Evaluated(Tiny):
    """Logs the means of its epochs of training, and those of all ranks, and keeps its parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        result = self.run_batch(batch)
        self.log("train_mean", result.loss, batch_size=result.tokens, on_step=False, on_epoch=True)
        return result.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        result = self.run_batch(batch)
        self.log("all_ranks", result.loss, batch_size=result.tokens, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def evaluated(strategy: Any, batches: Sequence[Any], **options: Any) -> tuple[dict[str, Tensor], nn.Module]:
    """Metrics of training, validation and test, and the model; ``options`` are the trainer's."""
    torch.manual_seed(SEED)
    module = Evaluated()
    used = fit(module, strategy() if callable(strategy) else strategy, batches, loader(batches), **options)
    metrics = dict(used.callback_metrics)
    used.test(module, loader(batches), verbose=False)
    assert module.model is not None
    return metrics | used.callback_metrics, module.model


def mean_of(model: nn.Module, batches: Sequence[Any]) -> Reference:
    """Mean over the counted labels of all batches, under each name that it is logged by."""

    @torch.no_grad()
    def mean() -> dict[str, Tensor]:
        sums = [summed_cross_entropy(model(one["input_ids"]), one["labels"]) for one in batches]
        tokens = sum(int((one["labels"] != -100).sum()) for one in batches)
        return dict.fromkeys(METRICS, torch.stack(sums).sum() / tokens)

    return Reference.of(mean)


METRICS = ("train_mean", "val_loss", "all_ranks", "test_loss")
STRATEGIES: list[Any] = ["auto", partial(llm, "1f1b", 2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["auto", "1f1b"])
def test_a_batch_without_counted_labels_has_no_weight_in_the_mean_of_an_epoch(strategy: Any) -> None:
    data = counting([2, 0, 3, 0])
    metrics, model = evaluated(strategy, data)
    assert mean_of(model, data).differences(metrics) == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["auto", "1f1b"])
def test_an_epoch_without_counted_labels_has_no_mean(strategy: Any) -> None:
    metrics, _ = evaluated(strategy, counting([0, 0]))
    assert all(metrics[name].isnan() for name in METRICS)


# Labels that count: two pipelines have some in turn, and then neither has any.
TWO_HALVES = (2, 0, 0, 0, 3, 0)


def evaluated_on_ranks(rank: int, world: int, schedule: str, dims: dict[str, int]) -> dict[str, Tensor]:
    """Metrics of six batches, of which each of two pipelines has a half."""
    data = counting(TWO_HALVES)
    mine = data if dims["pp"] == world else data[3 * rank :][:3]
    strategy = schedule if schedule == "ddp" else partial(llm, schedule, 4, **dims)
    return evaluated(strategy, mine, use_distributed_sampler=False)[0]


RANKS: list[tuple[str, dict[str, int]]] = [
    ("gpipe", {"pp": 1, "dp_replicate": 2}),
    ("gpipe", {"pp": 1, "dp_shard": 2}),
    *[(schedule, {"pp": 2}) for schedule in SCHEDULES],
]


@pytest.mark.parametrize(("schedule", "dims"), sampled_rows(RANKS, lambda case: "dp_replicate" in case[1]))
def test_batches_of_other_ranks_without_counted_labels_have_no_weight_either(
    schedule: str, dims: dict[str, int]
) -> None:
    data = counting(TWO_HALVES)
    expected = mean_of(evaluated("auto", data)[1], data)
    for metrics in run_ranks(evaluated_on_ranks, 2, schedule, dims):
        assert expected.differences(metrics) == []


def test_losses_of_evaluations_are_means_of_all_ranks_under_lightnings_ddp_too() -> None:
    data = counting(TWO_HALVES)
    expected, _ = evaluated("auto", data)
    for metrics in run_ranks(evaluated_on_ranks, 2, "ddp", {"pp": 1}):
        for name in ("val_loss", "test_loss"):
            torch.testing.assert_close(metrics[name], expected[name])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["auto", "1f1b"])
def test_labels_that_repeat_the_input_are_warned_about_under_every_strategy(strategy: Any) -> None:
    def messages(shift: bool) -> list[str]:
        batches = [batch | {"labels": batch["input_ids"].roll(-int(shift), 1)} for batch in row_batches(1, 4, (5,))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Tiny(), strategy() if callable(strategy) else strategy, batches)
        return [str(one.message) for one in caught if "labels equal input_ids" in str(one.message)]

    assert len(messages(shift=False)) == 1
    assert not messages(shift=True)


def test_hooks_say_what_a_batch_is_and_what_its_loss_is() -> None:
    class Regression(PipelineModule):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

        def model_inputs(self, micro_batch: Any) -> Any:
            return (micro_batch["x"],), {}

        def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
            return (output.squeeze(-1) - micro_batch["y"]).square().sum()

        def loss_tokens(self, micro_batch: Any) -> int:
            return len(micro_batch["y"])

        def prediction(self, output: Tensor, micro_batch: Any) -> Tensor:
            return output.squeeze(-1)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(SEED)
    batch = {"x": torch.randn(5, WIDTH), "y": torch.randn(5)}
    module = Regression()
    fit(module, "auto", [batch])
    model = module.model
    assert model is not None
    expected = Reference.of(lambda: {"loss": (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()})
    assert expected.differences({"loss": module.run_batch(batch).loss}) == []
    assert module.predict_step(batch, 0).shape == (5,)


@pytest.mark.parametrize("strategy", ["auto", "stages"])
def test_a_batch_without_labels_can_be_predicted_but_not_trained(strategy: str) -> None:
    used = "auto" if strategy == "auto" else llm("gpipe", 2)
    batches = [{"input_ids": batch["input_ids"]} for batch in row_batches(1)]
    assert len(trainer(used).predict(Tiny(), loader(batches))) == 1  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"The loss needs 'labels', but the batch has only the keys 'input_ids'"):
        fit(Tiny(), "auto" if strategy == "auto" else llm("gpipe", 2), batches)
