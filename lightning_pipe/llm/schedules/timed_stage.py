"""A pipeline stage that notes when it did what, the same for every schedule, and that every schedule can run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage

from lightning_pipe._compat.torch import is_view
from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar

__all__ = ["TimedStage", "median_durations"]


class TimedStage(PipelineStage):
    """PyTorch's stage, which notes its forwards and backwards, and the waits before them.

    Schedules wait in places of their own, for what the stage only made operations for. So a wait is measured between
    two calls of stages: it begins when the rank's last forward or backward ended, or, if that was later, when this
    stage was asked what to receive; it ends when the forward or backward begins that needs what was received. In it are
    microseconds of the schedule's own, and an FSDP stage's wait for its gathered parameters. Waits until neighbours
    have taken what was sent are counted only where a schedule waits for both together, as 1F1B does.

    On an accelerator each time is taken after the work in the current stream is done, so that what is noted is true;
    this costs the overlap of launching with running, while events are recorded.

    Args:
        args: PyTorch's.
        events: what is noted goes here, appended; one list for all stages of a rank. Times are seconds of
            ``time.perf_counter``; the stage does not know its rank and pipeline, which are 0 in its bars.
        recording: whether to note anything, asked before each forward or backward.
        on_failure: told what a forward has raised. The stage then goes on with zeros, since neighbours wait for its
            output; in the last stage's place, for a loss. None to let it be raised.
        kwargs: PyTorch's.
    """

    def __init__(
        self,
        *args: Any,
        events: list[Bar],
        recording: Callable[[], bool],
        on_failure: Callable[[Exception], object] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._events = events
        self._recording = recording
        self._on_failure = on_failure
        given = kwargs["output_args"]
        self._outputs_like: tuple[torch.Tensor, ...] = given if isinstance(given, tuple) else (given,)
        self._asked = 0.0

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing: PyTorch's drops gradients that FSDP accumulates, as if a real step had been run to find shapes."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        except Exception as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)
            return self._zeros(args)

    def _zeros(self, args: tuple[Any, ...]) -> Any:
        """An output that gradients flow through, to the inputs there are."""
        likes = (torch.zeros(()),) if self.is_last else self._outputs_like
        outputs = []
        for like in likes:
            wanted = torch.is_grad_enabled() and (like.requires_grad or self.is_last)
            zeros = torch.zeros(like.shape, dtype=like.dtype, device=self.device, requires_grad=wanted)
            for value in args if wanted else ():
                if value.is_floating_point():
                    zeros = zeros + value.flatten()[:0].sum().to(zeros)  # 0, also where the value is not finite
            outputs.append(zeros)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._asked = time.perf_counter()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._asked = time.perf_counter()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        def forward() -> Any:
            return super(TimedStage, self).forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

        received = not self.is_first and not self._is_same_rank(self.stage_index - 1)
        return self._note("forward", fwd_chunk_id, "wait_forward" if received else None, forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        def backward() -> None:
            super(TimedStage, self).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        if not full_backward and self.has_backward and not self.is_first:
            # PyTorch detaches in place what a backward for inputs began with, which a view refuses: the output of a
            # linear layer over sequences is one.
            output, inputs = self.fwd_cache[bwd_chunk_id]
            self.fwd_cache[bwd_chunk_id] = tuple(map(_not_a_view, output)), inputs
            loss = _not_a_view(loss)

        received = not self.is_last and not self._is_same_rank(self.stage_index + 1)
        kind = "backward" if full_backward else "input_backward"
        self._note(kind, bwd_chunk_id, "wait_backward" if received else None, backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        def backward() -> None:
            super(TimedStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward)

        self._note("weight_backward", bwd_chunk_id, None, backward)

    def extend_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, counted as part of the forward that it is called after: on the last stage, the loss."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if self._recording() and self._events:
                self._events[-1] = self._events[-1]._replace(end=self._now())
            return value

        return timed

    def _note(self, kind: str, microbatch: int, wait: str | None, work: Callable[[], Any]) -> Any:
        if not self._recording():
            return work()
        start = self._now()
        if wait is not None:
            idle = max(self._asked, self._events[-1].end if self._events else 0.0)
            self._events.append(microbatch_bar(self.stage_index, wait, microbatch, idle, start))
        value = work()
        self._events.append(microbatch_bar(self.stage_index, kind, microbatch, start, self._now()))
        return value

    def _now(self) -> float:
        device = torch.device(self.device)
        if device.type != "cpu":
            # Only this stream: others may hold receives that are posted ahead, for which neighbours wait for this rank.
            torch.accelerator.current_stream(device).synchronize()
        return time.perf_counter()


def _not_a_view(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and is_view(value) else value


def median_durations(events: Iterable[Bar]) -> dict[tuple[int, str], float]:
    """Seconds that each stage's forward, backward, ... took, the median over micro-batches: what ``simulate`` takes."""
    taken: dict[tuple[int, str], list[float]] = {}
    for event in events:
        assert event.stage is not None
        taken.setdefault((event.stage, event.kind), []).append(event.end - event.start)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}
