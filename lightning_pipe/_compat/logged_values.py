"""Values logged with ``self.log``, as plain data for a checkpoint. Lightning's checkpoints do not contain them.

A run that continues from a checkpoint needs them for work that was due when the checkpoint was written: schedulers and
callbacks that monitor a value, and the means of the current epoch. The same holds for attributes by which a
``ModelCheckpoint`` decides whether a save is due.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor
from torchmetrics import Metric

from lightning_pipe._compat.lightning import Metadata, ResultCollection, ResultMetric, Sync, TrainingEpochLoop

# Attributes of Lightning's logger connector.
_LATEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# Arguments of `self.log` that Lightning compares with those of the previous call, apart from those of the reduction.
_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
              "dataloader_idx", "metric_attribute")  # fmt: skip
_REDUCTIONS: dict[str, Any] = {"torch.mean": torch.mean, "torch.max": torch.max, "torch.min": torch.min,
                               "torch.sum": torch.sum, "max": max, "min": min, "sum": sum}  # fmt: skip

# Of each logged value: accumulated value, number of rows or None, value of the last step, True if it was reset.
Accumulated = list[tuple[ResultMetric, Any, Any, Any, bool]]


def snapshot_results(results: ResultCollection) -> Accumulated:
    """Return the present values of *results* without copies: Lightning does not change their tensors in place."""
    return [
        (metric, metric.value, getattr(metric, "cumulated_batch_size", None), metric._forward_cache, metric.has_reset)
        for metric in results.values()
    ]


def get_logged_values_state(loop: Any) -> dict[str, Any]:
    """Return the logged values of this rank for a checkpoint: text, numbers and tensors on the CPU."""
    trainer: pl.Trainer = loop.trainer
    connector = trainer._logger_connector
    latest = {
        name: {
            key: _copy_value_to_cpu(value)
            for key, value in getattr(connector, name).items()
            if isinstance(key, str) and _is_tensor_or_number(value)
        }
        for name in _LATEST
    }
    again = loop.batch_progress.current.ready != loop.batch_progress.current.processed
    values = loop.values_before_batch if again else snapshot_results(loop._results)
    entries = [_serialize_logged_value(again, *value) for value in values]
    # A callback ends its deferral after the save.
    validated = trainer.lightning_module._current_fx_name == "on_validation_end"
    reasons = {stopping.stopping_reason for stopping in _get_early_stopping_callbacks(trainer)} - {
        EarlyStoppingReason.NOT_STOPPED
    }
    return {
        "latest": latest,
        "epoch": [entry for entry in entries if entry is not None],
        "stopped": loop.stop_due or (trainer.should_stop and bool(reasons)),
        "saves": {
            callback.state_key: {
                "last_step": callback._last_global_step_saved,
                "deferred": callback._defer_save_until_validation and not validated,
            }
            for callback in _get_checkpoint_callbacks(trainer)
        },
    }


def _get_checkpoint_callbacks(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _get_early_stopping_callbacks(trainer: pl.Trainer) -> Sequence[Any]:
    return trainer.early_stopping_callbacks


def _is_tensor_or_number(value: Any) -> bool:
    return isinstance(value, Tensor | float) or type(value) in (bool, int)


def _copy_value_to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    # NumPy's float64 is a float, but no plain data.
    return float(value) if isinstance(value, float) else value


def _serialize_logged_value(
    again: bool, metric: ResultMetric, value: Any, rows: Any, last: Any, has_reset: bool
) -> Any:
    meta = metric.meta
    if has_reset or meta.sync.group is not None:
        return None
    packed: dict[str, Any] = {
        "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
        "reduction": next(name for name, reduction in _REDUCTIONS.items() if reduction is meta.reduce_fx),
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "last": _copy_value_to_cpu(last) if _is_tensor_or_number(last) else None,
    }
    if metric.is_tensor:
        return {**packed, "value": _copy_value_to_cpu(value), "rows": _copy_value_to_cpu(rows)}
    parts = _collect_submetrics(value)
    if any(type(part).__module__.startswith("torchmetrics.wrappers") for part in parts.values()):
        return None  # they have counts that are no states
    states = {name: _get_metric_states(part) for name, part in parts.items()}
    # torchmetrics changes states in place, so those before the batch are unknown. Lists grow with the epoch.
    if again or not all(isinstance(state, Tensor) for part_states in states.values() for state in part_states.values()):
        return None
    packed["states"] = {
        part: {name: _copy_value_to_cpu(state) for name, state in part_states.items()}
        for part, part_states in states.items()
    }
    packed["updates"] = {name: part._update_count for name, part in parts.items()}
    return packed


def _collect_submetrics(metric: Metric) -> dict[str, Metric]:
    """Metrics that *metric* consists of, itself included."""
    return {name: part for name, part in metric.named_modules() if isinstance(part, Metric)}


def _get_metric_states(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._defaults}


def reshard_logged_values(rank: int, rank_count: int, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Logged values for a rank; another number of ranks than wrote them gets equal shares."""
    stopped = any(packed["stopped"] for packed in ranks)
    if len(ranks) == rank_count:
        return {**ranks[rank], "stopped": stopped}
    shares = []
    for entry in ranks[0]["epoch"]:
        entries = [
            rank_entry
            for packed in ranks
            for rank_entry in packed["epoch"]
            if rank_entry["arguments"] == entry["arguments"]
        ]
        if "value" not in entry or len(entries) < len(ranks):
            continue
        values = torch.stack([rank_entry["value"] for rank_entry in entries])
        reduction = entry["reduction"].removeprefix("torch.")
        value = getattr(values, f"a{reduction}")(0) if reduction in ("max", "min") else values.sum(0) / rank_count
        rows = None if entry["rows"] is None else sum(rank_entry["rows"] for rank_entry in entries) / rank_count
        shares.append({**entry, "value": value, "rows": rows})
    return {**ranks[0], "epoch": shares, "stopped": stopped}


def restore_logged_values(loop: Any, packed: dict[str, Any]) -> None:
    """Restore the result of :func:`get_logged_values_state`."""
    trainer: pl.Trainer = loop.trainer
    device = trainer.strategy.root_device
    for name in _LATEST:
        getattr(trainer._logger_connector, name).update(_move_values_to_device(device, packed["latest"][name]))
    for entry in packed["epoch"]:
        _restore_logged_value(loop._results, entry, trainer, device)
    loop.values_before_batch = snapshot_results(loop._results)
    start = os.path.realpath(str(trainer.ckpt_path))
    for callback in _get_checkpoint_callbacks(trainer):
        if saved := packed["saves"].get(callback.state_key):
            callback._last_global_step_saved = saved["last_step"]
            callback._defer_save_until_validation = saved["deferred"]
        paths = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
        if start in [os.path.realpath(path) for path in paths if path]:
            # The callback has written this checkpoint, and noted that afterwards.
            callback._last_global_step_saved, callback._last_checkpoint_saved = trainer.global_step, start
    stops = bool(packed["stopped"] and _get_early_stopping_callbacks(trainer))
    epochs: Any = trainer.fit_loop.epoch_progress.current
    finished = epochs.ready == epochs.processed
    trainer.should_stop, loop.stop_due = stops and finished, stops and not finished


def _move_values_to_device(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in values.items()}


def _restore_logged_value(results: Any, entry: dict[str, Any], trainer: pl.Trainer, device: torch.device) -> None:
    meta = Metadata(
        **{name: entry["arguments"][name] for name in _ARGUMENTS}, reduce_fx=_REDUCTIONS[entry["reduction"]]
    )
    meta.sync = Sync(_should=entry["sync_dist"], fn=trainer.strategy.reduce, rank_zero_only=entry["rank_zero_only"])
    if "states" in entry:
        value = _restore_metric_states(trainer.lightning_module, meta.metric_attribute or "", entry, device)
        if value is None:
            return  # the module has changed since
    else:
        value = entry["value"].to(device)
    key = f"{meta.fx}.{meta.name}"
    results[key] = ResultMetric(meta, is_tensor="states" not in entry)
    metric = results[key]  # the collection may replace it
    metric.value = value
    if entry.get("rows") is not None:
        metric.cumulated_batch_size = entry["rows"].to(device)
    metric._forward_cache, metric._update_count = _move_values_to_device(device, {"last": entry["last"]})["last"], 1
    if hasattr(results, "restored"):
        results.restored.add(key)


def _restore_metric_states(module: Any, attribute: str, entry: dict[str, Any], device: torch.device) -> Metric | None:
    """Metric of the module with the states of the checkpoint, or None if the module has another metric there."""
    metric = dict(module.named_modules()).get(attribute)
    parts = _collect_submetrics(metric) if isinstance(metric, Metric) else {}
    names = {part: set(_get_metric_states(part_metric)) for part, part_metric in parts.items()}
    if names != {part: set(states) for part, states in entry["states"].items()}:
        return None
    for part, part_metric in parts.items():
        for name, state in _move_values_to_device(device, entry["states"][part]).items():
            setattr(part_metric, name, state)
        part_metric._update_count, part_metric._computed = entry["updates"][part], None
    return metric


def skip_logged_values_reset(loop: TrainingEpochLoop) -> None:
    """Make the values of the next batch of *loop* add to those of the epoch. Lightning resets them at a first batch."""
    loop.trainer._logger_connector._first_loop_iter = False


def step_lr_schedulers_and_reset_results(loop: TrainingEpochLoop) -> None:
    """Do the work that Lightning does after the hooks at the end of an epoch, apart from logging."""
    trainer, connector = loop.trainer, loop.trainer._logger_connector
    connector.on_epoch_end()
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    # A value that the module logs in `on_train_epoch_end` is missing if a callback has saved before that hook.
    monitored = {config.monitor for config in plateaus if config.interval == "epoch"}
    if loop._num_ready_batches_reached() and monitored <= trainer.callback_metrics.keys():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    connector.reset_results()


# ---------------------------------------------------------------------- torchmetrics


def get_metric_state_reductions(metric: Metric) -> dict[str, Any]:
    """How ranks combine each state of a metric, by its name."""
    return metric._reductions


def is_metric_computed(metric: Metric) -> bool:
    """Return True if a metric has a result since its last update, which ``compute`` would return again."""
    return metric._computed is not None


def clear_metric_compute_cache(metric: Metric) -> None:
    """Make the next ``compute`` of a metric combine the states of all ranks."""
    metric._computed = None


def increment_metric_update_count(metric: Metric) -> None:
    """Count an update, without which torchmetrics warns."""
    metric._update_count += 1
