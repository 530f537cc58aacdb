"""Checkpoint folders whose names are those of an older release of transformers.

A release may rename a model's parameters, or replace several by one, as transformers 5 did with the experts of a layer.
Optimizer states follow their parameters. The conversions are those that transformers applies to files of weights.

Tested in ``tests/scenarios/checkpoints/test_kept_hf_files.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pipe._compat.transformers import Conversion, conversions_of, is_pretrained_model
from lightning_pipe.checkpoints.folder_reading import fill_alone, room
from lightning_pipe.checkpoints.named_optimizer import Group
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.checkpoints.stage_layout import MODEL
from lightning_pipe.engine import SetupError

_PREFIX = "model."  # name of the attribute PipelineModule.model
_Path = tuple[Any, ...]  # of keys in nested dicts, as in dcp.Metadata.planner_data


@dataclass(frozen=True)
class OlderNames:
    """A folder's entries under the module's names.

    Attributes:
        saved: the folder's metadata under the module's names. Computed entries have a size, but no chunks.
        computed: computed entries by path: the conversion, the name of the result, and the keys of the
            conversion's sources in the folder.
        names: the module's names of parameters that have other names in the folder, by those names.
    """

    saved: dcp.Metadata
    computed: Mapping[_Path, tuple[Conversion, str, Mapping[str, str]]]
    names: Mapping[str, Sequence[str]]
    _model: Any
    _folder: dcp.Metadata

    @classmethod
    def of(cls, model: nn.Module | None, folder: dcp.Metadata, needed: Collection[str]) -> OlderNames | None:
        """Compare a folder's names with a module's.

        Args:
            model: this rank's stages of the module's model.
            folder: metadata of the folder.
            needed: names of the entries of all ranks.

        Returns:
            None if the model is not of transformers, or if its names in the folder are not those of an older release.
        """
        if model is None or not is_pretrained_model(model):
            return None
        stored = [path[1] for path in folder.planner_data.values() if _place_of_name(path) == 1]
        conversions, _ = conversions_of(model, _without_prefix(stored), _without_prefix(needed))
        conversions = [one for one in conversions if one.transform is not None or one.sources != (one.first,)]
        of_source = {_PREFIX + name: one for one in conversions for name in one.sources}
        if not of_source:
            return None
        entries: dict[_Path, Any] = {}
        moved: dict[str, _Path] = {}  # entries of the folder by key, and their paths here
        names: dict[str, list[str]] = {}
        sources: dict[tuple[str, _Path, _Path], dict[str, str]] = defaultdict(dict)
        for key, path in folder.planner_data.items():
            place = _place_of_name(path)
            conversion = of_source.get(path[place]) if place else None
            if conversion is not None and conversion.transform is not None:
                whose = (conversion.first, path[:place], path[place + 1 :])
                sources[whose][path[place].removeprefix(_PREFIX)] = key
                continue
            if conversion is not None:
                names[path[place]] = [_PREFIX + conversion.first]
                path = (*path[:place], *names[path[place]], *path[place + 1 :])
            entries[path], moved[key] = folder.state_dict_metadata[key], path
        computed: dict[_Path, Any] = {}
        of_weights: dict[str, torch.Size] = {}
        # Weights come first, since their conversion gives the names of the results.
        for (_, before, after), keys in sorted(sources.items(), key=lambda item: item[0][1] != (MODEL,)):
            conversion = of_source[_PREFIX + next(iter(keys))]
            kinds = {name: folder.state_dict_metadata[key] for name, key in keys.items()}
            described = {name: room(kind, _meta) for name, kind in kinds.items()}
            if before != (MODEL,):
                _refuse_other_shapes(described, of_weights, after)
            else:
                of_weights |= {name: one.shape for name, one in described.items()}
            try:
                results = _converted(conversion, model, described, names)
            except Exception:  # any type, because each conversion has its own checks
                return None
            properties = cast(TensorStorageMetadata, next(iter(kinds.values()))).properties
            for own, value in results.items():
                path = (*before, _PREFIX + own, *after)
                entries[path] = TensorStorageMetadata(properties, value.size(), [])
                computed[path] = conversion, own, keys
            names |= {_PREFIX + name: [_PREFIX + own for own in results] for name in keys}
        saved = replace(
            folder,
            state_dict_metadata={_key(path): entry for path, entry in entries.items()},
            planner_data={_key(path): path for path in entries},
            storage_data={
                MetadataIndex(_key(moved[index.fqn]), index.offset, index.index): info
                for index, info in folder.storage_data.items()
                if index.fqn in moved
            },
        )
        return cls(saved, computed, names, model, folder)

    def in_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Parameter groups with the module's names.

        Raises:
            SetupError: parameters of different groups have become one.
        """
        renamed = []
        for group in groups:
            names = [own for name in group["params"] for own in self.names.get(name, [name])]
            renamed.append({**group, "params": list(dict.fromkeys(names))})
        group_of: dict[str, int] = {}
        for number, group in enumerate(renamed):
            for name in group["params"]:
                if group_of.setdefault(name, number) != number:
                    raise SetupError(
                        f"the parameters that have become {name} are in the groups {group_of[name]} and {number} of the"
                        " checkpoint's optimizer, expected one group. Load it with the release of transformers that"
                        " wrote it"
                    )
        return renamed

    def take_out(self, state: dict[str, Any]) -> dict[_Path, Tensor]:
        """Remove the computed entries from a nested *state*, and return them by path."""
        taken = {}
        for path in self.computed:
            holder = _holder(state, path)
            if path[-1] in holder:
                taken[path] = holder.pop(path[-1])
        return taken

    def put_in(
        self, state: dict[str, Any], taken: Mapping[_Path, Tensor], folder: Folder, weights_only: bool | None
    ) -> None:
        """Compute the entries that :meth:`take_out` took from *state*, and put them back. Ranks do not communicate.

        The sources of one entry are in memory together, whole.

        Raises:
            SetupError: a file is damaged.
        """
        for path, target in taken.items():
            conversion, own, keys = self.computed[path]
            read = {key: room(self._folder.state_dict_metadata[key], _empty) for key in keys.values()}
            fill_alone(folder, self._folder, read, weights_only)
            sources = {name: read[key] for name, key in keys.items()}
            value = _converted(conversion, self._model, sources, self.names)[own]
            if isinstance(target, DTensor):
                value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(value)
            _holder(state, path)[path[-1]] = target


def under_own_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of *model*, whole, under its own names, if they have those of an older release of transformers."""
    if not is_pretrained_model(model) or tensors.keys() <= model.state_dict().keys():
        return dict(tensors)
    conversions, _ = conversions_of(model, tensors)
    known = {name for one in conversions for name in one.sources}
    found = {name: value for name, value in tensors.items() if name not in known}
    for conversion in conversions:
        found |= conversion.run(tensors, model)
    return found


def _refuse_other_shapes(states: Mapping[str, Tensor], weights: Mapping[str, torch.Size], after: _Path) -> None:
    """Refuse states that no conversion of weights fits, such as the sums over rows of a factored optimizer."""
    for name, state in states.items():
        if state.numel() > 1 and name in weights and state.shape != weights[name]:
            raise SetupError(
                f"the optimizer's state {'.'.join(map(str, after))!r} of {name} has the shape {list(state.shape)},"
                f" expected {list(weights[name])}, that of the parameter. This release of transformers has other"
                " parameters, to which such a state cannot be converted. Resume with weights alone, or with the release"
                " that wrote the checkpoint"
            )


def _holder(state: dict[str, Any], path: _Path) -> dict[Any, Any]:
    """Dict of a nested *state* that holds the entry at *path*; an empty one if the state does not reach so far."""
    for step in path[:-1]:
        state = state.get(step, {})
    return state


def _place_of_name(path: _Path) -> int:
    """Index of the parameter's name in an entry's path, or 0 if the entry has none."""
    place = 1 if path[0] == MODEL and len(path) == 2 else 2 if len(path) > 3 and path[1] == "state" else 0
    return place if place and isinstance(path[place], str) else 0


def _without_prefix(names: Collection[str]) -> list[str]:
    return [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]


def _key(path: _Path) -> str:
    return ".".join(map(str, path))


def _empty(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)


def _meta(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _converted(
    conversion: Conversion, model: Any, sources: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """Results of a conversion by their names, or of numbers of steps, the largest for each of the known *names*."""
    if all(one.dim() == 0 for one in sources.values()):
        return dict.fromkeys(
            _without_prefix(names[_PREFIX + conversion.sources[0]]), torch.stack([*sources.values()]).amax()
        )
    return conversion.run(sources, model)
