"""Lightning's loops, driven by the engine. For hooks, callbacks and loggers they behave like Lightning's own loops.

The source of batches is in ``data``, the tasks of an iteration are in ``programs``, and the subclasses of Lightning's
loops are in this folder. This package does not depend on TorchRec, model stages, or the pipe.
"""

from lightning_pipe.loops.evaluation_loop import PipelineEvaluationLoop
from lightning_pipe.loops.programs.program import EvaluationProgram, TrainingProgram
from lightning_pipe.loops.training_epoch_loop import PipelineTrainingEpochLoop

__all__ = [
    "EvaluationProgram",
    "PipelineEvaluationLoop",
    "PipelineTrainingEpochLoop",
    "TrainingProgram",
]
