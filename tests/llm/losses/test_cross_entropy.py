"""Summed cross-entropy, whole and in chunks with the head: the same loss, the same gradients, no whole logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.losses.cross_entropy import (
    check_loss_is_sum,
    chunked_cross_entropy,
    shift_labels,
    summed_cross_entropy,
)
from tests.distributed import run_ranks

WIDTH, VOCABULARY = 6, 23
# Relative bounds: a value is rounded at most 1,000 times in float64 (2**-53 each), and five times in bfloat16 (2**-9).
DOUBLE, HALF = 1000 * 2.0**-53, 5 * 2.0**-9


def case(dtype: torch.dtype = torch.float32, rows: int = 2, length: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, length, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    hidden, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels[0, 3:6] = -100
    labels[-1, -1] = -100
    return hidden, weight, bias, labels


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    return summed_cross_entropy(F.linear(hidden, weight, bias), labels)


def loss_and_gradients(loss: Callable[..., Tensor], tensors: tuple[Tensor, ...], scale: float = 1.0) -> list[Tensor]:
    value = loss(*tensors)
    return [value.detach(), *torch.autograd.grad(value * scale, tensors)]


def same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= tolerance * other.norm()


class Operations(TorchDispatchMode):
    """Records the largest tensor that any operation makes, in elements, and counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.itemsize)
        return result


def test_the_sum_is_that_of_the_tokens_that_count() -> None:
    hidden, weight, _, labels = case()
    logits = F.linear(hidden, weight)
    of_each = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(summed_cross_entropy(logits, labels), of_each[labels != -100].sum())
    every = labels.clamp(min=0)
    torch.testing.assert_close(summed_cross_entropy(logits, every, ignore_index=-1), of_each.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 500, VOCABULARY).to(dtype)
    labels = torch.randint(0, VOCABULARY, (2, 500))
    loss = summed_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, summed_cross_entropy(logits.float(), labels))


@pytest.mark.parametrize("chunked", [False, True])
def test_without_a_token_that_counts_loss_and_gradients_are_zero(chunked: bool) -> None:
    hidden, weight, bias, labels = case()
    loss = whole if not chunked else chunked_cross_entropy
    nothing = torch.full_like(labels, -100)
    for value in loss_and_gradients(lambda h, w, b: loss(h, w, nothing, bias=b), (hidden, weight, bias)):
        assert (value == 0).all()


def test_labels_of_other_positions_are_refused() -> None:
    hidden, weight, _, labels = case()
    logits = F.linear(hidden, weight)
    with pytest.raises(InputError, match=r"logits have the shape \(2, 9, 23\) and the labels \(9, 2\)"):
        summed_cross_entropy(logits, labels.T)
    with pytest.raises(InputError, match=r"hidden states have the shape \(2, 9, 6\) and the labels \(2, 8\)"):
        chunked_cross_entropy(hidden, weight, labels[:, 1:])


@pytest.mark.parametrize("chunk_tokens", [1, 4, 6, 17, 18, 1024])
@pytest.mark.parametrize("with_bias", [False, True])
def test_in_chunks_loss_and_gradients_are_those_of_whole_logits(chunk_tokens: int, with_bias: bool) -> None:
    hidden, weight, bias, labels = case(torch.float64)
    tensors = (hidden, weight, bias) if with_bias else (hidden, weight)

    def chunked(h: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return chunked_cross_entropy(h, w, labels, bias=b, chunk_tokens=chunk_tokens)

    found = loss_and_gradients(chunked, tensors, scale=3.0)
    expected = loss_and_gradients(lambda h, w, b=None: whole(h, w, labels, b), tensors, scale=3.0)
    same(found, expected, DOUBLE)


def test_in_chunks_the_gradients_are_the_derivatives() -> None:
    hidden, weight, bias, labels = case(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: chunked_cross_entropy(h, w, labels, bias=b, chunk_tokens=5), (hidden, weight, bias)
    )


def test_confident_logits_keep_their_small_losses() -> None:
    # Logits of 1e4 and a loss of 1e-3: as a difference of two numbers near 1e4 it would be lost.
    hidden, weight = torch.full((1, 4, 1), 1e4), torch.tensor([[1.0], [1.0 - 7e-4]])
    labels = torch.zeros(1, 4, dtype=torch.long)
    expected = whole(hidden.double(), weight.double(), labels)
    torch.testing.assert_close(chunked_cross_entropy(hidden, weight, labels).double(), expected, rtol=1e-3, atol=0)


def test_whole_logits_never_exist() -> None:
    tokens, vocabulary, chunk_tokens = 96, 50, 8
    hidden = torch.randn(3, tokens // 3, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    labels = torch.randint(0, vocabulary, (3, tokens // 3))
    with Operations() as of_whole:
        whole(hidden, weight, labels).backward()
    assert of_whole.largest >= tokens * vocabulary
    with Operations() as of_chunks:
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens).backward()
    assert of_chunks.largest == chunk_tokens * vocabulary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_low_precision_are_rounded_once_not_with_each_chunk(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 512, WIDTH).to(dtype), torch.randn(VOCABULARY, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (1, 512))
    exact = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(whole(hidden.double(), exact, labels), [exact])
    (found,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels, chunk_tokens=1), [weight])
    added = sum(
        torch.autograd.grad(whole(hidden[:, i : i + 1], weight, labels[:, i : i + 1]), [weight])[0] for i in range(512)
    )
    assert found.dtype == dtype
    assert (found - expected).norm() < 0.5 * (added - expected).norm()


def test_a_loss_scale_keeps_half_precision_gradients_from_underflow() -> None:
    hidden = torch.zeros(1, 1, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float16) * 2.0**-20
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([[0]]))
    unscaled, scaled = (torch.autograd.grad(loss * scale, [hidden], retain_graph=True)[0] for scale in (2e-5, 2.0**14))
    assert unscaled.item() == 0
    assert scaled.item() == -(2.0**-7)


def test_under_autocast_products_are_in_its_type_and_gradients_in_the_parameters() -> None:
    hidden, weight, bias, labels = case()

    def autocast(loss: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hidden, weight, labels, bias=bias)
        return [value.detach(), *torch.autograd.grad(value, (hidden, weight, bias))]

    found = autocast(lambda *args, **kwargs: chunked_cross_entropy(*args, chunk_tokens=4, **kwargs))
    same(found, autocast(whole), HALF)
    low = [tensor.bfloat16() for tensor in (hidden, weight, bias)]
    assert torch.equal(found[0], chunked_cross_entropy(low[0], low[1], labels, bias=low[2], chunk_tokens=4))
    assert found[0] != chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)


def test_frozen_tensors_get_no_gradient_and_cost_no_product() -> None:
    hidden, weight, _, labels = case()
    products = {}
    for name, frozen in {"neither": (), "hidden": (hidden,), "weight": (weight,)}.items():
        tensors = [tensor.detach() if any(tensor is one for one in frozen) else tensor for tensor in (hidden, weight)]
        loss = chunked_cross_entropy(tensors[0], tensors[1], labels)
        with Operations() as operations:
            loss.backward()
        products[name] = operations.products
    assert products == {"neither": 3, "hidden": 2, "weight": 2}


def test_a_backward_in_parts_computes_each_part_once() -> None:
    # What zero-bubble schedules do: first the gradients of the stage's inputs, later those of its weights.
    _, weight, _, labels = case()
    states = torch.randn(2, 9, WIDTH, requires_grad=True)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(weight.detach())]

    def forward() -> Tensor:
        return chunked_cross_entropy(states @ weights[0], weights[1], labels)

    expected = torch.autograd.grad(forward(), (states, *weights))
    loss = forward()
    with Operations() as operations:
        (of_states,), groups = stage_backward_input([loss], None, [states], iter(weights))
    assert of_states is not None
    assert torch.equal(of_states, expected[0])
    # The logits again, the hidden states' gradient, and the product before them.
    assert operations.products == 3
    stage_backward_weight(iter(weights), groups)
    for parameter, gradient in zip(weights, expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_it_can_be_checkpointed_and_run_without_gradients() -> None:
    hidden, weight, bias, labels = case()

    def chunked(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return chunked_cross_entropy(h, w, labels, bias=b, chunk_tokens=4)

    expected = loss_and_gradients(chunked, (hidden, weight, bias))
    found = loss_and_gradients(
        lambda *tensors: checkpoint(chunked, *tensors, use_reentrant=False), (hidden, weight, bias)
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(chunked(hidden, weight, bias), expected[0])


def test_shapes_are_known_without_values() -> None:
    hidden, weight, _, labels = (tensor.detach().to("meta") for tensor in case())
    assert chunked_cross_entropy(hidden, weight, labels).shape == ()


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, _, labels = case()
    with pytest.raises(SetupError, match=r"differentiated twice.*summed_cross_entropy"):
        torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), [weight], create_graph=True)


def test_chunks_without_tokens_are_refused() -> None:
    hidden, weight, _, labels = case()
    with pytest.raises(InputError, match=r"chunk_tokens is 0"):
        chunked_cross_entropy(hidden, weight, labels, chunk_tokens=0)


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3))
def test_shifted_labels_are_the_next_token_of_the_same_document(lengths: list[int], rows: int) -> None:
    ids = torch.arange(sum(lengths) * rows).view(rows, -1)
    shifted = shift_labels(ids)
    assert torch.equal(shifted[:, :-1], ids[:, 1:])
    assert (shifted[:, -1] == -100).all()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    in_documents = shift_labels(ids[:1], -1, ends.int())
    expected = [[*range(start + 1, end), -1] for start, end in pairwise(ends.tolist())]
    assert in_documents.tolist() == [[label for document in expected for label in document]]


def test_shifting_leaves_the_tokens_as_they_were_and_takes_empty_documents() -> None:
    ids = torch.arange(5)[None]
    ends = torch.tensor([0, 0, 2, 2, 5])
    assert shift_labels(ids, cu_seq_lens=ends).tolist() == [[1, -100, 3, 4, -100]]
    assert ids.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("rows", "end"), [(2, 5), (1, 6)])
def test_documents_are_those_of_one_row(rows: int, end: int) -> None:
    with pytest.raises(InputError, match=rf"shape \({rows}, 5\).*end at {end}.*one packed row"):
        shift_labels(torch.ones(rows, 5), cu_seq_lens=torch.tensor([0, 2, end]))


class Head(nn.Module):
    def __init__(self, chunked: bool) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.chunked = chunked

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden, labels = batch
        states = self.body(hidden)
        if self.chunked:
            return chunked_cross_entropy(states, self.head, labels, chunk_tokens=4)
        return whole(states, self.head, labels)


def under_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    hidden, _, _, labels = case(torch.float64)
    results: dict[str, Any] = {}
    for name, reshard, policy in (
        ("kept", False, MixedPrecisionPolicy()),
        ("resharded", True, MixedPrecisionPolicy()),
        ("bf16", True, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ):
        results[name] = []
        for chunked in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(Head(chunked)).double()
            # Only a module below the root gives its parameters back after its forward.
            fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
            fully_shard(model, mesh=mesh)
            loss = model((hidden.detach() + rank, labels))
            # What a head outside of this forward would find.
            assert isinstance(model[0].head, DTensor) == reshard
            loss.backward()
            gradients = [cast(DTensor, parameter.grad).full_tensor() for parameter in model.parameters()]
            results[name].append([loss.detach(), *gradients])
    sharded = cast(DTensor, model[0].head)
    with pytest.raises(InputError, match=r"DTensor as weight.*inside the forward") as error:
        chunked_cross_entropy(hidden, sharded, labels)
    return results | {"outside": str(error.value)}


def test_inside_the_forward_of_a_sharded_module_the_gradients_are_those_of_whole_logits() -> None:
    for results in run_ranks(under_fsdp, 2):
        assert "plain tensors" in results["outside"]
        for name, tolerance in (("kept", DOUBLE), ("resharded", DOUBLE), ("bf16", HALF)):
            expected, found = results[name]
            same(found, expected, tolerance)


# ---------------------------------------------------------------------- a mean in the place of a sum


def mean_loss(output: Tensor, target: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target["labels"].flatten())


def test_a_mean_is_refused_and_a_sum_is_let_be() -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(3, 4, 5, generator=generator)
    target = {"labels": torch.randint(5, (3, 4), generator=generator), "name": "a"}

    def summed(output: Tensor, target: Any) -> Tensor:
        return summed_cross_entropy(output, target["labels"])

    check_loss_is_sum(summed, summed(output, target), output, target)
    with pytest.raises(InputError, match=r"for a micro-batch, and .* for twice its rows, as a mean does"):
        check_loss_is_sum(mean_loss, mean_loss(output, target), output, target)


def test_a_loss_that_takes_its_own_rows_only_is_let_be() -> None:
    def own_rows(output: Tensor, target: Any) -> Tensor:
        return (output * torch.ones(3, 1)).sum() / len(output)

    output = torch.ones(3, 4)
    check_loss_is_sum(own_rows, own_rows(output, {}), output, {})
    check_loss_is_sum(mean_loss, torch.tensor(float("nan")), output, {})
