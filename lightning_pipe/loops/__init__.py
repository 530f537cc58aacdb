"""Lightning's loops, driven by the engine: hooks, callbacks and loggers see an ordinary loop.

The source of batches is in ``data``, the tasks of an iteration are in ``programs``, and the subclasses of Lightning's
loops are beside them. Nothing here knows TorchRec, stages of a model, or the pipe.
"""

from lightning_pipe.loops.data.ledger import InFlightLedger, LedgerEntry
from lightning_pipe.loops.evaluation_loop import PipelineEvaluationLoop, PipelinePredictionLoop
from lightning_pipe.loops.fit_loop import PipelineFitLoop
from lightning_pipe.loops.programs.program import EvaluationProgram, TrainingProgram
from lightning_pipe.loops.training_epoch_loop import PipelineTrainingEpochLoop

__all__ = [
    "EvaluationProgram",
    "InFlightLedger",
    "LedgerEntry",
    "PipelineEvaluationLoop",
    "PipelineFitLoop",
    "PipelinePredictionLoop",
    "PipelineTrainingEpochLoop",
    "TrainingProgram",
]
