"""What a user does in good faith, or by mistake, trains what was meant or is refused, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.distributed import run_ranks
from tests.strategies.llm_cases import (
    VOCABULARY,
    Tiny,
    TinyHF,
    Trained,
    backward_orders,
    differing,
    fit,
    hf_config,
    llm,
    loader,
    row_batches,
    train_alone,
    trainer,
    unequal,
    values_of,
)

# ---------------------------------------------------------------------- on one rank


def test_a_trainer_takes_one_module_after_another_and_goes_back_to_the_first() -> None:
    used = trainer(llm("gpipe"))
    torch.manual_seed(1)
    first, second = Tiny(), Tiny()
    used.fit(first, loader(row_batches(2)))
    before = values_of(first.model)
    used.validate(second, loader(row_batches(1)), verbose=False)
    fresh = used.callback_metrics["val_loss"]
    used.validate(first, loader(row_batches(1)), verbose=False)
    trained = used.callback_metrics["val_loss"]
    assert trained != fresh
    used.fit_loop.epoch_progress.reset()
    used.fit(second, loader(row_batches(2)))
    assert differing(values_of(second.model), second.initial)
    assert not differing(values_of(first.model), before)


class Skipping(Tiny):
    """Skips the second batch of two that make a step, in the first epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 and self.current_epoch == 0 else None


def test_a_step_that_an_epoch_left_unfinished_does_not_count_in_the_next() -> None:
    module = Skipping()
    fit(module, llm("gpipe"), row_batches(2), accumulate_grad_batches=2, max_epochs=2)
    other = Tiny()
    fit(other, llm("gpipe"), row_batches(2), accumulate_grad_batches=2)
    assert not differing(module.gradients[-1], other.gradients[-1])


class Failing(Tiny):
    broken = True

    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        if self.broken:
            raise ValueError("not yet")
        return super().summed_loss(output, micro_batch)


def test_a_step_that_failed_does_not_count_in_the_next() -> None:
    used, module, other = trainer(llm("gpipe")), Failing(), Tiny()
    torch.manual_seed(7)
    with pytest.raises(ValueError, match="not yet"):
        used.fit(module, loader(row_batches(1)))
    module.broken = False
    used.fit(module, loader(row_batches(1)))
    fit(other, llm("gpipe"), row_batches(1))
    assert not differing(module.gradients[0], other.gradients[0])


class Masking(Tiny):
    """Masks labels at the last moment."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.how == "replaced":
            batch["labels"] = torch.where(torch.arange(batch["labels"].shape[1]) % 2 == 0, -100, batch["labels"])
        else:
            batch["labels"][:, ::2] = -100


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_batch_that_is_changed_after_it_was_prepared_is_trained_as_it_is(how: str) -> None:
    module, other = Masking(how), Tiny()
    fit(module, llm("gpipe"), row_batches(2))
    masked = row_batches(2)
    for batch in masked:
        batch["labels"][:, ::2] = -100
    fit(other, llm("gpipe"), masked)
    assert module.losses == other.losses
    assert not differing(module.gradients[-1], other.gradients[-1])


class Targets(Tiny):
    """Calls its labels otherwise."""

    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        return super().summed_loss(output, {"labels": micro_batch["targets"]})

    def loss_tokens(self, micro_batch: Any) -> int:
        return super().loss_tokens({"labels": micro_batch["targets"]})

    def model_inputs(self, micro_batch: Any) -> Any:
        return (micro_batch["input_ids"],), {}


@pytest.mark.parametrize(("rows", "refused"), [(8, False), (5, True), (7, True)])
def test_copies_of_rows_that_a_loss_would_see_are_refused(rows: int, refused: bool) -> None:
    batches = [{"input_ids": one["input_ids"], "targets": one["labels"]} for one in row_batches(1, rows)]
    if not refused:
        fit(Targets(), llm("gpipe"), batches)
        return
    with pytest.raises(InputError, match=rf"{rows} rows do not fill 4 micro-batches.*drop_last=True"):
        fit(Targets(), llm("gpipe"), batches)


class Adding(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(one.square().sum() for one in self.parameters())


class Nothing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Fractional(Tiny):
    def loss_tokens(self, micro_batch: Any) -> Any:
        return super().loss_tokens(micro_batch) / 1


class Averaging(Tiny):
    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), micro_batch["labels"].flatten())


class OwnBackward(Tiny):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_a_backward_of_the_modules_own_is_refused() -> None:
    with pytest.raises(SetupError, match="OwnBackward overrides backward, which pipeline schedules do not call"):
        fit(OwnBackward(), llm("gpipe"), row_batches(1))


def test_half_precision_without_a_scale_is_refused() -> None:
    with pytest.raises(SetupError, match=r"precision is '16-true'.*Use '16-mixed'"):
        fit(Tiny(), llm("gpipe"), row_batches(1), precision="16-true")


def test_a_hugging_face_model_that_is_no_causal_language_model_is_refused() -> None:
    t5 = {"model_type": "t5", "d_model": 16, "num_heads": 2, "num_layers": 1, "vocab_size": 19}
    with pytest.raises(SetupError, match=r"t5 model with attention=None cannot be built(.|\n)*Use the config"):
        fit(TinyHF(t5), llm("gpipe"), row_batches(1))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Averaging, r"summed_loss gives .* for twice its rows, as a mean does"),
        (Adding, "a loss that requires gradients.*Add such terms in summed_loss"),
        (Nothing, r"training_step returned None.*return -1"),
        (Fractional, r"loss_tokens gave .*expected an int"),
    ],
)
def test_what_would_have_no_effect_is_refused(kind: type[Tiny], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fit(kind(), llm("gpipe"), row_batches(1))


def test_a_module_may_be_in_a_sequence_twice_and_trains_as_on_one_device() -> None:
    class Twice(Tiny):
        def build_model(self) -> nn.Module:
            act = nn.Tanh()
            return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), act, nn.Linear(8, VOCABULARY), act)

    module, batches = Twice(), row_batches(2)
    fit(module, llm("gpipe", 4), batches)
    assert module.model is not None
    orders = backward_orders("gpipe", 1, 4, derive_pp_module_config(module.model))
    alone = train_alone(Twice(), "sgd", batches, 4, orders)
    assert len(alone.gradients) == 2
    assert unequal(Trained(module.losses, module.gradients, values_of(module.model)), alone) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0; expected a whole number, 1 or more"),
        ({"compile_layers": "yes"}, "`compile_layers` must be true, false, or a mapping of torch.compile options"),
        ({"compile_layers": {"modus": "max-autotune"}}, "compile_layers has 'modus'; expected only .*mode, "),
        ({"parallel": {"ppp": 2}}, "parallel has 'ppp'; expected only pp, dp_replicate"),
        ({"activation_checkpoint": "full"}, "expected a mapping of mode, every_n_layers"),
        (
            {
                "parallel": {"cp": 2, "cp_method": "ring"},
                "batching": {"variable_lengths": False, "max_length": 14, "pad_to_multiple_of": 2},
            },
            "max_length is 14.*multiple of 4 .*and 4 for context parallelism.*Set it to 16",
        ),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        LLMPipelineStrategy(**given)


# ---------------------------------------------------------------------- on two


class ByClass(TinyHF):
    """Groups by the class of the module that holds a parameter."""

    def configure_optimizers(self) -> Any:
        model: Any = self.model
        embedded = {id(one) for part in model.modules() if isinstance(part, nn.Embedding) for one in part.parameters()}
        named = list(self.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [one for _, one in named if id(one) in embedded], "weight_decay": 0.0},
                {"params": [one for _, one in named if id(one) not in embedded], "weight_decay": 0.1},
            ]
        )


class HalfFrozen(TinyHF):
    def configure_optimizers(self) -> Any:
        model: Any = self.model
        if model.get_output_embeddings() is not None and hasattr(model.lm_head, "weight"):
            model.lm_head.requires_grad_(False)
        return super().configure_optimizers()


class Deeper(Tiny):
    """Another model on another rank."""

    def build_model(self) -> nn.Module:
        self.layers = 4 + self.global_rank
        return super().build_model()


class Pooled(TinyHF):
    def prediction(self, output: Tensor, micro_batch: Any) -> Tensor:
        return super().prediction(output, micro_batch).mean(1)


class Seen(Tiny):
    """Notes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(int(batch["input_ids"].sum()))
        if self.global_rank == 0:
            torch.rand(3)  # as dropout on one stage does
        return super().training_step(batch, batch_idx)


class Infinite(Tiny):
    """Has a loss that is not finite in the second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at_fault = batch_idx == 1
        return super().training_step(batch, batch_idx)

    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        loss = super().summed_loss(output, micro_batch)
        return loss / 0.0 if self.at_fault else loss


def beyond_vocabulary() -> list[dict[str, Tensor]]:
    (batch,) = row_batches(1)
    batch["input_ids"][9, 3] = VOCABULARY
    return [batch]


def message(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def samples() -> list[dict[str, Tensor]]:
    (batch,) = row_batches(1, 32)
    return [{key: value[row] for key, value in batch.items()} for row in range(32)]


def on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tied = hf_config("llama") | {"tie_word_embeddings": True}
    found["groups"] = message(lambda: fit(ByClass(tied), llm(), row_batches(1)))
    found["frozen"] = message(lambda: fit(HalfFrozen(tied), llm(), row_batches(1)))
    found["models"] = message(lambda: fit(Deeper(), llm(), row_batches(1)))
    context = {"cp": 2}
    found["pooled"] = message(
        lambda: trainer(llm("gpipe", **context)).predict(Pooled(hf_config("llama")), loader(row_batches(1)))
    )
    found["id"] = message(lambda: fit(TinyHF(hf_config("llama")), llm(), beyond_vocabulary()))
    stopped, once = Infinite(), Tiny()
    found["infinite"] = message(lambda: fit(stopped, llm("gpipe", detect_nan=True), row_batches(3)))
    fit(once, llm("gpipe"), row_batches(1))
    found["trained before"] = differing(values_of(stopped.model), values_of(once.model)), len(stopped.losses)
    found["not detected"] = message(lambda: fit(Infinite(), llm("gpipe"), row_batches(3)))
    data = samples()
    loaders: dict[str, dict[str, Any]] = {
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 32, 32), "batch_size": 16},
        "in batches": {"batch_sampler": BatchSampler(RandomSampler(data), 16, False)},
        "shuffled": {"shuffle": True, "batch_size": 16},
    }
    for name, options in loaders.items():
        module = Seen()
        drawn: DataLoader[Any] = DataLoader(data, **options)  # type: ignore[arg-type]
        fit(module, llm(), drawn, max_epochs=3, use_distributed_sampler=False)
        found[name] = module.seen
    again = Seen()
    again.train_dataloader = lambda: DataLoader(data, shuffle=True, batch_size=16)  # type: ignore[method-assign, arg-type]
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    trainer(llm(), **options).fit(again)
    found["made again"] = again.seen
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("groups", ["SetupError", "model.embed_tokens.weight", "weight_decay=0.0", "weight_decay=0.1", "names"]),
        ("frozen", ["SetupError", "model.embed_tokens.weight", "trained", "frozen"]),
        ("models", ["SetupError", "model's parameters", "rank 0", "rank 1", "layers.4"]),
        ("pooled", ["InputError", "cp", "(rows, tokens"]),
        ("id", ["InputError", "micro-batch 2 has the id 19 in row 1, position 3; expected ids from 0 to 18"]),
        ("infinite", ["InputError", "expected a finite loss, but it is not finite on rank(s) [1]"]),
    ],
)
def test_what_would_be_wrong_without_a_word_is_refused_on_every_rank(what: str, words: list[str], ranks: Any) -> None:
    for rank in ranks:
        for word in words:
            assert word in rank[what]


def test_no_step_is_made_of_a_loss_that_is_not_finite_if_that_is_asked_for(ranks: Any) -> None:
    for rank in ranks:
        assert rank["trained before"] == ([], 1)
        assert rank["not detected"] == "nothing"
    assert "(this rank has [inf, inf, inf, inf])" in ranks[1]["infinite"]


@pytest.mark.parametrize("sampler", ["weighted", "in batches", "shuffled"])
def test_ranks_of_a_pipeline_draw_the_same_data_in_every_epoch(sampler: str, ranks: Any) -> None:
    assert ranks[0][sampler] == ranks[1][sampler]
    assert len(set(ranks[0][sampler])) > 2


def test_loaders_that_are_made_again_shuffle_each_epoch_otherwise(ranks: Any) -> None:
    seen = ranks[0]["made again"]
    assert seen == ranks[1]["made again"]
    assert len(set(seen)) == len(seen) == 6
