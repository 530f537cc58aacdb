"""A model that is not made of layers alone, cut where its traced forward pass says: like the whole one, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.model.deferred import deferred_init, fake_copy
from lightning_pipe.llm.model.stage_module import StageModule
from lightning_pipe.llm.model.tied import TiedParameter
from lightning_pipe.llm.schedules.named import SCHEDULES, stages_of_rank
from lightning_pipe.llm.schedules.step import build_schedule, run_schedule
from lightning_pipe.llm.schedules.timed_stage import TimedStage
from lightning_pipe.llm.split.traced_split import (
    SplitPoint,
    TracedSplit,
    join_stages,
    pipe_split,
    split_into_equal_size,
    trace_split,
)
from tests.distributed import run_ranks
from tests.tiers import sampled, sampled_rows, wanted

WIDTH, VOCABULARY, ROWS, LENGTH, MICROBATCHES = 8, 11, 2, 5, 4
BEGINNING = SplitPoint.BEGINNING
FOUR = {f"layers.{index}": BEGINNING for index in (1, 2, 3)}
TWO = {"layers.1": BEGINNING}  # of a model with two layers, whose trace takes half the time


class Block(nn.Module):
    """With what traces do not take for granted: modes, buffers, contexts, views of unknown size, constants."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)
        self.table = torch.linspace(0.5, 1.0, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.linear(x).view(rows, length, 2, WIDTH // 2).transpose(1, 2)
        y = heads.transpose(1, 2).reshape(rows, length, WIDTH)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        with torch.no_grad():
            mean = y.mean()
        with torch.autocast("cpu", enabled=False):
            y = y * self.table * self.scale
        shift = torch.tensor([0.5]) if self.training else torch.tensor([0.25])
        return x + self.dropout(y * mask).relu_() - mean + shift


class Model(nn.Module):
    """A skip over two layers, an input that first and last stage use, and a parameter that nothing uses."""

    def __init__(self, dropout: float = 0.0, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.again = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, ids: Tensor, factor: int = 1, *, mask: Tensor) -> Tensor:
        x = skip = self.embedding(ids) * factor
        for index, layer in enumerate(self.layers):
            x = layer(x, mask)
            if index == min(2, len(self.layers) - 1):
                x = x + skip
        return self.head(self.dropout(x) + self.again(ids) + torch.arange(ids.shape[1])[:, None])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
        return x


class Marked(nn.Module):
    """Says itself where it may be cut, in the middle of what it does, and gives more than one result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.mm(x, self.weight).relu()
        pipe_split()
        pipe_split()
        return {"result": self.inner(x), "first": x, "input": x.shape[0] > 0, "nothing": None}


def inputs(rows: int = ROWS, length: int = LENGTH, seed: int = 0) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    return (ids,), {"mask": torch.rand(rows, length, 1, generator=generator)}


def built(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def make_stages(traced: TracedSplit, model: nn.Module) -> list[StageModule]:
    return [traced.make_stage(model, stage) for stage in range(traced.num_stages)]


def split(build: Callable[[], nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], **how: Any) -> Any:
    """The trace, and all stages of the model with the seed 0."""
    model = built(build)
    traced = trace_split(model, args, kwargs, **how)
    return traced, make_stages(traced, model)


def two_layers() -> Model:
    return Model(layers=2)


@cache
def traced_in_two() -> TracedSplit:
    return trace_split(built(Model), *inputs(), split_spec={"layers.2": BEGINNING})


@cache
def traced_in_four(dropout: float = 0.0) -> TracedSplit:
    return trace_split(built(lambda: Model(dropout)), *inputs(), split_spec=FOUR, num_stages=4)


def run(
    stages: Sequence[StageModule], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss_of: Callable[[Any], Tensor]
) -> Any:
    """The output, with gradients as stages make them: each from what the next one sends back."""
    passed: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []
    given, output = args, None
    for stage in stages:
        output = stage(*given, **kwargs)
        outputs = output if isinstance(output, tuple) else (output,)
        passed.append((given, outputs))
        given = tuple(one.detach().requires_grad_(one.requires_grad) for one in outputs if isinstance(one, Tensor))
    gradients: list[Any] = []
    for index in reversed(range(len(stages))):
        if index == len(stages) - 1:
            loss_of(output).backward()
        else:
            kept = [position for position, one in enumerate(passed[index][1]) if one.requires_grad]
            torch.autograd.backward([passed[index][1][one] for one in kept], [gradients[one] for one in kept])
        gradients = [one.grad for one in passed[index][0]]
    return output


def squares(output: Any) -> Tensor:
    parts = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    return torch.stack([(one * one).sum() for one in parts]).sum()


def gradients_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def parts_of(stages: Sequence[StageModule]) -> list[nn.Module]:
    return [stage.module for stage in stages]


# ---------------------------------------------------------------------- what is held


@pytest.fixture
def in_four() -> list[StageModule]:
    return make_stages(traced_in_four(0.3), built(lambda: Model(0.3)))


def test_stages_hold_the_unsplit_models_state_under_its_names(in_four: list[StageModule]) -> None:
    states = [part.state_dict() for part in parts_of(in_four)]
    assert {name for state in states for name in state} == set(Model().state_dict())
    assert sum(len(state) for state in states) == len(Model().state_dict())
    assert all(name.startswith("layers.1.") for name in states[1])
    assert "layers.1.scale" in dict(in_four[1].module.named_buffers())
    whole = [name for name, _ in Model().named_parameters()]
    held = [[name for name, _ in part.named_parameters()] for part in parts_of(in_four)]
    assert all(names == [name for name in whole if name in names] for names in held)
    assert traced_in_four(0.3).layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert traced_in_four(0.3).shared == ()


def test_a_deferred_model_is_traced_and_a_stage_made_of_its_own_values_alone_to_the_bit() -> None:
    torch.manual_seed(0)
    with deferred_init() as record:
        model = Model()
    traced = trace_split(model, *inputs(), split_spec=FOUR)
    record.materialise(model, keep=set(traced.names(2)).__contains__)
    real = {name for name, one in model.named_parameters() if not isinstance(one, FakeTensor)}
    assert real == {name for name in dict(model.named_parameters()) if name.startswith("layers.2.")}
    stage = traced.make_stage(model, 2)
    assert not any(isinstance(one, FakeTensor) for one in [*stage.parameters(), *stage.buffers()])
    whole = built(Model)
    assert_equal(stage.module.state_dict(), {name: whole.state_dict()[name] for name in stage.module.state_dict()})
    assert torch.equal(dict(stage.module.named_buffers())["layers.2.table"], whole.layers[2].table)  # type: ignore[index, union-attr]


def test_a_model_that_has_been_traced_is_as_it_was() -> None:
    model, other = built(two_layers), built(two_layers)
    state = torch.get_rng_state()
    trace_split(model, *inputs(), split_spec={"layers.0": SplitPoint.END})
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(model.state_dict(), other.state_dict())
    args, kwargs = inputs()
    assert model.training
    assert torch.equal(model(*args, **kwargs), other(*args, **kwargs))


def test_stages_of_one_rank_are_joined_into_one_module_whose_mode_is_theirs(
    in_four: list[StageModule],
) -> None:
    stages = in_four
    joined = join_stages([stages[0], stages[2]])
    own = {**stages[0].module.state_dict(keep_vars=True), **stages[2].module.state_dict(keep_vars=True)}
    assert {name: id(one) for name, one in joined.state_dict(keep_vars=True).items()} == {
        name: id(one) for name, one in own.items()
    }
    assert joined.get_submodule("layers.2") is stages[2].module.get_submodule("layers.2")
    args, kwargs = inputs()
    joined.eval()
    assert torch.equal(stages[0](*args, **kwargs)[2], stages[0](*args, **kwargs)[2])
    joined.train()
    assert not torch.equal(stages[0](*args, **kwargs)[2], stages[0](*args, **kwargs)[2])
    assert join_stages(stages[1:2]) is stages[1].module


def test_fake_stages_tell_shapes_of_any_size() -> None:
    fake, mode = fake_copy(Model())
    stages = make_stages(traced_in_four(), fake)
    with mode:
        values: Any = (torch.empty(3, 9, dtype=torch.long),)
        for stage in stages:
            values = stage(*values, mask=torch.empty(3, 9, 1))
            values = values if isinstance(values, tuple) else (values,)
    assert [tuple(one.shape) for one in values] == [(3, 9, VOCABULARY)]


# ---------------------------------------------------------------------- what is computed


SIZES = [(ROWS, LENGTH), (3, 7), (4, 4)]


# In training all sizes but the last, in evaluation the last.
@pytest.mark.parametrize(
    ("training", "rows", "length"),
    sampled_rows(
        [(training, *size) for training in (True, False) for size in SIZES],
        lambda case: case[0] == (case[1:] != SIZES[-1]),
        lambda case: "-".join(map(str, case)),
    ),
)
def test_outputs_gradients_and_buffers_are_the_unsplit_models(
    training: bool, rows: int, length: int, in_four: list[StageModule]
) -> None:
    whole = built(lambda: Model(0.3)).train(training)
    for stage in in_four:
        stage.train(training)
    args, kwargs = inputs(rows, length)
    torch.manual_seed(1)
    expected = whole(*args, **kwargs)
    squares(expected).backward()
    torch.manual_seed(1)
    assert torch.equal(run(in_four, args, kwargs, squares), expected)
    assert_equal(gradients_of(parts_of(in_four)), gradients_of([whole]))
    buffers = {name: one for part in parts_of(in_four) for name, one in part.named_buffers()}
    assert all(torch.equal(buffers[name], one) for name, one in whole.named_buffers())


def test_calls_of_pipe_split_in_a_forward_are_split_points() -> None:
    whole = built(Marked)
    x = torch.randn(3, WIDTH)
    traced, stages = split(Marked, (x,), {})
    assert [len(traced.names(stage)) for stage in range(traced.num_stages)] == [1, 2]
    expected, found = whole(x), run(stages, (x,), {}, squares)
    assert list(found) == list(expected)
    assert torch.equal(found["result"], expected["result"])
    assert torch.equal(found["first"], expected["first"])
    assert found["input"] is True
    assert found["nothing"] is None


def test_a_stage_may_begin_after_a_module() -> None:
    traced = trace_split(
        Small(), (torch.randn(2, 4),), split_spec={"layers.0.0": SplitPoint.END, "layers.0.1": BEGINNING}
    )
    assert [len(traced.names(stage)) for stage in range(traced.num_stages)] == [2, 6]


def test_a_module_cut_in_the_middle_is_on_both_stages() -> None:
    whole = built(Model)
    args, kwargs = inputs()
    traced, stages = split(Model, args, kwargs, split_spec={"layers.1.norm": BEGINNING})
    assert "layers.1.linear.weight" in traced.names(0)
    assert "layers.1.norm.weight" in traced.names(1)
    assert traced.layers == ("layers.0", "layers.2", "layers.3")
    squares(whole(*args, **kwargs)).backward()
    run(stages, args, kwargs, squares)
    assert_equal(gradients_of(parts_of(stages)), gradients_of([whole]))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_of_equal_size_keep_items_of_lists_whole(count: int) -> None:
    traced = trace_split(Small(), (torch.randn(2, 4),), split_policy=split_into_equal_size(count))
    assert [len(traced.names(stage)) for stage in range(traced.num_stages)] == [8 // count] * count
    assert len(traced.layers) == 4


def test_a_parameter_that_stages_share_is_told() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.middle = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.middle(self.embedding(ids)))

    (ids,), _ = inputs()
    traced, stages = split(Tied, (ids,), {}, split_spec={"middle": BEGINNING, "head": BEGINNING})
    assert traced.shared == (TiedParameter(("embedding.weight", "head.weight"), (0, 2)),)
    for stage in (stages[0], stages[2]):
        assert [name for name, _ in stage.module.named_parameters()] == ["embedding.weight"]
    assert {name for part in parts_of(stages) for name in part.state_dict()} == set(Tied().state_dict())


def test_a_part_that_is_frozen_in_evaluation_mode_stays_so() -> None:
    def build() -> nn.Module:
        model = two_layers()
        model.get_submodule("layers.1.norm").eval()
        return model

    args, kwargs = inputs()
    whole = built(build)
    _, stages = split(build, args, kwargs, split_spec=TWO)
    assert torch.equal(run(stages, args, kwargs, squares), whole(*args, **kwargs))
    assert torch.equal(dict(stages[1].module.named_buffers())["layers.1.norm.running_mean"], torch.zeros(WIDTH))


def test_autocast_is_part_of_the_trace() -> None:
    args, kwargs = inputs()
    whole = built(two_layers)
    with torch.autocast("cpu", torch.bfloat16):
        _, stages = split(two_layers, args, kwargs, split_spec=TWO)
        assert torch.equal(run(stages, args, kwargs, squares), whole(*args, **kwargs))


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.arange(x.shape[0], device=x.device)[:, None]


def test_a_trace_is_made_for_the_device_that_the_model_is_going_to_run_on() -> None:
    meta_device = torch.device("meta")
    traced = trace_split(model := Placed(), (torch.randn(3, 4),), device=meta_device)
    assert model.linear.weight.device == torch.device("cpu")
    assert traced.make_stage(model.to(meta_device), 0)(torch.empty(5, 4, device="meta")).is_meta


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"split_spec": {"layers.7": BEGINNING}}, "names 'layers.7', which Small does not have; .* layers.0, layers"),
        ({"split_spec": {"layers.1": "front"}}, "split_spec has the values 'front'; expected SplitPoint.BEGINNING"),
        ({"split_spec": FOUR, "num_stages": 2}, "3 split points.* make 4 stages, but the schedule has 2; expected 1"),
        ({"num_stages": 2}, "has 0 split points, with no split_spec"),
        ({"split_spec": FOUR, "split_policy": split_into_equal_size(2)}, "both given, expected one"),
        ({"split_policy": lambda traced: None}, "split_policy returned None; expected the GraphModule"),
        ({"split_policy": split_into_equal_size(1000)}, "operations cannot be split into 1000 stages"),
    ],
)
def test_split_points_that_do_not_fit_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=f"(?s){says}"):
        trace_split(Small(), (torch.randn(2, 4),), **how)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else x


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        pipe_split()
        x += 1
        return self.two(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.one(x) * self.count
        pipe_split()
        return self.two(x) * self.count


class Unconnected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.one(x)
        pipe_split()
        return self.two.weight * 2


class Unlike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        more = x * 2 if self.training else x[:1]
        pipe_split()
        return x + more


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, self.weight


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Branching, "Branching cannot be traced.*data-dependent.*get_pp_module_config"),
        (Changing, "stage 1 changes linear in place .*add_.* Write x = x \\+ y"),
        (Counting, "stage 0 changes count in place"),
        (Unconnected, "no tensor goes from stage 0 to stage 1"),
        (Unlike, "in training and .* in evaluation; expected the same"),
        (Bare, "the model returns weight itself"),
    ],
)
def test_models_that_stages_cannot_work_with_are_refused(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(SetupError, match=f"(?s){says}"):
        trace_split(build(), (torch.randn(3, 4),))


@cache
def first_stage() -> StageModule:
    """Shared by tests that only call it with inputs that it refuses."""
    return traced_in_four(0.3).make_stage(built(lambda: Model(0.3)), 0)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (inputs(3)[0], inputs(2)[1], "the model's trace is not valid for"),
        (inputs()[0], {}, "the keywords of a micro-batch are none; the model's trace was made with mask"),
        (inputs()[0], {"mask": torch.ones(ROWS, LENGTH)}, "mask is .2, 5. of torch.float32; .* made with .2, 5, 1."),
        (inputs()[0], {"mask": [torch.ones(ROWS, LENGTH, 1)]}, "the keyword mask is .* with another"),
        ((torch.zeros(ROWS, LENGTH),), inputs()[1], "ids is .2, 5. of torch.float32; .* of torch.int64"),
        ((*inputs()[0], 2), inputs()[1], "the arguments are .* another structure"),
        ((None,), inputs()[1], "ids is None; .* made with .2, 5. of torch.int64"),
    ],
)
def test_inputs_that_the_trace_does_not_hold_for_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        first_stage()(*args, **kwargs)


def test_a_size_that_the_model_fixes_is_told_when_another_comes() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.positions

    traced = trace_split(model := Fixed(), (torch.randn(ROWS, LENGTH, WIDTH),))
    stage = traced.make_stage(model, 0)
    assert stage(torch.randn(7, LENGTH, WIDTH)).shape[0] == 7
    with pytest.raises(InputError, match=r"is not valid for x .2, 9, 8. .*Guard failed.*Pad to sizes"):
        stage(torch.randn(ROWS, 9, WIDTH))


# ---------------------------------------------------------------------- in a pipeline


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def metas_of(traced: TracedSplit) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """What each stage takes and gives, found without data; what gradients come back for requires them."""
    fake, mode = fake_copy(Model())
    args, kwargs = inputs()
    found = []
    with mode:
        values: tuple[Tensor, ...] = tuple(map(mode.from_tensor, args))
        mask = mode.from_tensor(kwargs["mask"])
        for stage in range(traced.num_stages):
            output = traced.make_stage(fake, stage)(*values, mask=mask)
            outputs = output if isinstance(output, tuple) else (output,)
            found.append((tuple(map(meta, values)), tuple(map(meta, outputs))))
            values = tuple(one.detach().requires_grad_(one.requires_grad) for one in outputs)
    return found


def meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


# The first has one stage on each rank, the last has two and splits the backward.
PIPELINES = ("1f1b", "interleaved_1f1b", "zbv_zero_bubble")
OFTEN = (PIPELINES[0], PIPELINES[-1])


def two_ranks(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        found[name] = in_pipeline(name, rank)
    found["sharded"] = sharded(rank)
    return found


def in_pipeline(name: str, rank: int) -> dict[str, Any]:
    traced = traced_in_two() if name == "1f1b" else traced_in_four()
    stages = make_stages(traced, built(Model))
    metas = metas_of(traced)
    spec = SCHEDULES[name]
    mine = stages_of_rank(spec, rank, 2, traced.num_stages // 2)
    pipelined = [
        TimedStage(
            stages[index],
            index,
            traced.num_stages,
            torch.device("cpu"),
            input_args=metas[index][0],
            output_args=metas[index][1],
            events=[],
            recording=lambda: False,
        )
        for index in mine
    ]
    batch = [inputs(seed=one) for one in range(MICROBATCHES)]
    losses: list[Any] = []
    run_schedule(
        build_schedule(spec, pipelined, MICROBATCHES, loss_of),
        [args for args, _ in batch],
        [dict(kwargs) for _, kwargs in batch],
        [args[0] for args, _ in batch],
        losses=losses,
    )
    buffers = {name: one for index in mine for name, one in stages[index].module.named_buffers()}
    return {"losses": losses, "gradients": gradients_of([stages[index].module for index in mine]), "buffers": buffers}


def sharded(rank: int) -> dict[str, Tensor]:
    """Each rank has half of the micro-batches, and half of each parameter of every stage."""
    mesh = init_device_mesh("cpu", (2,))
    stages = make_stages(traced_in_two(), built(Model))
    for stage in stages:
        layers = [stage.module.get_submodule(name) for name in stage.module.layer_names]  # type: ignore[union-attr]
        for part in [*layers, stage]:
            fully_shard(part, mesh=mesh)
    args, kwargs = inputs(seed=rank)
    run(stages, args, kwargs, lambda output: loss_of(output, args[0]))
    return {
        name: parameter.grad.full_tensor() * 2  # type: ignore[attr-defined]
        for part in parts_of(stages)
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, wanted(request.config, PIPELINES, OFTEN.__contains__))


def whole_batch(count: int) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = built(Model)
    losses = []
    for one in range(count):
        args, kwargs = inputs(seed=one)
        losses.append(loss_of(model(*args, **kwargs), args[0]))
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses], gradients_of([model]), dict(model.named_buffers())


@pytest.mark.parametrize("schedule", sampled(PIPELINES, OFTEN.__contains__))
def test_a_pipeline_of_traced_stages_gives_the_single_devices_losses_and_gradients(
    schedule: str, found: list[dict[str, Any]]
) -> None:
    losses, gradients, buffers = whole_batch(MICROBATCHES)
    results = [one[schedule] for one in found]
    assert torch.equal(torch.stack([loss for one in results for loss in one["losses"]]), torch.stack(losses))
    assert_equal(results[0]["gradients"] | results[1]["gradients"], gradients)
    ours = results[0]["buffers"] | results[1]["buffers"]
    assert all(torch.equal(ours[name], one) for name, one in buffers.items())


def test_layers_of_traced_stages_can_be_sharded_one_by_one(found: list[dict[str, Any]]) -> None:
    _, gradients, _ = whole_batch(2)
    for one in found:
        assert one["sharded"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(one["sharded"][name], gradient)
