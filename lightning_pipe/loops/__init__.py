"""Lightning's training loop, driven by the engine: hooks, callbacks and loggers see an ordinary loop."""

from lightning_pipe.loops.fit_loop import PipelineFitLoop
from lightning_pipe.loops.ledger import InFlightLedger, LedgerEntry
from lightning_pipe.loops.program import TrainingProgram
from lightning_pipe.loops.training_epoch_loop import PipelineTrainingEpochLoop

__all__ = ["InFlightLedger", "LedgerEntry", "PipelineFitLoop", "PipelineTrainingEpochLoop", "TrainingProgram"]
