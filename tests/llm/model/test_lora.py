"""LoRA adapters of peft in stages: losses of peft on one device, checkpoints, and export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.run.stage_runner import StageRunner
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from tests.distributed import run_ranks
from tests.strategies.llm_cases import (
    SEED,
    Noted,
    TinyHF,
    differing,
    fit,
    hf_config,
    llm,
    loader,
    row_batches,
    sgd,
    trained_plainly,
    trainer,
    values_of,
)

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_alpha": 32, "init_lora_weights": False}
LAYERS, STEPS = 8, 3
CLOSE = 1e-5  # float32 losses of about 3, whose sums have other orders


def lora(**changes: Any) -> dict[str, Any]:
    return LORA | changes


def config(model_type: str = "llama") -> dict[str, Any]:
    return hf_config(model_type, LAYERS)


def batches() -> list[dict[str, Tensor]]:
    return row_batches(1) * STEPS


class Subclassed(Noted, HFCausalLM):
    """A user's own call of peft."""

    def build_model(self) -> nn.Module:
        return peft.get_peft_model(super().build_model(), peft.LoraConfig(**LORA))  # type: ignore[arg-type]


def alone(base: nn.Module, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and trained parameters of peft on one device, in a plain loop."""
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**options))
    losses = trained_plainly(model, batches(), sgd([one for one in model.parameters() if one.requires_grad]))
    return losses, {name: one for name, one in values_of(model.get_base_model()).items() if "lora_" in name}


def seeded(options: dict[str, Any], model_type: str = "llama") -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(SEED)
    own = HFCausalLM(config(model_type)).config
    losses, trained = alone(AutoModelForCausalLM.from_config(own, attn_implementation="sdpa"), options)
    assert losses[0] - losses[-1] > 10 * CLOSE  # otherwise wrong gradients would not be noticed
    return losses, trained


def staged(
    rank: int, world: int, schedule: str, options: dict[str, Any], given: dict[str, Any] | None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    module = Subclassed(config()) if given is None else TinyHF(config(), lora=given)
    rows = slice(rank % 2, None, 2) if "dp_shard" in options else slice(None)  # of this rank's pipeline
    mine = [{key: one[rows] for key, one in batch.items()} for batch in batches()]
    fit(module, llm(schedule, 8, **options), mine, use_distributed_sampler=False)
    values = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in values_of(module.model).items()
    }
    assert module.model is not None
    trained = {name for name, one in module.model.named_parameters() if one.requires_grad}
    frozen = {name: value for name, value in values.items() if name not in trained}
    before = {name: module.initial[name] for name in frozen if not options}
    return module.losses, {name: values[name] for name in trained}, frozen, before


def check(world: int, schedule: str, given: dict[str, Any] | None = LORA, **options: Any) -> list[int]:
    """Compare ranks with one device; return the number of trained parameters on each rank."""
    losses, trained = seeded(LORA if given is None else given)
    ranks = run_ranks(staged, world, schedule, options, given)
    for of_rank, *_ in ranks:
        assert of_rank == pytest.approx(losses, abs=CLOSE)
    held = {name: value for _, values, *_ in ranks for name, value in values.items()}
    assert held.keys() == trained.keys()
    for name, value in held.items():
        torch.testing.assert_close(value, trained[name], rtol=0, atol=CLOSE)
    for _, _, frozen, before in ranks:
        assert not before or not differing(frozen, before)
    return [len(values) for _, values, *_ in ranks]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv_zero_bubble"])
def test_losses_and_adapters_are_those_of_peft_on_one_device(schedule: str) -> None:
    check(2, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule", ["gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "dualpipev"]
)
def test_other_schedules_train_the_same_adapters(schedule: str) -> None:
    check(2, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_stages_without_trained_parameters_pass_gradients_on(schedule: str) -> None:
    assert 0 in check(2, schedule, lora(layers_to_transform=[LAYERS - 1]))
    if schedule != "1f1b":
        check(2, schedule, lora(layers_to_transform=[3]))


def test_layers_are_recomputed_when_their_inputs_have_no_gradient() -> None:
    check(2, "zbv_zero_bubble", activation_checkpoint={"mode": "full"})


def test_frozen_and_trained_parameters_are_sharded_together() -> None:
    check(4, "1f1b", dp_shard=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["zbv_zero_bubble", "1f1b"])
def test_sharded_stages_may_have_no_trained_parameter(schedule: str) -> None:
    check(4, schedule, lora(layers_to_transform=[5]), dp_shard=2)
    check(4, "1f1b", dp_shard=2, reshard_after_forward=True)


def test_a_subclass_may_call_peft_itself() -> None:
    check(2, "1f1b", None)


@pytest.mark.parametrize("given", [{"use_rslora": True, "lora_bias": True, "lora_alpha": 128}])
def test_scales_and_biases_of_adapters_are_pefts(given: dict[str, Any]) -> None:
    check(2, "1f1b", lora(**given))


# ---------------------------------------------------------------------- folders and checkpoints


def from_folder(rank: int, world: int, folder: str, target: str, given: dict[str, Any]) -> tuple[list[float], set[str]]:
    read: set[str] = set()
    original = PretrainedWeights.read

    def noting(self: PretrainedWeights, groups: Any) -> Any:
        groups = [list(names) for names in groups]
        read.update(name for names in groups for name in names)
        return original(self, groups)

    module = TinyHF(folder, lora=given)
    strategy = llm("1f1b", 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedWeights, "read", noting)
        used = fit(module, strategy, batches())
    used.save_checkpoint(target)
    samples = {name for name in read if "layers." in name}  # the ranks compare a few tensors of the folder
    return module.losses, samples


@pytest.mark.parametrize(("model_type", "bias"), [("llama", "none"), ("gpt_neox", "lora_only")])
def test_adapters_of_a_folder_are_exported_without_the_base(model_type: str, bias: str, tmp_path: Path) -> None:
    names = LORA["target_modules"] if model_type == "llama" else ["query_key_value", "dense_4h_to_h"]
    # Larger steps of GPT-NeoX, whose norms enlarge small activations, would enlarge rounding beyond CLOSE.
    given = lora(bias=bias, use_rslora=True, target_modules=names, lora_alpha=32 if model_type == "llama" else 1)
    torch.manual_seed(SEED + 1)
    own = HFCausalLM(config(model_type)).config
    AutoModelForCausalLM.from_config(own).save_pretrained(tmp_path / "base")
    ranks = run_ranks(from_folder, 2, str(tmp_path / "base"), str(tmp_path / "checkpoint"), given)
    torch.manual_seed(SEED)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    losses, _ = alone(base, given)
    # The adapters start from the same seed, because reading weights draws no random numbers.
    for found, _ in ranks:
        assert found == pytest.approx(losses, abs=CLOSE)
    export_pretrained(tmp_path / "checkpoint", tmp_path / "base", tmp_path / "adapters")
    assert {one.name for one in (tmp_path / "adapters").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all("lora_" in name or (bias != "none" and name.endswith(".bias")) for name in written)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapters").eval()
    ids = batches()[0]["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, base.eval()(input_ids=ids).logits, rtol=0, atol=CLOSE)
    assert len(written) == sum(one.requires_grad for one in base.parameters())


def reads(rank: int, world: int, folder: str) -> set[str]:
    return from_folder(rank, world, folder, f"{folder}-checkpoint", LORA)[1]


def test_each_rank_reads_the_base_weights_of_its_stages(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(HFCausalLM(config()).config).save_pretrained(tmp_path / "base")
    first, second = run_ranks(reads, 2, str(tmp_path / "base"))
    weights = PretrainedWeights(tmp_path / "base")
    compared = set(sorted(weights.tensors)[:: max(1, len(weights.tensors) // 16)])
    last = f"layers.{LAYERS - 1}."
    assert not {name for name in first - compared if last in name}
    assert {name for name in second - compared if last in name}


def resumed(rank: int, world: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    given = lora(layers_to_transform=[LAYERS - 1])

    def module() -> TinyHF:
        return TinyHF(config(), lora=given, optimizer="adamw")

    whole, part, rest = module(), module(), module()
    fit(whole, llm("1f1b", 8), batches(), max_epochs=2)
    fit(part, llm("1f1b", 8), batches()).save_checkpoint(folder)
    trainer(llm("1f1b", 8), max_epochs=2).fit(rest, loader(batches()), ckpt_path=folder)
    return values_of(whole.model), values_of(rest.model)


def test_training_resumes_to_the_bit_with_an_optimizer_without_parameters(tmp_path: Path) -> None:
    for whole, rest in run_ranks(resumed, 2, str(tmp_path / "checkpoint")):
        assert not differing(whole, rest)


def test_the_optimizer_has_trained_parameters_only() -> None:
    module = HFCausalLM(config(), lora=LORA)
    module.configure_model()
    assert module.model is not None
    (group,) = module.configure_optimizers().param_groups
    trained = [name for name, one in module.model.named_parameters() if one.requires_grad]
    assert len(group["params"]) == len(trained) == 2 * 3 * LAYERS
    assert all("lora_" in name for name in trained)


# ---------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["norm"]}, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"layer_replication": [(0, 4), (2, 8)]}, "layer_replication="),
        ({"target_modules": ["embed_tokens"]}, "get_input_embeddings"),
        ({"target_modules": ["lm_head"]}, "adapters of the embedding and of the head are not supported"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"rang": 3}, "rang"),
    ],
)
def test_configs_that_stages_cannot_train_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        HFCausalLM(config(), lora=lora(**changes)).configure_model()


@pytest.mark.parametrize(
    "given",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        peft.IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]),
    ],
    ids=["PROMPT_TUNING", "PREFIX_TUNING", "IA3"],
)
def test_other_methods_of_peft_are_refused_by_name(given: Any) -> None:
    class Other(HFCausalLM):
        def build_model(self) -> nn.Module:
            return peft.get_peft_model(super().build_model(), given)

    with pytest.raises(SetupError, match=str(given.peft_type.value)):
        Other(config()).configure_model()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SetupError, match=r"pip install 'lightning-pipe\[lora\]'"):
        HFCausalLM(config(), lora=LORA).configure_model()


def tensor_parallel(rank: int, world: int) -> None:
    with pytest.raises(SetupError, match=r"parallel\.tp is 2, and the model has LoRA adapters"):
        StageRunner(TinyHF(config(), lora=LORA), parallel={"tp": 2})


def test_tensor_parallel_adapters_are_refused() -> None:
    run_ranks(tensor_parallel, 2)
