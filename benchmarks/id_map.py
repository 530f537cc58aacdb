"""Time per id to find the rows of a cache, compared with other lookups of ids.

``OMP_NUM_THREADS=1 python -m benchmarks.id_map`` fills a cache of a million rows and then looks up the same batches,
whose ids are all cached, with alternating methods:

- *prefetch*: the complete ``RowCache.prefetch`` for such a batch (slots, the update of their use for eviction, distinct
  rows, the pin) and the discard of its ticket;
- *begin*: ``begin`` and ``end_trained`` for the same batch: counts, last steps, time to live, admission;
- *map*: only the ``find`` of ``id_map``;
- *searchsorted*: ``torch.searchsorted`` over the sorted ids and a gather of their slots;
- *dict*: a dictionary, with ids that are Python integers already.

Aim: *prefetch* at most 25 ns per id. In a second part, a sixteenth of each batch misses, so that rows are created and
evicted over a store that discards all rows. This measures the cost of the cache per new row, without the disk. The
output is medians over batches with quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.figures import Figure, add_options, at_most, quartiles, save
from benchmarks.quiet import QuietRuns
from lightning_pipe.recsys.dynamic.cache.id_map import id_map
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues, Normal, Uniform
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore, TableStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, RankStoreIdentity, Records, RowStore, StoreState
from lightning_pipe.recsys.kernels import native

LIMIT = 25.0  # ns an id


def main() -> None:
    """Print a row for each size and distribution of batches, then one for each eviction policy."""
    parser = argparse.ArgumentParser(description="lookup of ids, and creation and eviction of rows")
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--ids", type=int, nargs="+", default=[20_000, 60_000, 200_000])
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compiled = "compiled" if native.load_native_library() is not None else "not compiled"
    print(f"the library is {compiled}; {options.rows} rows cached; ns per id")
    quiet = QuietRuns()
    figures = known(options.rows, options.batches, options.ids, quiet)
    coming(options.rows, options.width)
    values(options.width, quiet)
    print(f"{quiet.disturbed} runs were disturbed")
    save(figures, options.json)


def known(rows: int, batches: int, sizes: list[int], quiet: QuietRuns) -> list[Figure]:
    """Measure ids that are all cached, and return the figures of *prefetch*."""
    source = np.random.default_rng(0)
    keys = source.integers(-(2**63), 2**63 - 1, rows)
    cache = _cache(rows, 1)
    cache.end_untrained(cache.prefetch(torch.from_numpy(keys)))
    table = id_map(rows)
    table.insert(keys, np.arange(rows))
    order, slots = torch.from_numpy(keys).sort()
    dictionary = {key: slot for slot, key in enumerate(keys.tolist())}
    heads = ("prefetch", "begin", "map", "searchsorted", "dict")
    print(f"{'ids':>8} {'kind':8}" + "".join(f"{name:>24}" for name in heads))
    step, figures = 0, []
    for size in sizes:
        for kind in ("uniform", "zipf"):
            times: list[list[float]] = []
            for _ in range(batches):
                places = source.integers(0, rows, size) if kind == "uniform" else source.zipf(1.2, size) % rows
                batch = torch.from_numpy(keys[places])
                ids = batch.tolist()
                step += 1

                def once(batch: Tensor = batch, ids: list[int] = ids, step: int = step) -> list[float]:
                    return [
                        _time(lambda: cache.end_untrained(cache.prefetch(batch))),
                        _begun(cache, batch, step),
                        _time(lambda: table.find(batch.numpy())),
                        _time(lambda: slots[torch.searchsorted(order, batch)]),
                        _time(lambda: np.array([dictionary[key] for key in ids])),
                    ]

                times.append([seconds / size for seconds in quiet.run(once)])
            columns = "".join(f"{_spread(column):>24}" for column in zip(*times, strict=True))
            print(f"{size:8} {kind:8}{columns}", flush=True)
            prefetch_times = [prefetch for prefetch, *_ in times]
            name = f"ids to rows of a cache, {kind}, {size} ids, {rows} rows cached"
            figures.append(
                at_most(name, statistics.median(prefetch_times), LIMIT, quartiles(prefetch_times), "ns an id")
            )
    return figures


def coming(rows: int, width: int) -> None:
    """Measure batches in which a sixteenth of the ids are new, so that the same number of rows is evicted."""
    print(f"{'policy':8}{'us per new row':>24}{'longest ms':>12}   rows of {width} numbers with equal states")
    size = 32_768
    for policy in ("lru", "lfu"):
        source = np.random.default_rng(1)
        cache = _cache(rows, width, policy)
        # All rows have been trained, so evicted rows are written to the store.
        _begun(cache, torch.arange(rows), 0)
        times: list[float] = []
        for step in range(1, 129):
            ids = source.integers(rows // 2, rows, size)
            ids[: size // 16] = np.arange(step * size // 16, (step + 1) * size // 16) + rows
            begun = time.perf_counter_ns()
            ticket = cache.prefetch(torch.from_numpy(ids))
            times.append(time.perf_counter_ns() - begun)
            cache.begin_batch_and_count_ids(ticket, step)
            cache.end_trained(ticket)
        stats = cache.stats
        came = stats.created - rows
        print(
            f"{policy:8}{sum(times) / came / 1e3:24.2f}{max(times) / 1e6:12.1f}   {came} new, {stats.evicted} evicted,"
            f" {stats.written} written",
            flush=True,
        )


def values(width: int, quiet: QuietRuns) -> None:
    """Measure the initial values of new rows."""
    keys = np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 8192)
    for initializer in (Uniform(-0.1, 0.1), Normal(0.0, 0.1)):
        initial = InitialValues("table", width, initializer)
        times = [quiet.run(partial(_time, partial(initial, keys))) / keys.size / width for _ in range(12)]
        print(f"{initializer}: {_spread(times)} ns per number", flush=True)


def _cache(rows: int, width: int, policy: str = "lru") -> RowCache:
    columns = [torch.zeros(rows, width), torch.zeros(rows, width)]
    return RowCache(
        "table",
        columns,
        TableStore(SharedStore(_Nothing(2 * width * 4 + 16)), "table"),
        initial=InitialValues("table", width, Uniform(-0.1, 0.1)),
        state_fill=[0.0],
        policy="lfu" if policy == "lfu" else "lru",
        ttl=1000,
    )


def _begun(cache: RowCache, batch: Tensor, step: int) -> float:
    ticket = cache.prefetch(batch)
    begun = time.perf_counter_ns()
    cache.begin_batch_and_count_ids(ticket, step)
    cache.end_trained(ticket)
    return time.perf_counter_ns() - begun


def _time(body: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    body()
    return time.perf_counter_ns() - begun


def _spread(times: list[float] | tuple[float, ...]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ({low:.1f} .. {high:.1f})"


class _Nothing(RowStore):
    """A store that discards all rows."""

    def __init__(self, width: int) -> None:
        self._width = width

    @property
    def current_state(self) -> StoreState:
        return StoreState(0, None)

    def write_identity(self, part: RankStoreIdentity) -> None: ...

    def recover(self, version: int) -> None: ...

    def read(self, table: str, keys: Keys) -> tuple[Records, np.ndarray]:
        return np.empty((len(keys), self._width), np.uint8), np.zeros(len(keys), bool)

    def write(self, table: str, keys: Keys, records: Records) -> None: ...

    def erase(self, table: str, keys: Keys) -> None: ...

    def prepare_commit(self, version: int, notes: Mapping[str, str] | None = None) -> None: ...

    def commit(self, version: int) -> None: ...

    def notes(self) -> dict[str, str]:
        return {}

    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        return iter(())

    def close(self) -> None: ...


if __name__ == "__main__":
    main()
