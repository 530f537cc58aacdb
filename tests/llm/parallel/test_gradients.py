"""One norm, one clipping, one scale for gradients that stages and shards hold: as one device would have them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_pipe.llm.parallel.gradients import (
    GradientNorm,
    clip_grads_with_norm,
    force_sum_reduction,
    scale_gradients,
)
from tests.distributed import run_ranks
from tests.rounding import Reference

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (40, 12),
    "layers.0.weight": (12, 12),
    "layers.0.bias": (12,),
    "layers.1.weight": (12, 12),
    "layers.1.bias": (12,),
    "scale": (),
    "norm": (7,),
    "head": (3, 12),
}
FIRST_STAGE = ("embed", "layers.0.weight", "layers.0.bias", "scale")
# An optimizer's order need not be the model's: here its groups are decayed and other parameters.
GROUPED = ("embed", "layers.0.weight", "layers.1.weight", "head", "layers.0.bias", "layers.1.bias", "scale", "norm")
MIXED = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def whole_model(case: str) -> dict[str, nn.Parameter]:
    """The unsplit model's parameters with their gradients, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    parameters = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        dtype = MIXED[index % len(MIXED)] if case == "mixed types" else torch.float32
        gradient = torch.randn(shape, generator=generator) * 10.0 ** (index % 5 - 2)
        parameters[name] = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameters[name].grad = gradient.to(dtype)
    if case == "a stage without gradients":
        for name in FIRST_STAGE:
            parameters[name].grad = None
    if case == "some without gradients":
        parameters["layers.0.bias"].grad = parameters["layers.1.weight"].grad = None
    if case == "none with gradients":
        for parameter in parameters.values():
            parameter.grad = None
    if case == "nan":
        cast(Tensor, parameters["head"].grad)[1, 1] = torch.nan
    if case == "infinite":
        cast(Tensor, parameters["embed"].grad)[0, 3] = -torch.inf
    if case == "tiny":
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 1e-25)
    return parameters


CASES = (
    "plain",
    "mixed types",
    "a stage without gradients",
    "some without gradients",
    "none with gradients",
    "nan",
    "infinite",
    "tiny",
)


def stage_of(rank: int, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: value for name, value in parameters.items() if (name in FIRST_STAGE) == (rank == 0)}


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def in_two_stages(rank: int, world_size: int) -> dict[str, Any]:
    """Everything that two plain stages are asked; what must hold on each rank is asserted here."""
    results: dict[str, Any] = {"norms": {}, "clipped": {}}
    for case in CASES:
        for order in (tuple(SHAPES), GROUPED):
            held = stage_of(rank, whole_model(case))
            norm = GradientNorm(order, held, dist.group.WORLD)()
            clip_grads_with_norm(held.values(), 0.5, norm)
            results["norms"][case, order] = norm
            results["clipped"][case, order] = {name: value.grad for name, value in held.items()}

    tied = whole_model("plain")
    # Both stages hold the embedding; the first alone counts it.
    results["tied"] = GradientNorm(tuple(SHAPES), stage_of(rank, tied), dist.group.WORLD)()
    alone = whole_model("plain") if rank else {}
    results["one rank without parameters"] = GradientNorm(tuple(SHAPES), alone, dist.group.WORLD)()
    norm_of = GradientNorm(tuple(SHAPES), held := stage_of(rank, whole_model("plain")), dist.group.WORLD)
    norm_of()
    scale_gradients(held.values(), 3.0)
    results["called again"] = norm_of()
    return results


@pytest.fixture(scope="module")
def stages() -> list[dict[str, Any]]:
    return run_ranks(in_two_stages, 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [tuple(SHAPES), GROUPED], ids=["the model's order", "the optimizer's order"])
def test_the_norm_over_stages_and_clipped_gradients_are_one_devices_to_the_bit(
    stages: list[dict[str, Any]], case: str, order: tuple[str, ...]
) -> None:
    parameters = whole_model(case)
    total = get_total_norm([value.grad for name in order if (value := parameters[name]).grad is not None])
    clip_grads_with_norm_(list(parameters.values()), 0.5, total)
    clipped = stages[0]["clipped"][case, order] | stages[1]["clipped"][case, order]
    assert all(same_bits(results["norms"][case, order], total) for results in stages)
    assert set(clipped) == set(SHAPES)
    for name, gradient in clipped.items():
        expected = parameters[name].grad
        assert gradient is expected is None or same_bits(gradient, cast(Tensor, expected))


def test_a_copy_that_is_not_handed_in_is_not_counted(stages: list[dict[str, Any]]) -> None:
    expected = get_total_norm([cast(Tensor, value.grad) for value in whole_model("plain").values()])
    for results in stages:
        assert torch.equal(results["tied"], expected)
        assert torch.equal(results["one rank without parameters"], expected)


def test_each_call_is_of_the_gradients_there_are_then(stages: list[dict[str, Any]]) -> None:
    expected = get_total_norm([3.0 * cast(Tensor, value.grad) for value in whole_model("plain").values()])
    assert all(torch.equal(results["called again"], expected) for results in stages)


@pytest.mark.parametrize("case", ["plain", "mixed types", "some without gradients"])
@pytest.mark.parametrize("factor", [1 / 3, 1 / 77, 0.0])
def test_scaling_multiplies_each_gradient_once_in_place(case: str, factor: float) -> None:
    parameters, expected = whole_model(case), whole_model(case)
    before = {name: value.grad for name, value in parameters.items()}
    scale_gradients(parameters.values(), factor)
    for name, parameter in parameters.items():
        assert parameter.grad is before[name]
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, cast(Tensor, expected[name].grad).mul_(factor))


def small_model() -> nn.Sequential:
    """Its last parameters have fewer rows than there are ranks, so that one of those has an empty shard."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def loss_of(model: nn.Module, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    # Each rank has a number of samples of its own, as it has of tokens.
    return cast(Tensor, model(torch.randn(3 + rank, 5, generator=generator))).square().sum()


def full_gradients(model: nn.Module) -> list[Tensor]:
    return [cast(DTensor, parameter.grad).full_tensor().clone() for parameter in model.parameters()]


def over_two_shards(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    meshes = {
        "fsdp": init_device_mesh("cpu", (2,)),
        "replicate": init_device_mesh("cpu", (2,)),
        "hsdp": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
    }
    for name, mesh in meshes.items():
        apply = replicate if name == "replicate" else fully_shard
        for summed in (True, False):
            model = small_model()
            apply(model[0], mesh=mesh)
            apply(model, mesh=mesh)
            if summed:
                force_sum_reduction(model)
            loss_of(model, rank).backward()
            results[name, "summed" if summed else "by default"] = full_gradients(model)
            if not summed:
                continue
            named = dict(model.named_parameters())
            norm_of = GradientNorm(tuple(named), named, None)
            results[name, "norms"] = norm_of()
            scale_gradients(model.parameters(), 0.25)
            results[name, "scaled"] = full_gradients(model)
            clip_grads_with_norm(model.parameters(), 0.1, norm_of())
            results[name, "clipped"] = full_gradients(model)
            # Of a shard that one rank alone has.
            part = cast(DTensor, named["2.weight"].grad).to_local()
            if part.numel():
                part[0, 0] = torch.nan
            results[name, "nan"] = norm_of()

    mesh = meshes["fsdp"]
    unsummed = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Replicate()]))
    unsummed.grad = cast(Tensor, DTensor.from_local(torch.full((4, 3), rank + 1.0), mesh, [Partial()]))
    columns = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]))
    columns.grad = distribute_tensor(torch.full((4, 3), 2.0), mesh, [Shard(1)])
    results["tensor parallel"] = GradientNorm(("a", "b"), {"a": unsummed, "b": columns}, None)()
    return results


@pytest.fixture(scope="module")
def shards() -> list[dict[Any, Any]]:
    return run_ranks(over_two_shards, 2)


def whole_gradients() -> list[Tensor]:
    model = small_model()
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    return [cast(Tensor, parameter.grad) for parameter in model.parameters()]


def whole_norm() -> Reference:
    return Reference.of(lambda: {"norm": get_total_norm(whole_gradients())})


def numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"parameter {number}": tensor for number, tensor in enumerate(tensors)}


@pytest.mark.parametrize("kind", ["fsdp", "replicate", "hsdp"])
def test_gradients_of_data_parallel_ranks_are_summed_only_if_forced(shards: list[dict[Any, Any]], kind: str) -> None:
    expected = Reference.of(lambda: numbered(whole_gradients()))
    for results in shards:
        assert expected.differences(numbered(results[kind, "summed"])) == []
        assert expected.differences(numbered([2 * half for half in results[kind, "by default"]])) == []


@pytest.mark.parametrize("kind", ["fsdp", "replicate", "hsdp"])
def test_the_norm_over_shards_is_that_of_whole_gradients(shards: list[dict[Any, Any]], kind: str) -> None:
    found = [results[kind, "norms"] for results in shards]
    assert whole_norm().differences({"norm": found[0]}) == []
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["fsdp", "replicate", "hsdp"])
def test_shards_are_scaled_and_clipped_in_place(shards: list[dict[Any, Any]], kind: str) -> None:
    def clipped() -> dict[str, Tensor]:
        model = small_model()
        for parameter, gradient in zip(model.parameters(), whole_gradients(), strict=True):
            parameter.grad = gradient * 0.25
        total = get_total_norm([cast(Tensor, parameter.grad) for parameter in model.parameters()])
        clip_grads_with_norm_(model.parameters(), 0.1, total)
        return numbered([cast(Tensor, parameter.grad) for parameter in model.parameters()])

    expected = Reference.of(clipped)
    for results in shards:
        for summed, scaled in zip(results[kind, "summed"], results[kind, "scaled"], strict=True):
            assert torch.equal(scaled, summed * 0.25)
        assert expected.differences(numbered(results[kind, "clipped"])) == []


@pytest.mark.parametrize("kind", ["fsdp", "replicate", "hsdp"])
def test_a_nan_in_one_ranks_shard_reaches_every_rank(shards: list[dict[Any, Any]], kind: str) -> None:
    assert all(results[kind, "nan"].isnan() for results in shards)


def test_gradients_that_tensor_parallelism_has_not_summed_yet_count_as_their_sum(shards: list[dict[Any, Any]]) -> None:
    expected = Reference.of(lambda: {"norm": get_total_norm([torch.full((4, 3), 3.0), torch.full((4, 3), 2.0)])})
    for results in shards:
        assert expected.differences({"norm": results["tensor parallel"]}) == []


def in_two_stages_of_two_shards(rank: int, world_size: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    model, stage = small_model(), 2 * mesh.get_local_rank("stage")
    gradients = dict(zip(dict(model.named_parameters()), whole_gradients(), strict=True))
    fully_shard(model[stage], mesh=mesh["shard"])
    held = {name: value for name, value in model.named_parameters() if name.startswith(f"{stage}.")}
    for name, parameter in held.items():
        parameter.grad = distribute_tensor(gradients[name], mesh["shard"], [Shard(0)])
    return GradientNorm(tuple(gradients), held, mesh.get_group("stage"))()


def test_stages_of_shards_have_one_norm_the_same_bits_on_every_rank() -> None:
    results = run_ranks(in_two_stages_of_two_shards, 4)
    assert whole_norm().differences({"norm": results[0]}) == []
    assert all(torch.equal(other, results[0]) for other in results[1:])
