"""Train an ``nn.Sequential`` whole and as an in-process pipe, and save all values of each way.

Ways: ``whole`` (Lightning alone), ``one`` (a pipe of one partition), ``two`` (two partitions on the device), ``mixed``
(the first on the CPU), each with ``:bf16``, ``:fp16`` or ``:resumed``. All pipes use the same micro-batches.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.strategies import InProcessPipelineStrategy
from scripts.gpu.devices import device_of, parser, save
from scripts.gpu.trainers import fit

__all__: list[str] = []

_WIDTH, _ROWS, _CHUNKS = 32, 64, 4


class Layers(pl.LightningModule):
    """Linear layers with a loss that is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch[0])
        loss = nn.functional.mse_loss(output, batch[1].to(output.device))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def strategy(name: str, kind: str) -> Any:
    if name == "whole":
        return "auto"
    device = device_of(kind)
    devices = {"one": [device], "two": [device, device], "mixed": [torch.device("cpu"), device]}[name]
    return InProcessPipelineStrategy(_CHUNKS, parallel_devices=devices)


def state(trainer: pl.Trainer) -> dict[str, Any]:
    return dict(trainer.lightning_module.state_dict())


def main() -> None:
    options = parser(__doc__, "whole, one, two, mixed").parse_args()
    generator = torch.Generator().manual_seed(0)
    data = [tuple(torch.randn(2, _ROWS, _WIDTH, generator=generator)) for _ in range(options.steps)]
    results: dict[str, Any] = {}
    for way in options.ways:
        name, _, variant = way.partition(":")
        folder = options.save.parent / way.replace(":", "-")
        make = strategy, name, options.device
        results[way], _ = fit(variant, options.device, folder, Layers, lambda: make[0](*make[1:]), data, state)  # noqa: B023
        save(results, options.save)


if __name__ == "__main__":
    main()
