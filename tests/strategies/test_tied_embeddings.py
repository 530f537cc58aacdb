"""An embedding and a head that are one parameter, on two ranks or on one, train as they do on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipe.strategies.stage_checkpoint import export_checkpoint, export_pretrained
from tests.distributed import run_ranks
from tests.strategies.llm_cases import TinyHF, as_one, far, fit, hf_config, llm, loader, row_batches, trainer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEPS = 3
# schedule, strategy's options, trainer's options
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "on two ranks": ("1f1b", {}, {}),
    "on two ranks of two stages": ("interleaved_1f1b", {}, {}),
    "on two ranks, in two parts": ("interleaved_zero_bubble", {}, {}),
    "on one rank": ("zbv_zero_bubble", {}, {}),
    "clipped": ("1f1b", {}, {"gradient_clip_val": 0.1}),
    "clipped, on one rank": ("dualpipev", {}, {"gradient_clip_val": 0.1}),
}
SHARDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sharded": ("1f1b", {"data_parallel_shard_size": 2}, {"gradient_clip_val": 0.1}),
    "replicated": ("interleaved_1f1b", {"data_parallel_replicate_size": 2}, {"gradient_clip_val": 0.1}),
}
V_AND_SHARDED = ("zbv_zero_bubble", {"data_parallel_shard_size": 2})


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
def alone() -> dict[bool, TinyHF]:
    """What one device comes to, by whether gradients are clipped."""
    found = {}
    for clipped in (False, True):
        found[clipped] = tied()
        options: dict[str, Any] = {"gradient_clip_val": 0.1} if clipped else {}
        fit(found[clipped], "auto", [as_one(batch) for batch in row_batches(STEPS)], **options)
    return found


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_training_comes_to_what_one_device_comes_to(case: str, two: Any, four: Any, alone: Any) -> None:
    _, _, options = (CASES | SHARDED)[case]
    reference = alone["gradient_clip_val" in options]
    expected = {name: value.detach() for name, value in reference.model.named_parameters()}
    seen: set[str] = set()
    for rank in two if case in CASES else four:
        assert rank[case]["losses"] == pytest.approx(reference.losses, abs=2e-6)
        assert not far(rank[case]["parameters"], {name: expected[name] for name in rank[case]["parameters"]})
        seen |= rank[case]["parameters"].keys()
    assert seen == expected.keys()


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_all_copies_stay_equal_to_the_bit(case: str, two: Any, four: Any) -> None:
    ranks = two if case in CASES else four
    copies = [copy for rank in ranks for copy in rank[case]["copies"].values()]
    assert len(copies) >= 2
    assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_a_checkpoint_of_two_copies_resumes_on_one(two: Any) -> None:
    for rank in two:
        resumed, undisturbed = rank["resumed"]
        # The order in which two gradients are added is another.
        assert resumed == pytest.approx(undisturbed, abs=2e-6)


def test_two_copies_on_one_rank_that_shards_them_are_refused_on_every_rank(four: Any) -> None:
    for rank in four:
        assert "lm_head.weight, one parameter" in rank["refused"]
        assert "interleaved_zero_bubble" in rank["refused"]


def test_exports_have_the_parameter_once(two: Any, folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    export_checkpoint(folder / "saved", folder / "one.ckpt")
    module = tied()
    trainer("auto", max_epochs=2).fit(
        module, loader([as_one(batch) for batch in row_batches(STEPS)]), ckpt_path=folder / "one.ckpt"
    )
    assert module.losses == pytest.approx(two[0]["resumed"][1], abs=2e-6)
    export_pretrained(folder / "saved", tied().config, folder / "pretrained")
    assert {EMBEDDING, HEAD} & load_file(folder / "pretrained" / "model.safetensors").keys() == {EMBEDDING}
    model = AutoModelForCausalLM.from_pretrained(folder / "pretrained")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = torch.load(folder / "one.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(model.lm_head.weight, stored[f"model.{EMBEDDING}"])
