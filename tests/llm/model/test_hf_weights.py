"""Folders that Hugging Face wrote are read tensor by tensor into what a rank holds, to the bit what they hold."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.hf_weights import (
    PretrainedWeights,
    build_uninitialized_causal_lm,
    deferred_weight_loading,
    load_pretrained_weights,
    pretrained_causal_lm,
)
from lightning_pipe.llm.model.module_config import is_inside
from lightning_pipe.llm.model.stage_module import named_parameters_and_buffers
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from lightning_pipe.strategies.language_model.stage_checkpoint import save_stage_checkpoint
from tests.strategies.llm_cases import SEED, TinyLM, hf_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BYTES = {"F32": 4, "BF16": 2}


def model_of(model_type: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(SEED)
    config = HFCausalLM(hf_config(model_type) | changes).config
    return AutoModelForCausalLM.from_config(config)


def saved(
    folder: Path, model_type: str = "llama", dtype: Any = torch.float32, size: Any = "1GB", **changes: Any
) -> Path:
    """A folder with a model's weights, in files of at most some size."""
    model_of(model_type, **changes).to(dtype).save_pretrained(folder, max_shard_size=size)
    return folder


def theirs(folder: Path, **options: Any) -> Any:
    """Hugging Face's model, by default in the dtype to train in and not in that of the files."""
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.get_default_dtype(), **options})


def loaded(folder: Path) -> nn.Module:
    """The whole model, as one device makes it."""
    weights = PretrainedWeights(folder)
    return pretrained_causal_lm(weights, weights.config(), "sdpa")


def part_of(folder: Path, rank: int, ranks: int = 2) -> dict[str, Tensor]:
    """The tensors of which one rank has read its own modules, under all their names."""
    weights = PretrainedWeights(folder)
    model = build_uninitialized_causal_lm(weights.config(), "sdpa")
    for parameter in model.parameters():
        parameter.detach().fill_(torch.nan)
    config = derive_pp_module_config(model)
    mine = {*split_layers_evenly(config, ranks)[rank], *config.always_keep_fqns}
    load_pretrained_weights(model, weights, lambda name: is_inside(name, mine))
    assert all(parameter.requires_grad for parameter in model.parameters())
    found = tensors_of(model)
    assert {name for name in found if is_inside(name, mine)} <= {n for n, one in found.items() if not one.isnan().any()}
    return {name: one for name, one in found.items() if not one.isnan().any()}


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All there are, with buffers that no state dict has."""
    return {name: tensor.detach() for name, tensor in named_parameters_and_buffers(model)}


def assert_same(found: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> None:
    assert found.keys() == needed.keys()
    for name, tensor in found.items():
        assert tensor.dtype == needed[name].dtype, name
        assert torch.equal(tensor, needed[name]), name


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("size", ["1GB", "3KB"], ids=["one file", "several files"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt_neox"])
def test_all_tensors_are_those_of_from_pretrained(
    model_type: str, tied: bool, dtype: torch.dtype, size: str, tmp_path: Path
) -> None:
    saved(tmp_path, model_type, dtype, size, tie_word_embeddings=tied)
    assert (tmp_path / (SINGLE if size == "1GB" else INDEX)).exists()
    needed = tensors_of(theirs(tmp_path))
    model: Any = loaded(tmp_path)
    assert_same(tensors_of(model), needed)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    found: dict[str, Tensor] = {}
    for rank in range(2):
        own = part_of(tmp_path, rank)
        assert own.keys() < needed.keys()
        assert_same(own, {name: needed[name] for name in own})
        found |= own
    assert found.keys() == needed.keys()


def test_parameters_have_the_default_dtype_as_from_pretrained_s_with_that_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tensors_of(loaded(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found["lm_head.weight"].dtype == torch.bfloat16
    assert_same(found, tensors_of(theirs(tmp_path, dtype=torch.bfloat16)))


def test_nothing_is_initialized_or_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)

    def refuse(self: Any, module: nn.Module) -> None:
        raise AssertionError("an initializer was run")

    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", refuse)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loaded(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    part_of(tmp_path, 0)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(AssertionError, match="an initializer was run"):
        AutoModelForCausalLM.from_config(LlamaConfig(**hf_config("llama")))


def test_values_are_the_models_own_and_not_the_files(tmp_path: Path) -> None:
    saved(tmp_path)
    needed = {name: tensor.clone() for name, tensor in tensors_of(theirs(tmp_path)).items()}
    model = loaded(tmp_path)
    file = tmp_path / SINGLE
    with file.open("r+b") as written:  # in place: what maps the file would see it
        written.seek(-4096, 2)
        written.write(bytes(4096))
    assert_same(tensors_of(model), needed)


def test_a_model_of_ones_own_is_read_by_its_own_names(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    original, model = TinyLM(), TinyLM()
    computed = torch.ones(3)
    model.register_buffer("computed", computed, persistent=False)  # some files hold what is no part of the state
    save_file({**original.state_dict(), "computed": torch.zeros(3)}, tmp_path / SINGLE)
    load_pretrained_weights(model, PretrainedWeights(tmp_path))
    assert_same(model.state_dict(), original.state_dict())
    assert torch.equal(computed, torch.ones(3))


# ---------------------------------------------------------------------- what is read


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that tensors are read by, whoever asks for them."""
    names: list[str] = []

    class Noting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._opened = original(*args, **kwargs)

        def __enter__(self) -> Noting:
            return self

        def __exit__(self, *_: Any) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._opened, name)

        def get_tensor(self, name: str) -> Tensor:
            names.append(name)
            return self._opened.get_tensor(name)

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Noting)
    return names


@pytest.mark.parametrize("size", ["1GB", "3KB"], ids=["one file", "several files"])
def test_a_rank_reads_its_own_tensors_once_and_no_others(size: str, tmp_path: Path, read: list[str]) -> None:
    saved(tmp_path, "qwen3", torch.bfloat16, size)
    stored = PretrainedWeights(tmp_path).tensors
    by_rank = []
    for rank in range(4):
        part = part_of(tmp_path, rank, 4)
        by_rank.append(list(read))
        assert set(read) == part.keys() & stored.keys()
        read.clear()
    assert sorted(name for names in by_rank for name in names) == sorted(stored)
    sizes = {name: BYTES[one.dtype] * torch.Size(one.shape).numel() for name, one in stored.items()}
    shares = [sum(sizes[name] for name in names) / sum(sizes.values()) for names in by_rank]
    assert max(shares) < 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_takes_no_memory_before_its_weights_are_loaded() -> None:
    def resident() -> int:
        (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    before = resident()
    model = build_uninitialized_causal_lm(HFCausalLM(hf_config("llama") | {"vocab_size": 2**21}).config, "sdpa")
    assert resident() - before < 0.5 * sum(one.nbytes for one in model.parameters())


def test_before_a_model_is_split_only_names_and_shapes_are_compared(tmp_path: Path, read: list[str]) -> None:
    weights = PretrainedWeights(saved(tmp_path, size="3KB"))
    with deferred_weight_loading():
        pretrained_causal_lm(weights, weights.config(), "sdpa")
        assert not read
        rewrite(saved(tmp_path), lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(SetupError, match=r"missing in it: model\.norm\.weight"):
            loaded(tmp_path)


# ---------------------------------------------------------------------- names


def base_model(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Save a model without its head and its head's prefix."""
    model = model_of(**changes)
    model.model.save_pretrained(folder)
    assert "layers.0.input_layernorm.weight" in PretrainedWeights(folder).tensors
    return tensors_of(model)


def test_a_base_models_folder_is_read_where_the_head_is_tied(tmp_path: Path) -> None:
    needed = base_model(tmp_path, tie_word_embeddings=True)
    assert_same(tensors_of(loaded(tmp_path)), needed)


def test_a_base_models_folder_lacks_a_head_of_its_own(tmp_path: Path) -> None:
    base_model(tmp_path)
    with pytest.raises(SetupError, match=r"does not fit the LlamaForCausalLM: missing in it: lm_head\.weight\. Build"):
        loaded(tmp_path)


def test_a_base_models_folder_may_have_the_head_too(tmp_path: Path) -> None:
    needed = base_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": needed["lm_head.weight"].clone()}))
    assert_same(tensors_of(loaded(tmp_path)), needed)
    assert_same(tensors_of(theirs(tmp_path)), needed)


def test_a_tied_parameter_may_be_stored_twice_with_one_value(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert_same(tensors_of(loaded(tmp_path)), tensors_of(theirs(tmp_path)))


def test_a_tied_parameter_with_two_values_is_refused(tmp_path: Path) -> None:
    """``from_pretrained`` warns and does not tie them: its model is another than that of the config."""
    saved(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(19, 16)}))
    with pytest.raises(SetupError, match=r"are tied in the model but of other values .* Set tie_word_embeddings to fa"):
        loaded(tmp_path)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.ones(16)}))  # a base model's name
    with pytest.raises(SetupError, match=r"unexpected in it: norm\.weight"):
        loaded(tmp_path)


def test_a_conversion_of_names_that_a_user_registers_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    needed = tensors_of(theirs(tmp_path))

    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(".layers.", ".blocks.")] = tensors.pop(name)

    rewrite(tmp_path, change)
    with pytest.raises(SetupError, match=r"unexpected in it: model\.blocks\.0"):
        loaded(tmp_path)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)  # made again by the next call
    monkeypatch.setattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set())
    register_checkpoint_conversion_mapping("llama", [WeightRenaming(r"\.blocks\.", ".layers.")], overwrite=True)
    assert_same(tensors_of(loaded(tmp_path)), needed)
    assert_same(tensors_of(theirs(tmp_path)), needed)


def test_what_older_versions_stored_and_the_class_ignores_is_not_read(tmp_path: Path, read: list[str]) -> None:
    saved(tmp_path, "gpt_neox")
    needed = tensors_of(theirs(tmp_path))
    older = {
        "gpt_neox.layers.0.attention.bias": torch.ones(4, 4),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "gpt_neox.rotary_emb.inv_freq": torch.ones(1),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(older))
    read.clear()
    assert_same(tensors_of(loaded(tmp_path)), needed)
    assert not set(read) & older.keys()


def test_weights_of_another_model_are_refused_by_the_models_names(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(15)
        tensors["lm_head.weight"] = torch.zeros(19, 16, dtype=torch.int8)

    weights = saved(tmp_path)
    rewrite(weights, change)
    for make in (loaded, lambda folder: part_of(folder, 0)):
        with pytest.raises(SetupError) as caught:
            make(tmp_path)
        for part in (
            "missing in it: model.layers.3.mlp.up_proj.weight;",
            "unexpected in it: model.layers.4.mlp.up_proj.weight;",
            "of another size: model.norm.weight ([15], expected [16]);",
            "of another kind: lm_head.weight (I8, expected a dtype that converts to torch.float32).",
        ):
            assert part in str(caught.value)


def test_a_missing_parameter_is_an_error_even_where_the_class_ignores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has initialized it."""
    saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_missing", ["lm_head"])
    with pytest.raises(SetupError, match=r"missing in it: lm_head\.weight"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**9}, r"model\.embed_tokens\.weight \(\[19, 16\], expected \[19, 1000000000\]\)"),
        (
            {"hidden_size": 2**31, "intermediate_size": 2**31},
            "the llama model of the config cannot be made: RuntimeError: Storage size",
        ),
    ],
    ids=str,
)
def test_a_config_of_another_model_is_refused_before_parameters_take_memory(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    config = saved(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(SetupError, match=message):
        loaded(tmp_path)


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    weights = PretrainedWeights(saved(tmp_path))
    with torch.device("meta"):
        model = build_uninitialized_causal_lm(weights.config(), "sdpa")
    with pytest.raises(SetupError, match="was built on the meta device"):
        load_pretrained_weights(model, weights)


# ---------------------------------------------------------------------- folders


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])


def drop_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def mix_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    shutil.copy(first, second)


def older_format(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def name_files(folder: Path, name: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))


def quantize(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("size", "spoil", "message"),
    [
        ("1GB", truncate, r"model\.safetensors' cannot be read: .*incomplete metadata, file not fully covered\. Copy"),
        ("3KB", truncate, r"model-0000\d-of.*' cannot be read: .*incomplete metadata"),
        ("1GB", lambda folder: (folder / SINGLE).write_text("version 1"), "cannot be read: .*header"),
        ("3KB", drop_a_shard, r"model-00002-of.*' cannot be read: No such file"),
        ("3KB", mix_shards, r"model-0000\d-of.*' cannot be read: .*does not contain tensor"),
        ("3KB", lambda folder: (folder / INDEX).write_text("{"), rf"{INDEX}' cannot be read: expected JSON"),
        ("3KB", lambda folder: (folder / INDEX).write_text("{}"), "with names of files as weight_map"),
        ("3KB", lambda folder: name_files(folder, "../x.safetensors"), "expected files in its folder .* got '../x"),
        ("3KB", lambda folder: name_files(folder, 5), rf"{INDEX}' cannot be read: .*TypeError"),
        (
            "1GB",
            older_format,
            rf"has neither {SINGLE} nor {INDEX} \(it holds: .*pytorch_model\.bin\)\. Convert other",
        ),
        ("1GB", empty, r"it is empty"),
        ("1GB", lambda folder: (folder / "config.json").unlink(), r"config\.json' cannot be used: "),
        ("1GB", lambda folder: (folder / "config.json").write_text('{"model_type": "x"}'), r"cannot be used: .*`x`"),
        (
            "1GB",
            lambda folder: (folder / "config.json").write_text("{"),
            r"config\.json' cannot be used: ",
        ),
        ("1GB", quantize, r"are quantized \(config\.json has a quantization_config\)"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(
    size: str, spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", size=size)
    spoil(folder)
    with pytest.raises(SetupError, match=message):
        loaded(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            r"from local folders\. .*'hf download meta-llama/Llama-3\.1-8B --local-dir FOLDER'",
        ),
        (
            "/none/there",
            r"'/none/there' is no folder, .* Give the path of a folder that save_p",
        ),
        (__file__, r"test_hf_weights\.py' is no folder"),
    ],
)
def test_what_is_no_folder_is_refused(path: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        PretrainedWeights(path)


def test_a_file_that_is_lost_after_it_was_opened_is_named(tmp_path: Path) -> None:
    weights = PretrainedWeights(saved(tmp_path))
    model = build_uninitialized_causal_lm(weights.config(), "sdpa")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(SetupError, match=rf"{SINGLE}' cannot be read: No such file"):
        load_pretrained_weights(model, weights)


# ---------------------------------------------------------------------- and back


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_is_exported_from_stages_is_read_again(tied: bool, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # writing is a matter of all ranks
    model, module = model_of("qwen3", tie_word_embeddings=tied), nn.Module()
    module.model = model
    save_stage_checkpoint({"state_dict": module.state_dict()}, tmp_path / "stages", module, [], [])
    export_pretrained(tmp_path / "stages", model.config, tmp_path / "whole")
    assert_same(tensors_of(loaded(tmp_path / "whole")), tensors_of(model))


def test_weights_are_exported_in_the_dtype_of_the_folder_that_training_began_with(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = HFCausalLM(saved(tmp_path / "before", "qwen3", torch.bfloat16))
    module.configure_model()
    assert module.model is not None
    stored = PretrainedWeights(tmp_path / "before").tensors
    trained = tensors_of(module.model)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    save_stage_checkpoint({"state_dict": module.state_dict()}, tmp_path / "stages", module, [], [])
    named = deepcopy(module.config)
    named.dtype = "bfloat16"
    for name, config, options, kind in (
        ("by name", named, {}, "BF16"),
        ("as before", module.config, {}, "BF16"),
        ("by folder", tmp_path / "before", {}, "BF16"),
        ("as asked", module.config, {"dtype": torch.float32}, "F32"),
        ("unknown", hf_config("qwen3"), {}, "F32"),
    ):
        export_pretrained(tmp_path / "stages", config, tmp_path / name, **options)
        found = PretrainedWeights(tmp_path / name)
        assert {one.dtype for one in found.tensors.values()} == {kind}
        assert found.tensors.keys() == stored.keys()
        assert_same(tensors_of(loaded(tmp_path / name)), trained)
        assert found.config().dtype is (torch.bfloat16 if kind == "BF16" else torch.float32)
