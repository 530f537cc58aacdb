"""Optimizer states keyed by parameter name, because parameter numbers differ between ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks

Group = dict[str, Any]


def optimizer_parameter_names(optimizers: Iterable[Optimizer], module: nn.Module, failed: str) -> list[list[str]]:
    """Names of each optimizer's parameters, in the order of the optimizer's numbers."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def names_on_rank() -> list[list[str]]:
        return [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in optimizers
        ]

    failed = f"{failed}, since an optimizer has parameters that the module has not"
    return run_on_all_ranks(names_on_rank, failed, dist.group.WORLD)


def replace_numbers_by_names(group: Group, names: Sequence[str]) -> Group:
    """Parameter group of an optimizer's ``state_dict`` with its parameter numbers replaced by names."""
    settings = {key: value for key, value in group.items() if key != "param_names"}  # these list only this rank's names
    return {**settings, "params": [names[index] for index in group["params"]]}


def merge_param_groups_of_ranks(ranks: Iterable[Sequence[Group]], order: Sequence[str]) -> list[Group]:
    """Parameter groups of the unsplit model.

    Groups at the same position on several ranks are merged if their hyperparameters are equal.
    """
    rank_in_model = {name: place for place, name in enumerate(order)}
    merged: list[Group] = []
    for at_one_place in zip_longest(*ranks):
        distinct: list[Group] = []
        for group in at_one_place:
            if group is None:
                continue
            same = next((candidate for candidate in distinct if _hyperparameters_equal(group, candidate)), None)
            if same is None:
                distinct.append({**group})
            else:
                same["params"] = [*same["params"], *group["params"]]
        merged += distinct
    for group in merged:
        group["params"] = sorted(dict.fromkeys(group["params"]), key=lambda name: rank_in_model.get(name, len(order)))
    return merged


def make_optimizer_state_dict(
    optimizer: Optimizer, names: Sequence[str], groups: Sequence[Group], states: Mapping[str, Any]
) -> Any:
    """Convert a state keyed by name to the format of the optimizer's ``load_state_dict``."""
    index = {name: place for place, name in enumerate(names)}
    group_of = {name: group for group in groups for name in group["params"]}
    local_groups = optimizer.state_dict()["param_groups"]
    packed = []
    for local_group, stored_group in zip_longest(local_groups, groups if len(groups) == len(local_groups) else ()):
        # A group without parameters on this rank is identified by its position.
        source = group_of[names[local_group["params"][0]]] if local_group["params"] else stored_group or local_group
        packed.append({**source, "params": local_group["params"]})
    return {"state": {index[name]: state for name, state in states.items()}, "param_groups": packed}


def find_optimizer_mismatches(
    groups: Sequence[Sequence[Group]], parameter_names: Sequence[Sequence[str]], optimizers: Sequence[Optimizer]
) -> list[str]:
    """Differences between the stored groups and the module's optimizers.

    Every rank must call this; all get the same result.
    """
    if len(groups) != len(parameter_names):
        return [f"it has states of {len(groups)} optimizers, but configure_optimizers returns {len(parameter_names)}"]
    problems = []
    for stored_groups, names, optimizer in zip(groups, parameter_names, optimizers, strict=True):
        place_of = {name: place for place, group in enumerate(stored_groups) for name in group["params"]}
        mixed = {
            " and ".join({place_of[name]: name for name in group_names if name in place_of}.values())
            for group_names in ([names[i] for i in group["params"]] for group in optimizer.state_dict()["param_groups"])
            if len({place_of[name] for name in group_names if name in place_of}) > 1
        }
        ranks = all_gather_objects((names, mixed), dist.group.WORLD)
        needed = {name for names, _ in ranks for name in names}
        problems += describe_names("not in the checkpoint's optimizer", needed - place_of.keys())
        problems += describe_names("in the checkpoint's optimizer, but not in the module's", place_of.keys() - needed)
        problems += describe_names(
            "in one group of the optimizer, but not of the checkpoint's", set().union(*(m for _, m in ranks))
        )
    return problems


def describe_names(label: str, names: Collection[str]) -> list[str]:
    shown = [name if len(name) <= 200 else f"{name[:200]}..." for name in sorted(names)[:10]]
    suffix = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"{label}: {', '.join(shown)}{suffix}"] if names else []


def _hyperparameters_equal(first: Group, second: Group) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first if key != "params")
