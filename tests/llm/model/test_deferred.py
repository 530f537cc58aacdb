"""Tests of lightning_pipe.llm.model.deferred: a model built without memory and made in part equals one built
outright."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model import random_track
from lightning_pipe.llm.model.deferred import DeferredInit, deferred_init, fake_copy, is_deferred

Build = Callable[[], Any]  # modules whose attributes tests use


class Initialised(nn.Module):
    """The initialisers of torch.nn.init, on parameters that are first filled otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(torch.randn(7, 5))
        nn.init.trunc_normal_(self.truncated, std=0.3, a=-0.5, b=0.5)
        self.orthogonal = nn.Parameter(torch.empty(4, 9))
        nn.init.orthogonal_(self.orthogonal)
        self.kaiming = nn.Parameter(torch.empty(6, 6))
        nn.init.kaiming_normal_(self.kaiming, nonlinearity="relu")
        self.xavier = nn.Parameter(torch.empty(6, 6))
        nn.init.xavier_uniform_(self.xavier)
        self.constant = nn.Parameter(torch.empty(3), requires_grad=False)
        nn.init.constant_(self.constant, 0.25)
        self.eye = nn.Parameter(torch.randn(3, 4))
        nn.init.eye_(self.eye)
        self.sparse = nn.Parameter(torch.empty(8, 3))
        nn.init.sparse_(self.sparse, sparsity=0.5)
        self.dirac = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac)


class Computed(nn.Module):
    """Buffers made by arithmetic, constants, and random operations of other kinds than filling."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("cos", torch.outer(torch.arange(5.0), frequencies).cos())
        self.register_buffer("rotation", torch.polar(torch.ones(4).float(), frequencies.float()))
        self.register_buffer("conjugate", torch.polar(torch.ones(4).float(), frequencies.float()).conj())
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("given", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("scaled", torch.tensor([1.0, 2.0]).mul_(3))
        self.register_buffer("count", torch.tensor(0, dtype=torch.long))
        self.register_buffer("drawn", torch.bernoulli(torch.full((9,), 0.5)))
        self.register_buffer("by_probability", torch.bernoulli(torch.rand(9)))
        self.register_buffer("order", torch.randperm(11))
        self.register_buffer("whole", torch.randint(0, 100, (5,)))
        self.register_buffer("picked", torch.multinomial(torch.rand(6), 3))
        self.register_buffer("counted", torch.poisson(torch.rand(6) * 5))
        self.register_buffer("dropped", nn.functional.dropout(torch.ones(20)))
        self.register_buffer("like", torch.randn_like(torch.rand(3, 2)))
        self.register_buffer("transposed", torch.randn(3, 5).t())
        self.register_buffer("from_numpy", torch.from_numpy(np.arange(4.0)) * 2)
        self.register_buffer("sorted", torch.randn(3, 4).sort(descending=True)[0])
        self.last = nn.Parameter(torch.randn(2, 2))


class Overlapping(nn.Module):
    """Parameters that are views, copies of slices of others, or the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(6, 4))
        self.b = nn.Parameter(torch.randn(4, 4))
        with torch.no_grad():
            self.a[2:4].copy_(self.b[:2])
            self.b[0].normal_()
            torch.mul(self.b.data, 2, out=self.b.data)
        both = torch.randn(2, 3)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        nn.init.uniform_(self.second)
        self.replaced = nn.Parameter(torch.randn(3))
        self.replaced.data = torch.rand(5, dtype=torch.float64)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class HuggingFaceLike(nn.Module):
    """Initialises everything a second time at the end, as `post_init` does, and ties."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)


class DropPath(nn.Module):
    """Reads values that are not random while it is built, as vision transformers do for their drop rates."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.scales = nn.ParameterList(nn.Parameter(torch.full((2,), rate)) for rate in rates)
        assert torch.tensor([1, 2]).tolist() == [1, 2]
        if torch.allclose(torch.ones(3), torch.ones(3)) and bool((torch.zeros(2) == 0).all()):
            self.weight = nn.Parameter(torch.randn(2))


class Conditional(nn.Module):
    """Reads random values while it is built, between draws, and does one thing or another."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(3, 3) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            nn.init.normal_(layer.weight)
            with torch.no_grad():
                if layer.weight.sum() > 0:
                    layer.weight.div_(layer.weight.norm().item())
                else:
                    layer.weight.uniform_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(100, ()).item()))
            self.seeded = nn.Parameter(torch.randn(int(torch.randint(2, 9, ()))))
        self.drawn_until = nn.Parameter(torch.empty(8))
        nn.init.trunc_normal_(self.drawn_until, std=2.0, a=-1.0, b=1.0)
        self.chosen = nn.Parameter(self.seeded.detach()[self.seeded > 0])
        self.rejected = nn.Parameter(torch.empty(50))
        nn.init.trunc_normal_(self.rejected, std=1.0, a=1.5, b=2.0)


class Seeded(nn.Module):
    """Seeds, forks and restores the generator, and uses one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.forked = nn.Parameter(torch.rand(17))
            with torch.random.fork_rng(devices=[]):
                self.nested = nn.Parameter(torch.randn(5))
            self.after_nested = nn.Parameter(torch.randn(5))
        self.after_fork = nn.Parameter(torch.randn(4))
        state = torch.get_rng_state()
        self.one, self.other = nn.Parameter(torch.randn(16)), nn.Parameter(torch.rand(3))
        torch.set_rng_state(state)
        self.one_again = nn.Parameter(torch.randn(16))
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(4).normal_(generator=generator))
        self.own_again = nn.Parameter(torch.randn(4, generator=generator))
        torch.manual_seed(11)
        self.seeded = nn.Parameter(torch.randn(4))
        torch.manual_seed(11)
        self.seeded_again = nn.Parameter(torch.randn(4))
        assert torch.initial_seed() == 11


def in_dtype(dtype: torch.dtype) -> Build:
    def build() -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return nn.Sequential(nn.Linear(4, 3), Computed())
        finally:
            torch.set_default_dtype(before)

    return build


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=3)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    return model


BUILDS: dict[str, Build] = {
    "linear": lambda: nn.Linear(5, 7),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=3),
    "layer norm": lambda: nn.LayerNorm(6),
    "convolution": lambda: nn.Conv1d(3, 4, 3),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "encoder of copied layers": encoder,
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    "initialisers": Initialised,
    "computed buffers": Computed,
    "overlapping parameters": Overlapping,
    "initialised twice": HuggingFaceLike,
    "conditions on values": DropPath,
    "conditions on random values": Conditional,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
    "seeds and forks": Seeded,
    "bfloat16 by argument": lambda: nn.Linear(5, 7, dtype=torch.bfloat16),
    "float64 by conversion": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).double(),
    "bfloat16 by default": in_dtype(torch.bfloat16),
    "float64 by default": in_dtype(torch.float64),
    "frozen": frozen,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 7)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 7)),
}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under all their names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def deferred(build: Build, seed: int = 0) -> tuple[Any, DeferredInit]:
    torch.manual_seed(seed)
    with deferred_init() as record:
        model = build()
    return model, record


def outright(build: Build, seed: int = 0) -> tuple[Any, Tensor]:
    """The model, and the random state afterwards."""
    torch.manual_seed(seed)
    return build(), torch.get_rng_state()


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert found.requires_grad == expected.requires_grad
    assert torch.equal(found, expected)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("first", range(12))
def test_a_seed_is_not_taken_for_a_position_of_the_record(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # One of these reaches 11 just before the model seeds with 11 for the second time.
    monkeypatch.setattr(random_track, "_POSITIONS", itertools.count(first))
    expected, _ = outright(Seeded)
    model, record = deferred(Seeded)
    record.materialise(model, keep=lambda name: True)
    assert torch.equal(model.seeded_again, expected.seeded_again)


@pytest.mark.parametrize("part", ["all", "none", "even", "odd", "first", "last"])
@pytest.mark.parametrize("name", BUILDS)
def test_what_is_kept_and_the_random_state_equal_those_of_building_outright_to_the_bit(name: str, part: str) -> None:
    expected, state = outright(BUILDS[name])
    model, record = deferred(BUILDS[name])
    names = list(tensors(expected))
    slices = {"all": slice(None), "none": slice(0), "even": slice(0, None, 2), "odd": slice(1, None, 2)}
    kept = set(names[slices.get(part, slice(1) if part == "first" else slice(-1, None))])
    record.materialise(model, keep=kept.__contains__)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(tensors(model)) == names
    same_object = {id(tensors(expected)[name]) for name in kept}
    for name, tensor in tensors(expected).items():
        if id(tensor) in same_object:
            assert_equal(tensors(model)[name], tensor)
        else:
            assert isinstance(tensors(model)[name], FakeTensor)
        assert tensors(model)[name].shape == tensor.shape


def hugging_face(name: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    more: dict[str, Any] = {"num_attention_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True}
    grouped = {} if name == "GPTNeoX" else {"num_key_value_heads": 1, "head_dim": 8}
    config = getattr(transformers, f"{name}Config")(**sizes, **more, **grouped)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPTNeoX"])
def test_a_hugging_face_model_made_in_two_parts_computes_what_one_built_outright_does(name: str) -> None:
    expected, state = outright(lambda: hugging_face(name))
    model, record = deferred(lambda: hugging_face(name))
    record.materialise(model, keep=lambda name: "layers.1." in name)
    assert is_deferred(model)
    record.materialise(model, keep=lambda name: "layers.1." not in name)
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_deferred(model)
    for name, tensor in tensors(expected).items():
        assert_equal(tensors(model)[name], tensor)
    ids = torch.arange(10).reshape(2, 5)
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_another_seed_gives_other_values() -> None:
    model, record = deferred(lambda: nn.Linear(3, 3), seed=1)
    record.materialise(model, keep=lambda name: True)
    assert not torch.equal(model.weight, outright(lambda: nn.Linear(3, 3), seed=0)[0].weight)


def test_the_random_state_is_the_one_before_until_something_is_materialised() -> None:
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with deferred_init() as record:
        model = Seeded()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    record.materialise(model, keep=lambda name: name == "nested")
    torch.manual_seed(4)
    assert torch.equal(model.nested, Seeded().nested)


def test_the_random_state_is_restored_after_an_error_in_the_block() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), deferred_init():
        torch.randn(3 + len(torch.randn(2)) // 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_of_the_callers_ends_where_building_outright_leaves_it() -> None:
    def build(generator: torch.Generator) -> Any:
        model = nn.Linear(3, 3)
        nn.init.normal_(model.weight, generator=generator)
        nn.init.uniform_(model.bias, generator=generator)
        return model

    generator, expected_generator = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    expected = build(expected_generator)
    with deferred_init() as record:
        model = build(generator)
    record.materialise(model, keep=lambda name: name == "bias")
    assert torch.equal(model.bias, expected.bias)
    assert torch.equal(generator.get_state(), expected_generator.get_state())


def test_numbers_from_python_and_numpy_are_drawn_once_and_kept() -> None:
    def build() -> Any:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, random.random())
        with torch.no_grad():
            model.bias.copy_(torch.from_numpy(np.random.rand(2)))
        return model

    random.seed(0)
    np.random.seed(0)
    expected = build()
    random.seed(0)
    np.random.seed(0)
    with deferred_init() as record:
        model = build()
    record.materialise(model, keep=lambda name: True)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_tied_parameters_stay_one_object_in_every_place() -> None:
    model, record = deferred(HuggingFaceLike)
    record.materialise(model, keep=lambda name: name == "head.weight")
    assert model.head.weight is model.embed.weight
    assert not isinstance(model.embed.weight, FakeTensor)


def test_an_lstm_runs_on_the_parameters_that_were_made() -> None:
    expected, _ = outright(BUILDS["lstm"])
    model, record = deferred(BUILDS["lstm"])
    record.materialise(model, keep=lambda name: name.startswith(("weight", "bias")))
    batch = torch.randn(2, 1, 3)
    assert torch.equal(model(batch)[0], expected(batch)[0])


def test_tensors_in_plain_attributes_are_made_too() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = torch.randn(3)
            self.several = {"one": [torch.randn(2), 5]}
            self.register_buffer("inv_freq", torch.rand(4))
            self.original_inv_freq = self.inv_freq

    expected, _ = outright(Rotary)
    model, record = deferred(Rotary)
    record.materialise(model, keep=lambda name: name in ("plain", "several", "inv_freq"))
    assert torch.equal(model.plain, expected.plain)
    assert torch.equal(model.several["one"][0], expected.several["one"][0])
    assert model.several["one"][1] == 5
    assert model.original_inv_freq is model.inv_freq


def test_attributes_of_parameters_and_buffers_stay() -> None:
    def build() -> Any:
        model: Any = nn.Module()
        model.weight = nn.Parameter(torch.randn(2))
        model.weight.no_weight_decay = True
        model.cache = nn.Buffer(torch.ones(2), persistent=False)
        return model

    model, record = deferred(build)
    record.materialise(model, keep=lambda name: True)
    assert model.weight.no_weight_decay is True
    assert list(model.state_dict()) == ["weight"]


def test_a_parameter_made_outside_is_kept_as_it_is() -> None:
    weight = torch.randn(4, 3)
    model, record = deferred(lambda: nn.Sequential(nn.Embedding.from_pretrained(weight), nn.Linear(3, 2)))
    before = model[0].weight
    record.materialise(model, keep=lambda name: True)
    assert model[0].weight is before
    assert before.data_ptr() == weight.data_ptr()


def test_values_computed_from_a_tensor_made_outside_are_the_same() -> None:
    outside = torch.randn(4, 3)

    def build() -> Any:
        model = nn.Linear(3, 4)
        with torch.no_grad():
            model.weight.copy_(outside[1:].repeat(2, 1)[:4])
            model.bias.fill_(outside.sum().item())
        return model

    expected, _ = outright(build)
    model, record = deferred(build)
    record.materialise(model, keep=lambda name: True)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


def test_the_values_do_not_depend_on_the_default_dtype_when_they_are_made() -> None:
    expected, _ = outright(Computed)
    model, record = deferred(Computed)
    torch.set_default_dtype(torch.float64)
    try:
        record.materialise(model, keep=lambda name: True)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in tensors(expected).items():
        assert_equal(tensors(model)[name], tensor)


def test_a_copy_made_inside_the_block_is_the_models_own() -> None:
    def build() -> Any:
        model: Any = nn.ModuleDict({"online": nn.Linear(2, 2)})
        model["target"] = copy.deepcopy(model["online"])
        nn.init.normal_(model.online.weight)
        return model

    expected, _ = outright(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, record = deferred(build)
    record.materialise(model, keep=lambda name: name.startswith("target"))
    assert torch.equal(model["target"].weight, expected["target"].weight)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of real tensors that operations made under it and that are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return outputs

    @property
    def now(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())


def eight_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))


def eight_layers_by_rejection() -> nn.Module:
    """Initialised by reading values: numbers outside of an interval are drawn again."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    for weight in model.parameters():
        nn.init.trunc_normal_(weight, std=1.0)
    return model


LAYER = (32 * 32 + 32) * 4
WEIGHT = 32 * 32 * 4


def test_the_counter_of_live_bytes_sees_a_model_built_outright() -> None:
    with LiveBytes() as live:
        model = eight_layers()
    assert live.now == 8 * LAYER
    assert live.peak >= live.now
    del model
    assert live.now == 0


def test_building_takes_no_memory() -> None:
    with LiveBytes() as live:
        model, _ = deferred(eight_layers)
    assert live.peak == 0
    assert is_deferred(model)


@pytest.mark.parametrize("keep", ["3.", "nothing"])
def test_making_one_layer_of_eight_never_holds_more_than_it_and_two_tensors(keep: str) -> None:
    model, record = deferred(eight_layers)
    with LiveBytes() as live:
        record.materialise(model, keep=lambda name: name.startswith(keep))
    kept = LAYER if keep == "3." else 0
    assert live.now == kept
    assert live.peak <= kept + 2 * WEIGHT
    assert live.peak >= kept + WEIGHT  # of another layer, drawn to move the generator on


def test_reading_values_while_building_takes_the_memory_of_one_tensor_at_a_time() -> None:
    with LiveBytes() as live:
        model, record = deferred(eight_layers_by_rejection)
    assert live.now <= 64  # the bounds of the interval
    assert live.peak <= 5 * WEIGHT  # the result, a new draw, the choice between them and two masks
    with LiveBytes() as live:
        record.materialise(model, keep=lambda name: name.startswith("3."))
    assert live.now == WEIGHT
    assert live.peak <= 5 * WEIGHT


def test_a_model_initialised_twice_is_made_within_the_same_memory() -> None:
    model, record = deferred(HuggingFaceLike)
    with LiveBytes() as live:
        record.materialise(model, keep=lambda name: name.startswith("layers.1."))
    kept, largest = (6 * 6 + 3 * 6) * 4, 11 * 6 * 4
    assert live.now == kept
    assert live.peak <= kept + 2 * largest


def test_the_rest_can_be_made_later_and_nothing_twice() -> None:
    expected, _ = outright(HuggingFaceLike)
    model, record = deferred(HuggingFaceLike)
    record.materialise(model, keep=lambda name: name.startswith("layers."))
    with pytest.raises(SetupError, match=r"layers\.2\.0\.weight.*twice"):
        record.materialise(model, keep=lambda name: name.startswith(("layers.2.0.weight", "head")))
    assert is_deferred(model)
    record.materialise(model, keep=lambda name: not name.startswith("layers."))
    for name, tensor in tensors(expected).items():
        assert_equal(tensors(model)[name], tensor)


def test_made_tensors_go_to_the_device_asked_for() -> None:
    model, record = deferred(lambda: nn.Linear(2, 3))
    record.materialise(model, keep=lambda name: name == "weight", device=torch.device("meta"))
    assert type(model.weight) is nn.Parameter
    assert model.weight.device.type == "meta"


def test_writing_a_result_whose_shape_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"aten\.nonzero\.out.*writes to a tensor"), deferred_init():
        torch.nonzero(torch.ones(3), out=torch.empty(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda real: real.normal_(), r"aten\.normal_.*shape \(3,\).*clone\(\)"),
        (lambda real: real.view(3, 1).mul_(torch.ones(3, 1)), r"aten\.mul_"),
        (lambda real: torch.ones(3, out=real), r"aten\.ones\.out|aten\.fill_"),
    ],
)
def test_writing_to_a_real_tensor_is_refused_and_leaves_it_as_it_was(
    write: Callable[[Tensor], object], named: str
) -> None:
    real = torch.full((3,), 5.0)
    with pytest.raises(SetupError, match=named), deferred_init():
        write(real)
    assert torch.equal(real, torch.full((3,), 5.0))


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"device meta.*expected the CPU"), deferred_init():
        nn.Linear(2, 2, device="meta")


def test_a_sparse_tensor_is_refused_by_its_layout() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(SetupError, match=r"layout torch\.sparse_coo"), deferred_init():
        torch.mm(sparse, torch.ones(3, 3))


def test_blocks_cannot_be_nested() -> None:
    with pytest.raises(SetupError, match="in one block"), deferred_init(), deferred_init():
        pass


def test_materialising_inside_the_block_is_an_error() -> None:
    with pytest.raises(SetupError, match="after the block"), deferred_init() as record:
        record.materialise(nn.Linear(2, 2), keep=lambda name: True)


def test_parameters_of_another_block_are_named() -> None:
    other, _ = deferred(lambda: nn.Linear(2, 2))
    model, record = deferred(lambda: nn.Linear(2, 2))
    whole = nn.ModuleDict({"mine": model, "other": other})
    with pytest.raises(SetupError, match=r"other\.weight, other\.bias have no values"):
        record.materialise(whole, keep=lambda name: name.startswith("mine"))


def test_writing_between_the_block_and_materialising_is_an_error() -> None:
    model, record = deferred(lambda: nn.Linear(2, 3))
    with pytest.raises(SetupError, match=r"aten\.zero_.*shape \(3,\)"), torch.no_grad():
        model.bias.zero_()
    record.materialise(model, keep=lambda name: True)
    with torch.no_grad():
        model.bias.zero_()


def test_a_conversion_between_the_block_and_materialising_is_an_error() -> None:
    model, record = deferred(lambda: nn.Linear(2, 3))
    model.double()
    with pytest.raises(SetupError, match=r"weight, bias have no values"):
        record.materialise(model, keep=lambda name: True)


def test_a_tensor_from_outside_that_has_changed_since_is_an_error() -> None:
    outside = torch.ones(3)
    model, record = deferred(lambda: nn.ParameterList([outside * 2]))
    outside.add_(1)
    state = torch.get_rng_state()
    with pytest.raises(SetupError, match=r"shape \(3,\).*has been changed since"):
        record.materialise(model, keep=lambda name: True)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_on_a_parameter_are_not_lost_silently() -> None:
    model, record = deferred(lambda: nn.Linear(2, 3))
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(SetupError, match="weight have hooks"):
        record.materialise(model, keep=lambda name: True)


def test_a_model_is_deferred_until_all_of_it_is_made() -> None:
    assert not is_deferred(nn.Linear(2, 2))
    model, record = deferred(lambda: nn.BatchNorm1d(2))
    record.materialise(model, keep=lambda name: name != "running_mean")
    assert is_deferred(model)
    record.materialise(model, keep=lambda name: name == "running_mean")
    assert not is_deferred(model)


@pytest.mark.parametrize("real", [True, False])
def test_a_fake_copy_tells_output_shapes_without_memory(real: bool) -> None:
    model = encoder() if real else deferred(encoder)[0]
    with LiveBytes() as live:
        fake, mode = fake_copy(model)
        with mode:
            output = fake(torch.randn(2, 5, 8))
    assert live.peak == 0
    assert output.shape == (2, 5, 8)
    assert is_deferred(fake)
    assert is_deferred(model) is not real
    assert [type(module) for module in fake.modules()] == [type(module) for module in model.modules()]


def test_a_fake_copy_keeps_ties_dtypes_and_frozen_parameters() -> None:
    model: Any = HuggingFaceLike().to(torch.bfloat16)
    model.layers[0].requires_grad_(False)
    fake, _ = fake_copy(model)
    assert tensors(fake)["head.weight"] is tensors(fake)["embed.weight"]
    for name, tensor in tensors(model).items():
        found = tensors(fake)[name]
        assert isinstance(found, nn.Parameter)
        assert (found.shape, found.dtype, found.device, found.requires_grad) == (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )
