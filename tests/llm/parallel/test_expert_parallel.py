"""Experts on several ranks learn from the tokens of all of them what one device with all experts would learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.losses.router_losses import RouterLosses, sum_router_losses
from lightning_pipe.llm.model.activation_checkpoint import checkpoint_layers
from lightning_pipe.llm.model.deferred import fake_copy
from lightning_pipe.llm.model.derived_config import derive_config
from lightning_pipe.llm.model.module_config import ModuleConfig
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import PassThrough, StageModule, make_stage, shallow_copy
from lightning_pipe.llm.parallel.expert_parallel import check_experts, parallelise_experts, spread_parameters
from lightning_pipe.llm.parallel.gradients import GradientNorm, force_sum_reduction
from lightning_pipe.llm.run.runner import PipelineRunner, StageInputs
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages, stages_of_rank
from lightning_pipe.llm.split.by_name import split_evenly
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.tiers import sampled, wanted

WIDTH, HIDDEN, VOCABULARY, EXPERTS, LAYERS = 8, 12, 11, 4, 4
COUNT = 4  # micro-batches of a data-parallel rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, HIDDEN, EXPERTS, 2, balance_coefficient=0.3, z_coefficient=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_pp_module_config(self) -> dict[str, Any]:
        return {
            "num_layers": LAYERS,
            "layer_prefix": "layers",
            "input_fqns": ["embedding"],
            "output_fqns": ["head"],
        }

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(3)
    return Model()


def micro_batches(part: int) -> list[Tensor]:
    """Of a data-parallel rank."""
    return list(torch.randint(VOCABULARY, (COUNT, 2, 5), generator=torch.Generator().manual_seed(part)))


def tokens_of(ids: Tensor) -> int:
    """Some number that differs from micro-batch to micro-batch."""
    return int(ids.sum()) % 7 + 3


def loss_of(output: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), ids.roll(1).flatten(), reduction="sum")


@dataclass(frozen=True)
class Case:
    """Ranks: of a pipeline, of replicas, that share parameters, that share experts."""

    schedule: str
    pipeline: int
    replicate: int
    shard: int
    expert: int
    checkpoint: Literal["full", "selective"] | None = None
    reshard: bool = False


CASES = {
    "two stages in two parts of the backward, replicas": Case("zbv_zero_bubble", 2, 2, 1, 2),
    "two stages in two parts of the backward, some computed again": Case("zbv_zero_bubble", 2, 1, 2, 2, "selective"),
    "experts sharded over two more": Case("1f1b", 1, 1, 4, 2, reshard=True),
    "experts replicated, the rest sharded too": Case("zbv_zero_bubble", 1, 2, 2, 2),
}


# Two stages of sharded experts are trained in the test of all dimensions, too.
OFTEN = (
    "two stages in two parts of the backward, replicas",
    "experts sharded over two more",
)


def parallelise(stage: StageModule, config: ModuleConfig, mesh: DeviceMesh, experts: DeviceMesh, case: Case) -> None:
    names = tuple(name for name in ("replicate", "shard") if experts[name].size() > 1)
    parallelise_experts(stage, experts["expert"], experts[names] if names else None, reshard_after_forward=case.reshard)
    if case.checkpoint is not None:
        checkpoint_layers(stage, config.layers, case.checkpoint)
    parts = [part for part in map(stage.module.get_submodule, config.layers) if not isinstance(part, PassThrough)]
    spread = spread_parameters(stage)
    data = mesh["replicate", "shard"] if case.replicate > 1 else mesh["shard"]
    for part in [*parts, stage]:
        if case.shard > 1:
            fully_shard(part, mesh=data, reshard_after_forward=case.reshard, ignored_params=spread)
        else:
            replicate(part, mesh=mesh["replicate"], ignored_params=spread)
    force_sum_reduction(stage)


def train(case: Case, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh(
        "cpu", (case.pipeline, case.replicate, case.shard), mesh_dim_names=("pipeline", "replicate", "shard")
    )
    # As the rest: whether experts are sharded or replicated must not differ in what they share with it.
    copies, sharing = (
        (case.replicate, case.shard // case.expert) if case.shard > 1 else (case.replicate // case.expert, 1)
    )
    experts = init_device_mesh(
        "cpu",
        (case.pipeline, copies, sharing, case.expert),
        mesh_dim_names=("pipeline", "replicate", "shard", "expert"),
    )
    rank, part = mesh["pipeline"].get_local_rank(), dist.get_rank() % (case.replicate * case.shard)
    spec, model = SCHEDULES[case.schedule], make_model()
    config = derive_config(model)
    per_rank = count_stages(spec, case.pipeline)
    total = case.pipeline * per_rank
    fqns = split_evenly(config, total)
    fake, mode = fake_copy(model)
    shapes = StageShapes(
        [make_stage(shallow_copy(fake), config, names, index, total) for index, names in enumerate(fqns)], mode
    )
    losses = [RouterLosses(tokens_of(ids)) for ids in micro_batches(part)]
    stages: dict[int, StageModule] = {}
    for index in stages_of_rank(spec, rank, case.pipeline, per_rank):
        stages[index] = make_stage(shallow_copy(model), config, fqns[index], index, total)
        parallelise(stages[index], config, mesh, experts, case)
    group = mesh["pipeline"].get_group()
    runner = PipelineRunner(stages, total, spec, group, torch.device("cpu"), shapes)
    inputs = [
        StageInputs((ids,), {}, ids, (lambda one=one: one,))  # type: ignore[misc]
        for ids, one in zip(micro_batches(part), losses, strict=True)
    ]
    loss = runner.train(inputs, loss_of)
    assert runner.failure is None
    held = {name: parameter for stage in stages.values() for name, parameter in stage.module.named_parameters()}
    found: dict[str, Any] = {"losses": loss, "routers": sum_router_losses(losses)}
    found["gradients"] = {name: full(one.grad) for name, one in held.items() if one.grad is not None}
    order = [name for name, _ in model.named_parameters()]
    found["norm"] = GradientNorm(order, held, group)()
    for foreach in (False, True):
        torch.optim.AdamW(held.values(), lr=0.01, eps=1e-3, foreach=foreach).step()
    found["parameters"] = {name: full(one).detach() for name, one in held.items()}
    if case.pipeline == 1:
        dcp.save(dict(held), checkpoint_id=folder)
    return found


def full(value: Any) -> Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


# ---------------------------------------------------------------------- single layers

FLOWS: dict[str, Callable[[int], Tensor]] = {
    # The layer's router looks at the first numbers.
    "none for the experts of some ranks": lambda rank: torch.eye(WIDTH)[[rank % 2, 0, 1]],
    "a rank without tokens": lambda rank: torch.eye(WIDTH)[[rank, 3] * (rank % 3)],
    "no tokens at all": lambda rank: torch.zeros(0, WIDTH),
}


def make_layer() -> MoE:
    torch.manual_seed(5)
    layer = MoE(WIDTH, HIDDEN, EXPERTS, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :EXPERTS] = torch.eye(EXPERTS)
    return layer


def run_layer(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    x = x.clone().requires_grad_()
    output = layer(x)
    (output.square().sum() + output.sum()).backward()
    assert x.grad is not None
    gradients = {name: None if one.grad is None else full(one.grad) for name, one in layer.named_parameters()}
    return output.detach(), x.grad, gradients


def on_four_ranks(rank: int, world_size: int, folder: str, cases: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: train(CASES[name], f"{folder}/{name}") for name in cases}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("expert",))
    for name, tokens in FLOWS.items():
        layer = make_layer()
        parallelise_experts(layer, mesh)
        found[name] = run_layer(layer, tokens(rank))
    uneven = init_device_mesh("cpu", (1, 4), mesh_dim_names=("expert", "shard"))
    try:
        parallelise_experts(MoE(6, 8, 4, 1), uneven["expert"], uneven["shard"])
    except SetupError as error:
        found["uneven"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(on_four_ranks, 4, str(folder), wanted(request.config, CASES, OFTEN.__contains__)), folder


def alone(parts: int) -> dict[str, Any]:
    """One device: the micro-batches of all data-parallel ranks."""
    model, losses, every = make_model(), [], []
    for part in range(parts):
        for ids in micro_batches(part):
            every.append(RouterLosses(tokens_of(ids)))
            with every[-1]:
                loss = loss_of(model(ids), ids)
            loss.backward()
            losses.append(loss.detach())
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    for _ in range(2):
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3).step()
    return {
        "losses": torch.stack(losses),
        "routers": sum_router_losses(every),
        "norm": get_total_norm(gradients.values()),
        **{f"gradient of {name}": one for name, one in gradients.items()},
        **{name: one.detach() for name, one in model.named_parameters()},
    }


@cache
def reference(parts: int) -> Reference:
    return Reference.of(lambda: alone(parts))


@pytest.mark.parametrize("name", sampled(CASES, OFTEN.__contains__))
def test_experts_on_several_ranks_learn_as_on_one_device(name: str, ranks: tuple[list[dict[str, Any]], Path]) -> None:
    case, results = CASES[name], [one[name] for one in ranks[0]]
    expected = reference(case.replicate * case.shard)
    together = {
        "losses": torch.stack([loss for result in results for loss in result["losses"]]),
        "routers": torch.stack([result["routers"] for result in results]).sum(0),
    }
    for result in results:
        own = {f"gradient of {key}": gradient for key, gradient in result["gradients"].items()}
        together |= {"norm": result["norm"], **own, **result["parameters"]}
        # What other ranks hold is theirs to show.
        problems = expected.differences(together)
        assert [problem for problem in problems if not problem.endswith(": missing")] == []
    assert problems == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize(
    "name", sampled([name for name, case in CASES.items() if case.pipeline == 1], OFTEN.__contains__)
)
def test_a_checkpoint_of_spread_experts_is_that_of_the_whole_model(
    name: str, ranks: tuple[list[dict[str, Any]], Path]
) -> None:
    results, folder = ranks
    loaded = {key: torch.zeros_like(value) for key, value in make_model().named_parameters()}
    dcp.load(loaded, checkpoint_id=folder / name, no_dist=True)
    for key, value in results[0][name]["parameters"].items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.parametrize("name", FLOWS)
def test_a_layer_gives_each_rank_its_tokens_results_however_they_flow(
    name: str, ranks: tuple[list[dict[str, Any]], Path]
) -> None:
    inputs = [FLOWS[name](rank) for rank in range(4)]

    def on_one_rank() -> dict[str, Any]:
        output, gradient, gradients = run_layer(make_layer(), torch.cat(inputs))
        experts = {key: value for key, value in gradients.items() if key.startswith("experts.")}
        return {"output": output, "gradient": gradient, **experts}

    expected, found = Reference.of(on_one_rank), [one[name] for one in ranks[0]]
    together = {"output": torch.cat([one[0] for one in found]), "gradient": torch.cat([one[1] for one in found])}
    for rank, (*_, gradients) in enumerate(found):
        assert [key for key, value in gradients.items() if value is None] == [], f"rank {rank}"
        assert expected.differences(together | gradients) == [], f"rank {rank}"


def test_experts_whose_widths_cannot_be_sharded_are_refused(ranks: tuple[list[dict[str, Any]], Path]) -> None:
    assert all("widths 6 and 8 cannot be sharded over 4 ranks" in one["uneven"] for one in ranks[0])


def test_a_number_of_experts_that_the_ranks_do_not_divide_is_refused() -> None:
    check_experts(make_model(), 2)
    with pytest.raises(SetupError, match=r"layers\.0\.moe\.experts has 4 experts, which parallel.ep=3"):
        check_experts(make_model(), 3)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(SetupError, match="Sequential has no experts"):
        check_experts(nn.Sequential(nn.Linear(2, 2)), 2)


def test_experts_of_another_layout_are_refused_by_name() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(2, 4), nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    with pytest.raises(
        SetupError, match=r"the experts '0\.experts' are a ModuleList; expected a class whose parameters"
    ):
        check_experts(nn.Sequential(Listed()), 2)
