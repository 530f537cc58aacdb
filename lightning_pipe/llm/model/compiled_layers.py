"""``torch.compile`` of a stage's layers, each by itself, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._functorch.config

from lightning_pipe.llm.model.stage_module import PassThrough, StageModule

__all__ = ["compile_layers", "keep_backward_buffers"]


def compile_layers(stage: StageModule, layers: Iterable[str], **options: Any) -> None:
    """Compile a stage's own layers in place: modules, and the names of what is in them, are what they were.

    Call it after :func:`~lightning_pipe.llm.model.activation_checkpoint.checkpoint_layers` and before ``fully_shard``,
    whose hooks stay outside of the graphs. Layers of one class share their graphs, also those of a rank's several
    stages, as far as shapes and the settings their forward reads are the same: training, evaluation and each way of
    calling a layer are graphs of their own, and beyond ``recompile_limit`` (8) layers run uncompiled.

    *Variable lengths.* ``dynamic=None``, the default, is best in most cases: the first length is compiled as it is, the
    second once more for any length, and that is all. ``dynamic=True`` saves the first of the two. ``dynamic=False``
    compiles each length anew, for the fastest code where there are at most a few: use it with the strategy's static
    lengths, or with fewer buckets than ``recompile_limit``.

    *Backward in two parts.* A compiled layer's backward is one node of the graph, which gives the gradients of inputs
    and of weights together; so zero-bubble schedules and DualPipeV run all of it twice, and need
    :func:`keep_backward_buffers` before the first step. Prefer 1F1B or interleaved 1F1B with compiled layers.

    *Random numbers.* Those that inductor draws are not eager's, unless ``torch._inductor.config.fallback_random`` is
    set.

    Args:
        stage: of the model.
        layers: FQNs of the whole model's layers.
        options: of ``torch.compile``: ``backend``, ``mode``, ``fullgraph``, ``dynamic``, ``recompile_limit``, ...
    """
    for name in layers:
        layer = stage.module.get_submodule(name)
        if not isinstance(layer, PassThrough):
            layer.compile(**options)


def keep_backward_buffers() -> Callable[[], None]:
    """From now on, compile graphs whose backward may run more than once, as schedules with two-part backwards need.

    Without it such a backward raises, since compiled code may write over what was saved for it ("donated" buffers).
    The setting is PyTorch's ``torch._functorch.config.donated_buffer``, for the calling thread, which must be the one
    that runs the schedule. What was compiled before is discarded if it was compiled otherwise.

    Returns:
        A function that puts the setting back.
    """
    before = torch._functorch.config.donated_buffer

    def put_back() -> None:
        torch._functorch.config.donated_buffer = before

    if before:
        torch.compiler.reset()  # layers to come would find graphs of earlier ones, which have donated buffers
        torch._functorch.config.donated_buffer = False
    return put_back
