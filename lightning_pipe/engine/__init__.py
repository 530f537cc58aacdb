"""Tasks say what to compute, a plan says when and where, one engine runs them. Pure PyTorch."""

from lightning_pipe.engine.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.errors import InputError, PipelineError, PlanError, SetupError, TaskError
from lightning_pipe.engine.pipeline import SWPipeline
from lightning_pipe.engine.plan import PipelinePlan, TaskSchedule
from lightning_pipe.engine.profile import ProfileResult, TaskProfile
from lightning_pipe.engine.profiler import TaskProfiler
from lightning_pipe.engine.sequencer import submitted
from lightning_pipe.engine.task import DeclaredIO, IterContext, PipelineTask, State
from lightning_pipe.engine.trace import TaskSpan

__all__ = [
    "DeclaredIO",
    "Dependency",
    "InputError",
    "IterContext",
    "PipelineError",
    "PipelinePlan",
    "PipelineTask",
    "PlanError",
    "ProfileResult",
    "SWPipeline",
    "SetupError",
    "State",
    "TaskError",
    "TaskProfile",
    "TaskProfiler",
    "TaskSchedule",
    "TaskSpan",
    "required_dependencies",
    "submitted",
]
