"""Files of costs: what they say, and what is wrong with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.costs_text import dump_costs
from lightning_pipe.engine import PlanError
from lightning_pipe.engine.planning.costs import TaskCost
from lightning_pipe.engine.planning.costs_yaml import CostsSpec, parse_costs_yaml
from lightning_pipe.engine.planning.network import Collective

FULL = CostsSpec(
    {
        "Copy": TaskCost(0.0004, "copy", launch=0.00001),
        "Exchange": TaskCost(0.0001, background=Collective("all_to_all", 2e6), waited_by="Train"),
        "Lookup": TaskCost(0.0002, background=0.0003, waited_by="Lookup"),
        "Fetch": TaskCost(0.0002, background=0.0003, background_resource="disk", waited_by="Train"),
        "Train": TaskCost(0.005, "host"),
    },
    between_periods=0.0002,
    cores=1.5,
    device_streams=True,
    latency=30e-6,
    bandwidth=1e9,
)


def test_costs_come_back_as_they_were_written() -> None:
    found = parse_costs_yaml(dump_costs(FULL))
    assert found.latency == pytest.approx(FULL.latency)
    assert replace(found, latency=FULL.latency) == FULL
    assert FULL.has_messages


def test_only_tasks_are_needed_and_a_number_is_milliseconds() -> None:
    found = parse_costs_yaml("tasks: {Train: 5, Send: {all_reduce: 2MB}, Rest: {}}")
    assert found.tasks == {
        "Train": TaskCost(0.005),
        "Send": TaskCost(0.0, background=Collective("all_reduce", 2e6)),
        "Rest": TaskCost(0.0),
    }
    assert found == CostsSpec(found.tasks)
    assert not parse_costs_yaml("tasks: {Train: 5, Send: {background_ms: 2}}").has_messages


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks: [", "not valid YAML"),
        ("- 5", r"the file of costs is \[5\]; expected a mapping of between_ms"),
        ("cores: 2", "'tasks' of the costs must be a mapping from tasks to costs, got None"),
        ("tasks: {Train: 5}\ntask: {}", "unknown key 'task'; known keys are between_ms"),
        ("tasks: {Train: 5, Train: 6}", "repeats the key 'Train'; write it once"),
        ("tasks: {Train: fast}", "task 'Train' of the costs is 'fast'; expected a mapping of ms"),
        ("tasks: {Train: -5}", "ms of task 'Train' of the costs must be a number from 0 to 1e\\+09, got -5"),
        ("tasks: {Train: {ms: .nan}}", "must be a number from 0 .* got nan"),
        ("tasks: {Train: {ms: true}}", "must be a number from 0 .* got True"),
        (
            "tasks: {Train: {ms: 5, resource: gpu}}",
            "'Train' of the costs is not valid: .* is 'gpu', which is unknown. Use one of",
        ),
        ("tasks: {Train: {all_to_all: 2 apples}}", "'Train' of the costs: the size is '2 apples'"),
        ("tasks: {Train: {all_to_all: 1MB, all_reduce: 1MB}}", "has all_to_all and all_reduce, expected at most one"),
        ("tasks: {Train: 5}\ndevice_streams: 1", "device_streams of the costs is 1; expected one of False, True"),
        (
            "tasks: {Train: 5}\nnetwork: fast",
            "network of the costs is 'fast'; expected a mapping of latency",
        ),
        ("tasks: {Train: 5}\nnetwork: {latency: 5}", "the time is '5'; expected a number of at least 0 with a unit"),
        ("tasks: {Train: 5}\nnetwork: {bandwidth: 0}", "the bandwidth is '0'"),
    ],
)
def test_a_wrong_file_is_refused_by_what_was_found_and_what_is_needed(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_costs_yaml(text)
