"""Maps from ids to rows of managed-collision tables in checkpoints, also for another number of ranks.

TorchRec's state dict has the entries of a map, but not the ids that it has collected since the last eviction. Without
them, a resumed run would evict other rows. TorchRec can only merge the parts of several ranks, since an id must have a
row on the rank that the id is sent to. Here an id without such a row moves there, together with its row and the states
of its optimizer. If a rank has more ids than rows, the ids with the largest values of the eviction policy keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.managed_collision import NO_ID, IdMapShard, sharded_id_maps
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_rank

# All values of a whole map by the names of its entries. Called once for each map that must be redistributed.
ReadWhole = Callable[[Iterable[str]], dict[str, Tensor]]


class IdMaps:
    """The maps of a sharded model."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        rows_of: Callable[[str, str], Sequence[Tensor]],
        group: dist.ProcessGroup,
    ) -> None:
        self._maps = [
            (name, id_map) for name, module in sorted(modules.items()) for id_map in sharded_id_maps(name, module)
        ]
        self._rows_of = rows_of
        self._group = group

    def __bool__(self) -> bool:
        return bool(self._maps)

    def load_unsharded(self, unsharded: Mapping[str, dict[str, Tensor]]) -> None:
        """Fill the maps with the ids of an unsharded module on rank 0. Every rank calls it, after rows are filled."""

        def has_ids(ids: Tensor) -> bool:
            return not ids.is_meta and bool((ids != NO_ID).any())

        for _, id_map in self._maps:
            values = unsharded[id_map.name]
            if run_on_rank(lambda: has_ids(values[id_map.buffer_names[0]]), "", self._group):  # noqa: B023
                entries = run_on_rank(lambda: {key: value.cpu() for key, value in values.items()}, "", self._group)  # noqa: B023
                self.redistribute(id_map, [0], lambda _: entries)  # noqa: B023

    def collect_id_histories(self) -> dict[str, dict[str, Tensor]]:
        """What state dicts leave out of this rank's maps, under names that no other rank uses."""
        rank = self._group.rank()
        return {f"{id_map.name}/{rank}": history for _, id_map in self._maps if (history := id_map.get_input_history())}

    def find_resharded(self, begins: Callable[[str], list[int] | None], always: bool = False) -> list[IdMapShard]:
        """Maps whose parts in a checkpoint are not those of the ranks."""
        moved = []
        for _, id_map in self._maps:
            checkpoint_begins = begins(id_map.buffer_names[0])
            parts = self._gather_row_ranges(id_map)
            if checkpoint_begins is not None and (always or checkpoint_begins != sorted(begin for begin, _ in parts)):
                moved.append(id_map)
        return moved

    def redistribute(self, id_map: IdMapShard, begins: Sequence[int], read: ReadWhole) -> int:
        """Fill a map from a checkpoint with other parts, and move the rows of ids that another rank must hold now.

        The table's rows and states must be loaded already. Every rank calls it.
        """
        ids_name, rows_name = id_map.buffer_names
        entries = read([*id_map.named_row_buffers, id_map.step_counter[0]])
        id_map.step_counter[1].copy_(entries[id_map.step_counter[0]])
        parts = self._gather_row_ranges(id_map)
        rows = parts[-1][1]  # a table may have grown, or lost its last rows
        present = ((entries[ids_name] != NO_ID) & (entries[rows_name] < rows)).nonzero()[:, 0]
        cut = int((entries[ids_name] != NO_ID).sum()) - len(present)
        present_entries = {name: entries[name][present] for name in id_map.named_row_buffers}
        owners = id_map.owners(present_entries[ids_name], len(parts))
        policy_values = [values for name, values in present_entries.items() if name not in id_map.buffer_names]
        new_rows = _assign_rows_to_ids(
            present_entries[ids_name], present_entries[rows_name], owners, parts, policy_values
        )
        has_row = new_rows >= 0
        # Ids without a row share the last row of each rank's part.
        ends = [*begins[1:], entries[ids_name].numel()]
        shared_before = torch.tensor(
            [min(rows, next((e for e in ends if e >= last), ends[-1])) - 1 for _, last in parts]
        )
        shared_now = torch.tensor([end - 1 for _, end in parts])
        sources = torch.cat([present_entries[rows_name][has_row], shared_before])
        targets = torch.cat([new_rows[has_row], shared_now])
        self._move_rows(id_map, sources, targets, parts)
        is_local = has_row & (owners == self._group.rank())
        self._put(
            id_map,
            {name: (new_rows if name == rows_name else values)[is_local] for name, values in present_entries.items()},
        )
        return cut + int((~has_row).sum())

    def restore_id_histories(
        self, histories: Callable[[str], dict[int, dict[str, Tensor]]], moved: Sequence[IdMapShard]
    ) -> None:
        """Continue histories of a checkpoint, after everything else is loaded."""
        rank = self._group.rank()
        for _, id_map in self._maps:
            rank_histories = histories(id_map.name)
            if id_map in moved and rank_histories:
                rank_histories = {
                    rank: _merge_id_histories(id_map, list(rank_histories.values()), rank, self._group.size())
                }
            id_map.restore_input_history(rank_histories.get(rank, {}))

    def _gather_row_ranges(self, id_map: IdMapShard) -> list[tuple[int, int]]:
        return all_gather_objects((id_map.begin, id_map.end), self._group)

    @torch.no_grad()
    def _put(self, id_map: IdMapShard, local_entries: dict[str, Tensor]) -> None:
        ids_name, rows_name = id_map.buffer_names
        order = local_entries[ids_name].argsort()
        is_used = torch.zeros(id_map.end - id_map.begin, dtype=torch.bool)
        is_used[local_entries[rows_name] - id_map.begin] = True
        free = (~is_used).nonzero()[:, 0] + id_map.begin
        for name, buffer in id_map.named_row_buffers.items():
            padding = torch.full_like(free, NO_ID) if name == ids_name else torch.zeros_like(free)
            buffer.copy_(torch.cat([local_entries[name][order], free if name == rows_name else padding]))

    @torch.no_grad()
    def _move_rows(
        self, id_map: IdMapShard, sources: Tensor, targets: Tensor, parts: Sequence[tuple[int, int]]
    ) -> None:
        """Copy rows of the table and their states; targets may be among the sources."""
        moving = sources != targets
        sources, targets = sources[moving], targets[moving]
        ends = torch.tensor([end for _, end in parts])
        holders, receivers = (torch.bucketize(rows, ends, right=True) for rows in (sources, targets))
        rank, ranks = self._group.rank(), len(parts)
        sent, received = holders == rank, receivers == rank
        # By the other rank, in the order of the list, which is the same on all ranks.
        going = sources[sent][receivers[sent].argsort(stable=True)] - id_map.begin
        coming = targets[received][holders[received].argsort(stable=True)] - id_map.begin
        counts = [
            torch.bincount(ranks_of_rows, minlength=ranks).tolist()
            for ranks_of_rows in (receivers[sent], holders[received])
        ]
        module = next(name for name, listed_map in self._maps if listed_map is id_map)
        for rows in self._rows_of(module, id_map.table):
            leaving = rows[going.to(rows.device)].contiguous()
            arriving = rows.new_empty((len(coming), *rows.shape[1:]))
            if ranks > 1:
                dist.all_to_all_single(arriving, leaving, counts[1], counts[0], group=self._group)
            else:
                arriving = leaving
            rows[coming.to(rows.device)] = arriving


def _assign_rows_to_ids(
    ids: Tensor, rows: Tensor, owners: Tensor, parts: Sequence[tuple[int, int]], policy_values: Sequence[Tensor]
) -> Tensor:
    """New row of each id, on its owner: the same row if possible; -1 if the owner has no free row."""
    begins, ends = (torch.tensor(side)[owners] for side in zip(*parts, strict=True))
    stays = (rows >= begins) & (rows < ends - 1)
    new_rows = torch.where(stays, rows, -1)
    # The largest values of the policy first; ids break ties, so that all ranks agree.
    order = ids.argsort()
    for values in reversed(policy_values):
        order = order[values[order].argsort(stable=True, descending=True)]
    for rank, (begin, end) in enumerate(parts):
        moving = order[(~stays & (owners == rank))[order]]
        is_used = torch.zeros(end - 1 - begin, dtype=torch.bool)
        is_used[new_rows[stays & (owners == rank)] - begin] = True
        free = (~is_used).nonzero()[:, 0] + begin
        new_rows[moving[: len(free)]] = free[: len(moving)]
    return new_rows


def _merge_id_histories(
    id_map: IdMapShard, histories: Sequence[Mapping[str, Any]], rank: int, ranks: int
) -> dict[str, Tensor]:
    """The history of a rank from those of other parts: the ids that it owns, in the order of the ranks."""
    merged = {name: torch.cat([history[name] for history in histories]) for name in histories[0] if name != "numbers"}
    is_local = id_map.owners(merged["ids"], ranks) == rank
    merged = {name: values[is_local] for name, values in merged.items()}
    sizes = [max(0, int(history["numbers"][0])) for history in histories]
    size = max(merged["ids"].numel(), -(-sum(sizes) // ranks)) or -1
    return merged | {"numbers": torch.tensor([size, int(histories[0]["numbers"][1])])}
