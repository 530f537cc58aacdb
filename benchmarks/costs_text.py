"""Task costs as YAML for ``lightning-pipe plan simulate``."""

from __future__ import annotations

from typing import Any

import yaml

from lightning_pipe.engine.planning.costs import TaskCost
from lightning_pipe.engine.planning.costs_yaml import CostsSpec
from lightning_pipe.engine.planning.network import Collective


def dump_costs(costs: CostsSpec) -> str:
    """YAML text from which ``parse_costs_yaml`` reads the same costs, up to rounding to six digits."""
    content: dict[str, Any] = {}
    if costs.between_periods:
        content["between_ms"] = _short(1e3 * costs.between_periods)
    if costs.cores is not None:
        content["cores"] = costs.cores
    if costs.device_streams:
        content["device_streams"] = True
    network: dict[str, str] = {}
    if costs.latency is not None:
        network["latency"] = f"{_short(1e6 * costs.latency)}us"
    if costs.bandwidth is not None:
        network["bandwidth"] = f"{_short(costs.bandwidth / 1e6)}MB/s"
    if network:
        content["network"] = network
    content["tasks"] = {name: _entry(cost) for name, cost in costs.tasks.items()}
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def _entry(cost: TaskCost) -> dict[str, Any]:
    entry: dict[str, Any] = {"ms": _short(1e3 * cost.seconds)}
    if cost.resource != "compute":
        entry["resource"] = cost.resource
    if cost.launch:
        entry["launch_ms"] = _short(1e3 * cost.launch)
    if isinstance(cost.background, Collective):
        entry[cost.background.kind] = f"{round(cost.background.bytes)}B"
    elif cost.background:
        entry["background_ms"] = _short(1e3 * cost.background)
    if cost.background and cost.background_resource != "network":
        entry["background_resource"] = cost.background_resource
    if cost.background and cost.waited_by is not None:
        entry["waited_by"] = cost.waited_by
    return entry


def _short(value: float) -> float:
    return float(f"{value:.6g}")
