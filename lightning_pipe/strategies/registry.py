"""Names of the strategies for ``Trainer(strategy=...)``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry


@dataclass(frozen=True)
class RegisteredStrategy:
    """Name of a strategy with arguments."""

    name: str
    description: str
    strategy: str = "PipelineStrategy"
    init_args: dict[str, Any] = field(default_factory=dict)
    plan: str = "copy_ahead"


def _make_recsys_registry_entry(plan: str, ahead: str) -> RegisteredStrategy:
    description = f"TorchRec tables sharded{ahead}"
    return RegisteredStrategy(f"recsys_{plan}_pipeline", description, "RecsysPipelineStrategy", {"plan": plan}, plan)


def _make_llm_registry_entry(schedule: str, description: str) -> RegisteredStrategy:
    return RegisteredStrategy(
        f"llm_{schedule}_pipeline", description, "LLMPipelineStrategy", {"schedule": schedule}, "llm"
    )


STRATEGIES = (
    RegisteredStrategy("pipeline", "data parallelism with the next batch copied ahead, for any LightningModule"),
    _make_recsys_registry_entry("serial", ", one batch at a time"),
    _make_recsys_registry_entry("base", ", copy and input dist ahead"),
    _make_recsys_registry_entry("threaded_input", "; copy and input dist of the next batch in a worker thread"),
    _make_recsys_registry_entry("prefetch", "; copy, input dist and cache prefetch ahead"),
    _make_recsys_registry_entry(
        "early_prefetch", "; as prefetch, with the prefetch before the previous batch's lookup, for rows on disk"
    ),
    _make_recsys_registry_entry(
        "fused_sparse_dist", "; copy and input dist ahead, and the lookup as soon as the tables are updated"
    ),
    _make_recsys_registry_entry(
        "compute_ahead",
        "; rows of the next batch that this one does not train are looked up and sent meanwhile, exact",
    ),
    _make_recsys_registry_entry(
        "semi_sync", "; the lookup before the previous batch has updated the tables: one batch stale"
    ),
    _make_recsys_registry_entry("auto", "; the fastest plan of a search in the first iterations"),
    _make_llm_registry_entry("gpipe", "language model in stages: all forwards, then all backwards"),
    _make_llm_registry_entry(
        "1f1b", "language model in stages: one forward and one backward in turn, with less memory for activations"
    ),
    _make_llm_registry_entry("interleaved_1f1b", "several stages per rank in loop order, with a smaller bubble"),
    _make_llm_registry_entry(
        "looped_bfs", "several stages per rank in loop order: all micro-batches through a stage before the next"
    ),
    _make_llm_registry_entry(
        "interleaved_zero_bubble", "several stages per rank, with the backward of weights in the bubble"
    ),
    _make_llm_registry_entry(
        "zbv_zero_bubble", "two stages per rank in V order, with the backward of weights in the bubble"
    ),
    _make_llm_registry_entry(
        "dualpipev",
        "two stages per rank in V order; with shared experts, a forward and a backward overlap",
    ),
    RegisteredStrategy(
        "llm_auto_pipeline",
        "language model in stages: schedule, stages, micro-batches and split chosen at set-up",
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


def register_strategies() -> None:
    """Register every name with Lightning. Repeated calls have no effect."""
    for entry in STRATEGIES:
        if entry.name not in StrategyRegistry:
            StrategyRegistry.register(
                entry.name, _LazyStrategyFactory(entry), description=entry.description, **entry.init_args
            )


class _LazyStrategyFactory:
    """Imports the strategy and its dependencies when a trainer requests it."""

    def __init__(self, entry: RegisteredStrategy) -> None:
        self._entry = entry

    def __call__(self, **init_args: Any) -> Any:
        import lightning_pipe.strategies as strategies

        return getattr(strategies, self._entry.strategy)(**init_args)
