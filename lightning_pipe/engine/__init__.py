"""Engine for software pipelines: tasks define the work, a plan schedules it, and the engine runs it. Pure PyTorch.

Sub-packages, lowest first: ``common``, ``plans``, ``observe``, ``ranks``, ``runtime``, ``planning``, ``profiling``.
"""

from lightning_pipe.engine.common.errors import InputError, PipelineError, PlanError, SetupError, TaskError
from lightning_pipe.engine.observe.trace import TaskSpan
from lightning_pipe.engine.plans.dependencies import Dependency
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import TaskSchedule
from lightning_pipe.engine.plans.spec import PlanSpec
from lightning_pipe.engine.plans.task import DeclaredIO, IterContext, PipelineTask, State, TrainingContext
from lightning_pipe.engine.profiling.profile import ProfileResult, TaskProfile
from lightning_pipe.engine.profiling.profiler import TaskProfiler
from lightning_pipe.engine.runtime.pipeline import SWPipeline

__all__ = [
    "DeclaredIO",
    "Dependency",
    "InputError",
    "IterContext",
    "PipelineError",
    "PipelinePlan",
    "PipelineTask",
    "PlanError",
    "PlanSpec",
    "ProfileResult",
    "SWPipeline",
    "SetupError",
    "State",
    "TaskError",
    "TaskProfile",
    "TaskProfiler",
    "TaskSchedule",
    "TaskSpan",
    "TrainingContext",
]
