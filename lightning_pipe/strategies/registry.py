"""The strategies' names, as ``Trainer(strategy=...)`` takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry


@dataclass(frozen=True)
class RegisteredStrategy:
    """One name.

    Args:
        name: as ``Trainer`` takes it.
        description: one line.
        strategy: the class of ``lightning_pipe.strategies`` that the name stands for.
        init_args: its arguments.
        plan: name of the plan that it runs its tasks under.
    """

    name: str
    description: str
    strategy: str = "PipelineStrategy"
    init_args: dict[str, Any] = field(default_factory=dict)
    plan: str = "copy_ahead"


def _recsys(plan: str, ahead: str) -> RegisteredStrategy:
    description = f"TorchRec tables sharded{ahead}"
    return RegisteredStrategy(f"recsys_{plan}_pipeline", description, "RecsysPipelineStrategy", {"plan": plan}, plan)


def _llm(schedule: str, description: str) -> RegisteredStrategy:
    return RegisteredStrategy(
        f"llm_{schedule}_pipeline", description, "LLMPipelineStrategy", {"schedule": schedule}, "llm"
    )


STRATEGIES = (
    RegisteredStrategy("pipeline", "data parallelism with the next batch copied ahead, for any LightningModule"),
    _recsys("serial", ", one batch at a time"),
    _recsys("base", ", copy and input dist ahead"),
    _recsys("prefetch", "; copy, input dist and cache prefetch ahead"),
    _recsys("early_prefetch", "; the same, the prefetch in front of the lookup: for rows that come from a disk"),
    _recsys("fused_sparse_dist", "; copy and input dist ahead, and the lookup as soon as the tables are written"),
    _recsys("semi_sync", "; the lookup before the batch before has written the tables: one batch stale"),
    _recsys("auto", "; the plan found in the first iterations"),
    _llm("gpipe", "language model in stages: all forwards, then all backwards"),
    _llm("1f1b", "language model in stages: one forward, one backward in turn, fewer activations held"),
    _llm("interleaved_1f1b", "several stages a rank in loop order, a smaller bubble"),
    _llm("looped_bfs", "several stages a rank in loop order, all micro-batches through one before the next"),
    _llm("interleaved_zero_bubble", "several stages a rank, weights' backward put into the bubble"),
    _llm("zbv_zero_bubble", "two stages a rank in V order, weights' backward put into the bubble"),
    _llm("dualpipev", "two stages a rank in V order, DualPipeV's order of forwards and backwards, one at a time"),
    RegisteredStrategy(
        "llm_auto_pipeline",
        "language model in stages: schedule, stages, micro-batches and split chosen when training is set up",
        "AutoLLMPipelineStrategy",
        plan="llm",
    ),
    RegisteredStrategy(
        "in_process_pipeline",
        "an nn.Sequential over the devices of one process, without a launcher",
        "InProcessPipelineStrategy",
        plan="gpipe_forward",
    ),
)


def register() -> None:
    """Register every name with Lightning; again does nothing."""
    for entry in STRATEGIES:
        if entry.name not in StrategyRegistry:
            StrategyRegistry.register(entry.name, _Lazy(entry), description=entry.description, **entry.init_args)


class _Lazy:
    """Imports the strategy, and what it is built on, when a trainer asks for it."""

    def __init__(self, entry: RegisteredStrategy) -> None:
        self._entry = entry

    def __call__(self, **init_args: Any) -> Any:
        import lightning_pipe.strategies as strategies

        return getattr(strategies, self._entry.strategy)(**init_args)
