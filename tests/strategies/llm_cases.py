"""Small language models, their batches and ``fit``, and what one device makes of the same micro-batches.

Everything is seeded: two calls with the same arguments train the same numbers. What a pipeline must equal is computed
here without any of it but the cutting and padding of batches: gradients of single micro-batches, added up in the order
in which the stage that holds a parameter adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader

from lightning_pipe.llm.batches.microbatches import split_batch
from lightning_pipe.llm.batches.options import Batching
from lightning_pipe.llm.batches.padding import pad_microbatch
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES, count_stages_per_rank
from lightning_pipe.llm.split.options import SplitOptions
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
from tests.llm.document_masks import block_diagonal_mask
from tests.llm.schedule_cases import backward_order
from tests.loops.models import trainer as quiet_trainer
from tests.rounding import Reference

VOCABULARY, WIDTH, MAX_LENGTH = 19, 8, 12
SEED = 7


# ---------------------------------------------------------------------- models


class Embedding(nn.Module):
    """Of tokens and of positions, which are counted from each row's beginning where none are given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        return self.tokens(input_ids) + self.positions(positions)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        ).squeeze(1)
        return x + attended + self.mlp(x)


class TinyLM(nn.Module):
    """A causal transformer that keeps packed documents apart, in plain PyTorch."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_pp_module_config(self) -> dict[str, Any]:
        return {
            "num_layers": len(self.layers),
            "layer_prefix": "layers",
            "input_fqns": ["embedding"],
            "output_fqns": ["norm", "head"],
        }

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
    ) -> Tensor:
        mask = None if cu_seq_lens_q is None else block_diagonal_mask(cu_seq_lens_q, input_ids.shape[1])
        x = self.embedding(input_ids, position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # Where a gradient is rounding noise, Adam would make a step of the learning rate of it.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}


class Noted:
    """What a module notes while it trains."""

    def __init__(self, *args: Any, optimizer: str = "sgd", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.initial: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        module: Any = self
        return OPTIMIZERS[self.optimizer](module.parameters())

    def on_fit_start(self) -> None:
        self.initial = values_of(self.model)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(gradients_of(self.model))  # type: ignore[attr-defined]


class Tiny(Noted, PipelineModule):
    """The plain PyTorch model; *early* builds it before the trainer is there, as real tensors."""

    def __init__(self, layers: int = 4, early: bool = False, optimizer: str = "sgd") -> None:
        super().__init__(optimizer=optimizer)
        self.layers = layers
        if early:
            self.model = self.build_model()

    def build_model(self) -> nn.Module:
        return TinyLM(self.layers)


class Counting(Tiny):
    """Notes in ``forwards`` each forward of a layer with real data, by the layer's index; and every inference mode."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.forwards: list[int] = []
        self.inference_modes: set[bool] = set()

    def build_model(self) -> nn.Module:
        model = TinyLM(self.layers)
        for index, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(self._note(index))
        return model

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inference_modes.add(torch.is_inference_mode_enabled())
        super().validation_step(batch, batch_idx)

    def _note(self, index: int) -> Callable[..., None]:
        # A function, of which there is one for all stages: a copied model has copies of objects.
        def note(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if not isinstance(args[0], FakeTensor):
                self.forwards.append(index)
                self.inference_modes.add(torch.is_inference_mode_enabled())

        return note


class TinyHF(Noted, HFCausalLM):
    """A Hugging Face model with random weights."""


def hf_config(model_type: str, layers: int = 4) -> dict[str, Any]:
    """As small as they get: Llama, Qwen3 and GPT-NeoX."""
    config = {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    return config if model_type == "gpt_neox" else config | {"num_key_value_heads": 1, "head_dim": 8}


def values_of(model: nn.Module | None) -> dict[str, Tensor]:
    """Copies of the parameters there are."""
    assert model is not None
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trained_plainly(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], optimizer: torch.optim.Optimizer
) -> list[float]:
    """Losses of a Hugging Face model in a plain loop, a step for each batch without padding."""
    losses = []
    for batch in batches:
        logits = model(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gradients_of(model: nn.Module | None) -> dict[str, Tensor]:
    assert model is not None
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


# ---------------------------------------------------------------------- batches


def row_batches(steps: int = 10, rows: int = 16, lengths: Sequence[int] = (9, 5, 12, 7)) -> list[dict[str, Tensor]]:
    """Batches of rows; a length for each step, and some labels that do not count."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (rows, lengths[step % len(lengths)] + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        batches.append({"input_ids": tokens[:, :-1].clone(), "labels": labels})
    return batches


def packed_batches(count: int, steps: int = 10) -> list[list[dict[str, Any]]]:
    """Lists of micro-batches, each one row of two or three documents; no two need be as long."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    for step in range(steps):
        batch = []
        for index in range(count):
            sizes = torch.randint(2, 5, (2 + (step + index) % 2,), generator=generator)
            length = int(sizes.sum())
            tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
            ends = sizes.cumsum(0)
            labels = tokens.roll(-1, 1)
            labels[0, ends - 1] = -100
            batch.append(
                {
                    "input_ids": tokens,
                    "labels": labels,
                    "position_ids": torch.cat([torch.arange(int(size)) for size in sizes])[None],
                    "cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), ends]),
                    "max_length_q": int(sizes.max()),
                }
            )
        batches.append(batch)
    return batches


def loader(batches: Sequence[Any]) -> DataLoader[Any]:
    """The batches as they are, in their order."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a trainer


_GROUPS = {"parallel": ParallelDims, "split": SplitOptions, "batching": Batching}


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a strategy, with fields of option groups moved into them: ``dp_shard=2`` into ``parallel``."""
    group_of = {one.name: name for name, group in _GROUPS.items() for one in fields(group)}
    arguments: dict[str, Any] = {name: value for name, value in options.items() if name not in group_of}
    for name in options.keys() - arguments.keys():
        arguments.setdefault(group_of[name], {})[name] = options[name]
    return arguments


def llm(schedule: Any = "1f1b", num_microbatches: int = 4, **options: Any) -> LLMPipelineStrategy:
    """A strategy with four micro-batches; fields of option groups may be given as keywords, see :func:`grouped`."""
    return LLMPipelineStrategy(schedule, num_microbatches=num_microbatches, **grouped(options))


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet trainer over this process, or over the ranks of ``run_ranks``."""
    alone = not dist.is_initialized() or strategy == "auto"
    ranks = 1 if alone else dist.get_world_size()
    return quiet_trainer(**{"devices": ranks, "strategy": strategy, "log_every_n_steps": 1, "max_epochs": 1, **options})


def fit(module: pl.LightningModule, strategy: Any, train: Any, val: Any = None, **options: Any) -> pl.Trainer:
    """Train; ``options`` are the trainer's."""
    used = trainer(strategy, **options)
    torch.manual_seed(SEED)
    used.fit(module, train if isinstance(train, DataLoader) else loader(train), val)
    return used


# ---------------------------------------------------------------------- what one device makes of it


@dataclass
class Trained:
    """Losses and gradients by step, and the final parameters, of one device or of one rank."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def backward_orders(schedule: str, ranks: int, num_microbatches: int, config: PPModuleConfig) -> dict[str, list[int]]:
    """For each module of a model the order in which the gradients of micro-batches are added up."""
    spec = SCHEDULES[schedule]
    stages = split_layers_evenly(config, ranks * count_stages_per_rank(spec, ranks))
    actions = list_compute_actions(spec, ranks, num_microbatches)
    return {name: backward_order(actions, index) for index, names in enumerate(stages) for name in names}


def microbatches_of(batch: Any, count: int, length: int | None = None) -> list[dict[str, Any]]:
    """The micro-batches of a batch, padded to a length, or to the longest of them."""
    items = split_batch(batch, count).items
    length = length or max(item["input_ids"].shape[1] for item in items)
    return [pad_microbatch(item, length) for item in items]


def train_alone(
    module: PipelineModule,
    optimizer: str,
    batches: Sequence[Any],
    count: int,
    orders: Mapping[str, Sequence[int]] | None = None,
    length: int | None = None,
) -> Trained:
    """One device accumulates gradients over micro-batches, in *orders* by module of the model (default: ascending)."""
    torch.manual_seed(SEED)
    module.configure_model()
    model = module.model
    assert model is not None
    orders = orders or {key: list(range(count)) for key in derive_pp_module_config(model).module_fqns}
    optimizer_of_all, trained = OPTIMIZERS[optimizer](model.parameters()), Trained()
    owner = {name: next(part for part in orders if name.startswith(f"{part}.")) for name, _ in model.named_parameters()}
    for batch in batches:
        each, losses, tokens = [], [], 0
        for item in microbatches_of(batch, count, length):
            model.zero_grad()
            loss = module.summed_loss(module._compute_unsplit_output(item), item)
            loss.backward()
            losses.append(loss.detach())
            each.append(gradients_of(model))
            tokens += int((item["labels"] != -100).sum())
        trained.losses.append(float(torch.stack(losses).sum() / tokens))
        for name, parameter in model.named_parameters():
            first, *others = orders[owner[name]]
            parameter.grad = each[first][name].clone()
            for index in others:
                parameter.grad += each[index][name]
            parameter.grad.mul_(1 / tokens)
        trained.gradients.append(gradients_of(model))
        optimizer_of_all.step()
    trained.parameters = values_of(model)
    return trained


def train_with_lightning(module: Any, batches: Sequence[Any], **options: Any) -> Trained:
    """Lightning by itself on one device; ``options`` are the trainer's."""
    fit(module, "auto", batches, **options)
    return Trained(module.losses, module.gradients, values_of(module.model))


def as_one(batch: Any) -> dict[str, Any]:
    """A batch as one micro-batch: rows as they are, packed rows one behind the other."""
    if isinstance(batch, Mapping):
        return dict(batch)
    whole = {key: torch.cat([item[key] for item in batch], 1) for key in ("input_ids", "labels", "position_ids")}
    sizes = torch.cat([item["cu_seq_lens_q"].diff() for item in batch])
    return whole | {"cu_seq_lens_q": torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])}


def join(ranks: Sequence[Trained]) -> Trained:
    """What the ranks of a pipeline hold, together. Every loss is the same on all, and no parameter on two."""
    first = ranks[0]
    assert all(one.losses == first.losses for one in ranks)
    held = [name for one in ranks for name in one.parameters]
    assert len(held) == len(set(held)), "a parameter is held by two ranks"
    return Trained(
        first.losses,
        [{k: v for one in ranks for k, v in one.gradients[step].items()} for step in range(len(first.gradients))],
        {k: v for one in ranks for k, v in one.parameters.items()},
    )


def unequal(one: Trained, other: Trained) -> list[str]:
    """What differs, in any bit."""
    found = [f"loss {i}" for i, (a, b) in enumerate(zip(one.losses, other.losses, strict=True)) if a != b]
    steps = zip(one.gradients, other.gradients, strict=True)
    pairs = [*((f"gradient {i} of", a, b) for i, (a, b) in enumerate(steps)), ("", one.parameters, other.parameters)]
    for what, a, b in pairs:
        found += [
            f"{what} {name}"
            for name in sorted({*a, *b})
            if name not in a or name not in b or not torch.equal(a[name], b[name])
        ]
    return found


def results_of(trained: Trained, steps: int | None = None) -> dict[str, Any]:
    """Losses, gradients of the first *steps* (default: all) and parameters, by name."""
    gradients = {
        f"gradient {step} of {name}": value
        for step, of_step in enumerate(trained.gradients[:steps])
        for name, value in of_step.items()
    }
    return {"losses": trained.losses, **gradients, **trained.parameters}


def beyond_rounding(found: Mapping[str, Any], reference: Reference) -> list[str]:
    """Results of one rank that differ by more than rounding, or that the reference of one device does not have."""
    unknown = [f"{name}: not in the reference" for name in sorted({*found} - {*reference.values})]
    return reference.differences(found, partly=True) + unknown


def ranks_beyond_rounding(ranks: Iterable[Mapping[str, Any]], reference: Reference) -> list[str]:
    """The same for all ranks, and results of the reference that no rank has."""
    ranks = list(ranks)
    held = {name for found in ranks for name in found}
    missing = [f"{name}: on no rank" for name in sorted({*reference.values} - held)]
    return [problem for found in ranks for problem in beyond_rounding(found, reference)] + missing


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of what differs in any bit, or is not in both."""
    names = sorted({*one, *other})
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]
