"""Checkpoints of a model in stages: a folder, keyed by the unsplit model's names, whatever the split.

Every rank writes its stages' part of the module's ``state_dict`` and, by parameter, its part of the optimisers' states.
So another number of stages, another schedule or another sharding reads the same folder: each rank takes what it holds.
The layout is that of Lightning's own distributed checkpoints: ``state_dict``, ``optimizer_0``, and ``meta.pt``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.checkpoint_folder import (
    fill_from_folder,
    on_all_ranks,
    read_metadata,
    read_rest,
    write_folder,
)

__all__ = ["export_checkpoint", "export_pretrained", "load_stage_checkpoint", "save_stage_checkpoint"]

_KIND = "under LLMPipelineStrategy. Give the path of one, or load the model's state before it is split"
_FIX = "Build the module, and its optimiser, as when it was written"
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"

Group = dict[str, Any]


def save_stage_checkpoint(
    checkpoint: dict[str, Any],
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    order: Sequence[str],
) -> None:
    """Write *checkpoint*, as Lightning made it, to the folder *path*; every rank calls this.

    Args:
        checkpoint: Lightning's dictionary: ``state_dict`` and ``optimizer_states`` of what this rank holds, and the
            rest, of which rank 0's is kept.
        path: the same on every rank, which all ranks can write to. What is there is replaced.
        module: this rank's part of it.
        optimizers: those of ``optimizer_states``.
        order: names of the unsplit module's parameters. An exported checkpoint numbers a group's parameters so.

    Raises:
        SetupError: on every rank, if any cannot write; what was there before is as it was.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (_MODEL, _OPTIMIZERS)}
    state: dict[str, Any] = {_MODEL: checkpoint[_MODEL]}
    if _OPTIMIZERS in checkpoint:
        held = _held(optimizers, module, f"the checkpoint {str(path)!r} cannot be written")
        groups = []
        for number, (names, packed) in enumerate(zip(held, checkpoint[_OPTIMIZERS], strict=True)):
            state[_part(number)] = {"state": {names[index]: value for index, value in packed["state"].items()}}
            groups.append([_by_name(group, names) for group in packed["param_groups"]])
        rest[_OPTIMIZERS] = [{"param_groups": _merge(ranks, order)} for ranks in zip(*_gather(groups), strict=True)]
    write_folder(path, state, rest)


def load_stage_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read what this rank holds from the folder *path*; every rank calls this.

    Args:
        path: what :func:`save_stage_checkpoint` wrote, on whatever stages.
        module: this rank's part of it; its tensors are filled.
        optimizers: whose states to read, where the checkpoint has them; None for the module's alone.
        strict: whether the checkpoint must hold just what the module does, all ranks' parts together.
        weights_only: read the rest of Lightning's dictionary with ``torch.load``'s restricted unpickler.

    Returns:
        Lightning's dictionary, its ``state_dict`` and ``optimizer_states`` those of this rank's part.

    Raises:
        SetupError: on every rank, if any finds no such folder, or the checkpoint is of another model or optimiser.
    """
    folder = Path(path)
    failed = f"the checkpoint {str(folder)!r} cannot be read"
    saved, rest = on_all_ranks(lambda: (read_metadata(folder, _MODEL, _KIND), read_rest(folder, weights_only)), failed)
    stored = rest.pop(_OPTIMIZERS, None)
    with_states = stored is not None and optimizers is not None
    trained = list(optimizers or ()) if with_states else []
    held = _held(trained, module, failed)
    groups: list[list[Group]] = [entry["param_groups"] for entry in stored] if with_states else []
    state: dict[str, Any] = {_MODEL: module.state_dict()}
    problems = _model_problems(saved, state[_MODEL], strict) + _optimizer_problems(groups, held, trained)
    if problems:
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {'; '.join(problems)}. {_FIX}")
    parameters = dict(module.named_parameters())
    for number, names in enumerate(held):
        room = _room_for_states(saved, _part(number), {name: parameters[name] for name in names})
        state[_part(number)] = {"state": room}
    fill_from_folder(folder, state, strict=strict, fix=_FIX)
    if with_states:
        rest[_OPTIMIZERS] = [
            _pack(optimizer, names, of_optimizer, state[_part(number)]["state"])
            for number, (optimizer, names, of_optimizer) in enumerate(zip(trained, held, groups, strict=True))
        ]
    return {**rest, _MODEL: state[_MODEL]}


def export_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Make of a checkpoint of stages one file as Lightning writes it for one device. One process does this alone.

    The whole model and its optimisers' states are in memory meanwhile. ``load_from_checkpoint`` takes the file, and so
    does ``Trainer.fit(ckpt_path=...)`` under Lightning's own strategies, provided that ``configure_optimizers`` has
    the parameters of each group in the model's order.

    Args:
        folder: what ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under ``LLMPipelineStrategy``.
        file: what is there is replaced.

    Raises:
        SetupError: there is no such folder.
    """
    source, target = Path(folder), Path(file)
    whole = _read_whole(source)
    checkpoint = {**read_rest(source, weights_only=False), _MODEL: whole[_MODEL]}
    for number, stored in enumerate(checkpoint.get(_OPTIMIZERS, ())):
        states = whole.get(_part(number), {}).get("state", {})
        names = [name for group in stored["param_groups"] for name in group["params"]]
        index = {name: place for place, name in enumerate(names)}
        checkpoint[_OPTIMIZERS][number] = {
            "state": {index[name]: state for name, state in states.items()},
            "param_groups": [
                {**group, "params": [index[name] for name in group["params"]]} for group in stored["param_groups"]
            ],
        }
    beside = target.with_name(f".{target.name}.writing")
    torch.save(checkpoint, beside)
    os.replace(beside, target)


def export_pretrained(folder: str | Path, config: Any, target: str | Path) -> None:
    """Make of a checkpoint of stages a folder that Hugging Face's ``from_pretrained`` loads. One process does this.

    Args:
        folder: what ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under ``LLMPipelineStrategy``.
        config: the model's ``PretrainedConfig``, such as ``HFCausalLM.config``.
        target: where safetensors and the config go.

    Raises:
        SetupError: there is no such folder, or it does not hold the model that the config describes.
    """
    from transformers import AutoModelForCausalLM

    whole = _read_whole(Path(folder), only=_MODEL)[_MODEL]
    prefix = "model."  # of PipelineModule
    weights = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=kinds.pop() if len(kinds) == 1 else None
        )
    sizes = {name: value.size() for name, value in weights.items()}
    problems = _differences(sizes, {name: value.size() for name, value in model.state_dict().items()}, strict=True)
    if problems:
        raise SetupError(
            f"the checkpoint {str(folder)!r} does not fit the {config.model_type} model of the config:"
            f" {'; '.join(problems)}. Give the config that the model was built from"
        )
    model.save_pretrained(target, state_dict=weights)


# ---------------------------------------------------------------------- by name


def _part(number: int) -> str:
    return f"optimizer_{number}"


def _held(optimizers: Iterable[Optimizer], module: nn.Module, failed: str) -> list[list[str]]:
    """The names of each optimiser's parameters, in the order in which it numbers them."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def held() -> list[list[str]]:
        return [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in optimizers
        ]

    return on_all_ranks(held, f"{failed}, since an optimiser has parameters that the module has not")


def _by_name(group: Group, names: Sequence[str]) -> Group:
    """A group as an optimiser's ``state_dict`` has it, with names in the numbers' place."""
    rest = {key: value for key, value in group.items() if key != "param_names"}  # those of this rank
    return {**rest, "params": [names[index] for index in group["params"]]}


def _merge(ranks: Iterable[Sequence[Group]], order: Sequence[str]) -> list[Group]:
    """The groups of the unsplit model: those at one place on several ranks are one, unless ranks made others there."""
    rank_in_model = {name: place for place, name in enumerate(order)}
    merged: list[Group] = []
    for at_one_place in zip_longest(*ranks):
        here: list[Group] = []
        for group in at_one_place:
            if group is None:
                continue
            same = next((other for other in here if _hyperparameters_equal(group, other)), None)
            if same is None:
                here.append({**group})
            else:
                same["params"] = [*same["params"], *group["params"]]
        merged += here
    for group in merged:
        group["params"] = sorted(dict.fromkeys(group["params"]), key=lambda name: rank_in_model.get(name, len(order)))
    return merged


def _hyperparameters_equal(one: Group, other: Group) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one if key != "params")


def _pack(optimizer: Optimizer, names: Sequence[str], groups: Sequence[Group], states: Mapping[str, Any]) -> Any:
    """What the optimiser's ``load_state_dict`` takes, made of what was kept by name."""
    index = {name: place for place, name in enumerate(names)}
    group_of = {name: group for group in groups for name in group["params"]}
    present = optimizer.state_dict()["param_groups"]
    packed = []
    for own, at_same_place in zip_longest(present, groups if len(groups) == len(present) else ()):
        # Of a group in which this rank has nothing, its place tells which it is.
        found = group_of[names[own["params"][0]]] if own["params"] else at_same_place or own
        packed.append({**found, "params": own["params"]})
    return {"state": {index[name]: state for name, state in states.items()}, "param_groups": packed}


def _room_for_states(saved: dcp.Metadata, part: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Something to load each of the parameters' states into; what has a parameter's size is sharded as it is."""
    room: dict[str, Any] = {}
    for key, path in (saved.planner_data or {}).items():
        if path[:2] == (part, "state") and path[2] in parameters:
            set_element(room, path[2:], _room(saved.state_dict_metadata[key], parameters[path[2]]))
    return room


def _room(stored: Any, like: Tensor | None = None) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return None  # it is replaced
    if like is not None and like.size() == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _read_whole(folder: Path, only: str | None = None) -> dict[str, Any]:
    """All that the folder holds, or one part of it."""
    saved = read_metadata(folder, _MODEL, _KIND)
    whole: dict[str, Any] = {}
    for key, path in (saved.planner_data or {}).items():
        if only in (None, path[0]):
            set_element(whole, path, _room(saved.state_dict_metadata[key]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(whole, checkpoint_id=folder, no_dist=True)
    return whole


# ---------------------------------------------------------------------- what does not fit


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _model_problems(saved: dcp.Metadata, state: Mapping[str, Any], strict: bool) -> list[str]:
    """The same on every rank."""
    stored = {
        path[1]: getattr(saved.state_dict_metadata[key], "size", None)
        for key, path in (saved.planner_data or {}).items()
        if path[0] == _MODEL
    }
    own = {name: value.size() if isinstance(value, Tensor) else None for name, value in state.items()}
    union: dict[str, Any] = {}
    for sizes in _gather(own):
        union.update(sizes)
    return _differences(stored, union, strict)


def _differences(stored: Mapping[str, Any], needed: Mapping[str, Any], strict: bool) -> list[str]:
    """What is missing, unexpected, or of another size; the latter also where it is not strict."""
    problems = _listed("missing in it", needed.keys() - stored.keys()) if strict else []
    problems += _listed("unexpected in it", stored.keys() - needed.keys()) if strict else []
    sizes = [
        f"{name} ({list(stored[name])}, needed is {list(needed[name])})"
        for name in stored.keys() & needed.keys()
        if None not in (stored[name], needed[name]) and stored[name] != needed[name]
    ]
    return problems + _listed("of another size", sizes)


def _optimizer_problems(
    groups: Sequence[Sequence[Group]], held: Sequence[Sequence[str]], optimizers: Sequence[Optimizer]
) -> list[str]:
    """The same on every rank."""
    if len(groups) != len(held):
        return [f"it has states of {len(groups)} optimisers, configure_optimizers returns {len(held)}"]
    problems = []
    for of_optimizer, names, optimizer in zip(groups, held, optimizers, strict=True):
        place_of = {name: place for place, group in enumerate(of_optimizer) for name in group["params"]}
        mixed = {
            " and ".join({place_of[name]: name for name in own if name in place_of}.values())
            for own in ([names[i] for i in group["params"]] for group in optimizer.state_dict()["param_groups"])
            if len({place_of[name] for name in own if name in place_of}) > 1
        }
        ranks = _gather((names, mixed))
        needed = {name for names, _ in ranks for name in names}
        problems += _listed("not in the checkpoint's optimiser", needed - place_of.keys())
        problems += _listed("in the checkpoint's optimiser, but not in the module's", place_of.keys() - needed)
        problems += _listed(
            "in one group of the optimiser, but not of the checkpoint's", set().union(*(m for _, m in ranks))
        )
    return problems


def _listed(what: str, names: Collection[str]) -> list[str]:
    shown = sorted(names)[:10]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return [f"{what}: {', '.join(shown)}{more}"] if names else []
