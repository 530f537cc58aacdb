"""Fine-tuning in pipeline stages: ``plain.py`` with five changed lines of code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

from lightning_pipe.strategies import PipelineModule


class FineTuning(PipelineModule):
    """Hugging Face causal language model with AdamW, linear warm-up and cosine decay.

    Args:
        model: path of a folder that ``save_pretrained`` wrote, or a config with ``model_type`` for random weights.
        learning_rate: learning rate after the warm-up (default 1e-3).
        weight_decay: weight decay of matrices; norms and biases have none (default 0.1).
        warmup_steps: number of steps of the warm-up (default 20).
        lora: fields of peft's ``LoraConfig``, to train adapters only (default None: train all parameters).
    """

    def __init__(
        self,
        model: str | dict[str, Any],
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
        lora: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        network: Any
        if isinstance(model, str):
            network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            network.train()  # from_pretrained returns it in evaluation mode
        else:
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model))
        network.config.use_cache = False  # with a cache, packed documents would attend to each other
        self.model = network if lora is None else get_peft_model(network, LoraConfig(**lora))

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.run_batch(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        result = self.run_batch(batch)
        self.log("val_loss", result.loss, batch_size=result.tokens, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_perplexity", self.trainer.callback_metrics["val_loss"].exp(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in trained if parameter.ndim > 1]},
            {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            groups, lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, self.hparams["warmup_steps"], steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
