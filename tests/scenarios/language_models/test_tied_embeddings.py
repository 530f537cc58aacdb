"""An embedding and a head that are one parameter, on two ranks or on one, train as they do on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    TinyHF,
    as_one,
    fit,
    hf_config,
    llm,
    loader,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    train_with_lightning,
    trainer,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEPS = 2
# schedule, strategy's options, trainer's options
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "on two ranks": ("1f1b", {}, {}),
    "on two ranks, in two parts": ("interleaved_zero_bubble", {}, {}),
    "clipped, on one rank": ("dualpipev", {}, {"gradient_clip_val": 0.1}),
}
SHARDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sharded": ("1f1b", {"dp_shard": 2}, {"gradient_clip_val": 0.1}),
}
V_AND_SHARDED = ("zbv_zero_bubble", {"dp_shard": 2})


def tied() -> TinyHF:
    return TinyHF(hf_config("llama") | {"tie_word_embeddings": True}, optimizer="adamw")


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(rank: int, cases: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for case, (schedule, options, of_trainer) in cases.items():
        parts = 2 if options else 1
        mine = [{key: value[rank % parts :: parts] for key, value in batch.items()} for batch in row_batches(STEPS)]
        module = tied()
        fit(module, llm(schedule, 4, **options), mine, use_distributed_sampler=False, **of_trainer)
        assert module.model is not None
        found[case] = {
            "losses": module.losses,
            "parameters": {name: whole(value).detach() for name, value in module.model.named_parameters()},
            "copies": {
                name: whole(value).detach()
                for name, value in module.model.named_parameters(remove_duplicate=False)
                if name in (EMBEDDING, HEAD)
            },
        }
    return found


def on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = train(rank, CASES)
    undisturbed, first, second = tied(), tied(), tied()
    fit(undisturbed, llm(), row_batches(STEPS), max_epochs=2)
    fit(first, llm(), row_batches(STEPS)).save_checkpoint(folder / "saved")
    trainer(llm("zbv_zero_bubble"), max_epochs=2).fit(second, loader(row_batches(STEPS)), ckpt_path=folder / "saved")
    found["resumed"] = second.losses, undisturbed.losses[STEPS:]
    return found


def on_four_ranks(rank: int, world: int) -> dict[str, Any]:
    found = train(rank, SHARDED)
    try:
        train(rank, {"": (*V_AND_SHARDED, {})})
    except Exception as error:
        found["refused"] = str(error)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tied")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4)


@pytest.fixture(scope="module")
def alone() -> dict[bool, Reference]:
    """What one device comes to, by whether gradients are clipped."""
    return {True: on_one_device(gradient_clip_val=0.1), False: on_one_device()}


def on_one_device(**options: Any) -> Reference:
    batches = [as_one(batch) for batch in row_batches(STEPS)]
    return Reference.of(lambda: results_of(train_with_lightning(tied(), batches, **options), steps=0))


@pytest.fixture(scope="module")
def second_epoch() -> Reference:
    """Losses of one device that trains on."""
    batches = [as_one(batch) for batch in row_batches(STEPS)]
    return Reference.of(lambda: {"losses": train_with_lightning(tied(), batches, max_epochs=2).losses[STEPS:]})


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_training_comes_to_what_one_device_comes_to(case: str, two: Any, four: Any, alone: Any) -> None:
    _, _, options = (CASES | SHARDED)[case]
    ranks = two if case in CASES else four
    found = ({"losses": rank[case]["losses"]} | rank[case]["parameters"] for rank in ranks)
    assert not ranks_beyond_rounding(found, alone["gradient_clip_val" in options])


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_all_copies_stay_equal_to_the_bit(case: str, two: Any, four: Any) -> None:
    ranks = two if case in CASES else four
    copies = [copy for rank in ranks for copy in rank[case]["copies"].values()]
    assert len(copies) >= 2
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_a_checkpoint_of_two_copies_resumes_on_one(two: Any, second_epoch: Reference) -> None:
    for rank in two:
        # The order in which two gradients are added is another after the checkpoint.
        resumed, undisturbed = rank["resumed"]
        assert not second_epoch.differences({"losses": resumed})
        assert not second_epoch.differences({"losses": undisturbed})


def test_two_copies_on_one_rank_that_shards_them_are_refused_on_every_rank(four: Any) -> None:
    for rank in four:
        assert "lm_head.weight, one tied parameter" in rank["refused"]
        assert "interleaved_zero_bubble" in rank["refused"]


def test_exports_have_the_parameter_once(two: Any, folder: Path, second_epoch: Reference) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    export_checkpoint(folder / "saved", folder / "one.ckpt")
    module = tied()
    trainer("auto", max_epochs=2).fit(
        module, loader([as_one(batch) for batch in row_batches(STEPS)]), ckpt_path=folder / "one.ckpt"
    )
    assert not second_epoch.differences({"losses": module.losses})
    export_pretrained(folder / "saved", tied().config, folder / "pretrained")
    assert {EMBEDDING, HEAD} & load_file(folder / "pretrained" / "model.safetensors").keys() == {EMBEDDING}
    model = AutoModelForCausalLM.from_pretrained(folder / "pretrained")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = torch.load(folder / "one.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(model.lm_head.weight, stored[f"model.{EMBEDDING}"])
