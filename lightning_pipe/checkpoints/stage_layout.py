"""What a checkpoint of stages has where, and parameters that go by several names.

Tested in ``tests/strategies/language_model/test_stage_checkpoint.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["KIND", "MODEL", "OPTIMIZERS", "TIED", "optimizer_part", "other_names", "with_other_names"]

KIND = "under LLMPipelineStrategy. Give the path of one, or load the model's state before it is split"
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
# Other names of parameters that go by their first: tied embeddings are written once.
TIED = "lightning_pipe.tied"


def optimizer_part(number: int) -> str:
    """Where the states of the optimiser with this number are."""
    return f"optimizer_{number}"


def other_names(module: nn.Module) -> dict[str, str]:
    """For every name but its first the first name of a parameter that has several."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


def with_other_names(state: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """A state by the names of :func:`other_names` too."""
    return {**state, **{alias: state[name] for alias, name in tied.items()}}
