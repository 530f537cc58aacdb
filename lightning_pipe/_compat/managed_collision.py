"""State of TorchRec's maps from ids to rows (``MCHManagedCollisionModule``), which has no public access.

A map's buffers are its entries, sorted by id: id, row of the whole table, and what the eviction policy knows of each. A
row without an id has the largest integer as its id. The last row of each rank's part stands for all ids without a row.
Between two evictions a map collects the ids of batches: its *window*, which TorchRec's state dict leaves out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

NO_ID = torch.iinfo(torch.int64).max
_IDS, _ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
ENTRIES_OF_MAP = (_IDS, _ROWS)  # in a state dict, after the map's name
_MAPS = "_managed_collision_collection._managed_collision_modules"
_STEPS, _SEGMENTS = "_current_iter_tensor", "_output_segments_tensor"


class IdMapEmbeddingEnumerator(EmbeddingEnumerator):
    """Enumerator that takes maps for any number of ranks: sharding makes a new map with a bucket for each rank."""

    def _get_num_buckets(self, parameter: str, module: nn.Module) -> int | None:
        if isinstance(module, BaseManagedCollisionEmbeddingCollection):
            return None
        return super()._get_num_buckets(parameter, module)


def get_unsharded_id_maps(module: Any) -> dict[str, ManagedCollisionModule]:
    """Maps of an unsharded managed-collision module, by the name of their table."""
    return dict(module._managed_collision_collection._managed_collision_modules.items())


def sharded_id_maps(name: str, module: nn.Module) -> Iterator[IdMapShard]:
    """Maps of a sharded module; none without managed collision."""
    for inner, child in module.named_modules():
        if isinstance(child, MCHManagedCollisionModule):
            yield IdMapShard(".".join(part for part in (name, inner) if part), child)


def is_id_map_entry(name: str) -> bool:
    """Return True if a state dict's entry belongs to the maps of a module."""
    return f".{_MAPS}." in f".{name}"


def id_map_name(weight: str) -> str:
    """Name of the map of a table, whose parameter has the name *weight*."""
    module, _, table = weight.rpartition("._embedding_module.") if "._embedding_module." in weight else ("", "", weight)
    return ".".join(part for part in (module, _MAPS, table.split(".")[-2]) if part)


class IdMapShard:
    """This rank's part of the map of a table: rows from *begin* up to *end*."""

    def __init__(self, name: str, module: MCHManagedCollisionModule) -> None:
        self.name = name
        self.table = name.rpartition(".")[2]
        self.begin = module._output_global_offset
        self.end = self.begin + module._zch_size
        self._module = module

    @property
    def named_row_buffers(self) -> dict[str, Tensor]:
        """Buffers with a value for each row of this rank, by their full names: ids, rows, and those of the policy."""
        return {
            f"{self.name}.{name}": getattr(self._module, name)
            for name in (_IDS, _ROWS, *self._get_policy_buffer_names())
        }

    @property
    def buffer_names(self) -> tuple[str, str]:
        """Full names of the buffers of ids and of rows."""
        return f"{self.name}.{_IDS}", f"{self.name}.{_ROWS}"

    @property
    def step_counter(self) -> tuple[str, Tensor]:
        """Full name of the number of batches that have passed the map, and its buffer."""
        return f"{self.name}.{_STEPS}", self._module.get_buffer(_STEPS)

    @property
    def has_id_filter(self) -> bool:
        """True if a function selects the ids that may have a row, possibly at random."""
        return self._module._eviction_policy._threshold_filtering_func is not None

    def evicted_row_seed(self) -> int:
        """Seed for the values of rows that the map evicts now, the same in a resumed run."""
        digest = hashlib.sha256(f"{self.table}/{int(self.step_counter[1])}/{self.begin}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def has_state_dict_key(self, name: str) -> bool:
        """Return True if *name* is one of the entries, or another value that a state dict holds of this map."""
        return name in self.named_row_buffers or name in (f"{self.name}.{_STEPS}", f"{self.name}.{_SEGMENTS}")

    def owners(self, ids: Tensor, ranks: int) -> Tensor:
        """Rank that each id is sent to, by the block of ids that it is in: FBGEMM's operator decides as in training."""
        module, count = self._module, ids.numel()
        blocks = module.buckets()
        size = (module.input_size() + blocks - 1) // blocks
        lengths, _, _, _, places = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.tensor([count], device=ids.device),
            ids,
            bucketize_pos=False,
            sequence=True,
            block_sizes=torch.tensor([size], device=ids.device),
            total_num_blocks=torch.tensor([blocks], device=ids.device),
            my_size=ranks,
            keep_orig_idx=True,
        )
        return torch.bucketize(places, lengths.cumsum(0), right=True)

    # ------------------------------------------------------------------ between two evictions

    def get_input_history(self) -> dict[str, Tensor]:
        """What TorchRec's state dict leaves out: ids since the last eviction, and numbers."""
        module = self._module
        if module._current_iter < 0:
            return {}
        filled = module._current_history_buffer_offset
        numbers = [module._input_history_buffer_size, module._last_eviction_iter]
        history = {"ids": module._history_accumulator[:filled], "numbers": torch.tensor(numbers)}
        return history | {name: values[:filled] for name, values in module._history_metadata.items()}

    def defer_history_sizing(self) -> None:
        """Let the next batch size the history if no batch has had ids yet; else it would stay without room."""
        if self._module._input_history_buffer_size == 0:
            self._module._input_history_buffer_size = -1

    def restore_input_history(self, history: Mapping[str, Tensor]) -> None:
        """Continue from :meth:`get_input_history`, after the buffers are loaded. Empty: with a new history."""
        module = self._module
        module._evicted = False
        module._current_iter, module._current_history_buffer_offset = -1, 0  # read from the buffer by the next batch
        if not history:
            return
        size, module._last_eviction_iter = map(int, history["numbers"])
        module._current_iter = int(module.get_buffer(_STEPS))
        filled = module._current_history_buffer_offset = history["ids"].numel()
        module._input_history_buffer_size = size

        def pad_to_size(values: Tensor) -> Tensor:
            buffer = torch.zeros(max(0, size), dtype=torch.int64, device=module.device)
            buffer[:filled] = values
            return buffer

        module._history_accumulator = pad_to_size(history["ids"])
        for name, _, is_history in module._eviction_policy.metadata_info:
            if is_history:
                module.register_buffer(f"_history_{name}", pad_to_size(history[name]), persistent=False)
                module._history_metadata[name] = module.get_buffer(f"_history_{name}")

    def _get_policy_buffer_names(self) -> list[str]:
        return [f"_mch_{name}" for name, is_of_map, _ in self._module._eviction_policy.metadata_info if is_of_map]
