"""Arguments of strategies in former versions, which are fields of option groups now.

Tested in ``tests/strategies/recommender/test_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_pipe.engine import SetupError

__all__ = ["RECOMMENDER", "refuse_renamed"]

# Former arguments of the strategy for recommenders, and the fields that they have become.
RECOMMENDER = {
    "sharding_plan": "sharding.plan",
    "constraints": "sharding.constraints",
    "topology": "sharding.topology",
    "replicas": "sharding.replicas",
    "sync_every": "sharding.sync_every",
    "quantized_comms": "wire.quantized_comms",
    "ids_on_wire": "wire.ids",
    "free_features_early": "memory.free_features_early",
    "validate_ids": "checks.validate_ids",
    "detect_nan": "checks.detect_nan",
    "exploration": "auto.exploration",
    "max_in_flight": "auto.max_in_flight",
    "save_plan": "auto.save_plan",
    "pipelined_evaluation": "rewrite.evaluation",
}


def refuse_renamed(arguments: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
    """Refuse arguments of former versions.

    Args:
        arguments: what a strategy was given beside its own arguments.
        renamed: former argument to the field that it has become, ``group.field``.

    Raises:
        SetupError: names them, with YAML that gives the same values to the fields that they have become.
    """
    former = [name for name in arguments if name in renamed]
    if not former:
        return
    groups: dict[str, dict[str, Any]] = {}
    for name in former:
        group, field = renamed[name].split(".")
        groups.setdefault(group, {})[field] = _plain(arguments[name])
    raise SetupError(
        f"{', '.join(former)} {'is' if len(former) == 1 else 'are'} given, but expected are the option groups"
        f" {', '.join(groups)}; give the same values as:\n{yaml.safe_dump(groups, sort_keys=False)}"
    )


def _plain(value: Any) -> Any:
    """The value as YAML can write it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
