"""Names of values that differ between a checkpoint and a module only in ``torch.compile``.

``torch.compile(module)`` inserts a level into the names of the module's values. ``module.compile()`` does not.
Checkpoints have the names without this level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed.checkpoint as dcp

from lightning_pipe._compat.torch import COMPILED


class CompiledNameMap:
    """Names of a module's values, to which names in a checkpoint are converted."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {plain_name(name): name for name in names}

    def __call__(self, name: str) -> str:
        """Return the module's name of a value; the plain name if the module has no such value."""
        name = plain_name(name)
        return self._names.get(name, name)

    def rename_keys(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values under the module's names."""
        return {self(name): value for name, value in values.items()}

    def rename_metadata(self, saved: dcp.Metadata) -> dcp.Metadata:
        """Return the metadata of a checkpoint folder under the module's names."""
        paths = {
            key: tuple(self(step) if isinstance(step, str) else step for step in path)
            for key, path in saved.planner_data.items()
        }
        keys = {key: ".".join(map(str, path)) for key, path in paths.items()}
        if all(key == renamed for key, renamed in keys.items()):
            return saved
        return replace(
            saved,
            state_dict_metadata={keys[key]: entry for key, entry in saved.state_dict_metadata.items()},
            planner_data={keys[key]: path for key, path in paths.items()},
            storage_data={replace(index, fqn=keys[index.fqn]): info for index, info in saved.storage_data.items()},
        )


def plain_name(name: str) -> str:
    """Return a name without the levels that ``torch.compile`` inserts."""
    return name.replace(f"{COMPILED}.", "") if COMPILED in name else name


def under_plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values under their names without the levels that ``torch.compile`` inserts."""
    return {plain_name(name): value for name, value in values.items()}
