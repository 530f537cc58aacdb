"""The examples of the in-process pipe: what they train on, and that they train with and without a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from examples.in_process.images import CLASSES, Shapes, ShapesData
from examples.in_process.transformer import ByteTransformer
from examples.in_process.unet import UNet, unet
from lightning_pipe.cli.main import main
from lightning_pipe.pipe import Pipe, compute_pipe_or_module_loss

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "in_process"


def test_an_image_follows_from_its_index_and_shows_what_its_classes_say() -> None:
    images = Shapes(50, 48, seed=1, noise=0.0)
    image, classes = images[7]
    again, same = images[7]
    assert torch.equal(image, again)
    assert torch.equal(classes, same)
    assert image.shape == (1, 48, 48)
    assert torch.equal(image[0] > 0.5, classes > 0)
    found = torch.stack([images[index][1] for index in range(len(images))])
    assert found.unique().tolist() == [*range(CLASSES)]
    assert not torch.equal(Shapes(50, 48, seed=2)[7][1], classes)


def test_the_transformer_does_not_see_what_follows() -> None:
    model = ByteTransformer(width=16, layers=2, heads=2, length=12).model.eval()
    ids = torch.randint(0, 256, (2, 12))
    changed = ids.clone()
    changed[:, 8:] = 0
    torch.testing.assert_close(model(ids)[:, :8], model(changed)[:, :8])


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_u_net_in_partitions_trains_as_it_does_in_one(checkpoint: Any) -> None:
    images, classes = next(iter(ShapesData(batch_size=4, size=16).train_dataloader()))
    torch.manual_seed(0)
    whole = unet(4, 2, CLASSES)
    torch.manual_seed(0)
    pipe = Pipe(unet(4, 2, CLASSES), 2, checkpoint, ["cpu"] * 3)
    for module in (whole, pipe):
        compute_pipe_or_module_loss(module, images, classes, nn.CrossEntropyLoss()).backward()
    for mine, theirs in zip(pipe.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    pipe.close()


@pytest.mark.parametrize("name", ["unet", "transformer"])
def test_it_trains_from_its_file_with_a_pipe_and_without(name: str, tmp_path: Path) -> None:
    small = (
        ["--data.size", "16", "--data.validation", "16", "--model.width", "4"]
        if name == "unet"
        else ["--data.length", "16", "--data.validation_rows", "16", "--model.width", "16"]
    )
    quick = [
        "--trainer.limit_train_batches",
        "2",
        "--trainer.logger",
        "false",
        "--trainer.enable_progress_bar",
        "false",
    ]
    quick += ["--trainer.enable_checkpointing", "false", "--trainer.default_root_dir", str(tmp_path)]
    for strategy in ([], ["--trainer.strategy", "auto", "--trainer.devices", "1"]):
        assert not main(["fit", "--config", str(FOLDER / f"{name}.yaml"), *small, *quick, *strategy])


def test_the_balance_adds_up_to_the_layers_and_micro_batches_divide_batches() -> None:
    options = yaml.safe_load((FOLDER / "unet.yaml").read_text())["trainer"]
    assert sum(options["strategy"]["init_args"]["balance"]) == len(UNet().model)
    assert len(options["strategy"]["init_args"]["balance"]) == options["devices"]
    assert ShapesData().batch_size % options["strategy"]["init_args"]["chunks"] == 0
