"""The cut between embeddings and dense part, seen from the user's code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_pipe.recsys.rewrite.boundary import EmbeddingCut, cut_autograd_at_output, cut_autograd_at_tensor


def source(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


def doubled(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (x * x).sum()


def a_view_zeroed(x: torch.Tensor) -> torch.Tensor:
    first = x.narrow(1, 0, 2)
    first.zero_()
    return (x * torch.arange(4.0)).pow(2).sum()


def rectified(x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x).pow(2).sum()


@pytest.mark.parametrize("use", [doubled, a_view_zeroed, rectified])
def test_gradients_are_those_of_the_uncut_graph_also_after_changes_in_place(
    use: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 4, generator=generator, requires_grad=True)
    expected_loss = use(source(weight))
    (expected,) = torch.autograd.grad(expected_loss, weight)

    cuts: list[EmbeddingCut] = []
    passed_on = cut_autograd_at_tensor(source(weight), cuts)
    loss = use(passed_on)
    loss.backward()
    assert torch.equal(loss, expected_loss)
    assert weight.grad is None, "the dense backward must stop at the cut"
    torch.autograd.backward(cuts[0].source, cuts[0].scaled_gradient(None))
    assert weight.grad is not None
    assert torch.equal(weight.grad, expected)


def test_what_is_handed_on_is_no_leaf_and_no_view_and_shares_memory() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    origin = source(weight)
    passed_on = cut_autograd_at_tensor(origin, [])
    assert passed_on.requires_grad
    assert not passed_on.is_leaf
    assert not passed_on._is_view()
    assert passed_on.data_ptr() == origin.data_ptr()


def test_a_change_in_place_of_something_the_lookup_saved_is_an_error_and_not_a_wrong_gradient() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    cuts: list[EmbeddingCut] = []
    passed_on = cut_autograd_at_tensor(torch.exp(weight), cuts)  # exp saves its result
    passed_on.add_(1.0)
    passed_on.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(cuts[0].source, cuts[0].scaled_gradient(None))


def test_an_output_without_use_has_a_gradient_of_zeros() -> None:
    cuts: list[EmbeddingCut] = []
    cut_autograd_at_tensor(source(torch.ones(2, 2, requires_grad=True)), cuts)
    assert cuts[0].gradient is None
    assert torch.equal(cuts[0].scaled_gradient(7.0), torch.zeros(2, 2))


def test_outputs_keep_their_structure() -> None:
    cuts: list[EmbeddingCut] = []
    weight = torch.arange(8.0).view(2, 4).requires_grad_()
    keyed = cut_autograd_at_output(KeyedTensor(["a", "b"], [1, 3], source(weight)), cuts)
    assert isinstance(keyed, KeyedTensor)
    assert torch.equal(keyed["b"], (weight * 2)[:, 1:])
    lengths = torch.tensor([1, 0, 1])
    jagged = cut_autograd_at_output({"a": JaggedTensor(source(weight), lengths=lengths)}, cuts)["a"]
    assert isinstance(jagged, JaggedTensor)
    assert jagged.lengths() is lengths
    pair = cut_autograd_at_output((source(weight), None), cuts)
    assert pair[1] is None
    assert [cut.name for cut in cuts] == ["", "a", ""]
    assert all(tensor.requires_grad for tensor in (keyed.values(), jagged.values(), pair[0]))
