"""Train a small transformer whole and in stages on all ranks, and save losses and the values of this rank's stages.

A way is ``whole`` (a plain loop with the same micro-batches) or the name of a schedule, with ``:bf16``, ``:resumed``,
``:compiled`` (each layer) or ``:sharded`` (by FSDP2 over a mesh of one rank, which the strategy would not shard).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from benchmarks.llm_step_time import Decoder, Language, batches_of
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.parallel.parallel_dims import ParallelMeshes
from lightning_pipe.llm.run import stage_parts
from lightning_pipe.strategies import LLMPipelineStrategy
from scripts.gpu.devices import backend, device_of, parser, recorded_kernels, save, tensors
from scripts.gpu.staged_messages import staged_messages
from scripts.gpu.trainers import fit

__all__: list[str] = []

_WIDTH, _LAYERS, _CHUNKS = 64, 4, 4
_RATE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


class Momentum(Language):
    """The model with an optimizer that has states."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), **_RATE)


def whole(data: list[dict[str, torch.Tensor]], device: torch.device, variant: str) -> dict[str, Any]:
    """Losses and values of a plain loop on one device."""
    torch.manual_seed(1)
    model = Decoder(_WIDTH, _LAYERS).to(device)
    optimizer = torch.optim.SGD(model.parameters(), **_RATE)
    losses = []
    with recorded_kernels() as kernels:
        for batch in data:
            optimizer.zero_grad()
            tokens, labels = batch["input_ids"].to(device), batch["labels"].to(device)
            total = torch.zeros((), device=device)
            for piece, targets in zip(tokens.chunk(_CHUNKS), labels.chunk(_CHUNKS), strict=True):
                with torch.autocast(device.type, torch.bfloat16, enabled=variant == "bf16"):
                    loss = summed_cross_entropy(model(piece), targets)
                loss.backward()
                total += loss.detach()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(labels.numel())
            optimizer.step()
            losses.append(total.cpu() / labels.numel())
    values = tensors({f"model.{name}": value for name, value in model.state_dict().items()})
    return {"losses": torch.stack(losses), "values": values, "peak": [], "kernels": kernels}


@contextmanager
def sharding_on_one_rank() -> Iterator[None]:
    """Context in which strategies shard stages over meshes of one rank."""

    def with_data_mesh(*arguments: Any) -> ParallelMeshes:
        meshes = ParallelMeshes(*arguments)
        meshes.data = meshes.root["shard"]
        return meshes

    with mock.patch.object(stage_parts, "ParallelMeshes", with_data_mesh):
        yield


def state(trainer: pl.Trainer) -> dict[str, Any]:
    return dict(trainer.lightning_module.state_dict())


def sharded_state(trainer: pl.Trainer) -> dict[str, Any]:
    values = state(trainer)
    if whole_values := [name for name, value in values.items() if not isinstance(value, DTensor)]:
        raise AssertionError(f"FSDP2 has not sharded {', '.join(whole_values)}")
    return values


def main() -> None:
    options = parser(__doc__, "whole, or schedules").parse_args()
    batch_options = argparse.Namespace(rows=8, length=16, steps=options.steps - 1)
    data = batches_of(batch_options)
    results: dict[str, Any] = {}
    shared = options.device == "cuda" and backend(options.device) == "gloo"
    with staged_messages() if shared else nullcontext():
        for way in options.ways:
            results[way] = trained(way, options, data)
            save(results, options.save)


def trained(way: str, options: argparse.Namespace, data: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Losses and values of one way."""
    name, _, variant = way.partition(":")
    if name == "whole":
        return whole(data, device_of(options.device), variant)
    folder = options.save.parent / way.replace(":", "-")
    arguments: dict[str, Any] = {"num_microbatches": _CHUNKS, "process_group_backend": backend(options.device)}
    with sharding_on_one_rank() if variant == "sharded" else nullcontext():
        results, _ = fit(
            variant,
            options.device,
            folder,
            lambda: Momentum(_WIDTH, _LAYERS),
            lambda: LLMPipelineStrategy(name, compile_layers=variant == "compiled", **arguments),
            data,
            sharded_state if variant == "sharded" else state,
        )
    return results


if __name__ == "__main__":
    main()
