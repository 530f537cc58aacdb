"""``torch.compile`` of a stage's layers, each separately and in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_pipe._compat.compiled_backward import inductor_with_split_backward
from lightning_pipe._compat.torch import set_donated_buffers
from lightning_pipe.llm.model.stage_module import PassThroughModule, StageModule


def compile_layers(stage: StageModule, layers: Iterable[str], *, split_backward: bool = False, **options: Any) -> None:
    """Compile a stage's own layers in place, without changing modules or names.

    Call it after :func:`~lightning_pipe.llm.model.activation_checkpoint.apply_activation_checkpoint` and before
    ``fully_shard``, whose hooks stay outside of the graphs. Layers of one class share their graphs, also across the
    stages of a rank, if shapes and the settings that their forward reads are the same. Training, evaluation and each
    way of calling a layer have separate graphs. Beyond ``recompile_limit`` (8) graphs, layers run uncompiled.

    *Variable lengths.* ``dynamic=None``, the default, is best in most cases: it compiles the first length statically
    and the second dynamically, for any length. ``dynamic=True`` skips the static compilation. ``dynamic=False``
    compiles each length separately, which gives the fastest code for few lengths: use it with the strategy's static
    lengths, or with fewer buckets than ``recompile_limit``.

    *Backward in two parts.* With ``split_backward``, Inductor compiles a backward as two graphs, which compute the
    gradients of the inputs and those of the weights when a zero-bubble schedule or DualPipeV asks for them. Other
    backends, and layers that a model compiles itself, have one backward for both, which these schedules run twice. All
    of them need :func:`disable_donated_buffers` before the first step.

    *Random numbers.* Inductor draws other random numbers than eager mode, unless
    ``torch._inductor.config.fallback_random`` is set.
    """
    if split_backward and options.get("backend", "inductor") == "inductor":
        options["backend"] = inductor_with_split_backward
    for name in layers:
        layer = stage.module.get_submodule(name)
        if not isinstance(layer, PassThroughModule):
            layer.compile(**options)


def disable_donated_buffers() -> Callable[[], None]:
    """Make later compiled graphs support more than one backward, as schedules with two-part backwards need.

    Without this setting such a backward raises, since compiled code may overwrite its saved tensors ("donated"
    buffers). The setting is PyTorch's ``torch._functorch.config.donated_buffer``, for the calling thread, which must be
    the thread that runs the schedule. Graphs compiled with another setting are discarded.
    """
    before = set_donated_buffers(False)
    if before:
        torch.compiler.reset()  # later layers would reuse earlier graphs, which have donated buffers

    def restore_donated_buffer_setting() -> None:
        set_donated_buffers(before)

    return restore_donated_buffer_setting
