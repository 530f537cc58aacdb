"""Predicted step times of a profiled recommender: on its own machine, on a slower network, and with rows on a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.planning.costs import Machine
from lightning_pipe.engine.planning.network import Collective, NetworkModel
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import TaskSchedule
from lightning_pipe.engine.profiling.profile import THIS_MACHINE
from lightning_pipe.recsys.batches.traversal import iterate_leaves
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, recsys_costs, recsys_machine
from lightning_pipe.recsys.tasks.declarations import TASKS

LINK = "between ranks on a link of 1 Gbit/s"
DISK = "with rows on a disk"
_PLANS = ("serial", "base", "prefetch")
_LINK_LATENCY, _LINK_BANDWIDTH = 50e-6, 125e6  # seconds; bytes per second
# Seconds of a random read of an NVMe disk, and reads at the same time, as in ``RocksDbStore``.
_READ_SECONDS, _READERS = 100e-6, 8


@dataclass(frozen=True)
class StepSizes:
    """Message of each task for one rank and batch, and the number of different rows that the batch looks up."""

    messages: Mapping[str, Collective]
    rows: int


def compute_step_sizes(sharded: ShardedModel, batch: Any) -> StepSizes | None:
    """Sizes of the messages of a step, without options for the wire; None if no KJT has a feature of a table."""
    kjts = [leaf for _, leaf in iterate_leaves(batch) if isinstance(leaf, KeyedJaggedTensor)]
    ids_bytes, output_bytes, rows = 0, 0, 0
    for table in sharded.tables.values():
        ids = []
        for kjt in kjts:
            for key in set(table.config.feature_names) & set(kjt.keys()):
                feature = kjt[key]
                ids.append(feature.values())
                ids_bytes += feature.values().nbytes + feature.lengths().nbytes
                if feature.weights_or_none() is not None:
                    ids_bytes += feature.weights().nbytes
                is_pooled = isinstance(table.config, EmbeddingBagConfig)
                outputs = (feature.lengths() if is_pooled else feature.values()).numel()
                output_bytes += 4 * outputs * table.config.embedding_dim
        rows += torch.cat(ids).unique().numel() if ids else 0
    if not ids_bytes:
        return None
    dense_bytes = sum(parameter.nbytes for _, parameter in sharded.dense_parameters())
    outputs_message = Collective("all_to_all", output_bytes)
    messages = {
        "EmbInputDistStart": Collective("all_to_all", 8 * len(sharded.tables)),
        "EmbInputDistWait": Collective("all_to_all", ids_bytes),
        "EmbForward": outputs_message,
        "EmbBackward": outputs_message,
        "DenseBackward": Collective("all_reduce", dense_bytes),
    }
    return StepSizes(messages, rows)


def predict_step_times(
    plan: PipelinePlan,
    task_times: Mapping[str, float],
    sizes: StepSizes | None,
    *,
    ranks: int,
    device: torch.device,
    on_disk: bool,
) -> dict[str, dict[str, float]]:
    """Simulate the serial, base and prefetch plans, and *plan*, from the times of its tasks in a serial order.

    If *plan* has tasks of the user, only the serial plan and *plan* are simulated.

    Args:
        plan: plan in use.
        task_times: seconds of each task in serial order, waits included.
        sizes: messages and rows of a step; None predicts only the machine of the profile.
        ranks: number of ranks of the profile.
        device: device of the tables.
        on_disk: True if rows are read from a disk already.

    Returns:
        Seconds of an iteration by plan, for the machine of the profile and for others.
    """
    tasks = list(plan.tasks.values())
    if set(plan.tasks) <= {task.name for task in TASKS}:
        others = [other for other in hand_written_plans(tasks) if other.name in _PLANS]
    else:  # only the user knows where to run own tasks
        others = [PipelinePlan([(task, TaskSchedule()) for task in tasks], name="serial")]
    plans = [*(other for other in others if other.name != plan.name), plan]
    plans.sort(key=lambda each: [*_PLANS, each.name].index(each.name))
    costs = recsys_costs(task_times, peers=ranks > 1, device=device)
    machine = recsys_machine(device)
    predicted = {THIS_MACHINE: _simulate_plans(plans, costs, machine)}
    if sizes is None:
        return predicted
    network = NetworkModel(_LINK_LATENCY, _LINK_BANDWIDTH, max(2, ranks))
    messages = {task: message for task, message in sizes.messages.items() if task in task_times}
    # The waits for messages on this machine remain: its cores move the messages, and would also for a link.
    remote_costs = recsys_costs(task_times, peers=True, device=device, waits={}, sent=messages)
    predicted[LINK] = _simulate_plans(plans, remote_costs, replace(machine, cores=1.0, network=network))
    if not on_disk and "EmbPrefetch" in costs:
        read = sizes.rows * _READ_SECONDS / _READERS
        prefetch = replace(costs["EmbPrefetch"], seconds=costs["EmbPrefetch"].seconds + read, resource="disk")
        predicted[DISK] = _simulate_plans(plans, {**costs, "EmbPrefetch": prefetch}, machine)
    return predicted


def _simulate_plans(plans: Sequence[PipelinePlan], costs: Mapping[str, Any], machine: Machine) -> dict[str, float]:
    return {plan.name: simulate(plan, costs, machine).seconds_per_iteration for plan in plans}
