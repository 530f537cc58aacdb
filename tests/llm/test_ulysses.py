"""Attention over cut sequences is that of the whole ones: alone, recomputed, and in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.llm.context_parallel import cut_sequence, join_sequence
from lightning_pipe.llm.data_parallel import parallelise_stage
from lightning_pipe.llm.deferred import fake_copy
from lightning_pipe.llm.losses import summed_cross_entropy
from lightning_pipe.llm.module_config import ModuleConfig, derive_config
from lightning_pipe.llm.padding import block_diagonal_mask
from lightning_pipe.llm.runner import PipelineRunner, StageInputs
from lightning_pipe.llm.schedules import SCHEDULES, count_stages, stages_of_rank
from lightning_pipe.llm.shapes import StageShapes
from lightning_pipe.llm.split import split_evenly
from lightning_pipe.llm.stage_module import StageModule, make_stage, shallow_copy
from lightning_pipe.llm.ulysses import CheckedAttention, Ulysses
from tests.distributed import run_ranks

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
    "Llama, packed": (partial(hugging_face, "llama"), packed),
    "Llama, square mask": (partial(hugging_face, "llama"), partial(square, torch.bool)),
    "Llama, a mask for each head": (partial(hugging_face, "llama"), partial(square, torch.float32, 2)),
    "Qwen3": (partial(hugging_face, "qwen3"), tokens),
    "Qwen3, packed": (partial(hugging_face, "qwen3"), packed_by_positions),
    "GPT-NeoX": (partial(hugging_face, "gpt_neox"), tokens),
    "GPT-NeoX, padded": (partial(hugging_face, "gpt_neox"), padded),
    "plain": (Plain, lambda: tokens() | {"position_ids": torch.arange(LENGTH)[None]}),
    "plain, packed": (Plain, packed),
}


def logits(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    keywords = {key: value for key, value in batch.items() if key not in ("labels", "cu_seq_lens_q")}
    if isinstance(model, Plain):
        return model(**keywords, cu_seq_lens_q=batch.get("cu_seq_lens_q"))
    return model(**keywords, use_cache=False).logits


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


# ---------------------------------------------------------------------- two ranks


def on_two_ranks(rank: int, size: int) -> dict[str, dict[str, float]]:
    """For each case how far loss, outputs and gradients are from those of one device."""
    return {name: deviations(model_of, batch_of) for name, (model_of, batch_of) in CASES.items()} | {
        "recomputed": deviations(Plain, packed, recompute=True),
        "within itself": deviations(Plain, packed, entered=2),
        "not entered": deviations(Plain, packed, entered=0),
    }


def deviations(
    model_of: Callable[[], nn.Module],
    batch_of: Callable[[], dict[str, Any]],
    recompute: bool = False,
    entered: int = 1,
) -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(3)
    model, batch = model_of(), batch_of()
    output = logits(model, batch)
    loss = summed_cross_entropy(output, batch["labels"])
    loss.backward()
    expected = gradients(model)
    model.zero_grad()

    local, attention = cut_sequence(batch, group.rank(), group.size())
    mode = Ulysses(group, attention)
    if recompute:
        assert isinstance(model, Plain)
        model.recompute = lambda: (nullcontext(), mode)
    with mode if entered else nullcontext(), mode if entered > 1 else nullcontext():
        part = logits(model, local)
    part_loss = summed_cross_entropy(part, local["labels"])
    part_loss.backward()
    total = part_loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": distance(total, loss.detach()), "outputs": distance(join_sequence(part, group), output.detach())}
    for name, gradient in gradients(model).items():
        dist.all_reduce(gradient)
        found[name] = distance(gradient, expected[name])
    assert found.keys() - {"loss", "outputs"} == expected.keys()
    with torch.no_grad(), Ulysses(group, attention):
        found["evaluation"] = distance(join_sequence(logits(model, local), group), output.detach())
    return found


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, dict[str, float]]:
    return run_ranks(on_two_ranks, 2)[0]


@pytest.mark.parametrize("case", [*CASES, "recomputed", "within itself"])
def test_outputs_and_gradients_over_two_ranks_are_those_of_one_device(
    two_ranks: dict[str, dict[str, float]], case: str
) -> None:
    found = two_ranks[case]
    assert max(found["loss"], found["outputs"], found["evaluation"]) < 1e-6
    assert not {name: value for name, value in found.items() if not value < 1e-5}


def test_without_it_chunks_do_not_see_each_other(two_ranks: dict[str, dict[str, float]]) -> None:
    assert two_ranks["not entered"]["outputs"] > 1e-3


# ---------------------------------------------------------------------- stages of a pipeline


class InContext(StageModule):
    """A stage, run within what the micro-batch says."""

    def forward(
        self,
        *args: Any,
        result_of: Callable[[Any], Any] | None = None,
        context: Callable[[], Any] = nullcontext,
        **kwargs: Any,
    ) -> Any:
        with context():
            return super().forward(*args, result_of=result_of, **kwargs)


class WithoutContext(CheckedAttention):
    """Where there are no data, no other ranks are asked for theirs."""

    def forward(self, *args: Any, context: Callable[[], Any], **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def on_four_ranks(rank: int, size: int) -> dict[str, dict[str, float]]:
    """For each schedule how far losses, outputs and gradients are from those of one device."""
    meshes = {
        name: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", name)) for name in ("replicate", "shard")
    }
    return {
        f"{schedule}, {name}": in_stages(schedule, meshes[name]["pipeline"], meshes[name][name])
        for schedule, name in (("1f1b", "replicate"), ("zbv_zero_bubble", "replicate"), ("1f1b", "shard"))
    }


def in_stages(schedule: str, pipeline: DeviceMesh, context: DeviceMesh) -> dict[str, float]:
    torch.manual_seed(3)
    model = hugging_face("llama", layers=4)
    batches = [packed(seed) for seed in range(4)]
    outputs = [logits(model, batch) for batch in batches]
    losses = [summed_cross_entropy(output, batch["labels"]) for output, batch in zip(outputs, batches, strict=True)]
    torch.stack(losses).sum().backward()
    expected = gradients(model)

    spec = SCHEDULES[schedule]
    count = 2 * count_stages(spec, 2)
    config = derive_config(model)
    fqns = split_evenly(config, count)
    fake, mode = fake_copy(model)
    shapes = StageShapes(
        [
            WithoutContext(make_stage(shallow_copy(fake), config, names, index, count).eval(), config.layers, 2)
            for index, names in enumerate(fqns)
        ],
        mode,
    )
    stages = {}
    for index in stages_of_rank(spec, pipeline.get_local_rank(), 2, count // 2):
        stage = make_stage(shallow_copy(model), config, fqns[index], index, count)
        stages[index] = InContext(stage.module, index, count)
        stages[index].zero_grad()
        parallelise_stage(stages[index], config.layers, context)
    runner = PipelineRunner(stages, count, spec, pipeline.get_group(), torch.device("cpu"), shapes)

    group = context.get_group()
    inputs = []
    for batch in batches:
        local, attention = cut_sequence(batch, group.rank(), group.size())
        within = {"context": partial(Ulysses, group, attention), "position_ids": local["position_ids"]}
        inputs.append(StageInputs((local["input_ids"],), within, local))

    found = {}
    parts = runner.train(inputs, lambda output, target: summed_cross_entropy(output, target["labels"]))
    for index, part in enumerate(parts):
        dist.all_reduce(part, group=group)
        found[f"loss {index}"] = distance(part, losses[index].detach())
    for stage in stages.values():
        for name, gradient in gradients(stage).items():
            assert isinstance(gradient, DTensor)
            found[name] = distance(gradient.full_tensor(), expected[name.removeprefix("module.")])
    assert len(found) == len(parts) + sum(1 for stage in stages.values() for _ in stage.parameters())
    results = runner.evaluate(inputs, lambda output, target: output)
    for index, part in enumerate(results):
        found[f"output {index}"] = distance(join_sequence(part, group), outputs[index].detach())
    return found


def test_stages_over_two_context_ranks_train_and_evaluate_as_one_device() -> None:
    ranks = run_ranks(on_four_ranks, 4)
    for schedule in ranks[0]:
        found = {name: value for rank in ranks for name, value in rank[schedule].items()}
        assert sum(name.startswith(("loss", "output")) for name in found) == 8
        assert not {name: value for name, value in found.items() if not value < (1e-6 if " " in name else 1e-5)}


# ---------------------------------------------------------------------- what is refused


class Layers(nn.Module):
    """Between an embedding and a head, whatever layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(*layers)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layers(self.embedding(ids))


def causal(query: Tensor, *args: Any, dtype: torch.dtype = torch.bool, **options: Any) -> Tensor:
    """Attention with a mask that the model made, in this type."""
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    if dtype.is_floating_point:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(query, args[0], args[1], mask, enable_gqa=True)


def crossing(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :, 1:], value[:, :, 1:], enable_gqa=True)


def by_hand(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def look_at(model: nn.Module, size: int = 2, **keywords: Tensor) -> None:
    """One forward without data, as every rank runs it before the first one with data."""
    if isinstance(model, Layers):
        config = ModuleConfig(len(model.layers), "layers", ("embedding",), ())
    else:
        config = derive_config(model)
    fake, mode = fake_copy(model)
    stage = CheckedAttention(StageModule(fake, 0, 1).eval(), config.layers, size)
    with mode, torch.no_grad():
        stage(mode.from_tensor(torch.zeros(2, 4, dtype=torch.long)), **keywords)


def test_attention_that_is_seen_and_fits_is_let_be() -> None:
    look_at(Layers(nn.Linear(16, 16), Block(), nn.Sequential(nn.LayerNorm(16), nn.GELU()), Block(causal)))
    look_at(hugging_face("llama"))


def test_a_mask_of_the_batch_may_be_additive_and_need_not_be_causal() -> None:
    model = Layers(Block(partial(causal, dtype=torch.float32)), Block(is_causal=False))
    look_at(model, attention_mask=torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Layers(Block(), Block(by_hand)), r"layer layers.1 \(Block\) does not call"),
        (lambda: hugging_face("llama", attention="eager"), r"layer model.layers.0 \(LlamaDecoderLayer\) does not call"),
        (lambda: Layers(Mixing()), "torch.nn.MultiheadAttention"),
        (lambda: Layers(Block(is_causal=False)), "is_causal=False, so that all tokens attend"),
        (lambda: Layers(Block(partial(causal, dtype=torch.float32))), "attn_mask of torch.float32"),
        (lambda: Layers(Block(crossing)), r"query of \(2, 2, 4, 8\) and a key of \(2, 1, 3, 8\)"),
        (lambda: hugging_face("mistral"), "sliding_window=4096"),
        (
            lambda: hugging_face("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_scaling of type 'dynamic'",
        ),
    ],
    ids=["by hand", "eager", "module", "not causal", "additive", "crossing", "window", "frequencies"],
)
def test_attention_that_would_be_another_over_several_ranks_is_refused(
    model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        look_at(model())


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(SetupError, match="2 heads, which context_parallel_size=4 does not divide"):
        look_at(Layers(Block()), size=4)
