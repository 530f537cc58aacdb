"""Last line of a run: the path of the checkpoint and the command that exports it."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class PrintExport(pl.Callback):
    """Prints the best checkpoint at the end, with the command that exports it for Hugging Face."""

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        saved = trainer.checkpoint_callback
        if not trainer.is_global_zero or not isinstance(saved, ModelCheckpoint) or not saved.best_model_path:
            return
        score = saved.best_model_score  # a run that was resumed in another folder and not validated since has none
        perplexity = "" if score is None else f" with a validation perplexity of {score:.2f}"
        line = f"Checkpoint{perplexity}: {saved.best_model_path}"
        if Path(saved.best_model_path).is_dir():  # Lightning's own strategies write one file
            target = "pretrained" if module.hparams["lora"] is None else "adapters"
            arguments = f"{saved.best_model_path!r}, {module.hparams['model']!r}, {target!r}"
            line += f'; export: python -c "import lightning_pipe.strategies as s; s.export_pretrained({arguments})"'
        print(line)
