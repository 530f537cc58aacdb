"""Checkpoints of Hugging Face's models that were trained with an older release of transformers are read to the bit.

``kept_hf_files.py`` writes them. The parameters that have other names now are put together here by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_pipe.checkpoints.folder_reading import read_metadata
from lightning_pipe.checkpoints.stage_layout import MODEL
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.older_names import OlderNames
from lightning_pipe.strategies.language_model.pretrained import export_pretrained
from tests.distributed import run_ranks
from tests.scenarios.checkpoints.kept_hf_files import CONFIGS, COUNT, STEP, batches, module_of, state_of
from tests.strategies.llm_cases import llm, loader, trainer

KEPT = Path(__file__).parent / "kept_hf"
VERSIONS = sorted(path.name for path in KEPT.iterdir())
EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d)\.(w[123])\.weight(.*)")


def expected(kind: str, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values under the names of transformers 5."""
    if kind == "gpt_neox":
        return {name.replace("embed_out", "lm_head"): value for name, value in kept.items()}
    values, experts = {}, {}
    for name, value in kept.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            values[name.replace("block_sparse_moe", "mlp")] = value
        else:
            layer, expert, which, state = found.groups()
            experts[layer, state, int(expert), which] = value
    for layer, state in {key[:2] for key in experts}:
        of = [[experts[layer, state, expert, which] for expert in range(4)] for which in ("w1", "w2", "w3")]
        if of[0][0].dim() == 0:
            up = down = max(value for values in of for value in values)
        else:
            gate, down, up = (torch.stack(values) for values in of)
            up = torch.cat([gate, up], 1)
        values[f"{layer}.mlp.experts.gate_up_proj{state}"] = up
        values[f"{layer}.mlp.experts.down_proj{state}"] = down
    return values


def all_kept(kind: str, version: str) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    for path in sorted((KEPT / version / kind).glob("values_*.pt")):
        kept |= torch.load(path)
    return expected(kind, kept)


class Loaded(Callback):
    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values = state_of(trainer)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def resume(rank: int, world_size: int, folder: Path, kind: str, options: dict[str, Any], to: Path) -> tuple[Any, int]:
    loaded = Loaded()
    used = trainer(llm("1f1b", COUNT, **options), callbacks=[loaded], max_epochs=2)
    used.fit(module_of(kind), loader(batches(STEP)), ckpt_path=folder)
    used.save_checkpoint(to)
    return {name: whole(value) for name, value in loaded.values.items()}, used.global_step


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("ranks", "steps", "options"),
    # Ranks that share the data have half of the batches.
    [(1, STEP, {}), (2, STEP, {}), (2, STEP - 1, {"pp": 1, "dp_shard": 2})],
    ids=["one rank", "two stages", "sharded"],
)
def test_training_goes_on_from_a_checkpoint_with_older_names(
    version: str, kind: str, ranks: int, steps: int, options: dict[str, Any], tmp_path: Path
) -> None:
    kept = all_kept(kind, version)
    found = run_ranks(resume, ranks, KEPT / version / kind / "checkpoint", kind, options, tmp_path / "after")
    values = {name: value for of_rank, _ in found for name, value in of_rank.items()}
    assert values.keys() == kept.keys()
    assert [name for name in kept if not torch.equal(values[name], kept[name])] == []
    assert {step for _, step in found} == {STEP + steps}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_with_older_names_is_exported_with_the_models_names(
    version: str, kind: str, tmp_path: Path
) -> None:
    export_pretrained(KEPT / version / kind / "checkpoint", module_of(kind).config, tmp_path / "after")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype=torch.float32)
    kept = all_kept(kind, version)
    values = loaded.state_dict()
    assert {f"model.{name}" for name in values} == {name for name in kept if " " not in name}
    assert [name for name, value in values.items() if not torch.equal(value, kept[f"model.{name}"])] == []


EXPERTS = "model.model.layers.0.block_sparse_moe.experts"


def older_of(saved: dcp.Metadata) -> OlderNames:
    module = module_of("mixtral")
    module.configure_model()
    found = OlderNames.of(module.model, saved, list(module.state_dict()))
    assert found is not None
    return found


def test_an_expert_that_is_missing_is_seen_in_the_size_of_all() -> None:
    saved = read_metadata(KEPT / "4.57" / "mixtral" / "checkpoint", (MODEL,), "")
    for which in ("w1", "w2", "w3"):
        saved.planner_data = {k: v for k, v in saved.planner_data.items() if f"{EXPERTS}.3.{which}" not in str(v)}
    entry: Any = older_of(saved).saved.state_dict_metadata[f"{MODEL}.model.model.layers.0.mlp.experts.gate_up_proj"]
    assert entry.size == (3, 24, 8)


def test_experts_of_different_groups_of_an_optimizer_are_refused() -> None:
    older = older_of(read_metadata(KEPT / "4.57" / "mixtral" / "checkpoint", (MODEL,), ""))
    one, other = ({"lr": lr, "params": [f"{EXPERTS}.{expert}.w1.weight"]} for expert, lr in ((0, 0.1), (1, 0.2)))
    with pytest.raises(SetupError, match=r"gate_up_proj are in the groups 0 and 1 of the checkpoint's optimizer"):
        older.in_groups([one, other])


def test_groups_name_each_parameter_once() -> None:
    older = older_of(read_metadata(KEPT / "4.57" / "mixtral" / "checkpoint", (MODEL,), ""))
    names = [f"{EXPERTS}.{expert}.{which}.weight" for expert in range(4) for which in ("w1", "w2", "w3")]
    (group,) = older.in_groups([{"lr": 0.1, "params": ["model.lm_head.weight", *names]}])
    experts = "model.model.layers.0.mlp.experts"
    assert group == {"lr": 0.1, "params": ["model.lm_head.weight", f"{experts}.gate_up_proj", f"{experts}.down_proj"]}


def test_the_largest_number_of_steps_is_taken() -> None:
    """An expert without tokens had no gradient, so the optimizer did not step."""
    folder = KEPT / "4.57" / "mixtral" / "checkpoint"
    older = older_of(read_metadata(folder, (MODEL,), ""))
    path = ("optimizer_0", "state", "model.model.layers.0.mlp.experts.down_proj", "step")
    values = iter([3.0, 1.0, 2.0, 0.0])
    state: dict[str, Any] = {"optimizer_0": {"state": {path[2]: {"step": torch.tensor(0.0)}}}}
    taken = older.take_out(state)
    assert state == {"optimizer_0": {"state": {path[2]: {}}}}
    with mock.patch.object(dcp, "load", lambda read, **_: [one.fill_(next(values)) for one in read.values()]):
        older.put_in(state, taken, folder, None)
    assert state == {"optimizer_0": {"state": {path[2]: {"step": torch.tensor(3.0)}}}}


def test_a_model_with_its_own_names_has_none_of_older_releases() -> None:
    module = module_of("mixtral")
    module.configure_model()
    names = list(module.state_dict())
    saved = dcp.Metadata({}, {f"{MODEL}.{name}": (MODEL, name) for name in names}, {})
    assert OlderNames.of(module.model, saved, names) is None
    assert OlderNames.of(torch.nn.Linear(2, 2), saved, names) is None
