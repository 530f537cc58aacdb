"""The recsys plans without Lightning: a drop-in for TorchRec's train pipelines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.optim.keyed import KeyedOptimizer

from lightning_pipe.engine import IterContext, PipelineError, PipelinePlan, SetupError, SWPipeline, TaskError
from lightning_pipe.engine.common.options import check_whole_number, parse_option_group
from lightning_pipe.recsys.batches.transfer import move_batch
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.actions import make_clip_function
from lightning_pipe.recsys.tasks.declarations import RecsysTask
from lightning_pipe.recsys.tasks.evaluation import PipelinedEvaluation
from lightning_pipe.recsys.tasks.options import SessionOptions, make_balancer
from lightning_pipe.recsys.tasks.session import RecsysSession, next_must_run_serially
from lightning_pipe.recsys.tasks.task_list import recsys_tasks

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import BalanceReport, BatchBalancer


class TrainPipeline:
    """Trains a sharded model under any recsys plan, one batch per call of :meth:`progress`.

    If the model is in evaluation mode (``model.eval()``), ``progress`` computes its output under ``no_grad`` and does
    not train, as TorchRec's pipelines do. All ranks must be in the same mode.

    Args:
        model: TorchRec's ``DistributedModelParallel`` (its data-parallel wrapper averages the dense gradients), or the
            result of :func:`~lightning_pipe.recsys.sharding.shard_model.shard_model` (this project's reducer averages
            them). Called with a batch, it returns ``(losses, output)``, as TorchRec's pipelines expect; the losses are
            summed. With a model of ``shard_model``, losses may be None on any rank, which then contributes zero
            gradients. With ``DistributedModelParallel``, losses are None on all ranks or on none.
        optimizer: optimizer of the dense parameters. Learning rates set between two calls of :meth:`progress` take
            effect with the next batch. The tables' rates are set through the model's ``fused_optimizer``, which
            TorchRec's ``CombinedOptimizer`` joins with the dense optimizer for a scheduler, or with
            ``ShardedModel.set_learning_rates``.
        device: device that batches are moved to.
        plan: name of a plan, a plan, or the path of a plan in YAML (default ``"prefetch"``).
        execute_all_batches: True (default) trains the batches in flight when the data ends; False abandons them.
        custom_model_fwd: function called with the batch instead of the model (default None).
        options: option groups by name, each a dataclass or a mapping of its fields: ``rewrite``
            (:class:`~lightning_pipe.recsys.RewriteOptions`; evaluations are always pipelined), ``wire``
            (:class:`~lightning_pipe.recsys.WireOptions`; only ``ids``, since *model* has the rest already),
            ``memory`` (:class:`~lightning_pipe.recsys.MemoryOptions`) and ``checks``
            (:class:`~lightning_pipe.recsys.CheckOptions`).
        accumulate: number of batches whose gradients are accumulated for an optimizer step (default 1). Each loss is
            divided by this number. Tables step in every batch, with the gradients of the divided loss. A window that is
            not full when the data ends continues with the next iterator. Above 1, requires a model of ``shard_model``
            and no ``max_norm``.
        max_norm: largest norm of all gradients of a batch together, the tables' included; larger gradients are scaled
            down to it (default None, no limit). Requires a model of ``shard_model``.
        balancer: exchanges samples between ranks, so that all ranks have about the same work: a
            :class:`~lightning_pipe.recsys.balancing.balancer.BatchBalancer`, its arguments as a mapping, or True for
            its defaults (default None). Batches of a model in evaluation mode are not exchanged.
        extra_tasks: additional training tasks, each by the name of the task that it follows in serial order (default
            none). *plan* must schedule them. An evaluation does not run them.
        input_group: process group of the input dist, over the ranks that the tables are sharded over. By default every
            rank of the world makes a new group if the plan runs a batch ahead, or if the ranks communicate by Gloo
            across hosts; otherwise the tables' group is used.

    Raises:
        PlanError: the plan does not exist, or cannot be run.
        SetupError: an option has the wrong type; the model holds no sharded module, one that cannot be trained here,
            or one with trained feature processors inside ``DistributedDataParallel``; or it is in another pipeline.

    Example::

        pipeline = TrainPipeline(model, optimizer, device, plan="prefetch")
        batches = iter(loader)
        while True:
            try:
                output = pipeline.progress(batches)
            except StopIteration:
                break
        pipeline.close()
    """

    def __init__(
        self,
        model: nn.Module | ShardedModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        plan: str | Path | PipelinePlan = "prefetch",
        *,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        options: SessionOptions | Mapping[str, Any] | None = None,
        accumulate: int = 1,
        max_norm: float | None = None,
        balancer: bool | Mapping[str, Any] | BatchBalancer | None = None,
        extra_tasks: Mapping[str, RecsysTask] | None = None,
        input_group: dist.ProcessGroup | None = None,
    ) -> None:
        # All refusals come before anything is built.
        chosen = parse_option_group(SessionOptions, "options", options)
        for name, value in (("quantized_comms", chosen.wire.quantized_comms), ("dedup", chosen.wire.dedup or None)):
            if value is not None:
                raise SetupError(
                    f"wire.{name} cannot be set for a TrainPipeline, because its model is sharded already. Pass {name}"
                    " to shard_model() instead."
                )
        self._sharded = sharded = model if isinstance(model, ShardedModel) else None
        replicated = sharded is not None and sharded.replicas is not None
        self._balancer = make_balancer(balancer)
        balanced = self._balancer is not None
        declared = recsys_plan(
            plan, recsys_tasks(balanced=balanced, replicated=replicated, divided=True, extra=extra_tasks)
        )
        clip = None
        if max_norm is not None:
            if sharded is None or accumulate != 1:
                raise SetupError(
                    f"max_norm is {max_norm}, but the model is a {type(model).__name__} and accumulate is {accumulate},"
                    " so tables step before the norm of all gradients is known. Pass the model that shard_model()"
                    " returns and set accumulate to 1, or remove max_norm."
                )
            clip = make_clip_function(sharded, max_norm)
        self._model: nn.Module = model.module if isinstance(model, ShardedModel) else model
        self._forward = self._model if custom_model_fwd is None else custom_model_fwd
        self._execute_all_batches = execute_all_batches
        self._closed = False
        # Tables are trained in backward; the step of their optimizer only copies learning rates to the kernels.
        tables: KeyedOptimizer | None = getattr(model, "fused_optimizer", None)
        self._session = session = RecsysSession(
            model,
            declared,
            torch.device(device),
            chosen,
            balancer=self._balancer,
            extra_tasks=extra_tasks,
            input_group=input_group,
        )
        self._transfer: Callable[[Any], Any] = partial(move_batch, device=session.device)
        with ExitStack() as undo:
            undo.callback(session.close)
            session.create_dense_gradient_reducer(None if tables is None else tables.step)
            self._accumulation = _Accumulation(accumulate, optimizer, session.reducer)
            tasks = session.training_tasks(
                "forward",
                transfer=self._transfer,
                training_step=self._training_step,
                loss_of=self._loss_of,
                optimizer_step=self._accumulation.step_optimizer,
                clip=clip,
                clipped=clip is not None,
            )
            assert session.rewrite is not None
            self.rewrite = session.rewrite
            _refuse_feature_processors_in_ddp(self._model, self.rewrite)
            self.pipeline = SWPipeline(recsys_plan(plan, tasks), session.device, session.world)
            undo.callback(self.pipeline.close)
            self._evaluating = False
            self._evaluation: PipelinedEvaluation | None = None
            self._undo = undo.pop_all()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train the next batch.

        Args:
            dataloader_iter: yields batches on the host. After its end, each call trains one of the batches in flight.

        Returns:
            The second element of the model's result.

        Raises:
            StopIteration: every batch has been trained; training may continue with another iterator.
            InputError: a batch cannot be trained; raised on every rank, whichever has the batch. Closes the pipeline.
            TaskError: the model, the optimizer or the iterator raised an error. Closes the pipeline.
        """
        self._refuse_while_evaluating()
        if not self.rewrite.is_attached:
            self.attach()
        with self._closing_on_error(), nullcontext() if self._model.training else torch.no_grad():
            ctx = self._train_next(dataloader_iter)
        return None if ctx.output is None else ctx.output[1]

    def evaluate(self, dataloader_iter: Iterator[Any]) -> Generator[Any, None, None]:
        """Run the model on batches without training them, between two calls of :meth:`progress`.

        Training batches stay in flight, and training then continues as if there had been no evaluation. The evaluation
        is pipelined as far ahead as the plan allows, without any training batch. Replicas of tables are averaged first.

        Args:
            dataloader_iter: yields batches on the host, the same number on every rank.

        Yields:
            The second element of the model's result for each batch, in evaluation mode and under ``no_grad``. Training
            may continue when the generator has ended or is closed. All ranks must stop at the same batch.

        Raises:
            SetupError: another evaluation is still running, or the pipeline is closed.
            InputError: a batch cannot be fed to the model; raised on every rank. Closes the pipeline.
            TaskError: the model or the iterator raised an error. Closes the pipeline.
        """
        self._refuse_while_evaluating()
        self.attach()
        self._evaluating = True
        try:
            with self._closing_on_error(), self._session.suspend_training(self.pipeline):
                if self._sharded is not None:
                    self._sharded.sync_replicas()
                if self._evaluation is None:
                    self._evaluation = PipelinedEvaluation(
                        self._session,
                        "forward",
                        self.pipeline.plan,
                        transfer=self._transfer,
                        training_step=self._training_step,
                    )
                    self._undo.callback(self._evaluation.close)
                with closing(self._evaluation.run(dataloader_iter)) as outputs:
                    for output in outputs:
                        yield None if output is None else output[1]
        finally:
            self._evaluating = False

    def _refuse_while_evaluating(self) -> None:
        if self._evaluating:
            raise SetupError(
                "an evaluation of this pipeline is still running. Consume all outputs of evaluate(), or call its"
                " close(), before you call the pipeline again."
            )

    @contextmanager
    def _closing_on_error(self) -> Generator[None, None, None]:
        try:
            yield
        except (StopIteration, GeneratorExit):
            raise
        except TaskError as error:
            self.close()
            cause = error.__cause__
            if not isinstance(cause, PipelineError):
                raise
            cause.add_note(error.summary)  # the cause describes the error, the note names the task and batch
            raise cause from cause.__cause__
        except BaseException:
            self.close()
            raise

    @property
    def balance_report(self) -> BalanceReport | None:
        """Imbalance of the ranks' work before and after samples were exchanged; None without a balancer."""
        return None if self._balancer is None else self._balancer.report

    def _train_next(self, dataloader_iter: Iterator[Any]) -> IterContext:
        if self.pipeline.is_empty and next_must_run_serially(self.rewrite, self.pipeline.plan):
            self.pipeline.begin_serial_period(dataloader_iter)
        else:
            self.pipeline.begin_period(dataloader_iter)
            ended = len(self.pipeline.in_flight) <= self.pipeline.plan.max_stage
            if ended and not self._execute_all_batches:
                self.reset()
                raise StopIteration
        with self._accumulation.no_sync_unless_last():
            ctx = self.pipeline.finish_period()
        self._accumulation.count_trained_batch(ctx)
        return ctx

    def detach(self) -> nn.Module:
        """Return the model with its forwards restored; batches in flight are kept for :meth:`attach`."""
        self.rewrite.detach()
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Rewrite the model again after :meth:`detach`; :meth:`progress` does so automatically.

        Args:
            model: the model that ``detach`` returned, or None (default); accepted for compatibility with TorchRec's
                signature.

        Raises:
            SetupError: *model* is another model, or the pipeline is closed.
        """
        if self._closed:
            raise SetupError("this TrainPipeline is closed. Build a new one over the model.")
        if model is not None and get_unwrapped_module(model) is not get_unwrapped_module(self._model):
            raise SetupError(
                f"attach() expected the model that the pipeline was built over, got another"
                f" {type(model).__name__}. Pass the model that detach() returned, or build a new TrainPipeline over the"
                " other model."
            )
        self.rewrite.attach()

    def reset(self) -> None:
        """Abandon the batches in flight; :meth:`progress` then starts afresh. All ranks call this at the same batch."""
        self.pipeline.wait_for_workers()
        self._session.undo_lookups_and_prefetches(self.pipeline.in_flight)
        self.pipeline.abandon()

    def close(self) -> None:
        """End the worker threads, restore the model and leave the process groups. May be called again."""
        if not self._closed:
            self._session.undo_lookups_and_prefetches(self.pipeline.in_flight)
        self._closed = True
        self._undo.close()

    def _training_step(self, batch: Any) -> Any:
        if torch.is_grad_enabled():
            self._accumulation.zero_grad()
        output = self._forward(batch)
        if output is not None and not (isinstance(output, (tuple, list)) and len(output) == 2):
            raise SetupError(
                f"expected the model to return a pair (losses, output), as for TorchRec's train pipelines, got a"
                f" {type(output).__name__}. Return (loss, None) if the model has no other output."
            )
        return output

    def _loss_of(self, output: Any) -> torch.Tensor | None:
        return None if output[0] is None else self._accumulation.scale_loss(torch.sum(output[0], dim=0))


class _Accumulation:
    """Selects the batches that clear gradients, average them over ranks and step the dense optimizer.

    Table optimizers are fused into backward. Tables therefore step in every batch, with the gradients of that batch's
    part of the loss.
    """

    def __init__(self, batches: int, optimizer: torch.optim.Optimizer, reducer: DenseGradientReducer | None) -> None:
        check_whole_number("accumulate", batches, 1)
        if batches > 1 and reducer is None:
            raise SetupError(
                f"accumulate is {batches}, but the model averages its gradients in every backward. Pass the model that"
                " shard_model() returns, or set accumulate to 1"
            )
        self._batches = batches
        self._optimizer = optimizer
        self._reducer = reducer
        self._done = 0

    @property
    def _is_last(self) -> bool:
        return self._done == self._batches - 1

    def zero_grad(self) -> None:
        """Clear gradients before the first forward of a step."""
        if self._done == 0:
            self._optimizer.zero_grad()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Part of a batch's loss that its backward starts from."""
        return loss if self._batches == 1 else loss / self._batches

    def no_sync_unless_last(self) -> AbstractContextManager[Any]:
        """Context for the backward of a batch: gradients are averaged over ranks only in the last batch of a step."""
        return nullcontext() if self._reducer is None or self._is_last else self._reducer.no_sync()

    def step_optimizer(self) -> None:
        """Step the dense optimizer after the backward of the last batch of a step."""
        if self._is_last:
            self._optimizer.step()

    def count_trained_batch(self, ctx: IterContext) -> None:
        """Count a batch that has finished."""
        if ctx.has_gradients:
            self._done = (self._done + 1) % self._batches


def _refuse_feature_processors_in_ddp(model: nn.Module, rewrite: ModelRewrite) -> None:
    """Refuse trained feature processors inside DistributedDataParallel.

    They get their gradients with the tables, after DistributedDataParallel has reduced its gradients.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, DistributedDataParallel) or wrapper.process_group.size() == 1:
            continue
        reduced = {
            id(parameter)
            for name, parameter in wrapper.module.named_parameters()
            if parameter.requires_grad and name not in wrapper.parameters_to_ignore
        }
        late = [
            name
            for name, module in rewrite.sharded_modules.items()
            if any(id(parameter) in reduced for parameter in module.parameters())
        ]
        if late:
            raise SetupError(
                f"sharded module(s) {', '.join(late)} hold trained feature processors inside DistributedDataParallel,"
                " which averages gradients before the processors have theirs, so ranks would diverge. Shard the model"
                " with lightning_pipe.recsys.shard_model, or freeze the processors before the model is wrapped."
            )
