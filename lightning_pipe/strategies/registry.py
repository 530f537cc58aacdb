"""The strategies' names, as ``Trainer(strategy=...)`` takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe.strategies.pipeline import PipelineStrategy


@dataclass(frozen=True)
class RegisteredStrategy:
    """One name.

    Args:
        name: as ``Trainer`` takes it.
        description: one line.
        init_args: arguments of the class that the name stands for.
        plan: name of the recsys plan, empty where the strategy has none.
    """

    name: str
    description: str
    init_args: dict[str, Any] = field(default_factory=dict)
    plan: str = ""


STRATEGIES = (
    RegisteredStrategy("pipeline", "data parallelism with the next batch copied ahead, for any LightningModule"),
    RegisteredStrategy(
        "recsys_serial_pipeline", "TorchRec tables sharded, one batch at a time", {"plan": "serial"}, "serial"
    ),
    RegisteredStrategy(
        "recsys_base_pipeline", "TorchRec tables sharded, copy and input dist ahead", {"plan": "base"}, "base"
    ),
    RegisteredStrategy(
        "recsys_prefetch_pipeline",
        "TorchRec tables sharded; copy, input dist and cache prefetch ahead",
        {"plan": "prefetch"},
        "prefetch",
    ),
)


def register() -> None:
    """Register every name with Lightning; again does nothing."""
    for entry in STRATEGIES:
        if entry.name not in StrategyRegistry:
            StrategyRegistry.register(entry.name, _Lazy(entry), description=entry.description, **entry.init_args)


class _Lazy:
    """Imports the recsys strategy, and with it TorchRec, when a trainer asks for it."""

    def __init__(self, entry: RegisteredStrategy) -> None:
        self._entry = entry

    def __call__(self, **init_args: Any) -> Any:
        if not self._entry.plan:
            return PipelineStrategy(**init_args)
        from lightning_pipe.strategies import RecsysPipelineStrategy

        return RecsysPipelineStrategy(**init_args)
