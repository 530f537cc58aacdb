"""``lightning-pipe export``: one artifact for a server from a checkpoint folder of sharded tables."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_pipe.checkpoints.compiled_names import CompiledNameMap
from lightning_pipe.checkpoints.export import export_checkpoint
from lightning_pipe.cli.training import PipelineArgumentParser, PipelineCLI
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.common.safe_text import escape_unprintable

_KINDS = ("aoti", "torch_export", "quantized", "rows")
_DESCRIPTION = """\
Make one artifact for a server from a checkpoint folder of a recsys strategy, on any number of ranks, local or a URL:

  aoti          package that is compiled for this kind of machine, for Python and C++
  torch_export  program of torch.export
  quantized     TorchScript program with tables of 8 or 4 bits
  rows          one Parquet file for each table, with ids

The first three compute predict_step, or forward, of the model of a configuration, for a batch like the first one of
its val_dataloader. Beside FILE, FILE.inputs.json describes the tensors that the program takes.
"""


def export(arguments: Sequence[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="lightning-pipe export",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder, or its URL")
    parser.add_argument("--to", required=True, choices=_KINDS, help="kind of artifact")
    parser.add_argument("--out", required=True, help="file to write, or folder for --to rows; must not exist")
    parser.add_argument("--config", action="append", default=[], help="configuration of the training")
    parser.add_argument(
        "--bits", type=int, default=8, help="bits of a value of a table, for --to quantized; default: 8"
    )
    options, remaining_args = parser.parse_known_args(list(arguments))
    if os.path.lexists(options.out):
        raise SetupError(f"--out must be new, but {options.out!r} exists. Give another name, or remove it")
    if options.to == "rows":
        from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet  # lazy: needs pyarrow

        for name, count in write_tables_to_parquet(options.checkpoint, options.out).items():
            print(escape_unprintable(f"{options.out}/{name}: {count} rows"))
        return
    from lightning_pipe.recsys.modules.dynamic_modules import is_dynamic_type  # lazy: needs TorchRec
    from lightning_pipe.recsys.serving import programs

    if not options.config:
        raise SetupError(f"--to {options.to} needs the model: give --config FILE, the configuration of the training")
    model, batch = _model_and_batch([f"--config={path}" for path in options.config] + remaining_args)
    if dynamic_names := [name for name, module in model.named_modules() if is_dynamic_type(type(module))]:
        raise SetupError(
            f"--to {options.to} needs tables of fixed size, but the model's {', '.join(dynamic_names)} have dynamic"
            " tables, whose rows are in no parameter. Export them with --to rows, and export a model that takes their"
            " vectors"
        )
    loaded = _load_checkpoint_into_model(model, options.checkpoint)
    out, described = Path(options.out), Path(f"{Path(options.out)}.inputs.json")
    with atomic_write(out) as file, atomic_write(described) as inputs:
        if options.to == "quantized":
            form = programs.write_quantized(model.eval(), batch, file, options.bits)
        else:
            write = programs.write_aoti if options.to == "aoti" else programs.write_torch_export
            form = write(model.eval(), batch, file)
        inputs.write_text(json.dumps(form.description(batch, model) | loaded, indent=1) + "\n")
    print(escape_unprintable(f"Wrote {out}, which takes the tensors of {described}"))


def _model_and_batch(arguments: list[str]) -> tuple[nn.Module, Any]:
    """The model of a configuration, and the first batch of its validation."""
    cli = PipelineCLI(parser_class=PipelineArgumentParser, save_config_callback=None, run=False, args=arguments)
    model, trainer, data = cli.model, cli.trainer, cli.datamodule
    model.trainer = trainer
    trainer.strategy.connect(model)
    source: Any = model
    if data is not None:
        data.trainer = trainer
        data.prepare_data()
        data.setup("validate")
        source = data
    batch = next(iter(source.val_dataloader()), None)
    if batch is None:
        raise SetupError("val_dataloader of the configuration has no batch, which export takes as an example")
    return model, batch


def _load_checkpoint_into_model(model: nn.Module, checkpoint: str) -> dict[str, Any]:
    """Fill a model, and return the ``global_step`` of the checkpoint and the names of its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.ckpt"
        export_checkpoint(checkpoint, file, weights_only=True)
        saved = torch.load(file, mmap=True, weights_only=True)
        state = saved["state_dict"]
        try:
            model.load_state_dict(CompiledNameMap(model.state_dict()).rename_keys(state))
        except RuntimeError as error:
            raise SetupError(f"the checkpoint does not fit the model of the configuration: {error}") from error
        names = sorted(name for name, value in state.items() if isinstance(value, torch.Tensor))
        return {"step": saved.get("global_step"), "state_dict": names}
