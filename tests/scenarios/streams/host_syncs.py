"""Tables of ``docs/gpu.md``: number of times that the host waits for the device in a step.

``python -m tests.scenarios.streams.host_syncs`` prints them, from trainings that the race detector has watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_pipe.recsys import PLANS
from lightning_pipe.strategies.registry import STRATEGIES
from tests.distributed import run_ranks
from tests.engine.findings import Sync
from tests.llm.stream_cases import STAGES, STARTS, watch_stages
from tests.recsys.stream_cases import COUNTED, watch, watch_torchrec

STATIC, DYNAMIC = "pooled", "dynamic bags"
# Task and function in which the host waits: why it has to.
REASONS = {
    ("EmbInputDistWait", "recsys.rewrite.input_dist.wait"): "the numbers of ids that all ranks send, which are the"
    " sizes of the messages: one read for all modules",
    (
        "EmbPrefetch",
        "recsys.dynamic.tables.batch_ids.copy_ids_to_host",
    ): "the ids of the batch, looked up on the host: one copy for all tables",
    ("EmbPrefetch", "recsys.dynamic.cache.row_columns.read"): "evicted rows of a table, written to the store",
}
TASKS = ["EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch"]
AHEAD_OF_LOSS = ("H2DAndShuffle", *TASKS, "EmbForward", "DenseForward", "LossPostprocess")


# Of language models.
SCHEDULES = [
    str(entry.init_args["schedule"])
    for entry in STRATEGIES
    if entry.strategy == "LLMPipelineStrategy" and "schedule" in entry.init_args
]
LLM_TASKS = ["Prepare", STARTS, STAGES, "ScheduleStep", "ScaleGradients", "OptimStep"]
LLM_REASONS = {
    ("ScheduleStep", "llm.run.batch_runner._all_reduce_loss_sums"): "the loss of the batch, on the rank of the last"
    " stage: all ranks receive it",
    ("OptimStep", "llm.parallel.gradients.__call__"): "which gradients the other stages have, if gradients are clipped",
}
# Only with a padding mask.
LLM_MASK_REASONS = {
    (STAGES, "transformers.masking_utils._ignore_causal_mask_sdpa"): "a padding mask, in each forward of a stage:"
    " transformers asks whether it masks a token"
}


def place(sync: Sync) -> tuple[str, str]:
    return sync.site.task, sync.site.function.rpartition(":")[0]


def counts(syncs: Iterable[Sync]) -> dict[tuple[str, str], int]:
    """Number of host synchronizations of a step, by task and function."""
    return {key: number // COUNTED for key, number in Counter(map(place, syncs)).items()}


def by_plan() -> dict[str, dict[tuple[str, str], int]]:
    return {plan: counts(run_ranks(watch, 2, plan, STATIC)[0].syncs) for plan in PLANS}


def of_dynamic_tables() -> set[tuple[str, str]]:
    """Places that only a model with dynamic tables has."""
    return {place(sync) for seen in run_ranks(watch, 2, "prefetch", DYNAMIC) for sync in seen.all_syncs}


def of_torchrec() -> dict[str, int]:
    """Number of host synchronizations of a step in the input dist of TorchRec's pipeline, by function."""
    syncs = counts(run_ranks(watch_torchrec, 2)[0])
    # In the backward, a kernel reads its learning rate, which is on the host of a GPU.
    return {function: number for (_, function), number in syncs.items() if not function.endswith("._backward")}


def of_schedule(schedule: str, *batches: str) -> dict[str, dict[tuple[str, str], int]]:
    """Number of host synchronizations of a step of a language model, on the rank with the most, by batch."""
    ranks = run_ranks(watch_stages, 2, schedule, *batches)
    most = {batch: sorted((rank[batch] for rank in ranks), key=len)[-1] for batch in batches}
    return {batch: Counter(map(place, syncs)) for batch, syncs in most.items()}


def language_row(schedule: str, syncs: dict[tuple[str, str], int]) -> str:
    numbers = [sum(number for key, number in syncs.items() if key[0] == task) for task in LLM_TASKS]
    assert sum(numbers) == sum(syncs.values())
    return f"| `{schedule}` | {' | '.join(map(str, [*numbers, sum(numbers)]))} |"


def language_tables(found: dict[str, dict[tuple[str, str], int]]) -> str:
    lines = ["| schedule | `Prepare` | `ScheduleStep`, to the first forward | to the last backward | to its end "]
    lines[0] += "| `ScaleGradients` | `OptimStep` | in all |"
    lines += ["| --- |" + " --- |" * (len(LLM_TASKS) + 1)]
    lines += [language_row(schedule, syncs) for schedule, syncs in found.items()]
    lines += ["", "| task | function | the host reads |", "| --- | --- | --- |"]
    lines += [
        f"| {'`ScheduleStep`, to the last backward' if key[0] == STAGES else f'`{key[0]}`'} | `{key[1]}` | {reason} |"
        for key, reason in (LLM_REASONS | LLM_MASK_REASONS).items()
    ]
    return "\n".join(lines)


def tables(
    found: dict[str, dict[tuple[str, str], int]], dynamic: set[tuple[str, str]], torchrec: dict[str, int]
) -> str:
    lines = [
        f"| plan | {' | '.join(f'`{task}`' for task in TASKS)} | other tasks | in all |",
        "| --- |" + " --- |" * (len(TASKS) + 2),
    ]
    for plan, syncs in found.items():
        numbers = [sum(number for key, number in syncs.items() if key[0] == task) for task in TASKS]
        total = sum(syncs.values())
        lines.append(f"| `{plan}` | {' | '.join(map(str, [*numbers, total - sum(numbers), total]))} |")
    lines.append(f"| TorchRec's `TrainPipelineSparseDist` | {'| ' * len(TASKS)}| {sum(torchrec.values())} |")
    lines += ["", "| function of TorchRec | in a step |", "| --- | --- |"]
    lines += [f"| `{function}` | {number} |" for function, number in torchrec.items()]
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
    print(tables(by_plan(), of_dynamic_tables(), of_torchrec()))
    print()
    print(language_tables({schedule: of_schedule(schedule, "rows")["rows"] for schedule in SCHEDULES}))
