"""Checkpoints of a model in stages: a folder, keyed by the unsplit model's names, whatever the split.

Every rank writes its stages' part of the module's ``state_dict`` and, by parameter, its part of the optimisers' states.
So another number of stages, another schedule or another sharding reads the same folder: each rank takes what it holds.
The layout is that of Lightning's own distributed checkpoints: ``state_dict``, ``optimizer_0``, and ``meta.pt``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.checkpoint_folder import (
    fill_from_folder,
    gather,
    on_all_ranks,
    read_metadata,
    read_rest,
    write_folder,
)
from lightning_pipe.strategies.named_optimizer import (
    Group,
    by_name,
    held_names,
    listed,
    merge_groups,
    optimizer_problems,
    pack_state,
)

__all__ = ["export_checkpoint", "export_pretrained", "load_stage_checkpoint", "save_stage_checkpoint"]

_KIND = "under LLMPipelineStrategy. Give the path of one, or load the model's state before it is split"
_FIX = "Build the module, and its optimiser, as when it was written"
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"
# Other names of parameters that go by their first: tied embeddings are written once.
_TIED = "lightning_pipe.tied"


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
    tied = {alias: name for names in gather(_other_names(module)) for alias, name in names.items()}
    if tied:
        rest[_TIED] = tied
    state: dict[str, Any] = {_MODEL: {name: value for name, value in checkpoint[_MODEL].items() if name not in tied}}
    if _OPTIMIZERS in checkpoint:
        held = held_names(optimizers, module, f"the checkpoint {str(path)!r} cannot be written")
        groups = []
        for number, (names, packed) in enumerate(zip(held, checkpoint[_OPTIMIZERS], strict=True)):
            state[_part(number)] = {"state": {names[index]: value for index, value in packed["state"].items()}}
            groups.append([by_name(group, names) for group in packed["param_groups"]])
        rest[_OPTIMIZERS] = [
            {"param_groups": merge_groups(ranks, order)} for ranks in zip(*gather(groups), strict=True)
        ]
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
    rest.pop(_TIED, None)
    stored = rest.pop(_OPTIMIZERS, None)
    with_states = stored is not None and optimizers is not None
    trained = list(optimizers or ()) if with_states else []
    held = held_names(trained, module, failed)
    groups: list[list[Group]] = [entry["param_groups"] for entry in stored] if with_states else []
    tied = _other_names(module)
    state: dict[str, Any] = {_MODEL: {name: value for name, value in module.state_dict().items() if name not in tied}}
    problems = _model_problems(saved, state[_MODEL], strict) + optimizer_problems(groups, held, trained)
    if problems:
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {'; '.join(problems)}. {_FIX}")
    parameters = dict(module.named_parameters())
    for number, names in enumerate(held):
        room = _room_for_states(saved, _part(number), {name: parameters[name] for name in names})
        state[_part(number)] = {"state": room}
    fill_from_folder(folder, state, strict=strict, fix=_FIX)
    if with_states:
        rest[_OPTIMIZERS] = [
            pack_state(optimizer, names, of_optimizer, state[_part(number)]["state"])
            for number, (optimizer, names, of_optimizer) in enumerate(zip(trained, held, groups, strict=True))
        ]
    return {**rest, _MODEL: _with_other_names(state[_MODEL], tied)}


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
    checkpoint = read_rest(source, weights_only=False)
    checkpoint[_MODEL] = _with_other_names(whole[_MODEL], checkpoint.pop(_TIED, {}))
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
        config: the model's, as :class:`~lightning_pipe.strategies.hf_causal_lm.HFCausalLM` takes it.
        target: where safetensors and the config go.

    Raises:
        SetupError: there is no such folder, or it does not hold the model that the config describes.
    """
    from transformers import AutoModelForCausalLM

    from lightning_pipe.strategies.hf_causal_lm import read_config

    config = read_config(config)
    whole = _read_whole(Path(folder), only=_MODEL)[_MODEL]
    prefix = "model."  # of PipelineModule
    weights = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
    kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=kinds.pop() if len(kinds) == 1 else None
        )
    tied = _other_names(model)
    sizes = {name: value.size() for name, value in weights.items()}
    needed = {name: value.size() for name, value in model.state_dict().items() if name not in tied}
    problems = _differences(sizes, needed, strict=True)
    if problems:
        raise SetupError(
            f"the checkpoint {str(folder)!r} does not fit the {config.model_type} model of the config:"
            f" {'; '.join(problems)}. Give the config that the model was built from"
        )
    model.save_pretrained(target, state_dict=weights)


# ---------------------------------------------------------------------- one parameter under several names


def _other_names(module: nn.Module) -> dict[str, str]:
    """For every name but its first the first name of a parameter that has several."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def _with_other_names(state: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    return {**state, **{alias: state[name] for alias, name in tied.items()}}


# ---------------------------------------------------------------------- what is read


def _part(number: int) -> str:
    return f"optimizer_{number}"


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


def _model_problems(saved: dcp.Metadata, state: Mapping[str, Any], strict: bool) -> list[str]:
    """The same on every rank."""
    stored = {
        path[1]: getattr(saved.state_dict_metadata[key], "size", None)
        for key, path in (saved.planner_data or {}).items()
        if path[0] == _MODEL
    }
    own = {name: value.size() if isinstance(value, Tensor) else None for name, value in state.items()}
    union: dict[str, Any] = {}
    for sizes in gather(own):
        union.update(sizes)
    return _differences(stored, union, strict)


def _differences(stored: Mapping[str, Any], needed: Mapping[str, Any], strict: bool) -> list[str]:
    """What is missing, unexpected, or of another size; the latter also where it is not strict."""
    problems = listed("missing in it", needed.keys() - stored.keys()) if strict else []
    problems += listed("unexpected in it", stored.keys() - needed.keys()) if strict else []
    sizes = [
        f"{name} ({list(stored[name])}, needed is {list(needed[name])})"
        for name in stored.keys() & needed.keys()
        if None not in (stored[name], needed[name]) and stored[name] != needed[name]
    ]
    return problems + listed("of another size", sizes)
