"""Tables of ``docs/gpu.md``: number of times that the host waits for the device in a step.

``python -m tests.scenarios.streams.host_syncs`` prints them, from trainings that the race detector has watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_pipe.recsys import PLANS
from tests.distributed import run_ranks
from tests.engine.findings import Sync
from tests.recsys.stream_cases import COUNTED, watch

STATIC, DYNAMIC = "pooled", "dynamic bags"
# Task and function in which the host waits: why it has to.
REASONS = {
    ("EmbInputDistStart", "torchrec.sparse.jagged_tensor._safe_tolist"): "the number of ids of each feature, which is"
    " the size of the messages",
    ("EmbInputDistStart", "torchrec.distributed.train_pipeline.runtime_forwards.__call__"): "the sizes of the messages"
    " and the batch size, copied from pageable memory",
    ("EmbInputDistStart", "recsys.modules.row_means.divisor"): "the widths of outputs of mean-pooled tables that are"
    " sharded by rows, copied from pageable memory",
    ("EmbInputDistWait", "torchrec.distributed.dist_data._safe_tolist_2d"): "the sizes of the messages of other ranks,"
    " which are the sizes of buffers",
    ("EmbInputDistWait", "torchrec.distributed.dist_data._get_recat"): "the order of the received features, copied from"
    " pageable memory",
    ("EmbPrefetch", "torchrec.sparse.jagged_tensor._safe_tolist"): "the number of received ids of each feature, which"
    " the lookup needs",
    ("EmbPrefetch", "recsys.dynamic.tables.batch_ids.on_host"): "the ids of the batch, looked up on the host: one"
    " copy for all tables",
    ("EmbPrefetch", "recsys.dynamic.cache.row_columns.read"): "the slots of evicted rows, copied from pageable memory,"
    " and these rows, written to the store",
    ("EmbPrefetch", "recsys.dynamic.cache.row_columns.write"): "rows from the store, copied from pageable memory",
    (
        "EmbPrefetch",
        "recsys.dynamic.cache.row_columns.start",
    ): "initial values of new rows, copied from pageable memory",
}
TASKS = list(dict.fromkeys(task for task, _ in REASONS))
AHEAD_OF_LOSS = ("H2DAndShuffle", *TASKS, "EmbForward", "DenseForward", "LossPostprocess")


def place(sync: Sync) -> tuple[str, str]:
    return sync.site.task, sync.site.function.rpartition(":")[0]


def counts(syncs: Iterable[Sync]) -> dict[tuple[str, str], int]:
    """Number of host synchronisations of a step, by task and function."""
    return {key: number // COUNTED for key, number in Counter(map(place, syncs)).items()}


def by_plan() -> dict[str, dict[tuple[str, str], int]]:
    return {plan: counts(run_ranks(watch, 2, plan, STATIC)[0].syncs) for plan in PLANS}


def of_dynamic_tables() -> set[tuple[str, str]]:
    """Places that only a model with dynamic tables has."""
    return {place(sync) for seen in run_ranks(watch, 2, "prefetch", DYNAMIC) for sync in seen.all_syncs}


def tables(found: dict[str, dict[tuple[str, str], int]], dynamic: set[tuple[str, str]]) -> str:
    tasks = [task for task in TASKS if any(task == key[0] for key in found["prefetch"])]
    lines = [
        f"| plan | {' | '.join(f'`{task}`' for task in tasks)} | other tasks |",
        "| --- |" + " --- |" * (len(tasks) + 1),
    ]
    for plan, syncs in found.items():
        numbers = [sum(number for key, number in syncs.items() if key[0] == task) for task in tasks]
        lines.append(f"| `{plan}` | {' | '.join(map(str, [*numbers, sum(syncs.values()) - sum(numbers)]))} |")
    lines += ["", "| task | function | in a step | the host reads or copies |", "| --- | --- | --- | --- |"]
    for key, reason in REASONS.items():
        if key in found["prefetch"]:
            lines.append(f"| `{key[0]}` | `{key[1]}` | {found['prefetch'][key]} | {reason} |")
    lines += ["", "| task | function | the host reads or copies |", "| --- | --- | --- |"]
    lines += [
        f"| `{key[0]}` | `{key[1]}` | {reason} |"
        for key, reason in REASONS.items()
        if key in dynamic and key not in found["prefetch"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables(by_plan(), of_dynamic_tables()))
