"""How a strategy cuts a model, and runs its layers: whatever is chosen, training comes to what one device comes to."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import (
    VOCABULARY,
    WIDTH,
    Block,
    Tiny,
    TinyHF,
    Trained,
    adamw,
    fit,
    hf_config,
    llm,
    loader,
    ranks_beyond_rounding,
    results_of,
    row_batches,
    sgd,
    train_alone,
    train_with_lightning,
    trainer,
    values_of,
)

STEPS = 2  # of two lengths: the second is compiled for any length


class WithExample(Tiny):
    def example_micro_batch(self) -> dict[str, Tensor]:
        tokens = torch.zeros(4, 6, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}


class Head(Tiny):
    """Trains its head alone: the first stage has nothing to train."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        return model

    def configure_optimizers(self) -> Any:
        return sgd([one for one in self.parameters() if one.requires_grad])


class Grouped(Tiny):
    """Groups of which a rank may have none; and a schedule of the learning rate."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [one for name, one in named if "head" in name], "lr": 0.05},
            {"params": [one for name, one in named if "embedding" in name], "lr": 0.01},
            {"params": [one for name, one in named if "head" not in name and "embedding" not in name]},
        ]
        optimizer = adamw(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Start(nn.Embedding):
    """Returns hidden states, a stream, and a mask without gradients."""

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        hidden = super().forward(ids)
        return hidden, hidden.tanh(), ids % 2


class Step(nn.Linear):
    def forward(self, hidden: Any, stream: Any = None, odd: Any = None) -> Any:
        if isinstance(hidden, tuple):
            hidden, stream, odd = hidden
        return super().forward(hidden + stream * odd[..., None]).tanh(), hidden + stream, odd


class HandingOn(nn.Module):
    """Layers that hand on several tensors, as several arguments or as one tuple."""

    def __init__(self, as_one: bool) -> None:
        super().__init__()
        self.as_one = as_one
        self.embedding = Start(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Step(WIDTH, WIDTH) for _ in range(4))
        self.norm = Step(WIDTH, WIDTH)
        self.head = nn.Sequential(First(), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, input_ids: Tensor) -> Any:
        state = self.embedding(input_ids)
        for layer in [*self.layers, self.norm]:
            state = layer(state) if self.as_one else layer(*state)
        return self.head(state)


class First(nn.Module):
    def forward(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[0]


class Handing(WithExample):
    def __init__(self, as_one: bool, told: bool = True) -> None:
        super().__init__(optimizer="adamw")
        self.as_one, self.told = as_one, told

    def build_model(self) -> nn.Module:
        return HandingOn(self.as_one)

    def get_pp_module_config(self) -> dict[str, Any]:
        names = {
            "num_layers": 4,
            "layer_prefix": "layers",
            "input_fqns": ["embedding"],
            "output_fqns": ["norm", "head"],
        }
        return names if self.as_one or not self.told else names | {"layer_outputs": 3}


class Shifted(Block):
    """Adds a parameter as large as the hidden states, so that its gradient is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.randn(4, 9, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        length = x.shape[1]
        return super().forward(x + self.before[:, :length], mask).tanh() + self.after[:, :length]


class Shifts(Tiny):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.layers = nn.ModuleList(Shifted() for _ in range(self.layers))
        return model


CSV = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
AOT = {"backend": "aot_eager"}
# module, schedule (or the file), strategy's options, whether the bits must be those of one device
CASES: dict[str, tuple[Any, str, dict[str, Any], bool]] = {
    "recomputed, in two parts": (
        partial(Tiny, optimizer="adamw"),
        "zbv_zero_bubble",
        {"activation_checkpoint": {"mode": "selective", "every_n_layers": 2}},
        True,
    ),
    "compiled, in two parts": (partial(Tiny, optimizer="adamw"), "zbv_zero_bubble", {"compile_layers": AOT}, False),
    "shared gradients, in two parts": (partial(Shifts, optimizer="adamw"), "zbv_zero_bubble", {}, False),
    "ranges": (partial(Tiny, optimizer="adamw"), "1f1b", {"layer_ranges": [(0, 1), (1, 4)]}, True),
    "by time": (partial(WithExample, optimizer="adamw"), "1f1b", {"balance": "time"}, True),
    "by memory": (partial(WithExample, optimizer="adamw"), "zbv_zero_bubble", {"balance": "memory"}, True),
    "a file": (partial(Tiny, optimizer="adamw"), "csv", {}, True),
    "handing on three tensors": (partial(Handing, False), "zbv_zero_bubble", {"balance": "time"}, True),
    "handing on a tuple": (
        partial(Handing, True),
        "interleaved_1f1b",
        {"activation_checkpoint": {"mode": "full"}},
        True,
    ),
    "frozen, in two parts": (Head, "zbv_zero_bubble", {}, False),
    "groups": (Grouped, "1f1b", {}, False),
    "compared": (Tiny, "1f1b", {"compare_batches": True}, True),
}


def refused(module: Any, **options: Any) -> str:
    try:
        fit(module, llm(**options), row_batches(1))
    except SetupError as error:
        return str(error)
    return "nothing"


class Other(Tiny):
    """Gets other tokens on one rank, as many."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"input_ids": (batch["input_ids"] + self.global_rank) % VOCABULARY}


def llama() -> TinyHF:
    return TinyHF(hf_config("llama") | {"num_key_value_heads": 2})


def on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        module_of, schedule, options, _ = CASES[case]
        module = module_of()
        given = str(folder / "schedule.csv") if schedule == "csv" else schedule
        fit(module, llm(given, 4, **options), row_batches(STEPS))
        assert module.model is not None
        found[case] = {
            "losses": module.losses,
            "parameters": {name: value.detach() for name, value in module.model.named_parameters()},
            "put back": torch._functorch.config.donated_buffer,
        }
    module = llama()
    fit(module, llm("zbv_zero_bubble", tp=2, compile_layers=AOT), row_batches(STEPS))
    found["compiled, tensor parallel"] = module.losses
    found["no example"] = refused(Tiny(), balance="time")
    found["several tensors"] = refused(Handing(as_one=False, told=False))
    try:
        fit(Other(), llm(compare_batches=True), row_batches(1))
    except Exception as error:
        found["other tokens"] = str(error)
    # Offloaded states go through a checkpoint.
    first = Tiny(optimizer="adamw")
    fit(first, llm(offload_optimizer=True), row_batches(STEPS)).save_checkpoint(folder / "offloaded")
    second = Tiny(optimizer="adamw")
    again = trainer(llm(offload_optimizer=True), max_epochs=2)
    again.fit(second, loader(row_batches(STEPS)), ckpt_path=folder / "offloaded")
    undisturbed = Tiny(optimizer="adamw")
    fit(undisturbed, llm(), row_batches(STEPS), max_epochs=2)
    found["resumed"] = second.losses, undisturbed.losses[STEPS:]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layers")
    (folder / "schedule.csv").write_text(CSV)
    return run_ranks(on_two_ranks, 2, folder)


@pytest.mark.parametrize("case", CASES)
def test_training_comes_to_what_one_device_comes_to(case: str, ranks: Any) -> None:
    module_of, _, _, exact = CASES[case]

    def alone() -> dict[str, Any]:
        module = module_of()
        if type(module) in (Head, Grouped):
            # One micro-batch a batch: rounding is another, hooks are Lightning's.
            return results_of(train_with_lightning(module, row_batches(STEPS)), steps=0)
        # Of all these schedules the micro-batches' gradients are added in their order.
        orders = dict.fromkeys(("embedding", "layers", "norm", "head", "first", "middle", "last"), range(4))
        return results_of(train_alone(module, module.optimizer, row_batches(STEPS), 4, orders), steps=0)

    expected = Reference.exactly(alone()) if exact else Reference.of(alone)
    found = ({"losses": rank[case]["losses"]} | rank[case]["parameters"] for rank in ranks)
    assert not ranks_beyond_rounding(found, expected)


def test_compiled_layers_that_ranks_share_are_trained_on_several_lengths(ranks: Any) -> None:
    def losses() -> dict[str, Any]:
        return {"losses": train_with_lightning(llama(), row_batches(STEPS)).losses}

    expected = Reference.of(losses)
    assert not ranks_beyond_rounding(({"losses": rank["compiled, tensor parallel"]} for rank in ranks), expected)


def test_settings_of_the_compiler_are_put_back(ranks: Any) -> None:
    assert all(rank[case]["put back"] for rank in ranks for case in CASES)


def test_offloaded_states_are_in_checkpoints(ranks: Any) -> None:
    for rank in ranks:
        resumed, undisturbed = rank["resumed"]
        assert resumed == undisturbed


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no example", ["split.balance is 'time'", "example_micro_batch()", "split.balance to 'layers'"]),
        ("several tensors", ["HandingOn cannot be cut", "set layer_outputs in the config to their number"]),
        ("other tokens", ["different batches", "digest"]),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(what: str, words: list[str], ranks: Any) -> None:
    for rank in ranks:
        for word in words:
            assert word in rank[what]


def test_padded_rows_of_hugging_faces_models_train_in_stages() -> None:
    batches = row_batches(2)
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][::2, :2] = 0
    expected = Reference.of(lambda: results_of(train_with_lightning(TinyHF(hf_config("llama")), batches), steps=0))
    module = TinyHF(hf_config("llama"))
    fit(module, llm("interleaved_1f1b", 4), batches)
    found = results_of(Trained(module.losses, [], values_of(module.model)))
    assert not expected.differences(found)
