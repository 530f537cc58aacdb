"""Faults that are planted in the recommender's tasks, for `tests.recsys.stream_cases`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.tables import sharded_tables
from lightning_pipe.recsys.plans import recsys_plans
from lightning_pipe.recsys.rewrite import model_rewrite, routes
from lightning_pipe.recsys.rewrite.batch_state import DistributedFeatures
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.tasks import actions, train_pipeline
from tests.engine.device_tensors import left_out

STALE = replace(recsys_plans.PLANS["fused_sparse_dist"], name="stale", stale=(("EmbBackward", "EmbForward"),))


def _written_after_hand_over() -> AbstractContextManager[Any]:
    """The copy's stream also changes an earlier batch, whose step comes next."""
    before: list[Any] = []
    move = train_pipeline.move_batch

    def copy(batch: Any, device: Any) -> Any:
        moved = move(batch, device)
        if len(before) == 2:  # on its way since the period before the last
            before.pop(0).dense.add_(0)
        before.append(moved)
        return moved

    return mock.patch.object(train_pipeline, "move_batch", copy)


def _read_in_worker() -> AbstractContextManager[Any]:
    wait_inputs = ModelRewrite.wait_inputs

    def read(rewrite: ModelRewrite, *arguments: Any) -> DistributedFeatures:
        features = wait_inputs(rewrite, *arguments)
        for distributed in features.distributed.values():
            assert distributed[0].values().sum().item() >= 0
        return features

    return mock.patch.object(ModelRewrite, "wait_inputs", read)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no waits for events": lambda: mock.patch.object(DeviceStreams, "wait_event", left_out),
    "no events": lambda: mock.patch.object(DeviceStreams, "record", left_out),
    "batch not recorded": lambda: mock.patch.object(actions, "record_stream", left_out),
    "features not recorded": lambda: mock.patch.object(model_rewrite, "record_stream", left_out),
    "written after it was handed on": _written_after_hand_over,
    "read in a worker": _read_in_worker,
    "messages not recorded": lambda: mock.patch.object(routes, "record_stream", left_out),
    "rows not ordered": lambda: mock.patch.object(RowColumns, "_make_stream_wait_for_events", left_out),
    "slots not recorded": lambda: mock.patch.object(sharded_tables, "record_stream", left_out),
    "collectives not waited for": lambda: mock.patch("tests.engine.device_tensors._wait_for", left_out),
    "stale lookups": lambda: mock.patch.dict(recsys_plans.PLANS, {"fused_sparse_dist": STALE}),
}
