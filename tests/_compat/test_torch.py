"""Contracts with PyTorch: its private names are there, and do what the wrappers say.

A failure means that PyTorch has changed: look for a public way first, then adapt ``lightning_pipe/_compat/torch.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.overrides import TorchFunctionMode

from lightning_pipe._compat import torch as compat
from lightning_pipe._compat.torch import (
    TorchDispatchMode,
    TreeSpec,
    overflow_flags,
    pytree,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from tests.distributed import run_ranks


def test_a_scaler_skips_the_step_where_its_flag_is_set() -> None:
    for overflow in (0.0, 1.0):
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        flags = overflow_flags(scaler, optimizer)
        assert flags, "GradScaler does not keep its flags in _per_optimizer_states after unscale_"
        for flag in flags.values():
            flag.fill_(overflow)
        scaler.step(optimizer)
        assert parameter.item() == overflow, "GradScaler does not read found_inf_per_device in step"


def test_trees_are_flattened_changed_and_put_together() -> None:
    tree = {"a": [1, (2.0, None)]}
    leaves, shape = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == [1, 2.0, None], "torch.utils._pytree flattens another way"
    assert isinstance(shape, TreeSpec)
    assert tree_unflatten(leaves, shape) == tree == pytree.tree_unflatten(leaves, shape)
    assert tree_map(str, tree) == {"a": ["1", ("2.0", "None")]}
    assert tree_map_only(int, str, tree) == {"a": ["1", (2.0, None)]}


class Pair:
    def __init__(self, one: object, other: object) -> None:
        self.both = [one, other]


def test_a_class_can_be_registered_as_a_tree() -> None:
    register_pytree_node(Pair, lambda one: (one.both, None), lambda both, _: Pair(*both))
    assert tree_leaves(Pair(1, 2)) == [1, 2], "register_pytree_node takes other arguments"


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_modes_are_listed_entered_and_left_by_hand() -> None:
    functions, operators = Functions(), Operators()
    compat.push_function_mode(functions)
    compat.push_dispatch_mode(operators)
    try:
        assert compat.function_mode_stack() == [functions], "torch.overrides lists its modes another way"
        assert compat.function_mode_count() == 1
        assert compat.dispatch_mode_stack() == [operators], "_python_dispatch lists its modes another way"
        with compat.dispatch_modes_disabled():
            assert compat.dispatch_mode_stack() == [], "_disable_current_modes leaves modes on"
    finally:
        compat.pop_dispatch_mode(operators)
        compat.pop_function_mode()
    assert compat.function_mode_stack() == compat.dispatch_mode_stack() == []


def test_the_innermost_hooks_of_saved_tensors_are_found() -> None:
    assert compat.saved_tensor_hooks() is None, "there are hooks of saved tensors where none were set"
    hooks = (lambda one: one, lambda one: one)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert compat.saved_tensor_hooks() == hooks, "_top_saved_tensors_default_hooks gives something else"


def test_a_profiler_is_seen_from_every_thread() -> None:
    seen: list[bool] = []
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            thread = threading.Thread(target=lambda: seen.append(compat.is_profiler_at_work()))
            thread.start()
            thread.join()
    assert seen == [True, True], "torch.autograd.profiler._is_profiler_enabled is not of the process any more"
    assert not compat.is_profiler_at_work()


def stored(rank: int, size: int) -> str:
    compat.default_store().set(f"contract {rank}", str(rank))
    return compat.default_store().get(f"contract {1 - rank}").decode()


def test_ranks_share_the_default_groups_store() -> None:
    assert run_ranks(stored, 2) == ["1", "0"], "_get_default_store is not the store of all ranks"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.SGD([], lr=0.1),
        lambda: torch.optim.AdamW(iter([])),
        lambda: torch.optim.Adagrad([], lr=0.1),
        lambda: torch.optim.Muon([]),
    ],
)
def test_optimizers_of_no_parameters_can_be_made_where_that_is_allowed(
    make: Callable[[], torch.optim.Optimizer],
) -> None:
    with compat.empty_optimizers_allowed():
        made = make()
    assert [group["params"] for group in made.param_groups] == [[]]
    made.step()
    made.load_state_dict(made.state_dict())
    with pytest.raises(ValueError, match="empty parameter list"):
        make()


def test_fused_optimizers_say_that_they_look_for_overflow() -> None:
    own, fused = (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=fused) for fused in (False, True))
    assert not compat.looks_for_overflow(own)
    assert compat.looks_for_overflow(fused), "GradScaler has another way to know fused optimizers now"


def test_tensors_say_whether_they_are_views_and_which_storage_they_have() -> None:
    whole = torch.zeros(4)
    assert compat.is_view(whole[1:]), "Tensor._is_view does not say so of a slice"
    assert not compat.is_view(whole)
    meta = torch.empty(2, device="meta")
    assert compat.storage_key(whole) == compat.storage_key(whole[1:].untyped_storage()), "_cdata is not of the storage"
    assert compat.storage_key(meta) != compat.storage_key(torch.empty(2, device="meta")), "_cdata is not of one storage"


def test_operators_have_a_schema() -> None:
    schema = compat.schema_of(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert schema.is_mutable
    assert schema.name == "aten::add_"


def test_changes_that_autograd_need_not_see_keep_a_tensors_version() -> None:
    tensor = torch.zeros(1)
    before = tensor._version
    with compat.version_counters_preserved((tensor,)):
        tensor.add_(1)
    assert tensor._version == before, "_unsafe_preserve_version_counter takes other arguments"


def test_optimizers_in_backward_are_found_at_their_parameters() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter, other = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    assert compat.optimizers_in_backward(parameter) == []
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.5})
    said = [(torch.optim.SGD, {"lr": 0.5})]
    words = "they are not kept in _optimizer_classes and _optimizer_kwargs"
    assert compat.optimizers_in_backward(parameter) == said, words
    compat.set_optimizer_in_backward(other, torch.optim.SGD, {"lr": 0.5})
    assert compat.optimizers_in_backward(other) == said


def test_a_writer_for_urls_takes_the_options_that_saves_need() -> None:
    writer = compat.fsspec_writer("memory://of-a-contract/a.ckpt", sync_files=False, use_listings_cache=False)
    assert isinstance(writer, dcp.StorageWriter)
    assert writer.sync_files is False  # type: ignore[attr-defined]


def test_a_tensor_that_is_kept_in_cpp_has_one_more_reference_and_is_never_deleted() -> None:
    tensor: Any = torch.ones(2)
    alive = weakref.ref(tensor)
    compat.keep_in_cpp([tensor, torch.nn.Parameter(tensor)])
    assert tensor._use_count() == 2
    del tensor
    assert alive() is not None
    compat.keep_in_cpp([])
