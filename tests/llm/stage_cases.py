"""A small transformer with dropout in stages, trained under a schedule on two ranks, for what is done to its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import StageModule, copy_model_sharing_tensors, make_stage_module
from lightning_pipe.llm.parallel.data_parallel import apply_data_parallel
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner, StageInputs
from lightning_pipe.llm.schedules.specs import SCHEDULES, count_stages_per_rank, stages_of_rank
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly

WIDTH, VOCABULARY, LAYERS, LENGTH = 8, 11, 4, 6
CONFIG = PPModuleConfig(LAYERS, "layers", ("embedding",), ("head",))
MICRO_BATCHES = 4


class Layer(nn.Module):
    """A transformer's layer; counts its forwards, those of a backward included."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.forwards = 0

    def forward(self, x: Tensor, scale: tuple[Tensor, ...]) -> Tensor:
        if not torch.compiler.is_compiling():
            self.forwards += 1
        query, key, value = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(attended.squeeze(1)) * scale[0]
        return x + self.dropout(self.mlp(x)) * scale[1]


class Model(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, factor: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, scale=(factor.mean(), factor.max()))
        return self.head(x)


def make_model(dropout: float = 0.3) -> Model:
    """From one seed, which is the generator's when it returns, too."""
    torch.manual_seed(3)
    return Model(dropout)


def whole_stage(dropout: float = 0.3) -> StageModule:
    """The model as its only stage."""
    return make_stage_module(make_model(dropout), CONFIG, CONFIG.module_fqns, 0, 1)


def layers_of(stage: StageModule) -> Iterator[Layer]:
    return (module for module in stage.modules() if isinstance(module, Layer))


def inputs(length: int = LENGTH, rows: int = 2) -> list[StageInputs]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (MICRO_BATCHES, rows, length), generator=generator)
    factors = torch.rand(MICRO_BATCHES, 3, generator=generator)
    return [StageInputs((one,), {"factor": factor}, one.roll(1)) for one, factor in zip(ids, factors, strict=True)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def train_stages(
    rank: int,
    schedule: str,
    prepare: Callable[[StageModule], None] = lambda stage: None,
    *,
    sharded: bool = False,
    dropout: float = 0.3,
    lengths: tuple[int, ...] = (LENGTH,),
) -> tuple[dict[str, Tensor], list[StageModule]]:
    """Gradients of this rank's part, by name, and its stages, after steps of a schedule on two ranks.

    Args:
        rank: of two.
        schedule: its name.
        prepare: what is done to each stage before it is sharded.
        sharded: whether ``fully_shard`` is around layers and stages, over this rank alone.
        dropout: the probability of it.
        lengths: of the steps' sequences; gradients are added up.
    """
    spec = SCHEDULES[schedule]
    num_stages = 2 * count_stages_per_rank(spec, 2)
    model = make_model(dropout)
    fqns = split_layers_evenly(CONFIG, num_stages)
    fake, mode = fake_copy(model)
    shapes = StageShapes(
        [
            make_stage_module(copy_model_sharing_tensors(fake), CONFIG, names, index, num_stages)
            for index, names in enumerate(fqns)
        ],
        mode,
    )
    stages = {
        index: make_stage_module(copy_model_sharing_tensors(model), CONFIG, fqns[index], index, num_stages)
        for index in stages_of_rank(spec, rank, 2, num_stages // 2)
    }
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    for stage in stages.values():
        prepare(stage)
        if sharded:
            apply_data_parallel(stage, CONFIG.layer_fqns, mesh["shard"])
    group = dist.group.WORLD
    assert group is not None
    runner = ScheduleRunner(stages, num_stages, spec, group, torch.device("cpu"), shapes)
    torch.manual_seed(5)
    total: dict[str, Tensor] = {}
    for length in lengths:
        runner.train(inputs(length), loss_of)
        if runner.failure is not None:
            raise runner.failure
        for stage in stages.values():
            for name, one in stage.module.named_parameters():
                if one.grad is not None:
                    total[name] = total.get(name, 0) + whole(one.grad)
            stage.zero_grad()
    return total, list(stages.values())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float = 0.0) -> list[str]:
    """Names of what only one has, or what differs by more than the tolerance, relative to the larger norm."""
    wrong = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        difference = (one[name] - other[name]).norm()
        if not difference <= tolerance * torch.maximum(one[name].norm(), other[name].norm()):
            wrong.append(name)
    return wrong
