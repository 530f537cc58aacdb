"""Layout of a checkpoint of stages, and the names of tied parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

KIND = "under LLMPipelineStrategy. Give the path of one, or load the model's state before it is split"
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
# Key for the alternative names of tied parameters, which are written once, under their first name.
TIED = "lightning_pipe.tied"


def get_optimizer_checkpoint_key(number: int) -> str:
    """Name of the part that holds the states of the optimizer with this number."""
    return f"optimizer_{number}"


def tied_aliases(module: nn.Module) -> dict[str, str]:
    """Map from each alternative name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def add_tied_aliases(state: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """Copy of a state that also has the entries under the names from :func:`tied_aliases`."""
    return {**state, **{alias: state[name] for alias, name in tied.items()}}
