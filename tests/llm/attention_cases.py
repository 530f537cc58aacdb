"""Models, batches and what one device makes of them, for the ways in which ranks share sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pipe.llm.batches.padding import PadValues
from lightning_pipe.llm.losses.cross_entropy import summed_cross_entropy
from lightning_pipe.llm.parallel.context_parallel_group import ContextMethod, ContextParallelGroup
from tests.llm.document_masks import block_diagonal_mask
from tests.rounding import Reference

VOCABULARY, LENGTH, ROWS = 19, 8, 2


# ---------------------------------------------------------------------- models


class Block(nn.Module):
    """Two heads of queries over one of keys and values; `attend` is what it calls."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query = nn.Linear(16, 16)
        self.key_value = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.attend = attend
        self.options = options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        query = self.query(h).view(*h.shape[:2], 2, 8).transpose(1, 2)
        key, value = self.key_value(h).view(*h.shape[:2], 2, 1, 8).permute(2, 0, 3, 1, 4)
        options = {"is_causal": mask is None, "enable_gqa": True} | self.options
        attended = self.attend(query, key, value, mask, **options)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """In plain PyTorch; with `recompute`, layers are run again in backward, within the given context."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.places = nn.Embedding(LENGTH, 16)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(16, VOCABULARY)
        self.recompute: Callable[[], Any] | None = None

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens_q: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        mask = None if cu_seq_lens_q is None else block_diagonal_mask(cu_seq_lens_q, input_ids.shape[1])
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, mask)
            else:
                x = checkpoint(layer, x, mask, use_reentrant=False, context_fn=self.recompute)
        return self.head(x)


def hugging_face(model_type: str, heads: int = 2, key_value_heads: int = 1, **options: Any) -> nn.Module:
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "intermediate_size": 16,
        "num_hidden_layers": options.pop("layers", 2),
        "num_attention_heads": heads,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    if model_type != "gpt_neox":
        config |= {"num_key_value_heads": key_value_heads, "head_dim": 8}
    attention = options.pop("attention", "sdpa")
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, **options), attn_implementation=attention)


# ---------------------------------------------------------------------- batches


def tokens(rows: int = ROWS, seed: int = 0, length: int = LENGTH) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 2] = -100
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


def padded() -> dict[str, Any]:
    """One row ends early, the other begins late."""
    batch = tokens()
    real = torch.ones(ROWS, LENGTH, dtype=torch.long)
    real[0, -3:] = 0
    real[1, :2] = 0
    batch["labels"][real == 0] = -100
    return batch | {"attention_mask": real}


def padded_at_the_end() -> dict[str, Any]:
    batch = tokens()
    real = torch.ones(ROWS, LENGTH, dtype=torch.long)
    real[0, -1:] = 0
    batch["labels"][real == 0] = -100
    return batch | {"attention_mask": real}


def packed_at_the_end() -> dict[str, Any]:
    return tokens(1) | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1]])}


def packed(seed: int = 0) -> dict[str, Any]:
    """Of three documents, one lies on both sides of the cut."""
    ends = torch.tensor([0, 3, 6, 8])
    positions = torch.cat([torch.arange(int(size)) for size in ends.diff()])[None]
    return tokens(1, seed) | {"cu_seq_lens_q": ends, "position_ids": positions}


def packed_by_positions() -> dict[str, Any]:
    batch = packed()
    del batch["cu_seq_lens_q"]
    return batch


def square(dtype: torch.dtype, heads: int = 1) -> dict[str, Any]:
    """Who attends to whom is random, but for each token to itself; `heads` of them differ."""
    generator = torch.Generator().manual_seed(5)
    attends = torch.rand(ROWS, heads, LENGTH, LENGTH, generator=generator) < 0.6
    attends |= torch.eye(LENGTH, dtype=torch.bool)
    if dtype == torch.bool:
        return tokens() | {"attention_mask": attends}
    biases = torch.randn(ROWS, heads, LENGTH, LENGTH, generator=generator)
    return tokens() | {"attention_mask": biases.masked_fill(~attends, float("-inf"))}


def without_padding() -> dict[str, Any]:
    return tokens() | {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long)}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "Llama": (partial(hugging_face, "llama", 4, 2), tokens),
    "Llama, grouped heads in SDPA": (partial(hugging_face, "llama", 4, 2), without_padding),
    "Llama, one head for two ranks": (partial(hugging_face, "llama"), without_padding),
    "Llama, padded": (partial(hugging_face, "llama", 4, 2), padded),
    "Llama, padded on one rank": (partial(hugging_face, "llama", 4, 2), padded_at_the_end),
    "Llama, packed": (partial(hugging_face, "llama"), packed),
    "Llama, packed on one rank": (partial(hugging_face, "llama", 4, 2), packed_at_the_end),
    "Llama, square mask": (partial(hugging_face, "llama"), partial(square, torch.bool)),
    "Llama, a mask for each head": (partial(hugging_face, "llama"), partial(square, torch.float32, 2)),
    "Qwen3": (partial(hugging_face, "qwen3"), tokens),
    "Qwen3, packed": (partial(hugging_face, "qwen3"), packed_by_positions),
    "GPT-NeoX": (partial(hugging_face, "gpt_neox"), tokens),
    "GPT-NeoX, padded": (partial(hugging_face, "gpt_neox"), padded),
    "plain": (Plain, lambda: tokens() | {"position_ids": torch.arange(LENGTH)[None]}),
    "plain, packed": (Plain, packed),
}


def logits(model: nn.Module, batch: Mapping[str, Any], ranks: ContextParallelGroup | None = None) -> Tensor:
    def model_inputs(batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left_out = "labels" if isinstance(model, Plain) else "cu_seq_lens_q"
        return (), {key: value for key, value in batch.items() if key not in ("labels", left_out)}

    _, keywords = model_inputs(batch) if ranks is None else ranks.build_model_inputs(dict(batch), model_inputs)
    return model(**keywords) if isinstance(model, Plain) else model(**keywords, use_cache=False).logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def on_one_device(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Reference:
    """Losses and outputs of batches, and gradients of the losses' sum; the model is left without gradients."""

    def run() -> dict[str, Tensor]:
        outputs = [logits(model, batch) for batch in batches]
        losses = [summed_cross_entropy(one, batch["labels"]) for one, batch in zip(outputs, batches, strict=True)]
        torch.stack(losses).sum().backward()
        results = {f"loss {index}": loss for index, loss in enumerate(losses)}
        results |= {f"output {index}": output for index, output in enumerate(outputs)}
        results |= gradients(model)
        model.zero_grad()
        return results

    return Reference.of(run)


Results = tuple[dict[str, Tensor], dict[str, Tensor]]


def over_ranks(
    model_of: Callable[[], nn.Module],
    batch_of: Callable[[], dict[str, Any]],
    method: ContextMethod = "ulysses",
    recompute: bool = False,
    entered: int = 1,
) -> Results:
    """Loss, outputs and gradients of all ranks, and the same with the outputs of an evaluation; called on each rank."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(3)
    model, batch = model_of(), batch_of()
    ranks = ContextParallelGroup.from_model(group, method, model)
    local, within = ranks.shard(batch, PadValues())
    mode = within()
    if recompute:
        assert isinstance(model, Plain)
        model.recompute = lambda: (nullcontext(), mode)
    with mode if entered else nullcontext(), mode if entered > 1 else nullcontext():
        part = logits(model, local, ranks)
    part_loss = summed_cross_entropy(part, local["labels"])
    part_loss.backward()
    total = part_loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss 0": total, "output 0": ranks.gather(part).detach()}
    for name, gradient in gradients(model).items():
        dist.all_reduce(gradient)
        found[name] = gradient
    with torch.no_grad(), within():
        evaluated = found | {"output 0": ranks.gather(logits(model, local, ranks))}
    return found, evaluated


def deviations(
    model_of: Callable[[], nn.Module], batch_of: Callable[[], dict[str, Any]], results: Results
) -> list[str]:
    """What of the results of :func:`over_ranks` differs from one device's by more than rounding.

    Called in the process of the test: each rank would compute the reference, with all of its perturbed runs.
    """
    torch.manual_seed(3)
    expected = on_one_device(model_of(), [batch_of()])
    found, evaluated = results
    return expected.differences(found) + [f"evaluation: {one}" for one in expected.differences(evaluated)]
