"""Stages whose layers several ranks share train as one device does, and plans that cannot be followed are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils import get_total_norm

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.hf_experts import make_experts_pass_through
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import StageModule, copy_model_sharing_tensors, make_stage_module
from lightning_pipe.llm.parallel.data_parallel import apply_data_parallel
from lightning_pipe.llm.parallel.gradients import GradientNorm
from lightning_pipe.llm.parallel.tensor_parallel import TensorParallelGradients, apply_tensor_parallel
from lightning_pipe.llm.parallel.tensor_plan import TensorPlan, derive_tensor_plan
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner, StageInputs
from lightning_pipe.llm.schedules.specs import count_stages_per_rank, resolve_schedule_spec, stages_of_rank
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly
from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.llm_cases import SEED, beyond_rounding, hf_config, ranks_beyond_rounding
from tests.tiers import sampled, wanted

ROWS, LENGTH, COUNT = 2, 6, 4
ATTENTION = "model.layers.*.self_attn"


@dataclass(frozen=True)
class Case:
    """What is trained: one step, on a mesh of the given dimensions and a last one of two tensor-parallel ranks."""

    model: str
    schedule: str
    mesh: Mapping[str, int] = field(default_factory=lambda: {"pipeline": 2})
    reshard: bool = False


# Experts stay whole on every rank.
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
SHARDED = {"pipeline": 1, "shard": 2}
CASES = {
    "Qwen3, ZBV": Case("qwen3", "zbv_zero_bubble"),
    "plain PyTorch, ZBV": Case("plain", "zbv_zero_bubble"),
    "Qwen3, sharded, gathered anew for backward": Case("qwen3", "1f1b", SHARDED, reshard=True),
    "Mixtral, ZBV": Case("mixtral", "zbv_zero_bubble"),
    "GPT-NeoX, replicated, ZBV": Case("gpt_neox", "zbv_zero_bubble", {"pipeline": 1, "replicate": 2}),
}
OFTEN = ("Qwen3, ZBV", "plain PyTorch, ZBV", "Qwen3, sharded, gathered anew for backward")


# ---------------------------------------------------------------------- models


class OverSequence(ParallelStyle):
    """A whole norm, each rank for its part of the sequence: the gradient is left to be summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()]).redistribute(placements=[Shard(1)])

        def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Replicate()]).to_local()

        return distribute_module(module, device_mesh, None, take, give)


class Block(nn.Module):
    """Ends in what a stage hands on: a matrix cut by rows. A bare parameter sees a part of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.slope = nn.Parameter(torch.tensor(1.5))
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(torch.tanh(self.up(self.norm(x))) * self.slope)
        return output


class Plain(nn.Sequential):
    def get_tensor_parallel_plan(self) -> Any:
        return {
            "*.norm": OverSequence(),
            "*.up": ColwiseParallel(),
            "*": "partial_gradient",
            "*.down": RowwiseParallel(),
        }


def build(kind: str) -> Any:
    """The same values each time, none of them as at the beginning of training, where norms are all 1 and biases 0."""
    torch.manual_seed(SEED)
    if kind == "plain":
        return Plain(*(Block() for _ in range(4)))
    heads = {"num_attention_heads": 4} | ({} if kind == "gpt_neox" else {"num_key_value_heads": 2})
    module = HFCausalLM(hf_config(kind) | heads | EXPERTS.get(kind, {}), chunk_tokens=8)
    module.configure_model()
    assert module.model is not None
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def model_of(module: Any) -> nn.Module:
    model = module.model if isinstance(module, HFCausalLM) else module
    assert isinstance(model, nn.Module)
    return model


def batches(seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(19, (2, ROWS, LENGTH), generator=generator) for _ in range(COUNT)]
    return [{"input_ids": tokens, "labels": labels} for tokens, labels in draw]


def inputs_of(kind: str, batch: Mapping[str, Tensor]) -> Tensor:
    if kind != "plain":
        return batch["input_ids"]
    return torch.sin(batch["input_ids"][..., None] + torch.arange(8.0))


def loss_of(module: Any, output: Tensor, batch: Any) -> Tensor:
    return module.summed_loss(output, batch) if isinstance(module, HFCausalLM) else output.pow(2).sum()


def train_alone(kind: str, data: Sequence[Mapping[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    module = build(kind)
    model = model_of(module)
    stage = StageModule(model, 0, 1)
    losses = []
    for batch in data:
        loss = loss_of(module, stage(inputs_of(kind, batch)), batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@cache
def alone(kind: str, parts: int) -> Reference:
    """Losses of each part of the data, gradients of all, and their norm."""

    def trained() -> dict[str, Any]:
        losses, gradients = train_alone(kind, [batch for part in range(parts) for batch in batches(part)])
        of_parts = {f"losses {part}": losses[part * COUNT : (part + 1) * COUNT] for part in range(parts)}
        return {"norm": get_total_norm(gradients.values()), **of_parts, **gradients}

    return Reference.of(trained)


# ---------------------------------------------------------------------- ranks


class Trainee:
    """A rank's stages and what runs them."""

    def __init__(self, case: Case, plan: TensorPlan | None = None) -> None:
        self.case = case
        self.mesh = init_device_mesh("cpu", (*case.mesh.values(), 2), mesh_dim_names=(*case.mesh, "tensor"))
        self.module = build(case.model)
        model = model_of(self.module)
        config = derive_pp_module_config(model)
        spec = resolve_schedule_spec(case.schedule)
        size, rank = self.mesh["pipeline"].size(), self.mesh["pipeline"].get_local_rank()
        count = size * count_stages_per_rank(spec, size)
        fqns = split_layers_evenly(config, count)
        fake, mode = fake_copy(model)
        make_experts_pass_through(fake)
        plan = plan or derive_tensor_plan(fake, config)
        shapes = [
            make_stage_module(copy_model_sharing_tensors(fake), config, names, index, count)
            for index, names in enumerate(fqns)
        ]
        self.names = [name for name, _ in model.named_parameters()]
        mine = stages_of_rank(spec, rank, size)
        self.stages = {
            index: make_stage_module(copy_model_sharing_tensors(model), config, fqns[index], index, count)
            for index in mine
        }
        for stage in self.stages.values():
            apply_tensor_parallel(stage, config, self.mesh["tensor"], plan)
            for name in {"shard", "replicate"} & case.mesh.keys():
                apply_data_parallel(stage, config.layer_fqns, self.mesh[name], reshard_after_forward=case.reshard)
        if isinstance(self.module, HFCausalLM) and count - 1 in self.stages:
            # Whose head the loss takes.
            self.module.model = self.stages[count - 1].module
        self.gradients = [TensorParallelGradients(stage.module, self.mesh["tensor"]) for stage in self.stages.values()]
        group = self.mesh["pipeline"].get_group()
        self.runner = ScheduleRunner(self.stages, count, spec, group, torch.device("cpu"), StageShapes(shapes, mode))

    def train(self, data: Sequence[Mapping[str, Tensor]]) -> list[float]:
        steps = [StageInputs((inputs_of(self.case.model, batch),), {}, batch) for batch in data]
        losses = self.runner.train(steps, lambda output, batch: loss_of(self.module, output, batch))
        assert self.runner.failure is None
        return [float(loss) for loss in losses]

    def finish(self) -> None:
        for one in self.gradients:
            one.all_reduce()

    def held(self) -> dict[str, nn.Parameter]:
        return {name: one for stage in self.stages.values() for name, one in stage.module.named_parameters()}


def placements(value: Tensor) -> str:
    return str(value.placements[-1]) if isinstance(value, DTensor) and "tensor" in dimensions(value) else "plain"


def dimensions(value: DTensor) -> tuple[str, ...]:
    return value.device_mesh.mesh_dim_names or ()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def four_ranks(rank: int, world_size: int, folder: str, cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: run_case(CASES[name]) for name in cases}
    found["accumulated"], found["saved"] = accumulate_and_save(folder)
    found["missing"] = refusal({f"{ATTENTION}.q_norm": "replicate"}, first_is_nan=True)
    found["extra"] = refusal({"model.layers.*.input_layernorm": "partial_gradient"})
    return found


def run_case(case: Case) -> dict[str, Any]:
    trainee = Trainee(case)
    mesh = trainee.mesh
    part = next((mesh[name].get_local_rank() for name in ("shard", "replicate") if name in case.mesh), 0)
    losses = trainee.train(batches(part))
    trainee.finish()
    held = trainee.held()
    gradients = {name: one.grad for name, one in held.items() if one.grad is not None}
    return {
        "part": part,
        "losses": losses,
        "tensor": mesh.get_coordinate(),
        "placements": {name: placements(one) for name, one in held.items()},
        "same": {name: local(one).clone() for name, one in gradients.items() if "S(" not in placements(one)},
        "norm": float(GradientNorm(trainee.names, held, mesh["pipeline"].get_group())()),
        "gradients": {name: whole(one).clone() for name, one in gradients.items()},
    }


def accumulate_and_save(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of two batches; and the parameters and states that are saved after a step with them."""
    trainee = Trainee(Case("qwen3", "1f1b"))
    trainee.train(batches(0))
    trainee.train(batches(1))
    trainee.finish()
    held = trainee.held()
    gradients = {name: whole(one.grad).clone() for name, one in held.items() if one.grad is not None}
    return gradients, save(folder, held)


def refusal(changes: Mapping[str, str], first_is_nan: bool = False) -> str:
    model = model_of(build("qwen3"))
    trainee = Trainee(Case("qwen3", "1f1b"), {**derive_tensor_plan(model, derive_pp_module_config(model)), **changes})
    trainee.train(batches())
    if first_is_nan:
        one = next(one for name, one in trainee.held().items() if "input_layernorm" in name)
        kept, one.grad = one.grad, torch.full_like(one, torch.nan)
        trainee.finish()
        one.grad = kept
    with pytest.raises(SetupError) as caught:
        trainee.finish()
    return str(caught.value)


def save(folder: str, held: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(held.values(), lr=0.1)
    optimizer.step()
    state = {f"{name}.exp_avg": optimizer.state[one]["exp_avg"] for name, one in held.items()}
    dcp.save({name: one.detach() for name, one in held.items()} | state, checkpoint_id=folder)
    return {name: whole(one.detach()).clone() for name, one in held.items()} | {
        name: whole(one).clone() for name, one in state.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor_parallel")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(four_ranks, 4, str(folder), wanted(request.config, CASES, OFTEN.__contains__))


@pytest.mark.parametrize("name", sampled(CASES, OFTEN.__contains__))
def test_losses_gradients_and_their_norm_are_those_of_one_device(name: str, ranks: Any) -> None:
    case = CASES[name]
    results = []
    for found in (rank[name] for rank in ranks):
        # Only ranks of the last stage have losses.
        losses = {f"losses {found['part']}": found["losses"]} if found["losses"] else {}
        results.append({"norm": found["norm"], **losses, **found["gradients"]})
    assert not ranks_beyond_rounding(results, alone(case.model, 1 + max(rank[name]["part"] for rank in ranks)))


@pytest.mark.parametrize("name", sampled(CASES, OFTEN.__contains__))
def test_whole_parameters_have_the_same_gradient_on_both_ranks_to_the_bit(name: str, ranks: Any) -> None:
    for one, other in ((0, 1), (2, 3)):
        first, second = ranks[one][name]["same"], ranks[other][name]["same"]
        assert first
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == []


def test_matrices_of_layers_are_cut_and_all_else_is_whole(ranks: Any, request: pytest.FixtureRequest) -> None:
    expected = {"o_proj": "S(1)", "down_proj": "S(1)"} | dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "S(0)"
    )
    names = ("Qwen3, ZBV", "Qwen3, sharded, gathered anew for backward")
    for name in wanted(request.config, names, OFTEN.__contains__):
        for found in ranks:
            for parameter, placement in found[name]["placements"].items():
                assert placement == expected.get(parameter.split(".")[-2], "plain"), parameter


def test_partial_gradients_of_accumulated_batches_are_summed_once(ranks: Any) -> None:
    for found in ranks:
        assert found["accumulated"]
        assert not beyond_rounding(found["accumulated"], alone("qwen3", 2))


def test_a_whole_parameter_between_cut_matrices_that_the_plan_forgets_is_named(ranks: Any) -> None:
    # In the first step without a NaN, which gradients in half precision may begin with.
    for found in ranks:
        assert "self_attn.q_norm.weight has norms from" in found["missing"]
        assert "'partial_gradient'" in found["missing"]


def test_a_complete_gradient_that_the_plan_calls_partial_is_named(ranks: Any) -> None:
    for found in ranks:
        assert "input_layernorm.weight is the same on all ranks" in found["extra"]
        assert "'replicate'" in found["extra"]


def test_a_checkpoint_of_cut_stages_is_read_by_one_device(ranks: Any, folder: Path) -> None:
    model = model_of(build("qwen3"))
    state = {name: torch.zeros_like(one) for name, one in model.state_dict().items()}
    state |= {f"{name}.exp_avg": torch.zeros_like(one) for name, one in state.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    written = {name: one for found in ranks for name, one in found["saved"].items()}
    assert written.keys() == state.keys()
    assert [name for name in written if not torch.equal(written[name], state[name])] == []
