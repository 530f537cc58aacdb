"""Contracts with Lightning: the methods that loops override or call are there, and take the same arguments.

A failure means that Lightning has changed: compare the loops in ``lightning_pipe/loops/`` with Lightning's new ones,
then correct the table below.
"""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest

from lightning_pipe._compat import lightning

# Each with its arguments after self.
ARGUMENTS = [
    ("TrainingEpochLoop.advance", "data_fetcher"),
    ("TrainingEpochLoop.on_advance_end", "data_fetcher"),
    ("TrainingEpochLoop.on_run_start", "data_fetcher"),
    ("TrainingEpochLoop.reset", ""),
    ("TrainingEpochLoop.run", "data_fetcher"),
    ("TrainingEpochLoop.teardown", ""),
    ("TrainingEpochLoop._build_kwargs", "kwargs batch batch_idx"),
    ("TrainingEpochLoop._num_ready_batches_reached", ""),
    ("TrainingEpochLoop._should_check_val_fx", "data_fetcher"),
    ("TrainingEpochLoop.update_lr_schedulers", "interval update_plateau_schedulers"),
    ("EvaluationLoop.reset", ""),
    ("EvaluationLoop.run", "args kwargs"),
    ("EvaluationLoop.setup_data", ""),
    ("EvaluationLoop._build_kwargs", "batch batch_idx dataloader_idx"),
    ("EvaluationLoop._build_step_args_from_hook_kwargs", "hook_kwargs step_hook_name"),
    ("EvaluationLoop._evaluation_step", "batch batch_idx dataloader_idx dataloader_iter"),
    ("EvaluationLoop._on_evaluation_end", "args kwargs"),
    ("EvaluationLoop._store_dataloader_outputs", ""),
    ("PredictionLoop.reset", ""),
    ("PredictionLoop.run", "args kwargs"),
    ("PredictionLoop.setup_data", ""),
    ("PredictionLoop._build_kwargs", "batch batch_idx dataloader_idx"),
    ("PredictionLoop._build_step_args_from_hook_kwargs", "hook_kwargs step_hook_name"),
    ("PredictionLoop._predict_step", "batch batch_idx dataloader_idx dataloader_iter"),
    ("PredictionLoop._store_data_for_prediction_writer", "batch_idx dataloader_idx"),
    ("FitLoop.on_run_start", ""),
    ("FitLoop.reset", ""),
    ("FitLoop.setup_data", ""),
    ("FitLoop._load_combined_loader_states", ""),
    ("FitLoop._should_accumulate", ""),
    ("AutomaticOptimization.run", "optimizer batch_idx kwargs"),
    ("AutomaticOptimization._make_backward_fn", "optimizer"),
    ("AutomaticOptimization._make_closure", "kwargs optimizer batch_idx"),
    ("AutomaticOptimization._make_step_fn", "kwargs"),
    ("AutomaticOptimization._make_zero_grad_fn", "batch_idx optimizer"),
    ("SignalConnector._sigterm_notifier_fn", "signum _"),
    ("ResultMetric.__init__", "metadata is_tensor"),
    ("ResultMetric.update", "value batch_size"),
    ("call_callback_hooks", "trainer hook_name args monitoring_callbacks kwargs"),
    ("call_module_hook", "trainer hook_name args pl_module kwargs"),
    ("call_strategy_hook", "trainer hook_name args kwargs"),
    ("set_sampler_epoch", "dataloader epoch"),
]


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_lightnings_loops_have_the_methods_that_ours_override_or_call(name: str, arguments: str) -> None:
    found = [one for one in inspect.signature(attrgetter(name)(lightning)).parameters if one != "self"]
    assert found == arguments.split(), f"Lightning's {name} takes {found}, expected {arguments.split()}"
