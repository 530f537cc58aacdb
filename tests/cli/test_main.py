"""The command line: what it prints, how it ends, and what reaches the trainer from YAML."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe.cli import main as main_module
from lightning_pipe.cli.main import main
from lightning_pipe.engine import PipelinePlan
from lightning_pipe.recsys.plans.recsys_plans import PLANS, recsys_plan
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies.registry import STRATEGIES
from tests.patience import HANG
from tests.recsys.serving.saved_rows import exported, removed, save
from tests.running_in import running_in
from tests.strategies.cases import Clicks, fit, loader, recsys

# A user's file, in the folder where the command runs.
MODULE = """
import lightning.pytorch as pl
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor


class Model(pl.LightningModule):
    def __init__(self, fails_on_rank: int = -1, odd_keys_on_rank: int = -1) -> None:
        super().__init__()
        self.fails_on_rank, self.odd_keys_on_rank = fails_on_rank, odd_keys_on_rank
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(name=f"table_{key}", num_embeddings=10, embedding_dim=4, feature_names=[key])
             for key in ("user", "item")]
        )
        self.head = torch.nn.Linear(8, 1)

    def train_dataloader(self):
        ids, lengths = torch.arange(8), torch.ones(8, dtype=torch.int64)
        batches = [KeyedJaggedTensor(["user", "item"], ids, lengths=lengths) for _ in range(6)]
        if self.odd_keys_on_rank == self.global_rank:
            batches[4] = KeyedJaggedTensor(["user", "shop"], ids, lengths=lengths)
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def training_step(self, batch, batch_idx):
        if self.fails_on_rank == self.global_rank and batch_idx == 1:
            raise ZeroDivisionError("the user's own")
        return self.head(self.tables(batch).values()).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
"""

CONFIGURATION = """
model:
  class_path: shop.Model
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  use_distributed_sampler: false
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lightning_pipe.strategies.RecsysPipelineStrategy
    init_args:
      plan: base
      sparse_optimizer:
        class_path: torch.optim.Adagrad
        init_args: {lr: 0.1}
"""


PICKY = """
import lightning.pytorch as pl

from lightning_pipe.engine import SetupError


class PickyModel(pl.LightningModule):
    def __init__(self):
        raise SetupError("a model needs what is not installed: install it")


class PickyCallback(pl.Callback):
    def __init__(self):
        raise SetupError("a callback needs what is not installed: install it")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder where the command runs, which holds the user's module and configuration."""
    (tmp_path / "shop.py").write_text(MODULE)
    (tmp_path / "fit.yaml").write_text(CONFIGURATION)
    with running_in(tmp_path):
        yield tmp_path


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a refused command writes to stderr from its own line on."""
    assert main(arguments) == 1
    _, found, message = capsys.readouterr().err.partition("lightning-pipe: ")
    assert found
    return message


# ---------------------------------------------------------------------- looking


def test_help_names_every_command_and_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict", "bubble", "strategies", "plan"):
        assert f"\n    {command} " in out
    assert "lightning-pipe fit --config examples/recsys_movielens/prefetch.yaml" in out


@pytest.mark.parametrize("arguments", [[], ["train"], ["plan"], ["plan", "show"], ["plan", "show", "base", "--jpeg"]])
def test_arguments_that_make_no_command_end_with_a_usage_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("usage: lightning-pipe")


def test_strategies_lists_every_name_that_the_trainer_takes_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[:3] == ["pipeline", "recsys_serial_pipeline", "recsys_base_pipeline"]
    assert names == [entry.name for entry in STRATEGIES]
    for name, line in zip(names, lines, strict=True):
        assert StrategyRegistry[name]["description"] in line


@pytest.mark.parametrize(
    ("name", "plan", "tasks"),
    [
        ("pipeline", "copy_ahead", 2),
        ("recsys_prefetch_pipeline", "prefetch", 11),
        ("llm_1f1b_pipeline", "llm", 5),
        ("in_process_pipeline", "gpipe_forward", 2),
        ("serial", "serial", 11),
    ],
)
def test_plan_show_takes_a_strategy_or_a_plan(
    name: str, plan: str, tasks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "show", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"plan {plan}: ")
    assert f"timeline of {plan}: " in out
    assert main(["plan", "show", name, "--format", "yaml"]) == 0
    assert len(yaml.safe_load(capsys.readouterr().out)["tasks"]) == tasks


def test_a_plan_that_is_found_while_training_cannot_be_shown_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert "chooses its plan during training" in refusal(["plan", "show", "recsys_auto_pipeline"], capsys)


def test_plan_show_takes_the_path_of_what_it_wrote_as_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "show", "recsys_prefetch_pipeline"])
    shown = capsys.readouterr().out
    main(["plan", "show", "prefetch", "--format", "yaml"])
    text = capsys.readouterr().out
    assert PipelinePlan.from_yaml(text, recsys_tasks()).to_yaml() == recsys_plan("prefetch", recsys_tasks()).to_yaml()
    Path("mine.yaml").write_text(text)
    assert main(["plan", "show", "mine.yaml"]) == 0
    assert capsys.readouterr().out == shown


def test_plan_show_takes_the_tasks_that_a_file_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = recsys_tasks(balanced=True, replicated=True)
    Path("mine.yaml").write_text(recsys_plan("prefetch", tasks).to_yaml())
    assert main(["plan", "show", "mine.yaml", "--format", "yaml"]) == 0
    assert set(yaml.safe_load(capsys.readouterr().out)["tasks"]) == {task.name for task in tasks}
    assert len(tasks) == 14


def test_the_pipe_of_one_process_is_shown_with_both_ways_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "show", "in_process_pipeline"]) == 0
    out = capsys.readouterr().out
    for plan in ("gpipe_forward", "gpipe_backward", "1f1b"):
        assert f"plan {plan}" in out
    for name in ("1f1b", "gpipe_backward"):
        assert main(["plan", "show", name]) == 0
        assert "Backward1" in capsys.readouterr().out


def test_an_unknown_plan_is_refused_with_every_name_and_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["plan", "show", "recsys_prefech_pipeline"], capsys)
    assert message.startswith("Unknown plan 'recsys_prefech_pipeline'")
    assert message.endswith("Did you mean recsys_prefetch_pipeline?\n")
    for name in [*PLANS, *(entry.name for entry in STRATEGIES)]:
        assert name in message


def test_a_file_that_is_no_plan_is_refused_by_its_first_unknown_key(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unknown key 'model'" in refusal(["plan", "show", "fit.yaml"], capsys)


# ---------------------------------------------------------------------- configurations


def test_a_configuration_may_name_classes_of_the_current_folder_and_keeps_the_table_optimizer_as_it_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "fit.yaml", "--print_config"])
    assert end.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["class_path"] == "shop.Model"
    init_args = printed["trainer"]["strategy"]["init_args"]
    assert init_args["sparse_optimizer"] == {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.1}}


def test_a_strategy_by_name_without_a_table_optimizer_is_refused_by_the_tables_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configuration = yaml.safe_load(CONFIGURATION)
    configuration["trainer"]["strategy"] = "recsys_prefetch_pipeline"
    Path("name.yaml").write_text(yaml.safe_dump(configuration))
    message = refusal(["fit", "--config", "name.yaml"], capsys)
    assert "must have an optimizer, got none" in message
    assert "table_user" in message
    assert "table_item" in message


def test_an_unknown_strategy_is_refused_and_the_command_that_lists_them_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(["fit", "--config", "fit.yaml", "--trainer.strategy", "recsys_prefetch"], capsys)
    assert "recsys_prefetch" in message
    assert "'lightning-pipe strategies' lists" in message
    assert "Did you mean recsys_prefetch_pipeline?" in message


@pytest.mark.parametrize("what", ["model", "callback"])
def test_what_a_model_or_a_callback_refuses_is_said_in_its_own_words(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "picky.py").write_text(PICKY)
    name = {"model": "--model", "callback": "--trainer.callbacks"}[what]
    message = refusal(["fit", "--config", "fit.yaml", name, f"picky.Picky{what.capitalize()}"], capsys)
    assert message == f"a {what} needs what is not installed: install it\n"


def test_an_unknown_key_of_the_strategy_is_named_below_a_short_usage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "fit.yaml", "--trainer.strategy.init_args.plann", "base"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "'plann' is not accepted" in err
    assert len(err.splitlines()) < 15


@pytest.mark.parametrize("given", ["{validate_ids: true, detect_nan: true}", "{validate: true}"])
def test_an_option_group_is_built_from_its_fields_and_an_unknown_field_is_named(
    given: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIGURATION.replace("      plan: base\n", f"      plan: base\n      checks: {given}\n")
    Path("groups.yaml").write_text(text)
    command = ["fit", "--config", "groups.yaml"]
    if "validate_ids" in given:
        assert main(command) == 0
    else:
        assert refusal(command, capsys).startswith("checks has 'validate'; expected only validate_ids, detect_nan")


def test_a_model_that_lacks_torchrec_is_refused_with_what_fits(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("lacks.py").write_text("raise ModuleNotFoundError(\"No module named 'torchrec'\", name='torchrec')")
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    with pytest.raises(SystemExit):
        raise SystemExit(main(["fit", "--config", "fit.yaml", "--model", "lacks.Model"]))
    assert "The recsys strategies need torchrec and fbgemm, which cannot be imported" in capsys.readouterr().err


def test_a_users_own_exception_is_raised_as_it_is(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        main(["fit", "--config", "fit.yaml", "--model.fails_on_rank", "0"])


def test_without_jsonargparse_training_names_what_to_install_and_looking_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "find_spec", lambda name: None)
    assert "pip install 'jsonargparse[signatures]'" in refusal(["fit"], capsys)
    assert main(["strategies"]) == 0


# ---------------------------------------------------------------------- the bubble

STAGES = """
import lightning.pytorch as pl
import torch
from lightning_pipe.strategies import PipelineModule


class Language(PipelineModule):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11))

    def train_dataloader(self):
        rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(6)]
        return torch.utils.data.DataLoader(rows, 2)

    def validation_step(self, batch, batch_idx):
        raise AssertionError("validated")

    def val_dataloader(self):
        return self.train_dataloader()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loud(pl.Callback):
    def on_train_start(self, trainer, module):
        raise AssertionError("called")
"""

IN_STAGES = """
model: {class_path: language.Language}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  max_steps: 2
  accumulate_grad_batches: 2
  strategy:
    class_path: lightning_pipe.strategies.LLMPipelineStrategy
    init_args: {schedule: gpipe, num_microbatches: 2}
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
    - class_path: language.Loud
ckpt_path: gone.ckpt
"""


def test_options_of_a_strategy_that_is_given_by_its_name_are_refused_with_what_to_give(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["fit", "--trainer.strategy", "recsys_base_pipeline", "--trainer.strategy.plan", "base"]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "--trainer.strategy lightning_pipe.strategies.RecsysPipelineStrategy --trainer.strategy.plan base" in said


def test_verbose_logs_details_and_is_no_option_of_lightnings(folder: Path) -> None:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    try:
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--help", "--verbose"])
        assert ended.value.code == 0
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def test_checkpoint_export_makes_a_file_that_an_unsharded_module_is_made_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = fit(Clicks(), recsys(), loader(8), max_epochs=1)
    used.save_checkpoint(folder / "saved")
    tables = {name: used.strategy.sharded_model.full_table(name) for name in ("people", "things")}  # type: ignore[attr-defined]
    capsys.readouterr()
    assert main(["checkpoint", "export", "saved", "one.ckpt"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "Exported saved to one.ckpt"
    assert "lightning-pipe:" not in printed.err
    values = Clicks.load_from_checkpoint(folder / "one.ckpt").state_dict()
    for name, table in tables.items():
        (value,) = [one for key, one in values.items() if f".{name}." in key]
        assert torch.equal(value, table)
    before = (folder / "one.ckpt").read_bytes()
    assert "FILE must be a new file, but 'one.ckpt' exists" in refusal(
        ["checkpoint", "export", "saved", "one.ckpt"], capsys
    )
    assert (folder / "one.ckpt").read_bytes() == before
    assert main(["checkpoint", "export", "saved", "one.ckpt", "--force"]) == 0
    assert Clicks.load_from_checkpoint(folder / "one.ckpt").state_dict().keys() == values.keys()


def test_bubble_trains_a_few_steps_and_prints_their_table_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "language.py").write_text(STAGES)
    (folder / "stages.yaml").write_text(IN_STAGES)
    before = set(folder.rglob("*"))
    assert main(["bubble", "--config", "stages.yaml", "--steps", "4", "--warmup", "1"]) == 0
    out = capsys.readouterr().out
    assert "schedule gpipe: 1 rank, 2 micro-batches; medians of 4 steps" in out
    for line in ("measured", "simulated", "(P - 1) / (m + P - 1)"):
        assert f"\n  {line}" in out
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_bubble_refuses_a_strategy_without_stages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["bubble", "--config", "fit.yaml", "--steps", "1"], capsys)
    assert message.startswith("BubbleMonitor expected an LLMPipelineStrategy, got RecsysPipelineStrategy")


# ---------------------------------------------------------------------- several processes


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed command on two processes, the second of which Lightning's launcher starts."""
    program = str(Path(sys.executable).with_name("lightning-pipe"))
    command = [program, "fit", "--config", "fit.yaml", "--trainer.devices", "2", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG, check=False)


@pytest.mark.exhaustive
def test_an_error_of_one_ranks_data_ends_both_processes_with_a_message_each_and_no_traceback(folder: Path) -> None:
    result = run_command(folder, "--model.odd_keys_on_rank", "1")
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    message = "lightning-pipe: rank 1: sharded module 'tables' expected the features of its first batch"
    lines = result.stderr.splitlines()
    for prefix in ("", "[rank1]: "):
        assert [line for line in lines if line.startswith(prefix + message)], result.stderr


@pytest.mark.exhaustive
def test_a_users_exception_on_one_rank_keeps_its_traceback_and_ends_both_processes(folder: Path) -> None:
    result = run_command(folder, "--model.fails_on_rank", "1")
    # Lightning's launcher kills a rank that has not ended some seconds after another one failed.
    assert result.returncode in (1, -signal.SIGKILL)
    assert "[rank1]: ZeroDivisionError: the user's own" in result.stderr
    assert "raise ZeroDivisionError" in textwrap.dedent(result.stderr)


@pytest.mark.exhaustive
def test_commands_that_train_no_language_model_do_without_what_only_newer_releases_of_torch_have() -> None:
    code = (
        "import sys; sys.modules['lightning_pipe.llm.parallel.ring_attention'] = None\n"
        "from lightning_pipe.cli.main import main\n"
        "sys.exit(main(['plan', 'show', 'llm']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    assert "ScheduleStep" in done.stdout


# ---------------------------------------------------------------------- changed rows


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[str, str]:
    """The newer and the older one: rows 2 and 3 were trained in batch 5, and row 1 is gone."""
    old, new = torch.ones(3), torch.zeros(3)
    older = save(tmp_path / "older.ckpt", {"users": {1: (4, old), 2: (4, old), 4: (4, old)}})
    return str(save(tmp_path / "newer.ckpt", {"users": {2: (5, new), 3: (5, new), 4: (4, old)}})), str(older)


def test_changed_rows_and_removed_ids_are_files(
    checkpoints: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older = checkpoints
    out = tmp_path / "new" / "diff"
    assert main(["rows", "diff", newer, "--since", older, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/bags.users.parquet: 2 rows",
        f"{out}/bags.users.removed.parquet: 1 rows",
    ]
    assert exported(out)["bags.users"].keys() == {2, 3}
    assert removed(out) == {"bags.users": [1]}
    for place, name in ((older, "of older"), (newer, "of newer")):
        assert main(["export", place, "--to", "rows", "--out", str(tmp_path / name)]) == 0
    capsys.readouterr()
    applied = tmp_path / "applied"
    assert main(["rows", "apply", str(tmp_path / "of older"), "--diff", str(out), "--out", str(applied)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{applied}/bags.users.parquet: 3 rows"]
    assert exported(applied) == exported(tmp_path / "of newer")


def test_rows_are_written_since_a_batch(
    checkpoints: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rows", "diff", checkpoints[0], "--since", "5", "--out", str(tmp_path / "diff")]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path}/diff/bags.users.parquet: 2 rows"]
