"""What tasks cost in other plans, made of what they took in the serial one."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Collective
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.task import PipelineTask
from lightning_pipe.recsys.plans.recsys_plans import PLANS
from lightning_pipe.recsys.tasks.actions import DENSE_PARAMETERS
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans, recsys_costs, recsys_machine
from lightning_pipe.recsys.tasks.declarations import TASKS
from lightning_pipe.recsys.tasks.task_list import recsys_tasks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMES = [task.name for task in recsys_tasks()]
OWN = dict(zip(NAMES, (1.0, 1.0, 2.0, 3.0, 4.0, 2.0, 0.5, 5.0, 3.0, 2.0, 0.5), strict=True))
# Rows that take longer than any other task, as from a disk.
SLOW_ROWS = {**OWN, "EmbPrefetch": 9.0}
# Of these, waiting for other ranks.
WAITS = {"EmbInputDistWait": 1.5, "EmbPrefetch": 2.0, "EmbForward": 1.0, "EmbBackward": 1.0, "FinalizeGrads": 1.5}
SERIAL, BASE, THREADED, PREFETCH, FUSED = hand_written_plans(recsys_tasks())
ONE = Machine(cores=1)


def seconds(plan: object, costs: dict[str, TaskCost], machine: Machine = ONE) -> float:
    return simulate(plan, costs, machine).seconds_per_iteration  # type: ignore[arg-type]


def test_the_serial_plan_takes_what_it_took() -> None:
    draw = random.Random(1)
    for late in (False, True):
        tasks = recsys_tasks(scaled_late=late)
        serial = hand_written_plans(tasks)[0]
        for _ in range(40):
            own = {task.name: draw.choice((0.0, draw.random(), 10 * draw.random())) for task in tasks}
            waits = {name: draw.choice((0.0, 0.01, draw.random(), 1.0)) * own[name] for name in own if name in WAITS}
            for known in (None, waits):
                costs = recsys_costs(own, peers=True, device=CPU, waits=known)
                assert seconds(serial, costs) == pytest.approx(sum(own.values())), (own, waits, known)


def test_plans_that_look_up_ahead_are_tried_where_lookups_read_tables_alone_and_stale_ones_nowhere() -> None:
    tried = [plan.name for plan in (SERIAL, BASE, THREADED, PREFETCH, FUSED)]
    assert tried == [name for name in PLANS if name not in ("semi_sync", "early_prefetch", "compute_ahead")]
    on_disk = [plan.name for plan in hand_written_plans(recsys_tasks(), on_disk=True)]
    assert on_disk == [name for name in PLANS if name not in ("semi_sync", "compute_ahead")]
    divided = recsys_tasks(divided=True)
    assert [plan.name for plan in hand_written_plans(divided)] == [*tried, "compute_ahead"]
    assert [plan.name for plan in hand_written_plans(divided, can_divide=False)] == tried
    reading_more = [
        PipelineTask(task.name, task.fn, reads=(*task.reads, DENSE_PARAMETERS), writes=task.writes)
        if task.name == "EmbForward"
        else task
        for task in recsys_tasks()
    ]
    assert [plan.name for plan in hand_written_plans(reading_more)] == [
        *("serial", "base", "threaded_input", "prefetch")
    ]


def test_waits_for_messages_are_hidden_by_plans_that_run_ahead_and_work_is_not() -> None:
    costs = recsys_costs(OWN, peers=True, device=CPU, waits=WAITS)
    whole = sum(OWN.values())
    # Splits arrive during the forward pass, or during a copy of 1; lengths and values while another batch is trained.
    for plan, hidden in ((BASE, WAITS["EmbInputDistWait"]), (PREFETCH, 1.0)):
        assert seconds(plan, costs) == pytest.approx(whole - hidden - WAITS["EmbPrefetch"])
    assert costs["EmbInputDistWait"] == TaskCost(0.5, background=2.0, waited_by="EmbPrefetch")
    assert costs["EmbForward"] == TaskCost(3.0, background=1.0, waited_by="EmbForward")


def test_with_sizes_a_network_gives_the_seconds() -> None:
    sent = {
        "EmbForward": Collective("all_to_all", 1e6),
        "DenseBackward": Collective("all_reduce", 2e6),
        "LossPostprocess": Collective("all_reduce", 4),
    }
    costs = recsys_costs(OWN, peers=True, device=CPU, waits=WAITS, sent=sent)
    assert costs["EmbForward"] == TaskCost(3.0, background=sent["EmbForward"], waited_by="EmbForward")
    assert costs["DenseBackward"] == TaskCost(5.0, background=sent["DenseBackward"], waited_by="FinalizeGrads")
    assert costs["EmbBackward"] == TaskCost(2.0)
    # The check of the loss on all ranks waits by itself.
    assert costs["LossPostprocess"] == TaskCost(0.5, background=sent["LossPostprocess"], waited_by="LossPostprocess")


def test_ranks_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert recsys_machine(CPU) == Machine(cores=6.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert recsys_machine(CPU, 0.1) == Machine(cores=1.5, between_periods=0.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "12")
    assert recsys_machine(CPU).cores == 1.0
    assert recsys_machine(CUDA) == Machine(cores=1.0, device_streams=True)


def test_where_rows_are_slow_a_plan_is_proposed_that_is_predicted_to_be_faster_than_the_hand_written_ones() -> None:
    by_hand = [SERIAL, BASE, THREADED, PREFETCH, FUSED]
    costs, machine = recsys_costs(SLOW_ROWS, peers=True, device=CPU), recsys_machine(CPU, 0.5)
    plans = propose_plans(by_hand, SLOW_ROWS, 0.5, max_in_flight=3, peers=True, device=CPU, max_plans=2)
    assert len(plans) == 2
    assert seconds(plans[0], costs, machine) < min(seconds(plan, costs, machine) for plan in by_hand)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_proposed_plans_leave_the_trained_batch_and_its_hooks_in_their_place(device: torch.device) -> None:
    by_hand = [SERIAL, BASE, THREADED, PREFETCH]
    plans = propose_plans(by_hand, SLOW_ROWS, 0.0, max_in_flight=3, peers=True, device=device, max_plans=20)
    assert plans
    for plan in plans:
        assert plan.pipeline_depth <= 3
        for task in TASKS:
            if task.trains and task.name in plan.tasks:
                assert plan.schedule[task.name].stage == 0
                assert plan.schedule[task.name].thread_group == "main"
                assert plan.order.index("H2DAndShuffle") < plan.order.index(task.name)
