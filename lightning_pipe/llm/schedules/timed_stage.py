"""Pipeline stage that records the times of its work, for every schedule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed import P2POp
from torch.distributed.pipelining import PipelineStage

from lightning_pipe._compat.pipelining import copy_view_outputs, run_weight_backward
from lightning_pipe._compat.torch import is_view
from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar
from lightning_pipe.engine.ranks.current_tasks import current_tasks
from lightning_pipe.llm.parallel.overlap import ForwardBackwardOverlap, exclude_other_call_time

_CONTINUED = " continued"


class TimedStage(PipelineStage):
    """PyTorch's stage, with recording of its forwards and backwards and of the waits before them.

    Schedules wait on operations that the stage only creates, so a wait is measured between two calls of stages. It
    begins when the rank's last forward or backward ended, or, if that was later, when the schedule asked this stage for
    its receive operations. It ends when the forward or backward that needs the received tensors begins. It includes
    the wait of an FSDP stage for its gathered parameters.

    A forward and a backward that take turns are recorded as several bars, one for each turn.

    On an accelerator each time is taken after synchronizing with the current stream, so that times are exact. While
    events are recorded, this costs the overlap of launching kernels with running them.
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
        outputs = kwargs["output_args"]
        self._outputs_like: tuple[torch.Tensor, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
        self._receive_requested = 0.0

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing: PyTorch's method drops FSDP's gradients, as if a real step had been run to infer shapes."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_maybe_with_nosync(*args, **kwargs)
        except Exception as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)
            return self._make_zero_outputs(args)

    def _make_zero_outputs(self, args: tuple[Any, ...]) -> Any:
        """A zero output through which gradients flow to the inputs."""
        likes = (torch.zeros(()),) if self.is_last else self._outputs_like
        outputs = []
        for like in likes:
            requires_grad = torch.is_grad_enabled() and (like.requires_grad or self.is_last)
            zeros = torch.zeros(like.shape, dtype=like.dtype, device=self.device, requires_grad=requires_grad)
            for value in args if requires_grad else ():
                if value.is_floating_point():
                    zeros = zeros + value.flatten()[:0].sum().to(zeros)  # 0, also where the value is not finite
            outputs.append(zeros)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._receive_requested = time.perf_counter()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._receive_requested = time.perf_counter()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        def run_forward() -> Any:
            return super(TimedStage, self).forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

        received = not self.is_first and self._is_elsewhere(self.stage_index - 1)
        return self._run_and_record("forward", fwd_chunk_id, "wait_forward" if received else None, run_forward)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        def run_backward() -> None:
            super(TimedStage, self).backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

        if not full_backward and self.has_backward and not self.is_first:
            copy_view_outputs(self, bwd_chunk_id)
            if isinstance(loss, torch.Tensor) and is_view(loss):
                loss = loss.clone()

        received = not self.is_last and self._is_elsewhere(self.stage_index + 1)
        kind = "backward" if full_backward else "input_backward"
        self._run_and_record(kind, bwd_chunk_id, "wait_backward" if received else None, run_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        def run_backward() -> None:
            super(TimedStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward)

        run = partial(run_weight_backward, self, bwd_chunk_id, run_backward)
        self._run_and_record("weight_backward", bwd_chunk_id, None, run)

    def _is_elsewhere(self, stage_index: int) -> bool:
        return bool(self.stage_index_to_group_rank[stage_index] != self.group_rank)

    def time_as_part_of_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function whose time counts as part of the preceding forward, such as the loss on the last stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if self._recording() and self._events:
                self._events[-1] = self._events[-1]._replace(end=self._now())
            return value

        return timed

    def _run_and_record(self, kind: str, microbatch: int, wait: str | None, work: Callable[[], Any]) -> Any:
        action = f"{kind} of micro-batch {microbatch} in stage {self.stage_index}"
        current_tasks["stages"] = action, None, False
        if not self._recording():
            value = work()
            current_tasks["stages"] = action, None, True
            return value
        start = self._now()
        if wait is not None:
            idle = max(self._receive_requested, self._events[-1].end if self._events else 0.0)
            self._events.append(microbatch_bar(self.stage_index, wait, microbatch, idle, start))
        value = work()
        current_tasks["stages"] = action, None, True
        bars = [
            microbatch_bar(self.stage_index, kind, microbatch, *span)
            for span in exclude_other_call_time(start, self._now())
        ]
        self._events += [bars[0], *(bar._replace(name=f"{kind}{_CONTINUED}") for bar in bars[1:])]
        return value

    def _now(self) -> float:
        device = torch.device(self.device)
        if device.type != "cpu":
            # Only this stream: others may hold receives posted ahead, whose senders wait for this rank.
            torch.accelerator.current_stream(device).synchronize()
        return time.perf_counter()


def run_overlapped(stage: Any, other_stage: Any, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run work of two stages of a rank, in turns."""
    recorded = isinstance(stage, TimedStage) and stage._recording()
    events, count = (stage._events, len(stage._events)) if recorded else ([], 0)

    def reset_wait_start_and_run_second() -> None:
        other_stage._receive_requested = time.perf_counter()  # it has waited for the other work, not for a message
        second()

    ForwardBackwardOverlap(torch.device(stage.device), stage._now if recorded else time.perf_counter).run(
        first, reset_wait_start_and_run_second
    )
    events[count:] = sorted(events[count:], key=lambda bar: bar.start)


def compute_median_stage_durations(events: Iterable[Bar]) -> dict[tuple[int, str], float]:
    """Median seconds of each stage's kinds of work over micro-batches, in the format that ``simulate`` takes."""
    durations: dict[tuple[int, str], list[float]] = {}
    for event in events:
        assert event.stage is not None
        seconds = durations.setdefault((event.stage, event.kind), [])
        before = seconds.pop() if event.name.endswith(_CONTINUED) else 0.0
        seconds.append(before + event.end - event.start)
    return {key: statistics.median(seconds) for key, seconds in durations.items()}
