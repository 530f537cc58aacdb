"""Models of Hugging Face's configs: their own code and names, and no whole logits in training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    SEED,
    VOCABULARY,
    TinyHF,
    beyond_rounding,
    differing,
    fit,
    gradients_of,
    hf_config,
    llm,
    loader,
    row_batches,
    trainer,
    values_of,
)

TYPES = ("llama", "qwen3", "gpt_neox")


def built(model_type: str = "llama", **changes: Any) -> HFCausalLM:
    torch.manual_seed(SEED)
    module = HFCausalLM(hf_config(model_type) | changes, chunk_tokens=8)
    module.configure_model()
    return module


def original(module: HFCausalLM) -> Any:
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(module.config, attn_implementation="sdpa")


@pytest.mark.parametrize("model_type", TYPES)
def test_class_names_and_initial_values_are_hugging_faces_own(model_type: str) -> None:
    module = built(model_type)
    theirs = original(module)
    assert module.model is not None
    assert type(module.model) is type(theirs)
    assert list(module.model.state_dict()) == list(theirs.state_dict())
    assert not differing(values_of(module.model), values_of(theirs))


def test_a_model_on_meta_has_no_memory_until_it_is_cut_into_stages() -> None:
    module = HFCausalLM(hf_config("llama"), chunk_tokens=8, on_meta=True)
    model = module.build_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    fit(module, llm("gpipe"), loader(row_batches(2)))
    assert module.model is not None
    assert all(torch.isfinite(parameter).all() for parameter in module.model.parameters())


@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_hugging_faces_whole_logits(model_type: str) -> None:
    module, batch = built(model_type), row_batches(1)[0]
    loss = module.run_batch(batch).loss
    loss.backward()
    found, expected = {"loss": loss, **gradients_of(module.model)}, whole_logits(module, batch)
    assert not beyond_rounding(found, expected)
    assert found.keys() == expected.values.keys()


def whole_logits(module: HFCausalLM, batch: dict[str, Tensor]) -> Reference:
    """Loss and gradients of Hugging Face's own model."""

    def trained() -> dict[str, Any]:
        theirs = original(module)
        logits = theirs(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        return {"loss": loss, **gradients_of(theirs)}

    return Reference.of(trained)


def test_whole_logits_are_never_made_in_training() -> None:
    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for one in tree_leaves(result):
                if isinstance(one, Tensor) and one.shape[-1:] == (VOCABULARY,):
                    self.rows = max(self.rows, one.numel() // VOCABULARY)
            return result

    module = built()
    batch = row_batches(1)[0]
    with Largest() as largest:
        module.run_batch(batch).loss.backward()
    assert 8 <= largest.rows < batch["labels"].numel()
    assert largest.rows <= 16  # a chunk's; the head's weight is as wide, with 16 rows


@pytest.mark.parametrize("model_type", TYPES)
def test_predictions_are_logits(model_type: str) -> None:
    module, data = TinyHF(hf_config(model_type)), row_batches(1, 3)
    torch.manual_seed(SEED)
    (predicted,) = trainer("auto").predict(module, loader(data))  # type: ignore[misc]
    with torch.no_grad():
        expected = Reference.of(lambda: {"logits": original(module).eval()(input_ids=data[0]["input_ids"]).logits})
    assert not expected.differences({"logits": predicted})


def test_a_model_that_changes_its_logits_keeps_its_head() -> None:
    module = built("granite", logits_scaling=4.0)
    batch = row_batches(1)[0]
    loss = module.run_batch(batch).loss
    loss.backward()
    assert not whole_logits(module, batch).differences({"loss": loss, **gradients_of(module.model)})


def test_logits_that_are_capped_are_in_the_loss() -> None:
    torch.manual_seed(SEED)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    module = HFCausalLM({"model_type": "gemma2", "final_logit_softcapping": 0.05} | sizes, attention="eager")
    module.configure_model()
    assert module.model is not None
    torch.manual_seed(SEED)
    theirs = AutoModelForCausalLM.from_config(module.config, attn_implementation="eager")
    theirs.load_state_dict(module.model.state_dict())
    batch = row_batches(1)[0]

    def loss() -> dict[str, Tensor]:
        logits = theirs(input_ids=batch["input_ids"], use_cache=False).logits
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())}

    assert Reference.of(loss).differences({"loss": module.run_batch(batch).loss}) == []


def mixture(**changes: Any) -> dict[str, Any]:
    routers = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return hf_config("mixtral") | routers | changes


def test_the_loss_of_routers_over_all_layers_is_transformers_own() -> None:
    module, batch = built(**mixture()), row_batches(1)[0]
    batch["attention_mask"] = (torch.arange(9) < torch.arange(1, 17)[:, None].clamp(max=9)).long()
    loss = module.run_batch(batch).loss
    loss.backward()

    def theirs() -> dict[str, Any]:
        model = original(module)
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        output = model(**inputs, use_cache=False)
        of_tokens = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        total = of_tokens + 0.5 * output.aux_loss
        total.backward()
        return {"loss": total, **gradients_of(model)}

    assert not beyond_rounding({"loss": loss, **gradients_of(module.model)}, Reference.of(theirs))
    assert abs(float(loss.detach()) - float(built(**mixture(router_aux_loss_coef=0.0)).run_batch(batch).loss)) > 0.1


def losses_with_routers(rank: int, world: int, lengths: tuple[int, ...]) -> list[float]:
    rows = [{key: value[:2] for key, value in batch.items()} for batch in row_batches(len(lengths), 2, lengths)]
    for row in rows:
        row["labels"] = row["input_ids"]
    module = TinyHF(mixture())
    fit(module, "auto" if world == 1 else llm("1f1b", len(rows)), [rows])
    return module.losses


def test_padding_that_a_strategy_adds_is_not_in_the_loss_of_routers() -> None:
    lengths = (9, 5)
    (expected,) = losses_with_routers(0, 1, lengths)
    for found in run_ranks(losses_with_routers, 2, lengths):
        assert found == pytest.approx([expected], abs=1e-5)


def five_rows(with_mask: bool) -> list[dict[str, Tensor]]:
    (batch,) = row_batches(1, 5)
    return [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} if with_mask else batch]


def loss_of_five_rows(rank: int, world: int, with_mask: bool) -> list[float]:
    module = TinyHF(mixture())
    fit(module, llm("1f1b", 2), five_rows(with_mask))
    return module.losses


@pytest.mark.parametrize("with_mask", [False, True])
def test_rows_that_fill_up_micro_batches_are_not_in_the_loss_of_routers(with_mask: bool) -> None:
    torch.manual_seed(SEED)
    module, (batch,) = built(**mixture()), five_rows(with_mask)
    parts = [module.run_batch({key: value[rows] for key, value in batch.items()}) for rows in (slice(3), slice(3, 5))]
    expected = sum(float(part.loss.detach()) * part.tokens for part in parts) / sum(part.tokens for part in parts)
    for found in run_ranks(loss_of_five_rows, 2, with_mask):
        assert found == pytest.approx([expected], abs=1e-5)


def test_a_loss_of_routers_with_context_parallelism_is_refused() -> None:
    for message in run_ranks(refused_with_context, 2):
        assert "output_router_logits=True, and parallel.cp is 2; expected 1" in message


def refused_with_context(rank: int, world: int) -> str:
    with pytest.raises(SetupError) as caught:
        fit(TinyHF(mixture()), llm("1f1b", 2, pp=1, cp=2), row_batches(1))
    return str(caught.value)


def test_a_term_of_a_models_loss_that_is_not_computed_is_refused() -> None:
    with pytest.raises(SetupError, match=r"z_loss_coefficient=0\.1, for a term of the model's own loss"):
        HFCausalLM({"model_type": "bamba", "z_loss_coefficient": 0.1})


@pytest.mark.parametrize(("model_type", "chosen"), [("llama", "sdpa"), ("gemma2", "eager")])
def test_attention_is_chosen_by_the_family(model_type: str, chosen: str) -> None:
    module = HFCausalLM(hf_config("llama") | {"model_type": model_type})
    module.configure_model()
    assert module.model is not None
    assert module.model.config._attn_implementation == chosen  # type: ignore[union-attr]


def test_attention_that_a_family_does_not_support_is_refused_by_the_arguments_name() -> None:
    module = HFCausalLM(hf_config("llama") | {"model_type": "gemma2"}, attention="sdpa")
    with pytest.raises(
        SetupError, match=r"gemma2 model with attention='sdpa' cannot be built(.|\n)*Leave out the argument `attention`"
    ):
        module.configure_model()


def test_attention_to_later_tokens_is_refused() -> None:
    bert = {"model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(SetupError, match=r"bert model has is_decoder=False, .* Set is_decoder=True"):
        HFCausalLM(bert | {"num_hidden_layers": 1}).configure_model()


def test_a_misspelt_family_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(SetupError, match=r"model_type='lama', .* expected a family such as .*llama"):
        HFCausalLM({"model_type": "lama"})


@pytest.mark.parametrize("given", [{"hidden_size": 8}, None], ids=str)
def test_a_config_without_a_type_is_refused(given: Any) -> None:
    with pytest.raises(SetupError, match=r"must be a mapping with model_type"):
        HFCausalLM(given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's weights in half the bits, in several files."""
    original(built("qwen3")).to(torch.bfloat16).save_pretrained(tmp_path / "saved", max_shard_size="3KB")
    return tmp_path / "saved"


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_folders_weights_are_what_it_begins_with(as_path: Any, folder: Path) -> None:
    module = TinyHF(as_path(folder))
    fit(module, "auto", row_batches(1))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert module.config.model_type == "qwen3"
    assert not differing(module.initial, values_of(theirs))


def test_stages_begin_with_a_folders_weights(folder: Path) -> None:
    module = TinyHF(folder)
    fit(module, llm("interleaved_1f1b", 4), row_batches(1))
    assert not differing(module.initial, values_of(AutoModelForCausalLM.from_pretrained(folder)))


def changed(folder: Path, copy: Path, change: str) -> Path:
    """A copy of a folder with one change: a folder of one node's own."""
    shutil.copytree(folder, copy)
    if change == "a field of the config":
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    else:
        for file in copy.glob("*.safetensors"):
            save_file({name: 3 * one for name, one in load_file(file).items()}, file, {"format": "pt"})
    return copy


CHANGES = {
    "a field of the config": "'rms_norm_eps' = '1e-06', but rank 1 has 'rms_norm_eps' = '0.5'",
    "other values": "content of the folder of weights differs between ranks",
}


def from_folders_of_ranks(rank: int, world: int, folders: list[list[Path]]) -> list[str]:
    found = []
    for of_ranks in folders:
        try:
            fit(TinyHF(of_ranks[rank]), llm("1f1b", 4), row_batches(1))
            found.append("trained")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_folder_that_differs_on_one_rank_is_an_error_on_every_rank(folder: Path, tmp_path: Path) -> None:
    original_folder = tmp_path / "same"
    shutil.copytree(folder, original_folder)
    folders = [[original_folder, changed(original_folder, tmp_path / change, change)] for change in CHANGES]
    ranks = run_ranks(from_folders_of_ranks, 2, [*folders, [original_folder] * 2])
    for found in ranks:
        assert found[-1] == "trained"
        for (change, said), message in zip(CHANGES.items(), found, strict=False):
            assert message.startswith("SetupError"), (change, message)
            assert said in message, (change, message)


def test_a_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(SetupError, match=r"'hf download meta-llama/Llama-3\.1-8B --local-dir FOLDER'"):
        HFCausalLM("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(("given", "refused"), [({}, True), ({"max_length": 12}, False)])
def test_a_sequence_longer_than_the_configs_positions_is_refused_unless_a_strategy_says_more(
    given: dict[str, Any], refused: bool
) -> None:
    module = TinyHF(hf_config("llama") | {"max_position_embeddings": 8})
    if not refused:
        fit(module, llm("gpipe", 4, **given), row_batches(1))
        return
    with pytest.raises(InputError, match=r"a sequence has 9 tokens; the model's maximum is 8"):
        fit(module, llm("gpipe", 4, **given), row_batches(1))
