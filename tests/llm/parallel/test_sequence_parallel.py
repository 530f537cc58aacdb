"""Stages whose ranks share the tokens between matrices train as one device does; other models are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.parallel.sequence_parallel import check_sequence_parallel
from lightning_pipe.llm.parallel.tensor_plan import TensorPlan, derive_tensor_plan, resolve_parallel_styles
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.strategies.llm_cases import SEED, TinyHF, adamw, fit, hf_config, llm, row_batches, trained_plainly, values_of

CLOSE = 1e-5  # float32 losses of about 3, whose sums have other orders


def config(model_type: str) -> dict[str, Any]:
    return hf_config(model_type) | {"num_key_value_heads": 2}


def batches() -> list[dict[str, Tensor]]:
    """Lengths of 9, 5 and 12 tokens, of which two ranks cannot share all evenly."""
    return row_batches(3)


class Lengths(TinyHF):
    """Notes the number of tokens that norms see in training."""

    def build_model(self) -> nn.Module:
        self.lengths: set[int] = set()
        model = super().build_model()
        for name, module in model.named_modules():
            if name.endswith("layernorm"):
                module.register_forward_pre_hook(_note(self.lengths))
        return model


def _note(lengths: set[int]) -> Any:
    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if type(args[0]) is Tensor:
            lengths.add(args[0].shape[1])

    return note


def staged(
    rank: int, world: int, model_type: str, schedule: str, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], set[int]]:
    module = Lengths(config(model_type), optimizer="adamw")
    strategy = llm(schedule, 4, tp=2, sequence_parallel=True, **options)
    rows = slice(rank // 2 % 2, None, 2) if "dp_shard" in options else slice(None)  # of this rank's pipeline
    mine = [{key: one[rows] for key, one in batch.items()} for batch in batches()]
    fit(module, strategy, mine, use_distributed_sampler=False)
    values = values_of(module.model)
    return (
        module.losses,
        {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in values.items()},
        module.lengths,
    )


def alone(model_type: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and parameters of a plain loop, and the parameters before it."""
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_config(HFCausalLM(config(model_type)).config, attn_implementation="sdpa")
    before = values_of(model)
    losses = trained_plainly(model, batches(), adamw(model.parameters()))
    return losses, values_of(model), before


def check(world: int, model_type: str, schedule: str, **options: Any) -> None:
    losses, values, before = alone(model_type)
    # Otherwise a gradient of a norm that is not summed over the ranks would not be noticed.
    norms = [name for name in values if "norm" in name]
    assert norms
    assert all((values[name] - before[name]).abs().max() > 10 * CLOSE for name in norms)
    ranks = run_ranks(staged, world, model_type, schedule, options)
    held: set[str] = set()
    for found, parameters, lengths in ranks:
        assert found == pytest.approx(losses, abs=CLOSE)
        for name, one in parameters.items():
            torch.testing.assert_close(one, values[name], rtol=0, atol=CLOSE)
        assert lengths == ({5, 3, 6} if "cp" not in options else {4, 2})  # of 9, 5 and 12 tokens, padded
        held |= parameters.keys()
    assert held == values.keys()


@pytest.mark.parametrize(("model_type", "schedule"), [("llama", "1f1b"), ("qwen3", "zbv_zero_bubble")])
def test_stages_train_as_a_plain_loop(model_type: str, schedule: str) -> None:
    check(4, model_type, schedule)


@pytest.mark.exhaustive
def test_biases_and_parallel_blocks_train_as_a_plain_loop() -> None:
    check(4, "gpt_neox", "1f1b")


def test_sharded_and_recomputed_layers_train_as_a_plain_loop() -> None:
    check(4, "qwen3", "1f1b", pp=1, dp_shard=2, activation_checkpoint={"mode": "full"})


@pytest.mark.exhaustive
def test_chunks_of_sequences_are_shared_too() -> None:
    check(4, "llama", "1f1b", pp=1, cp=2, cp_method="ring")


@pytest.mark.exhaustive
def test_eight_ranks_train_as_a_plain_loop() -> None:
    check(8, "llama", "zbv_zero_bubble", dp_shard=2)


# ---------------------------------------------------------------------- wrong use


def test_one_rank_cannot_share_tokens() -> None:
    with pytest.raises(SetupError, match=r"parallel\.sequence_parallel is true, but parallel\.tp is 1"):
        ParallelDims(sequence_parallel=True)


def test_lengths_are_a_multiple_of_all_ranks_that_share_them() -> None:
    assert ParallelDims(tp=2, sequence_parallel=True).length_multiple == 2
    assert ParallelDims(cp=2, tp=2, sequence_parallel=True).length_multiple == 4
    assert ParallelDims(cp=2, tp=2).length_multiple == 2


class Layer(nn.Module):
    """A layer that contains matrices directly, or a convolution next to a block."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        pair = {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
        if inside:
            self.mlp = nn.ModuleDict(pair)
            self.mixer = nn.Conv1d(8, 8, 3)
        else:
            self.up, self.down = pair.values()


class Model(nn.Sequential):
    def get_tensor_parallel_plan(self) -> TensorPlan:
        prefix = "*.mlp." if hasattr(self[0], "mlp") else "*."
        return {f"{prefix}up": "colwise", f"{prefix}down": "rowwise"}


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (lambda: Model(Layer(False)), "has 0 in its layers"),
        (lambda: Model(Layer(True)), r"has 0\.mixer in its layers"),
        (
            lambda: AutoModelForCausalLM.from_config(
                HFCausalLM(config("mixtral") | {"num_local_experts": 4, "num_experts_per_tok": 2}).config
            ),
            "mixture of experts",
        ),
    ],
)
def test_models_that_need_all_tokens_between_blocks_are_refused(model: Any, named: str) -> None:
    built = model()
    names = derive_pp_module_config(built)
    plan = derive_tensor_plan(built, names)
    with pytest.raises(SetupError, match=named):
        check_sequence_parallel(built, names, plan, resolve_parallel_styles(built, names, plan, 2))
