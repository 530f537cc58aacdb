"""Stages in half precision: autocast as on one device, one loss scale and one verdict on overflow for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.distributed import run_ranks
from tests.strategies.llm_cases import Tiny, differing, fit, llm, microbatches_of, row_batches

STEPS = 4
SCALE = 2.0**10
# Steps after which it is doubled.
GROWTH = 3


def half() -> MixedPrecision:
    # Lightning's precision="16-mixed" is bf16 on a CPU.
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("1f1b", {}),
    "zero bubble, clipped": ("zbv_zero_bubble", {"gradient_clip_val": 0.1}),
    "accumulated": ("interleaved_1f1b", {"accumulate_grad_batches": 2}),
}


class Noting(Tiny):
    """Notes the scale and whether a parameter has moved, after each step."""

    def __init__(self, overflow_at: int | None = None) -> None:
        super().__init__()
        self.overflow_at = overflow_at
        self.scales: list[float] = []
        self.moved: list[bool] = []
        self.last: Tensor | None = None

    def summed_loss(self, output: Tensor, micro_batch: Any) -> Tensor:
        loss = super().summed_loss(output, micro_batch)
        now = self.overflow_at is not None and self.trainer.global_step == self.overflow_at and self.training
        return loss * float("inf") if now else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last = next(iter(self.parameters())).detach().clone()

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.last is not None
        self.moved.append(not torch.equal(self.last, next(iter(self.parameters()))))
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


def trained(strategy: Any, module: Noting, **options: Any) -> dict[str, Any]:
    fit(module, strategy, row_batches(STEPS), **options)
    return {
        "losses": module.losses,
        "gradients": module.gradients,
        "parameters": {name: value.detach() for name, value in module.model.named_parameters()},  # type: ignore[union-attr]
        "scales": module.scales,
        "moved": module.moved,
    }


def on_two_ranks(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, (schedule, options) in CASES.items():
        found[case] = trained(llm(schedule), Noting(), plugins=[half()], **options)
    # Only the last stage's rank has the loss, but infinite gradients reach both.
    found["overflow"] = trained(llm(), Noting(1), plugins=[half()])
    found["bf16"] = trained(llm(), Bf16(), precision="bf16-mixed")
    return found


class Bf16(Noting):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2)


def train_alone(case: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """One device accumulates over the same micro-batches, with the loss scaled as the strategy scales it.

    Scales are powers of two, which round nothing but halves below 2^-14; norms are added up in the same order.
    """
    _, options = CASES.get(case, ("", {}))
    torch.manual_seed(7)
    module = Tiny()
    module.configure_model()
    model = module.model
    assert model is not None
    optimizer = module.configure_optimizers()
    every, losses, tokens = options.get("accumulate_grad_batches", 1), [], 0
    for step, batch in enumerate(row_batches(STEPS)):
        parts = microbatches_of(batch, 4)
        here = sum(int((part["labels"] != -100).sum()) for part in parts)
        with torch.autocast("cpu", dtype):
            each = [module.summed_loss(module._compute_unsplit_output(part), part) for part in parts]
        if step % every == 0:
            tokens, divisor = 0, 2.0 ** (here - 1).bit_length()
        tokens += here
        scale = SCALE * 2.0 ** (step // every // GROWTH)
        for loss in each:
            (loss * (scale / divisor)).backward()
        losses.append(float(torch.stack(each).sum() / here))
        if step % every == every - 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(divisor / tokens / scale)
            if "gradient_clip_val" in options:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options["gradient_clip_val"])
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("case", [*CASES, "bf16"])
def test_half_precision_trains_as_one_device_over_the_same_micro_batches_to_the_bit(case: str, found: Any) -> None:
    losses, parameters = train_alone(case, torch.bfloat16 if case == "bf16" else torch.float16)
    for rank in found:
        assert rank[case]["losses"] == losses
        held = rank[case]["parameters"]
        assert not differing(held, {name: parameters[name] for name in held})


@pytest.mark.parametrize("case", CASES)
def test_every_step_is_made_and_the_scale_grows_on_every_rank(case: str, found: Any) -> None:
    for rank in found:
        steps = STEPS // CASES[case][1].get("accumulate_grad_batches", 1)
        assert sum(rank[case]["moved"]) == steps
        assert rank[case]["scales"][-1] == (2 * SCALE if steps >= GROWTH else SCALE)


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: Any) -> None:
    for rank in found:
        assert rank["overflow"]["moved"][:2] == [True, False]
        assert rank["overflow"]["scales"][1] == SCALE / 2


def test_a_scalers_own_method_is_back_after_training(found: Any) -> None:
    plugin = half()
    fit(Tiny(), llm("gpipe"), row_batches(1), plugins=[plugin])
    assert "unscale_" not in plugin.scaler.__dict__
