"""Train a small Llama of transformers on packed documents, in stages and in a plain loop, and save all values.

A way is ``documents`` (transformers' model in a plain loop over single documents, with PyTorch's attention) or
``SCHEDULE+ATTENTION`` (packed rows in stages), such as ``1f1b+flex_attention``, each with ``:bf16`` or ``:lora``
(adapters of peft). The values include the gradients of the first step.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.llm.batches.packing import PackedDocuments, split_packed_batch_by_row
from lightning_pipe.strategies import HFCausalLM, LLMPipelineStrategy
from scripts.gpu.devices import backend, device_of, parser, recorded_kernels, save, tensors
from scripts.gpu.trainers import fit

__all__: list[str] = []

_ROWS, _VOCABULARY = 4, 64
_LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64}
_CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": _VOCABULARY, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}


class Packed(HFCausalLM):
    """The model under a Trainer. Records losses, and the gradients of the first step."""

    def __init__(self, attention: str, lora: dict[str, Any] | None) -> None:
        super().__init__(_CONFIG, attention=attention, lora=lora)
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = self.gradients or gradients_of(self)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)


def gradients_of(model: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Copies of the gradients, by the parameters' names after *prefix*."""
    named = model.named_parameters(prefix)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def single_documents(data: list[dict[str, Tensor]], device: torch.device, variant: str) -> dict[str, Any]:
    """Losses and values of a plain loop over the documents of each batch."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_CONFIG), attn_implementation="sdpa")
    if variant == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**_LORA)).get_base_model()  # type: ignore[arg-type]
    model.to(device)
    optimizer = optimizer_of(model)
    losses = []
    first: dict[str, Tensor] = {}
    with recorded_kernels() as kernels:
        for batch in data:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for row in split_packed_batch_by_row(batch):
                cuts = row["cu_seq_lens_q"].diff().tolist()
                pieces = (row[name].to(device).split(cuts, 1) for name in ("input_ids", "labels"))
                for ids, labels in zip(*pieces, strict=True):
                    with torch.autocast(device.type, torch.bfloat16, enabled=variant == "bf16"):
                        logits = model(input_ids=ids).logits.flatten(0, 1)
                        loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
                    loss.backward()
                    total += loss.detach()
            tokens = int((batch["labels"] != -100).sum())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(tokens)
            first = first or gradients_of(model, "model")
            optimizer.step()
            losses.append(total.cpu() / tokens)
    values = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {
        "losses": torch.stack(losses),
        "values": tensors({**values, "gradient": first}),
        "peak": [],
        "kernels": kernels,
    }


def state(trainer: pl.Trainer) -> dict[str, Any]:
    module = trainer.lightning_module
    assert isinstance(module, Packed)
    return {**module.state_dict(), "gradient": module.gradients}


def batches_of(steps: int, length: int) -> list[dict[str, Tensor]]:
    """Packed rows of documents of one token to a whole row."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, length + 1, (4 * _ROWS * steps,), generator=generator).tolist()
    documents = [torch.randint(_VOCABULARY, (size,), generator=generator) for size in sizes]
    return list(PackedDocuments(documents, length, _ROWS))[:steps]


def main() -> None:
    arg_parser = parser(__doc__, "documents, or SCHEDULE+ATTENTION")
    arg_parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    options = arg_parser.parse_args()
    data = batches_of(options.steps, options.length)
    results: dict[str, Any] = {}
    for way in options.ways:
        try:
            results[way] = trained(way, options, data)
        except Exception as error:  # ways with other kernels are compared nevertheless
            results[way] = {"error": f"{type(error).__name__}: {error}"}
        save(results, options.save)


def trained(way: str, options: argparse.Namespace, data: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Losses and values of one way, which runs in this process alone."""
    name, _, variant = way.partition(":")
    schedule, _, attention = name.partition("+")
    if not attention:
        return single_documents(data, device_of(options.device), variant)
    folder = options.save.parent / way.replace(":", "-")
    arguments: dict[str, Any] = {"num_microbatches": _ROWS, "process_group_backend": backend(options.device)}
    results, _ = fit(
        variant,
        options.device,
        folder,
        lambda: Packed(attention, _LORA if variant == "lora" else None),
        lambda: LLMPipelineStrategy(schedule, **arguments),
        data,
        state,
    )
    return results


if __name__ == "__main__":
    main()
