"""Effects of the recsys tasks that replays restore, other than tensors of the context.

A replayed iteration has a batch equal to the captured one, but in other objects, and its sharded modules are only
served features that were distributed for the very objects that the step passes to them. Results of a task are therefore
rebuilt around the current batch: its wait for splits and tensors returns those that were received before, and its
outputs are cut again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import NoWait

from lightning_pipe._compat.torchrec import feature_processor_parameters
from lightning_pipe.engine.plans.task import DeclaredIO
from lightning_pipe.engine.runtime.captured import ByReference
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer
from lightning_pipe.recsys.kernels.fused_kernels import (
    add_to_kernel_iteration_counts,
    get_newest_prefetch_locations,
    requeue_prefetch_locations,
)
from lightning_pipe.recsys.kernels.kernel_calls import KernelOutputGradients, LookupCalls
from lightning_pipe.recsys.modules.dynamic_modules import is_dynamic
from lightning_pipe.recsys.rewrite.batch_state import (
    DistributedFeatures,
    Embeddings,
    ModuleInputs,
    PendingFeatures,
    PendingSplits,
)
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.tasks.context import RecsysContext

if TYPE_CHECKING:
    from lightning_pipe.recsys.balancing.balancer import PendingSampleExchange


class RecsysReplayDeclarations:
    """Effects of the tasks of one model."""

    def __init__(self, rewrite: ModelRewrite, reducer: DenseGradientReducer | None) -> None:
        self._rewrite = rewrite
        self._reducer = reducer
        modules = list(rewrite.sharded_modules.values())
        sharded = {id(parameter) for module in modules for parameter in module.parameters()}
        buffers = {id(buffer) for module in modules for buffer in module.buffers()}
        model = rewrite.model
        self._dense = [parameter for parameter in model.parameters() if id(parameter) not in sharded]
        # Gradients of feature processors. Kernels train the tables, whose parameters have no gradients.
        self._in_modules = [parameter for module in modules for parameter in feature_processor_parameters(module)]
        self._buffers = [buffer for buffer in model.buffers() if id(buffer) not in buffers]

    # ------------------------------------------------------------------ input dist

    def balance_start(self) -> tuple[DeclaredIO, ...]:
        def restore_balance(ctx: RecsysContext, balance: PendingSampleExchange | None) -> None:
            ctx.balance = None if balance is None else balance.with_batch(ctx.batch)

        # The workloads are known, so another wait for the partition exchanges the samples again.
        return (DeclaredIO(lambda ctx: ByReference(ctx.balance), restore_balance, ("balance",)),)

    def emb_input_dist_start(self) -> tuple[DeclaredIO, ...]:
        def restore_splits(ctx: RecsysContext, splits: PendingSplits) -> None:
            inputs = self._rewrite.rebuild_inputs(ctx.batch, _copy_contexts(splits.inputs.contexts))
            ctx.splits = replace(splits, inputs=inputs)

        # Another wait for the splits sends the tensors again.
        return (DeclaredIO(lambda ctx: ByReference(ctx.splits), restore_splits, ("splits",)),)

    def emb_input_dist_wait(self) -> tuple[DeclaredIO, ...]:
        def capture_requests(ctx: RecsysContext) -> dict[str, Any]:
            requests = ctx.input_requests
            tensors = {name: awaitable.wait() for name, awaitable in requests.tensors.items()}
            ctx.input_requests = _make_completed_pending_features(requests.inputs, tensors)
            return {"tensors": tensors, "contexts": ByReference(requests.inputs.contexts)}

        def restore_requests(ctx: RecsysContext, captured: Mapping[str, Any]) -> None:
            inputs = replace(ctx.splits.inputs, contexts=_copy_contexts(captured["contexts"]))
            ctx.input_requests = _make_completed_pending_features(inputs, captured["tensors"])

        return (DeclaredIO(capture_requests, restore_requests, ("input_requests",)),)

    def emb_prefetch(self) -> tuple[DeclaredIO, ...]:
        def capture_distributed_features(ctx: RecsysContext) -> dict[str, Any]:
            features = ctx.features
            return {"distributed": features.distributed, "contexts": ByReference(features.inputs.contexts)}

        def restore_distributed_features(ctx: RecsysContext, captured: Mapping[str, Any]) -> None:
            inputs = replace(ctx.input_requests.inputs, contexts=_copy_contexts(captured["contexts"]))
            ctx.features = DistributedFeatures(inputs, captured["distributed"])
            for name, features in captured["distributed"].items():
                module = self._rewrite.sharded_modules[name]
                if is_dynamic(module):
                    module.replay_prefetch(inputs.contexts[name], features)

        def capture_prefetches(ctx: RecsysContext) -> Any:
            return get_newest_prefetch_locations(self._get_sharded_modules(ctx.features.distributed))

        def restore_prefetches(ctx: RecsysContext, locations: Any) -> None:
            requeue_prefetch_locations(self._get_sharded_modules(ctx.features.distributed), locations)

        return DeclaredIO(capture_distributed_features, restore_distributed_features, ("features",)), DeclaredIO(
            capture_prefetches, restore_prefetches
        )

    # ------------------------------------------------------------------ lookup, and the dense part

    def divided_lookup(self) -> tuple[DeclaredIO, ...]:
        # Not replayed. In a check, a batch that is trained again has another batch before it.
        return (DeclaredIO(lambda ctx: None, lambda ctx, _: None, ("divided", "ahead")),)

    def emb_forward(self) -> tuple[DeclaredIO, ...]:
        def restore_embedding_outputs(ctx: RecsysContext, outputs: Mapping[str, Any]) -> None:
            if (ahead := ctx.pop("ahead")) is not None:
                self._rewrite.discard_ahead(ahead)
            ctx.embeddings = Embeddings(ctx.features.inputs)
            for name, output in outputs.items():
                # Outputs without a graph get no captured lookups, since no gradients can be sent to them.
                ctx.embeddings.add_ready_output(name, output)
            if torch.is_grad_enabled():
                for module in self._get_sharded_modules(outputs):
                    add_to_kernel_iteration_counts(module, 1)
            for context in ctx.features.inputs.contexts.values():
                if rows := getattr(context, "rows", None):
                    rows.release(trained=False)

        return (
            DeclaredIO(
                lambda ctx: ctx.embeddings.ready,
                restore_embedding_outputs,
                ("embeddings",),
                upstream=lambda ctx: self._in_modules,
            ),
        )

    def dense_forward(self) -> tuple[DeclaredIO, ...]:
        def collect_upstream_tensors(ctx: RecsysContext) -> Iterable[Tensor]:
            passed_on: list[Tensor] = []
            for output in ctx.embeddings.ready.values():
                _tensors(output, passed_on)
            return [*passed_on, *self._dense]

        # Outputs that the step has taken, and lookups that it made directly, are left as they are.
        embeddings = DeclaredIO(lambda ctx: None, lambda ctx, _: None, ("embeddings",), collect_upstream_tensors)
        gradients = self._declare_gradients([*self._dense, *self._in_modules])  # the step may begin with zero_grad()
        return embeddings, gradients, self._declare_buffer_values(self._buffers)

    def dense_backward(self) -> tuple[DeclaredIO, ...]:
        def capture_embedding_gradients(ctx: RecsysContext) -> dict[str, Any]:
            embeddings = ctx.embeddings
            kernels = embeddings.kernel_gradients
            return {
                "cuts": [cut.gradient for cut in embeddings.iterate_autograd_cuts()],
                "kernels": None if kernels is None else kernels.gradients,
                "replicated": () if kernels is None else [weights.grad for weights in kernels.replicated],
            }

        def restore_embedding_gradients(ctx: RecsysContext, captured: Mapping[str, Any]) -> None:
            embeddings = ctx.embeddings
            for cut, gradient in zip(embeddings.iterate_autograd_cuts(), captured["cuts"], strict=True):
                cut.gradient = gradient
            if captured["kernels"] is not None:
                calls: list[LookupCalls] = [call.lookups for call in embeddings.calls if call.lookups is not None]
                replicated = list(dict.fromkeys(weights for lookups in calls for weights in lookups.replicated))
                kernels = list(chain.from_iterable(lookups.kernel_calls for lookups in calls))
                embeddings.kernel_gradients = KernelOutputGradients(kernels, captured["kernels"], replicated)
                for weights, gradient in zip(replicated, captured["replicated"], strict=True):
                    weights.grad = gradient

        def mark_dense_gradients_ready(ctx: RecsysContext, _: Any) -> None:
            if self._reducer is not None and ctx.has_gradients:
                self._reducer.prepare_for_backward()
                self._reducer.mark_gradients_ready(self._dense)

        in_context = DeclaredIO(capture_embedding_gradients, restore_embedding_gradients, ("embeddings",))
        return (
            in_context,
            self._declare_gradients(self._dense),
            DeclaredIO(lambda ctx: None, mark_dense_gradients_ready),
        )

    def emb_backward(self) -> tuple[DeclaredIO, ...]:
        return (self._declare_gradients(self._in_modules),)

    def finalize_grads(self) -> tuple[DeclaredIO, ...]:
        def discard_averaged_gradients(ctx: RecsysContext, _: Any) -> None:
            if self._reducer is not None and ctx.has_gradients:
                self._reducer.discard_averaged_gradients()

        return DeclaredIO(lambda ctx: None, discard_averaged_gradients), self._declare_gradients(
            [*self._dense, *self._in_modules]
        )

    # ------------------------------------------------------------------ building blocks

    def _get_sharded_modules(self, names: Iterable[str]) -> list[nn.Module]:
        return [self._rewrite.sharded_modules[name] for name in names]

    def _declare_gradients(self, parameters: Sequence[nn.Parameter]) -> DeclaredIO:
        def capture_gradients(ctx: RecsysContext) -> list[Tensor | None]:
            return [parameter.grad for parameter in parameters]

        def restore_gradients(ctx: RecsysContext, gradients: Sequence[Tensor | None]) -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        return DeclaredIO(capture_gradients, restore_gradients)

    def _declare_buffer_values(self, buffers: Sequence[Tensor]) -> DeclaredIO:
        @torch.no_grad()
        def restore_buffers(ctx: RecsysContext, values: Sequence[Tensor]) -> None:
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

        return DeclaredIO(lambda ctx: list(buffers), restore_buffers)


def _copy_contexts(contexts: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of contexts, since iterations in flight may have the same batch, each with rows of its own."""
    return {name: copy.copy(context) for name, context in contexts.items()}


def _make_completed_pending_features(inputs: ModuleInputs, tensors: Mapping[str, Any]) -> PendingFeatures:
    return PendingFeatures(inputs, {name: NoWait(value) for name, value in tensors.items()})


def _tensors(output: Any, tensors: list[Tensor]) -> None:
    """Collect the differentiable tensors of a sharded module's output, in the form that the step gets."""
    if isinstance(output, Tensor):
        tensors.append(output)
    elif isinstance(output, dict):
        for entry in output.values():
            _tensors(entry, tensors)
    elif isinstance(output, tuple):
        for part in output:
            _tensors(part, tensors)
    elif hasattr(output, "values"):
        tensors.append(output.values())
