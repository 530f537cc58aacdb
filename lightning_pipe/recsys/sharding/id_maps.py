"""Maps from ids to rows of managed-collision tables in checkpoints, also for another number of ranks.

TorchRec's state dict has the entries of a map, but not the ids that it has collected since the last eviction. Without
them, a resumed run would evict other rows. TorchRec can only merge the parts of several ranks, since an id must have a
row on the rank that the id is sent to. Here an id without such a row moves there, together with its row and the states
of its optimiser. If a rank has more ids than rows, the ids with the largest values of the eviction policy keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.managed_collision import NO_ID, ManagedMap, id_maps_in
from lightning_pipe.engine.ranks.together import from_rank, gather

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
        self._maps = [(name, one) for name, module in sorted(modules.items()) for one in id_maps_in(name, module)]
        self._rows_of = rows_of
        self._group = group

    def __bool__(self) -> bool:
        return bool(self._maps)

    def take_over(self, unsharded: Mapping[str, dict[str, Tensor]]) -> None:
        """Fill the maps with the ids of an unsharded module on rank 0. Every rank calls it, after rows are filled."""

        def has_ids(ids: Tensor) -> bool:
            return not ids.is_meta and bool((ids != NO_ID).any())

        for _, one in self._maps:
            values = unsharded[one.name]
            if from_rank(lambda: has_ids(values[one.names[0]]), "", self._group):  # noqa: B023
                whole = from_rank(lambda: {key: value.cpu() for key, value in values.items()}, "", self._group)  # noqa: B023
                self.redistribute(one, [0], lambda _: whole)  # noqa: B023

    def windows(self) -> dict[str, dict[str, Tensor]]:
        """What state dicts leave out of this rank's maps, under names that no other rank uses."""
        rank = self._group.rank()
        return {f"{one.name}/{rank}": window for _, one in self._maps if (window := one.window())}

    def moved(self, begins: Callable[[str], list[int] | None], always: bool = False) -> list[ManagedMap]:
        """Maps whose parts in a checkpoint are not those of the ranks."""
        found = []
        for _, one in self._maps:
            before = begins(one.names[0])
            parts = self._parts(one)
            if before is not None and (always or before != sorted(begin for begin, _ in parts)):
                found.append(one)
        return found

    def redistribute(self, one: ManagedMap, begins: Sequence[int], read: ReadWhole) -> int:
        """Fill a map from a checkpoint with other parts, and move the rows of ids that another rank must hold now.

        The table's rows and states must be loaded already. Every rank calls it.
        """
        ids_name, rows_name = one.names
        whole = read([*one.entries, one.steps[0]])
        one.steps[1].copy_(whole[one.steps[0]])
        parts = self._parts(one)
        rows = parts[-1][1]  # a table may have grown, or lost its last rows
        present = ((whole[ids_name] != NO_ID) & (whole[rows_name] < rows)).nonzero()[:, 0]
        cut = int((whole[ids_name] != NO_ID).sum()) - len(present)
        held = {name: whole[name][present] for name in one.entries}
        owners = one.owners(held[ids_name], len(parts))
        others = [values for name, values in held.items() if name not in one.names]
        to = _new_rows(held[ids_name], held[rows_name], owners, parts, others)
        kept = to >= 0
        # Ids without a row share the last row of each rank's part.
        ends = [*begins[1:], whole[ids_name].numel()]
        shared_before = torch.tensor(
            [min(rows, next((e for e in ends if e >= last), ends[-1])) - 1 for _, last in parts]
        )
        shared_now = torch.tensor([end - 1 for _, end in parts])
        sources = torch.cat([held[rows_name][kept], shared_before])
        targets = torch.cat([to[kept], shared_now])
        self._move_rows(one, sources, targets, parts)
        mine = kept & (owners == self._group.rank())
        self._put(one, {name: (to if name == rows_name else values)[mine] for name, values in held.items()})
        return cut + int((~kept).sum())

    def set_windows(self, windows: Callable[[str], dict[int, dict[str, Tensor]]], moved: Sequence[ManagedMap]) -> None:
        """Continue windows of a checkpoint, after everything else is loaded."""
        rank = self._group.rank()
        for _, one in self._maps:
            found = windows(one.name)
            if one in moved and found:
                found = {rank: _merged(one, list(found.values()), rank, self._group.size())}
            one.set_window(found.get(rank, {}))

    def _parts(self, one: ManagedMap) -> list[tuple[int, int]]:
        return gather((one.begin, one.end), self._group)

    @torch.no_grad()
    def _put(self, one: ManagedMap, mine: dict[str, Tensor]) -> None:
        ids_name, rows_name = one.names
        order = mine[ids_name].argsort()
        taken = torch.zeros(one.end - one.begin, dtype=torch.bool)
        taken[mine[rows_name] - one.begin] = True
        free = (~taken).nonzero()[:, 0] + one.begin
        for name, buffer in one.entries.items():
            rest = torch.full_like(free, NO_ID) if name == ids_name else torch.zeros_like(free)
            buffer.copy_(torch.cat([mine[name][order], free if name == rows_name else rest]))

    @torch.no_grad()
    def _move_rows(self, one: ManagedMap, sources: Tensor, targets: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the table and their states; targets may be among the sources."""
        moving = sources != targets
        sources, targets = sources[moving], targets[moving]
        ends = torch.tensor([end for _, end in parts])
        holders, receivers = (torch.bucketize(rows, ends, right=True) for rows in (sources, targets))
        rank, ranks = self._group.rank(), len(parts)
        sent, received = holders == rank, receivers == rank
        # By the other rank, in the order of the list, which is the same on all ranks.
        going = sources[sent][receivers[sent].argsort(stable=True)] - one.begin
        coming = targets[received][holders[received].argsort(stable=True)] - one.begin
        counts = [torch.bincount(found, minlength=ranks).tolist() for found in (receivers[sent], holders[received])]
        module = next(name for name, other in self._maps if other is one)
        for rows in self._rows_of(module, one.table):
            leaving = rows[going.to(rows.device)].contiguous()
            arriving = rows.new_empty((len(coming), *rows.shape[1:]))
            if ranks > 1:
                dist.all_to_all_single(arriving, leaving, counts[1], counts[0], group=self._group)
            else:
                arriving = leaving
            rows[coming.to(rows.device)] = arriving


def _new_rows(
    ids: Tensor, rows: Tensor, owners: Tensor, parts: Sequence[tuple[int, int]], others: Sequence[Tensor]
) -> Tensor:
    """New row of each id, on its owner: the same row if possible; -1 if the owner has no free row."""
    begins, ends = (torch.tensor(side)[owners] for side in zip(*parts, strict=True))
    stays = (rows >= begins) & (rows < ends - 1)
    to = torch.where(stays, rows, -1)
    # The largest values of the policy first; ids break ties, so that all ranks agree.
    order = ids.argsort()
    for values in reversed(others):
        order = order[values[order].argsort(stable=True, descending=True)]
    for rank, (begin, end) in enumerate(parts):
        moving = order[(~stays & (owners == rank))[order]]
        taken = torch.zeros(end - 1 - begin, dtype=torch.bool)
        taken[to[stays & (owners == rank)] - begin] = True
        free = (~taken).nonzero()[:, 0] + begin
        to[moving[: len(free)]] = free[: len(moving)]
    return to


def _merged(one: ManagedMap, windows: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Tensor]:
    """The window of a rank from those of other parts: the ids that it owns, in the order of the ranks."""
    found = {name: torch.cat([window[name] for window in windows]) for name in windows[0] if name != "numbers"}
    mine = one.owners(found["ids"], ranks) == rank
    found = {name: values[mine] for name, values in found.items()}
    sizes = [max(0, int(window["numbers"][0])) for window in windows]
    size = max(found["ids"].numel(), -(-sum(sizes) // ranks)) or -1
    return found | {"numbers": torch.tensor([size, int(windows[0]["numbers"][1])])}
