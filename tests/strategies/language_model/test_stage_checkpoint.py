"""Checkpoints of stages: training goes on from one on any split as if it had not stopped; exports; what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.checkpoints.optimizer_state import merge_param_groups_of_ranks
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained
from tests.distributed import InParts, run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    Tiny,
    TinyHF,
    TinyLM,
    fit,
    hf_config,
    llm,
    loader,
    row_batches,
    train_with_lightning,
    trainer,
    values_of,
)

LAYERS = 4  # one for each stage of a schedule with two stages on each of two ranks
BEFORE = 3  # steps of the first of two epochs, after which the checkpoint is written
BATCHES = row_batches(BEFORE, rows=8)


class Grouped(Tiny):
    """AdamW in three groups: the first is on the first stage alone, the last on the last."""

    def __init__(self, layers: int = LAYERS, **options: Any) -> None:
        super().__init__(layers, **options)
        self.save_hyperparameters("layers")

    def configure_optimizers(self) -> Any:
        groups: dict[str, list[nn.Parameter]] = {"embedding": [], "layers": [], "head": []}
        for name, parameter in self.named_parameters():
            groups[next((key for key in groups if f".{key}." in name), "head")].append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": groups["embedding"], "lr": 0.02, "weight_decay": 0.0},
                {"params": groups["layers"], "lr": 0.01, "betas": (0.8, 0.99)},
                {"params": groups["head"], "lr": 0.005},
            ],
            eps=1e-3,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}


class OneGroup(Grouped):
    """The same parameters in one group."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Frozen(Grouped):
    """The optimizer has nothing of the embedding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for n, p in self.named_parameters() if "embedding" not in n), lr=0.01)


class Wider(Grouped):
    """Of another size in the first layer and in the last."""

    def build_model(self) -> nn.Module:
        model = TinyLM(self.layers)
        for index in (0, -1):
            model.layers[index].mlp = nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8))
        return model


def keeping(folder: Path, **options: Any) -> dict[str, Any]:
    """The trainer's arguments for keeping a checkpoint of each epoch."""
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **options)
    return {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [callback]}


def go_on(module: pl.LightningModule, strategy: Any, path: Path, batches: Any = BATCHES, **options: Any) -> pl.Trainer:
    """Train on from a checkpoint, the module made from another seed than the one that it was written by."""
    used = trainer(strategy, **options)
    torch.manual_seed(0)
    used.fit(module, loader(batches), ckpt_path=path)
    return used


def undisturbed(folder: Path) -> dict[str, Any]:
    """Two epochs of training; checkpoints are kept in the folder."""
    module = Grouped()
    fit(module, llm(), BATCHES, max_epochs=2, **keeping(folder))
    return {"losses": module.losses, "parameters": values_of(module.model)}


def resumed(path: Path, strategy: Any, batches: Any = BATCHES) -> dict[str, Any]:
    """The second epoch, from a checkpoint."""
    module = Grouped()
    used = go_on(module, strategy, path, batches, max_epochs=2, use_distributed_sampler=False)
    rates = [group["lr"] for group in used.optimizers[0].param_groups]
    return {"losses": module.losses, "parameters": values_of(module.model), "rates": rates}


def half(rank: int) -> list[dict[str, Tensor]]:
    """Every other row of each batch, of the first replica of a pipeline or of the second."""
    return [{key: value[rank % 2 :: 2] for key, value in batch.items()} for batch in BATCHES]


def evaluated(
    path: Path | None, strategy: Any, names: Collection[str] = ("validate", "test", "predict")
) -> dict[str, Any]:
    """What validation, test and prediction make of a checkpoint; of the module as it is where there is none."""
    results: dict[str, Any] = {}
    for name in names:
        used = trainer(strategy())
        found = getattr(used, name)(Grouped(), loader(BATCHES[:2]), ckpt_path=path)
        results[name] = found if name == "predict" else next(iter(found[0].values()))
    return results


def error_of(work: Callable[[], Any]) -> str:
    with pytest.raises(SetupError) as caught:
        work()
    return str(caught.value)


# ---------------------------------------------------------------------- two ranks, then four, then one


# Ways to train the second epoch. With another schedule some layers move to another rank and some stay.
RESUMES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "another schedule": lambda folder: resumed(folder / "two" / "step=3.ckpt", llm("interleaved_1f1b")),
    "saved on one": lambda folder: resumed(folder / "one" / "step=3.ckpt", llm()),
    "saved on V stages": lambda folder: _through_v_stages(folder),
}


def on_two_ranks(rank: int, world_size: int, part: str, folder: Path) -> dict[str, Any]:
    path = folder / "two" / "step=3.ckpt"
    if part == "undisturbed":
        return {part: undisturbed(folder / "two")}
    if part == "resumed":
        found = {name: resume(folder) for name, resume in RESUMES.items()}
        return {part: found, "sharded": _through_shards(path, folder, half(rank))}
    if part == "errors":
        return {part: _errors(path, folder)}
    hf = TinyHF(hf_config("llama"))
    fit(hf, llm(), BATCHES[:2]).save_checkpoint(folder / "hf")
    predicting, untrained = trainer(llm()), TinyHF(hf_config("llama"))
    return {
        "evaluated": evaluated(path, llm),
        "weights only": _weights_only(folder),
        "hf": predicting.predict(untrained, loader(BATCHES[:1]), ckpt_path=folder / "hf"),
    }


def part_of(key: str) -> str:
    parts = {"undisturbed": "undisturbed", "resumed": "resumed", "sharded": "resumed", "errors": "errors"}
    return parts.get(key, "others")


def _through_v_stages(folder: Path) -> dict[str, Any]:
    """Saved where rank 0 has the first stage and the last: the hyper-parameters of no group depend on the rank."""
    fit(Grouped(), llm("zbv_zero_bubble"), BATCHES, **keeping(folder / "v"))
    return resumed(folder / "v" / "step=3.ckpt", llm())


def _through_shards(path: Path, folder: Path, batches: Any) -> dict[str, Any]:
    """Read from two stages into two shards of one stage, saved there, and read back; and trained on as shards."""

    def shards() -> Any:
        return llm(pp=1, dp_shard=2)

    used = go_on(Grouped(), shards(), path)  # nothing is left to train after one epoch
    used.save_checkpoint(folder / "shards")
    module = Grouped()
    trainer(llm()).validate(module, loader(BATCHES[:1]), ckpt_path=folder / "shards")
    through = values_of(module.model)
    return {"parameters": through, "losses": resumed(path, shards(), batches=batches)["losses"]}


def _weights_only(folder: Path) -> dict[str, Any]:
    fit(Grouped(), llm(), BATCHES, **keeping(folder / "weights", save_weights_only=True))
    path = folder / "weights" / "step=3.ckpt"
    with pytest.raises(KeyError, match="contains only the model"):
        go_on(Grouped(), llm(), path)
    keys = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {"evaluated": evaluated(path, llm), "parts": {key.partition(".")[0] for key in keys}}


def _errors(path: Path, folder: Path) -> dict[str, str]:
    def validate(given: Any, module: pl.LightningModule | None = None) -> str:
        return error_of(lambda: trainer(llm()).validate(module or Grouped(), loader(BATCHES), ckpt_path=given))

    def resume(module: pl.LightningModule) -> str:
        return error_of(lambda: go_on(module, llm(), path))

    used = trainer(llm())
    used.validate(Grouped(), loader(BATCHES[:1]), verbose=False)
    lenient = Grouped(LAYERS + 2)
    lenient.strict_loading = False
    trainer(llm()).validate(lenient, loader(BATCHES[:1]), ckpt_path=path)
    return {
        "nothing": validate(folder / "nothing"),
        "of another kind": validate(folder / "other"),
        "missing": validate(path, Grouped(LAYERS + 2)),
        "unexpected": validate(path, Grouped(LAYERS - 2)),
        "sizes": validate(path, Wider()),
        "more trained": resume(Frozen()),
        "other groups": resume(OneGroup()),
        "options": error_of(lambda: used.save_checkpoint(folder / "out", storage_options={})),
        "plugin": error_of(lambda: setattr(used.strategy, "checkpoint_io", used.strategy.checkpoint_io)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One process, one stage; its checkpoint is in ``folder / "one"``."""
    return undisturbed(folder / "one")


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "other").mkdir()
    torch.save({}, folder / "other" / "meta.pt")
    dcp.save({"module": {"weight": torch.ones(2)}}, checkpoint_id=folder / "other")
    found = InParts(lambda part: run_ranks(on_two_ranks, 2, part, folder), part_of)
    found.of(0, "undisturbed")  # its checkpoints are what others read
    return found.of_ranks(2)


def check_resumed(parts: list[dict[str, Any]], expected: dict[str, Any], name: str = "") -> None:
    """To the bit: the losses, and the parameters of all ranks together."""
    whole = {key: value for part in parts for key, value in part["parameters"].items()}
    assert whole.keys() == expected["parameters"].keys(), name
    assert [key for key, value in whole.items() if not torch.equal(value, expected["parameters"][key])] == [], name
    for part in parts:
        assert part["losses"] == expected["losses"][BEFORE:], name


@pytest.fixture(scope="module")
def second_epoch() -> Reference:
    """Losses under Lightning's own strategy, for gradients that are added up in another order."""
    return Reference.of(lambda: {"losses": train_with_lightning(Grouped(), BATCHES, max_epochs=2).losses[BEFORE:]})


def test_training_goes_on_as_if_it_had_not_stopped(
    ranks: list[dict[str, Any]], alone: dict[str, Any], second_epoch: Reference
) -> None:
    assert len(alone["losses"]) == 2 * BEFORE
    for result in ranks:
        assert result["undisturbed"]["losses"] == alone["losses"]
    for name in RESUMES.keys() - {"saved on V stages"}:
        check_resumed([result["resumed"][name] for result in ranks], alone, name)
    # A V schedule may add up gradients of micro-batches in another order.
    for result in ranks:
        assert not second_epoch.differences({"losses": result["resumed"]["saved on V stages"]["losses"]})


def test_each_group_goes_on_with_its_own_hyperparameters(ranks: list[dict[str, Any]]) -> None:
    """Six steps, the rates halved after each two; also where a rank has nothing of a group."""
    for result in ranks:
        for name, found in result["resumed"].items():
            assert found["rates"] == pytest.approx([0.02 / 8, 0.01 / 8, 0.005 / 8]), name


def test_two_stages_go_on_as_one(ranks: list[dict[str, Any]], alone: dict[str, Any], folder: Path) -> None:
    check_resumed([resumed(folder / "two" / "step=3.ckpt", llm())], alone)


def test_shards_of_a_stage_are_read_and_written(
    ranks: list[dict[str, Any]], folder: Path, second_epoch: Reference
) -> None:
    """What went through two shards and back is as it was."""
    module = Grouped()
    trainer(llm()).validate(module, loader(BATCHES[:1]), ckpt_path=folder / "two" / "step=3.ckpt")
    expected = values_of(module.model)
    whole = {key: value for result in ranks for key, value in result["sharded"]["parameters"].items()}
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[key], expected[key]) for key in expected)
    for result in ranks:
        assert not second_epoch.differences({"losses": result["sharded"]["losses"]})


def test_evaluation_reads_a_checkpoint(ranks: list[dict[str, Any]], folder: Path) -> None:
    expected = evaluated(folder / "one" / "step=3.ckpt", llm)
    assert expected["validate"] == expected["test"]
    assert expected["validate"] != evaluated(None, llm, ["validate"])["validate"]
    for result in ranks:
        for found in (result["evaluated"], result["weights only"]["evaluated"]):
            assert (found["validate"], found["test"]) == (expected["validate"], expected["test"])
            assert all(torch.equal(*pair) for pair in zip(found["predict"], expected["predict"], strict=True))
        assert result["weights only"]["parts"] == {"state_dict"}


def test_a_folder_is_keyed_by_the_unsplit_model_s_names(ranks: list[dict[str, Any]], folder: Path) -> None:
    module = Grouped()
    module.configure_model()
    names = set(module.state_dict())
    assert "saved on V stages" in ranks[0]["resumed"]
    for kept in ("one", "two", "v"):
        paths = dcp.FileSystemReader(folder / kept / "step=3.ckpt").read_metadata().planner_data
        assert paths is not None
        assert {path[1] for path in paths.values() if path[0] == "state_dict"} == names
        assert {path[2] for path in paths.values() if path[0] == "optimizer_0"} == names


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "nothing' is not there, expected a folder written under LLMPipelineStrategy"),
        ("of another kind", "other' is a folder of another kind"),
        ("missing", r"missing in it: model\.layers\.4\.mlp\.0\.bias, .*, model\.layers\.5\..*\. Build the module"),
        ("unexpected", r"unexpected in it: model\.layers\.2\.mlp\.0\.bias"),
        ("sizes", r"of another size: model\.layers\.0\.mlp\.0\.bias \(\[8\], expected \[9\]\), .*layers\.3\.mlp"),
        ("more trained", r"in the checkpoint's optimizer, but not in the module's: model\.embedding\."),
        ("other groups", r"in one group of the optimizer, but not of the checkpoint's: model\.embedding\.\S+ and "),
        ("options", "storage_options were given"),
        ("plugin", "plugin TorchCheckpointIO"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(case: str, message: str, ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        with pytest.raises(SetupError, match=message):
            raise SetupError(result["errors"][case])


# ---------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def exported(ranks: list[dict[str, Any]], folder: Path) -> Path:
    export_checkpoint(folder / "two" / "step=3.ckpt", folder / "exported.ckpt")
    return folder / "exported.ckpt"


def test_one_file_holds_what_the_unsplit_module_takes(exported: Path, ranks: list[dict[str, Any]]) -> None:
    module = Grouped.load_from_checkpoint(exported, layers=LAYERS)
    assert Grouped.load_from_checkpoint(exported).layers == LAYERS, "the hyper-parameters are kept"
    state = torch.load(exported, weights_only=True)["state_dict"]
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    model = TinyLM(LAYERS)
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    used = trainer("auto")
    expected = Reference.of(lambda: used.validate(module, loader(BATCHES[:2]), verbose=False)[0])
    assert not expected.differences({"val_loss": ranks[0]["evaluated"]["validate"]})


def test_one_device_trains_on_from_the_file(exported: Path, second_epoch: Reference) -> None:
    """Under Lightning's own strategy."""
    found = resumed(exported, "auto")
    assert not second_epoch.differences({"losses": found["losses"]})
    assert found["rates"] == pytest.approx([0.02 / 8, 0.01 / 8, 0.005 / 8])


def test_a_hugging_face_model_is_exported_for_from_pretrained(
    ranks: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    predicted = [result["hf"][0] for result in ranks]
    config = TinyHF(hf_config("llama")).config
    export_pretrained(folder / "hf", config, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = Reference.of(lambda: {"logits": model(input_ids=BATCHES[0]["input_ids"]).logits})
    for found in predicted:
        assert not expected.differences({"logits": found})
    other = TinyHF(hf_config("llama", layers=5)).config
    with pytest.raises(SetupError, match=r"does not fit the llama model of the config: missing in it: model\.la"):
        export_pretrained(folder / "hf", other, tmp_path / "other")


# ---------------------------------------------------------------------- groups of several ranks


def test_groups_of_ranks_are_one_where_they_say_the_same() -> None:
    decayed, plain = {"lr": 1.0, "decay": 0.1}, {"lr": 1.0, "decay": 0.0}
    first = [{**decayed, "params": ["b"]}, {**plain, "params": []}]
    second = [{**decayed, "params": ["a", "b"]}, {**plain, "params": ["c"]}]
    merged = merge_param_groups_of_ranks([first, second], ["a", "b", "c"])
    assert merged == [{**decayed, "params": ["a", "b"]}, {**plain, "params": ["c"]}]


def test_ranks_that_leave_out_empty_groups_do_not_mix_them() -> None:
    decayed = {"lr": torch.tensor(1.0), "decay": 0.1, "params": ["a"]}
    plain = {"lr": torch.tensor(1.0), "decay": 0.0, "params": ["b"]}
    merged = merge_param_groups_of_ranks([[decayed], [plain], [decayed, plain]], ["a", "b"])
    assert [(group["decay"], group["params"]) for group in merged] == [(0.1, ["a"]), (0.0, ["b"]), (0.0, ["b"])]
