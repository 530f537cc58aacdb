"""Thin Lightning strategies: set-up, sharding, checkpoints, teardown; and their names."""

from typing import TYPE_CHECKING, Any

from lightning_pipe.strategies.pipeline import PipelineStrategy

if TYPE_CHECKING:
    from lightning_pipe.strategies.recsys import RecsysPipelineStrategy

__all__ = ["PipelineStrategy", "RecsysPipelineStrategy"]


def __getattr__(name: str) -> Any:
    # TorchRec is imported when its strategy is asked for, so that the others work without it.
    if name == "RecsysPipelineStrategy":
        from lightning_pipe.environment import import_torchrec

        import_torchrec()
        from lightning_pipe.strategies.recsys import RecsysPipelineStrategy

        return RecsysPipelineStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
