"""Splits the call of every sharded module into steps that a plan can place: input dist, lookup, use, backward.

The rewrite replaces each sharded module's ``forward``, with the same replacement for training, evaluation and direct
calls. The replacement has three cases, depending on whether a step is being *served*:

1. In a served step, for a pipelined module: return the output that was looked up ahead for this batch.
2. In a served step otherwise (not pipelined, called again, the recorded step): look up now, return the cut output.
3. Outside of a served step: run the module's original forward, and wait for its output.

All state of a batch is in the objects that the methods return. The rewrite only holds results of the resolution.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.types import ShardedModule

from lightning_pipe._compat.torchrec import copy_kjt_with_tensors
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange
from lightning_pipe.engine.ranks.gloo_all_to_all import unwrap_full_duplex_group
from lightning_pipe.engine.ranks.object_collectives import (
    all_reduce_any,
    raise_gathered,
    raise_together,
    run_on_all_ranks,
)
from lightning_pipe.engine.runtime.devices import current_stream
from lightning_pipe.engine.runtime.record_stream import record_stream
from lightning_pipe.engine.runtime.sequencer import end_submission_turn
from lightning_pipe.engine.runtime.worker import is_worker_thread
from lightning_pipe.recsys.kernels.fused_kernels import (
    add_to_kernel_iteration_counts,
    find_fused_kernels,
    moves_rows_at_zero_gradient,
)
from lightning_pipe.recsys.kernels.kernel_calls import (
    LookupCalls,
    capture_calls,
    check_calls_can_be_captured,
    looks_up_replicated_tables,
    maps_ids_at_lookup,
    supports_late_rates,
    trains_only_tables,
)
from lightning_pipe.recsys.kernels.row_adam import get_attached_row_optimizer
from lightning_pipe.recsys.modules.call_arguments import Arguments, CallArguments, PostprocessResults, same_arguments
from lightning_pipe.recsys.modules.dynamic_modules import is_dynamic
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.modules.output_order import detach_output, wait_output
from lightning_pipe.recsys.rewrite.batch_state import (
    AheadLookup,
    DistributedFeatures,
    DividedFeatures,
    Embeddings,
    ModuleInputs,
    PendingFeatures,
    PendingSplits,
    release_pinned_rows,
)
from lightning_pipe.recsys.rewrite.call_recorder import Recorder
from lightning_pipe.recsys.rewrite.divided_lookup import DividedOutputDist, DivisionExchange, RowDivision
from lightning_pipe.recsys.rewrite.early_release import EarlyRelease, shallow_copy_arguments
from lightning_pipe.recsys.rewrite.input_dist import SplitsMessageLayout, SplitsRequest, defer_input_dists
from lightning_pipe.recsys.rewrite.resolution import ArgumentResolver, Method
from lightning_pipe.recsys.rewrite.sharded_modules import (
    AnnouncedCall,
    ShardedModuleEntry,
    find_sharded_modules,
    match_lookups_to_grad_mode,
    sum_lengths_on_host,
)
from lightning_pipe.recsys.rewrite.table_backward import TableBackward

if TYPE_CHECKING:
    from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows

_NOTHING = nullcontext()
_ADVICE = " Or evaluate without a pipeline: set the strategy's rewrite: {evaluation: false}."


class ModelRewrite:
    """Replaces the forwards of a model's sharded modules until ``restore``.

    Args:
        model: model with sharded modules at any depth; wrappers (``DistributedModelParallel``, DDP) are unwrapped.
        method: method that finds the input of each module: ``record`` (observe the training of the first batch),
            ``direct`` (by keys), ``fx`` (trace the step); ``auto`` (default) records, then traces for modules whose
            argument the step made.
        step: name of the model's method that trains a batch (default ``forward``); its first argument is the batch.
        input_group: process group of the input dists, not used for anything else while they are in flight (default
            None, the modules' group).
        output_group: process group for the all-to-alls of outputs and of their gradients, not used for anything else
            (default None, the modules' group). Modules on other ranks keep theirs.
        status_group: process group over all ranks that reports a batch that cannot be trained, and is not used for
            anything else. Needed if the input group is not over all ranks (default None, the input group).
        agree_group: process group over all ranks, for the resolution and the backward (default None, the input group).
        validate_ids: check every id against its table, and every length, before they are sent (default False).
        ids_on_wire: integer type of the ids that pipelined modules send; see ``ids_on_wire.sends_int32``.
        split_backward: capture the calls of the lookups, so that ``tables_backward`` can stop before the kernels
            (default False). Always on if a row optimizer trains tables.
        look_ahead: capture the calls if possible, for lookups before the previous batch has trained: learning rates may
            change until the batch's turn (default False).
        divide_lookups: the same for lookups in two parts (:mod:`.divided_lookup`), of modules for which this is
            possible (default False).
        undivided_reason: why no module's lookups can be divided, as the end of a sentence that begins with the module's
            name (default empty: no such reason).
        free_features_early: release ids after they are sent, if only pipelined modules use them (default False).

    Attributes:
        splits_backward: True if the backward is split.
        can_look_up_all_ahead: True if ``look_ahead`` was requested and is possible for all modules on all ranks.
        looks_ahead: True if lookups may precede the batch's turn, those in two parts included.
        skips_unused_in_backward: value for ``agree_unused`` of ``backward``: True if an optimizer on any rank changes
            rows at a gradient of zero, which an unused output has.
        tables_backward: implementation of ``backward``, with its two halves.
        announce_lookup: function called with the argument of :meth:`run_empty_lookup` before each lookup, if some ranks
            must join it.
        statuses: statuses of the next batches, which ranks send with the sizes of the input dist (default None).

    Raises:
        SetupError: the model has no sharded module, one that cannot be trained here, one whose backward cannot be split
            as requested, or one whose ids do not fit the requested type; or it is rewritten already.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        method: Method = "auto",
        step: str = "forward",
        input_group: dist.ProcessGroup | None = None,
        output_group: dist.ProcessGroup | None = None,
        agree_group: dist.ProcessGroup | None = None,
        validate_ids: bool = False,
        ids_on_wire: IdsOnWire = "auto",
        split_backward: bool = False,
        look_ahead: bool = False,
        divide_lookups: bool = False,
        undivided_reason: str = "",
        free_features_early: bool = False,
        status_group: dist.ProcessGroup | None = None,
    ) -> None:
        model = get_unwrapped_module(model)
        sharded = find_sharded_modules(model, validate_ids, ids_on_wire)
        first = next(iter(sharded.values()))
        group = input_group if input_group is not None else first.process_group
        self._output_group = output_group
        self._agree_group = agree_group if agree_group is not None else group
        self._model = model
        self._sharded = sharded
        self._resolution = ArgumentResolver(model, method, step, sharded, self._agree_group, group)
        self._postprocess_forwards: dict[str, Callable[..., Any]] = {}
        self._attached = False
        self._early_release = EarlyRelease(self._sharded) if free_features_early else None
        self._device = first.device
        self._group = group if group is not None and group.size() > 1 else None
        status = status_group if status_group is not None else group
        self._status_group = status if status is not None and status.size() > 1 else None
        # A rank only knows the kernels of its shards, but all ranks must behave alike.
        modules = self.sharded_modules.values()
        by_rows, some_have_early_rates, some_map_ids, self.skips_unused_in_backward = all_reduce_any(
            [
                _has_row_optimizers(modules),
                not all(map(supports_late_rates, modules)),
                any(map(maps_ids_at_lookup, modules)),
                any(map(moves_rows_at_zero_gradient, modules)),
            ],
            self._agree_group,
        )
        self.splits_backward = split_backward or by_rows
        if self.splits_backward:
            run_on_all_ranks(
                lambda: check_calls_can_be_captured(self.sharded_modules), "", self._agree_group, InputError
            )
        self.can_look_up_all_ahead = look_ahead and not some_have_early_rates and not some_map_ids
        self._has_reported_undivided = False
        if not undivided_reason and some_have_early_rates:
            undivided_reason = "is in a model with kernels that step with the learning rate of their lookup"
        if undivided_reason:
            for entry in sharded.values():
                entry.undivided_reason = undivided_reason
        self.looks_ahead = self.can_look_up_all_ahead or (divide_lookups and not some_have_early_rates)
        self.tables_backward = TableBackward(self.sharded_modules, self._agree_group)
        self._lookup_stream = current_stream(self._device)
        self._layout: SplitsMessageLayout | None = None
        self._serving: Embeddings | None = None
        self._recorder: Recorder | None = None
        self.announce_lookup: Callable[[AnnouncedCall], None] | None = None
        self.statuses: BatchStatusExchange | None = None
        self.attach()

    @property
    def model(self) -> torch.nn.Module:
        """The model, without wrappers."""
        return self._model

    @property
    def is_resolved(self) -> bool:
        """True if it is known which modules are pipelined. Until then, batches must be trained serially."""
        return self._resolution.done

    @property
    def needs_recording(self) -> bool:
        """True if the method observes the first step, which must then be trained serially."""
        return self._resolution.needs_recording

    @property
    def sharded_modules_train_only_tables(self) -> bool:
        """True if the sharded modules train only tables, and no feature processors."""
        return all(map(trains_only_tables, self.sharded_modules.values()))

    @property
    def has_replicated_tables(self) -> bool:
        """True if this rank looks up replicated tables, which no kernel trains."""
        return any(map(looks_up_replicated_tables, self.sharded_modules.values()))

    @property
    def is_attached(self) -> bool:
        """True while the forwards are replaced."""
        return self._attached

    @property
    def pipelined(self) -> dict[str, CallArguments]:
        """The pipelined modules, with the sources of their arguments in a batch."""
        return {name: entry.arguments for name, entry in self._sharded.items() if entry.arguments is not None}

    @property
    def unpipelined_reasons(self) -> dict[str, str]:
        """The other sharded modules, with the reason why each is not pipelined."""
        return {name: entry.reason for name, entry in self._sharded.items() if entry.arguments is None}

    @property
    def postprocessed(self) -> dict[str, CallArguments]:
        """The post-processing modules that run ahead, with the sources of their arguments in a batch."""
        arguments_by_name: dict[str, CallArguments] = {}
        for arguments in self.pipelined.values():
            arguments_by_name |= arguments.collect_postprocess_calls()
        return arguments_by_name

    @property
    def can_divide_lookups(self) -> bool:
        """True if no reason is known why the lookups of a module cannot be divided."""
        return not all(entry.undivided_reason for entry in self._sharded.values())

    @property
    def sharded_modules(self) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
        """All sharded modules by name."""
        return {name: entry.module for name, entry in self._sharded.items()}

    @property
    def has_other_ranks(self) -> bool:
        """True if other ranks take part, which would wait for operations that this rank leaves out."""
        return self._status_group is not None

    def attach(self) -> None:
        """Replace the forwards, also after ``detach``. Results of the resolution are kept."""
        if not self._attached:
            for entry in self._sharded.values():
                entry.install(partial(self._run_replaced_forward, entry), self._output_group)
            self._attached = True
            self._attach_postprocesses()

    def _attach_postprocesses(self) -> None:
        for name in self.postprocessed:
            module = self._model.get_submodule(name)
            if "forward" not in module.__dict__:
                self._postprocess_forwards[name] = module.forward
                module.forward = partial(self._get_or_run_postprocess, name, module.forward)

    def detach(self) -> None:
        """Restore all replaced forwards, so that the model is as before. Batches in flight stay valid."""
        if self._attached:
            for entry in self._sharded.values():
                entry.restore()
            for name in self.postprocessed:
                self._model.get_submodule(name).__dict__.pop("forward", None)
            self._attached = False

    def restore(self) -> None:
        """Detach for good, so that another rewrite can replace the forwards."""
        self.detach()

    @contextmanager
    def recording(self, batch: Any) -> Iterator[Embeddings]:
        """Context of the user's step on the first batch: sharded modules look up when called, and are observed.

        Yields:
            The embeddings of the step, for ``backward``.
        """
        with self.using_looked_up_embeddings(Embeddings(self._init_module_inputs(batch)), batch) as embeddings:
            yield embeddings

    def transferring(self, batch: Any) -> AbstractContextManager[None]:
        """Context of the copy of a loader's batch to the device; checks the lengths of features on the host."""
        # On a CPU, ``prepare`` checks the features that modules get.
        return _NOTHING if self._device.type == "cpu" else sum_lengths_on_host(self._sharded.values(), batch)

    def exclude_loader_features_from_release(self, loader_batch: Any, device_batch: Any) -> None:
        """Record that a batch was moved to the device: objects that it shares with the loader's are not released."""
        if self._early_release is not None:
            self._early_release.exclude_loader_features(loader_batch, device_batch)

    def start_input_dist(self, batch: Any, error: Exception | None = None) -> PendingSplits:
        """Take the pipelined modules' arguments from the transferred batch, and submit all splits together.

        Until the model is resolved no splits are submitted. ``direct`` and ``fx`` resolve it here, at the first batch.

        Args:
            batch: the transferred batch.
            error: earlier error of this rank's batch, or None; it is raised like an error that is found here.

        Raises:
            InputError: this rank's batch cannot be trained, if it is the only rank. With several ranks, or in a
                worker, ``wait_splits`` raises it, on all ranks.
        """
        if not self.is_resolved:
            raise_together(error, "", self._agree_group, InputError)
            self._resolution.check_first_batch_and_resolve(batch)
            self._attach_postprocesses()
        splits = PendingSplits(self._init_module_inputs(batch))
        pipelined = [entry for entry in self._sharded.values() if entry.arguments is not None]
        requests: dict[str, Any] = {}
        try:
            if error is not None:
                raise error
            checked: dict[int, object] = {}
            prepared = [self._resolve_checked_arguments(entry, splits.inputs, checked) for entry in pipelined]
            if self._early_release is not None:
                prepared = [shallow_copy_arguments(call) for call in prepared]
            with defer_input_dists():
                for entry, (positional, named) in zip(pipelined, prepared, strict=True):
                    context = splits.inputs.contexts[entry.name] = entry.module.create_context()
                    requests[entry.name] = entry.module.input_dist(context, *positional, **named)
        except Exception as problem:
            if self._status_group is None and not is_worker_thread():
                raise
            splits.error = problem
        layout = self._get_splits_message_layout(pipelined)
        if self._status_group is not None and (layout is None or self._status_group is not self._group):
            failed = torch.full((1,), int(splits.error is not None), dtype=torch.int32, device=self._device)
            work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._status_group, async_op=True)
            splits.status = work, failed
        if pipelined:
            failed_here = splits.error is not None
            sizes = None if failed_here else requests
            splits.request = SplitsRequest(layout, sizes, splits.inputs.contexts, self.statuses)
            if self._early_release is not None and not failed_here:
                self._early_release.release(splits.inputs)
        return splits

    def _get_splits_message_layout(self, pipelined: Sequence[ShardedModuleEntry]) -> SplitsMessageLayout | None:
        routes = [route for entry in pipelined for route in entry.routes]
        if not routes:
            return None
        if self._layout is None or self._layout.routes != routes:
            self._layout = SplitsMessageLayout(routes, self._device)
        return self._layout

    def rebuild_inputs(self, batch: Any, contexts: dict[str, Any]) -> ModuleInputs:
        """Return the pipelined modules' inputs from a batch whose features are distributed already.

        Args:
            batch: transferred batch with the same features as the distributed one.
            contexts: contexts of the distributed batch.
        """
        inputs = self._init_module_inputs(batch)
        inputs.contexts = contexts
        for entry in self._sharded.values():
            if entry.arguments is not None:
                inputs.arguments[entry.name] = entry.resolve_arguments(batch, inputs.postprocessed)
        return inputs

    def wait_splits(self, splits: PendingSplits) -> PendingFeatures:
        """Wait for the splits and submit the tensors of all modules.

        Raises:
            InputError: the batch of a rank cannot be trained; raised on every rank, and names the rank.
        """
        any_failed = splits.error is not None
        if splits.request is not None:
            any_failed |= splits.request.any_failed()
        if splits.status is not None:
            splits.status[0].wait()
            any_failed = bool(splits.status[1].item())
        if any_failed:
            raise_gathered(splits.error, "", unwrap_full_duplex_group(self._status_group), InputError)
        return PendingFeatures(splits.inputs, {} if splits.request is None else splits.request.wait_and_send_tensors())

    def wait_inputs(self, requests: PendingFeatures) -> DistributedFeatures:
        """Wait for the tensors of *requests*, and let modules with cached tables prefetch the rows of the lookup."""
        inputs = requests.inputs
        # FBGEMM records what it prefetches on the lookup's stream; it expects None if that is the current stream.
        lookup_on = None if self._lookup_stream == current_stream(self._device) else self._lookup_stream
        distributed: dict[str, Any] = {}
        for name, tensors in requests.tensors.items():
            features = distributed[name] = tensors.wait()
            record_stream([features, inputs.contexts[name]])
            self._sharded[name].prefetch(features, inputs.contexts[name], lookup_on, self.splits_backward)
        return DistributedFeatures(inputs, distributed, requests.error)

    def divide_lookups(self, features: DistributedFeatures) -> DividedFeatures:
        """Find the rows that the batch before has as well, and tell other ranks which of their rows come late.

        Called for every batch, in order: the rows of this batch are compared with those of the last call.
        """
        divisions: dict[str, list[tuple[DividedOutputDist, RowDivision]]] = {}
        group = None
        for name, distributed in features.distributed.items():
            entry = self._sharded[name]
            if output_dists := entry.get_divided_output_dists():
                group = output_dists[0].group
                context = features.inputs.contexts[name]
                features_by_sharding = _features_to_look_up(distributed, context)
                divisions[name] = [
                    (output_dist, output_dist.divide(*inputs))
                    for output_dist, *inputs in zip(
                        output_dists, features_by_sharding, context.sharding_contexts, strict=True
                    )
                ]
        self._report_undivided_modules(features.distributed)
        if group is None:
            return DividedFeatures(divisions, None)
        all_divisions = [division for of_module in divisions.values() for _, division in of_module]
        flags = [self._sharded[name].sends_enough_ahead for name in divisions]
        return DividedFeatures(divisions, DivisionExchange(all_divisions, group, flags))

    def _report_undivided_modules(self, names: Iterable[str]) -> None:
        if self._has_reported_undivided or not (entries := [self._sharded[name] for name in names]):
            return
        self._has_reported_undivided = True
        reasons = [f"{entry.name!r} {entry.undivided_reason}" for entry in entries if entry.undivided_reason]
        if reasons and (self._agree_group is None or self._agree_group.rank() == 0):
            warnings.warn(
                "These sharded modules are looked up only after the batch before has trained, as under the plan 'base':"
                f" {'; '.join(reasons)}",
                stacklevel=2,
            )

    def look_up_ahead(self, features: DistributedFeatures, divided: DividedFeatures) -> dict[str, AheadLookup]:
        """Look up for the divided modules, and send the rows that do not wait. Requires grad mode."""
        if divided.exchange is None:
            return {}
        divided.exchange.wait()
        lookups: dict[str, AheadLookup] = {}
        for name, divisions in divided.divisions.items():
            entry = self._sharded[name]
            if entry.undivided_reason:
                continue
            with ExitStack() as sending, capture_calls(entry.module) as calls:
                rows = [
                    sending.enter_context(output_dist.sending_ahead(division)) for output_dist, division in divisions
                ]
                output = entry.module.compute_and_output_dist(
                    features.inputs.contexts[name], features.distributed[name]
                )
            sent = [divided_rows for of_dist in rows for divided_rows in of_dist]
            entry.record_sent_bytes(*map(sum, zip(*(of_sharding.sent_bytes for of_sharding in sent), strict=True)))
            lookups[name] = AheadLookup(output, sent, calls, _take_pinned_rows([entry.module]))
        for name, is_worth_it in zip(divided.divisions, divided.exchange.set_anywhere, strict=True):
            if not is_worth_it:
                self._stop_dividing(self._sharded[name])
        return lookups

    def _stop_dividing(self, entry: ShardedModuleEntry, reason: str = "") -> None:
        if not entry.undivided_reason:
            entry.stop_dividing(reason)
            self._has_reported_undivided = False

    def discard_ahead(self, lookups: Mapping[str, AheadLookup]) -> None:
        """Undo the first parts of lookups whose batch will not be trained."""
        for name, lookup in lookups.items():
            for rows in lookup.rows:
                rows.drop()
            add_to_kernel_iteration_counts(self._sharded[name].module, -1)
            release_pinned_rows(lookup.pinned, trained=False)

    def look_up_embeddings(
        self, features: DistributedFeatures, ahead: Mapping[str, AheadLookup] | None = None
    ) -> Embeddings:
        """Look up for all modules, wait for the output dist of each, and cut the outputs.

        Without grad mode (evaluation) outputs are not cut and the kernels' step counters do not advance.

        Args:
            features: features of a batch after the input dist. An error that they hold is raised.
            ahead: lookups whose first part is made; here only their second part is (default none).

        Returns:
            Outputs by module, of the types and shapes of the sharded modules, with the state for their backward.
        """
        if features.error is not None:
            raise features.error
        inputs = features.inputs
        self._lookup_stream = current_stream(self._device)
        record_stream([features.distributed, inputs.contexts])
        embeddings = Embeddings(inputs)
        ahead = dict(ahead or {})
        undivided = [name for name in ahead if self._sharded[name].undivided_reason]
        self.discard_ahead({name: ahead.pop(name) for name in undivided})
        self._send_late_rows(ahead)
        modules = {name: self._sharded[name].module for name in features.distributed}
        awaitables: dict[str, Any] = {}
        captured: dict[str, LookupCalls | None] = {}
        with match_lookups_to_grad_mode(*modules.values()):
            for name, module in modules.items():
                if (lookup := ahead.get(name)) is not None:
                    awaitables[name], captured[name] = lookup.output, lookup.calls
                    for call in lookup.calls.kernel_calls:
                        call.recount()
                    embeddings.hold_rows(lookup.pinned)
                    continue
                with self._capturing_lookup_calls(module) as captured[name]:
                    awaitables[name] = module.compute_and_output_dist(inputs.contexts[name], features.distributed[name])
            end_submission_turn()
            outputs = {name: wait_output(awaitable) for name, awaitable in awaitables.items()}
        embeddings.hold_rows(_take_pinned_rows(module for name, module in modules.items() if name not in ahead))
        for name, output in outputs.items():
            embeddings.add_ready_output(name, output, captured[name])
        return embeddings

    def _send_late_rows(self, ahead: Mapping[str, AheadLookup]) -> None:
        if not ahead:
            return
        with torch.no_grad(), match_lookups_to_grad_mode(*(self._sharded[name].module for name in ahead)):
            for lookup in ahead.values():
                for rows in lookup.rows:
                    rows.send_late_rows()

    @contextmanager
    def using_looked_up_embeddings(self, embeddings: Embeddings, batch: Any) -> Iterator[Embeddings]:
        """Context of the user's step on a batch: sharded modules return the outputs that were looked up for it.

        Until the model is resolved, this context records, as ``recording`` does, and resolves at its end (a
        collective).

        Args:
            embeddings: result of ``lookup``.
            batch: the batch that the step gets.

        Raises:
            InputError: the step passes a module other objects than those distributed for it; raised in the step.
        """
        if self._serving is not None:
            raise SetupError(
                "a step is being served already. Leave using_looked_up_embeddings() before the next one begins."
            )
        recorder = self._recorder = None if self.is_resolved else Recorder(batch)
        self._serving = embeddings
        record_stream(embeddings.inputs.postprocessed.all_results())
        try:
            yield embeddings
        finally:
            self._serving = self._recorder = None
        if recorder is not None:
            self._resolution.resolve_from_recording(recorder)
            self._attach_postprocesses()

    def run_embedding_backward(
        self, embeddings: Embeddings, scale: torch.Tensor | float | None = None, *, agree_unused: bool = False
    ) -> None:
        """Send the gradients that the dense backward left at the cuts through output dists and lookups.

        Optimizers fused into the lookups step here. An output that this rank did not use sends zeros, so that other
        ranks do not wait for it. After ``tables_backward.run_to_kernels``, only the second half runs.

        Args:
            embeddings: embeddings of the step, which release their outputs and gradients.
            scale: factor of every gradient; None (default) for 1.
            agree_unused: True to leave out modules whose output no rank used (default False; one small collective).
                For optimizers that change a row at a gradient of zero (momentum, weight decay). Equal on all ranks.
        """
        with ExitStack() as prefetches:
            for entry in self._sharded.values():
                prefetches.enter_context(entry.block_prefetch())
            self.tables_backward.run(embeddings, scale, agree_unused)

    @torch.compiler.disable
    def _run_replaced_forward(self, entry: ShardedModuleEntry, /, *positional: Any, **named: Any) -> Any:
        embeddings, call = self._serving, (positional, named)
        if embeddings is not None and entry.name in embeddings.ready:
            if not same_arguments(call, embeddings.inputs.arguments[entry.name]):
                raise InputError(
                    f"sharded module {entry.name!r} must be called with the objects that were distributed for it ahead"
                    f" of the step, {entry.arguments}, but got others. Pass these objects of the batch unchanged, or"
                    " use method='record', which does not pipeline a module whose input the step makes."
                    + ("" if torch.is_grad_enabled() else _ADVICE)
                )
            output = embeddings.ready.pop(entry.name)
            record_stream(output)
            return output if torch.is_grad_enabled() else detach_output(output)
        if self._recorder is not None:
            self._recorder.record_call(entry.name, *call)
        if embeddings is None:
            return self._call_sharded_module_now(entry, call)
        if self._recorder is None and entry.arguments is not None and torch.is_grad_enabled():
            self._stop_dividing(entry, "is called again in a step, which trains rows that are not known in advance")
        with self._capturing_lookup_calls(entry.module) as lookups:
            output = self._call_sharded_module_now(entry, call)
        embeddings.hold_rows(_take_pinned_rows([entry.module]))
        return embeddings.add_output_with_autograd_cut(entry.name, output, lookups)

    def _call_sharded_module_now(self, entry: ShardedModuleEntry, call: Arguments) -> Any:
        return entry.call_now(
            lambda: self._check_and_conform_arguments(entry, call), self._agree_group, self.announce_lookup
        )

    def run_empty_lookup(self, announced: AnnouncedCall) -> None:
        """Run a lookup that other ranks have announced, with empty features. The output is discarded.

        Args:
            announced: name of the module, and the arguments of the call with features replaced by their forms.
        """
        name, forms = announced
        self._sharded[name].run_empty_lookup(forms)

    @torch.compiler.disable
    def _get_or_run_postprocess(self, name: str, forward: Callable[..., Any], /, *positional: Any, **named: Any) -> Any:
        if self._serving is not None and self._serving.inputs.postprocessed.matches(name, positional, named):
            return self._serving.inputs.postprocessed.result(name)
        return forward(*positional, **named)

    def _init_module_inputs(self, batch: Any) -> ModuleInputs:
        return ModuleInputs(batch, PostprocessResults(self._postprocess_forwards))

    def _resolve_checked_arguments(
        self, entry: ShardedModuleEntry, inputs: ModuleInputs, checked: dict[int, object]
    ) -> Arguments:
        assert entry.arguments is not None
        call = inputs.arguments[entry.name] = entry.resolve_arguments(inputs.batch, inputs.postprocessed)
        record_stream(call)
        return self._check_and_conform_arguments(entry, call, checked)

    def _check_and_conform_arguments(
        self, entry: ShardedModuleEntry, call: Arguments, checked: dict[int, object] | None = None
    ) -> Arguments:
        call = entry.check_and_conform_arguments(call, checked)
        if self.splits_backward and entry.form is not None and entry.form.inverse_keys is not None:
            raise InputError(
                f"sharded module {entry.name!r} got features with a batch size per feature, for which gradients of its"
                " tables cannot be kept. Use one batch size, or train without gradient clipping and windows."
            )
        return call

    def _capturing_lookup_calls(self, module: torch.nn.Module) -> AbstractContextManager[LookupCalls | None]:
        captures = self.splits_backward or self.looks_ahead
        return capture_calls(module) if captures and torch.is_grad_enabled() else nullcontext()


def _has_row_optimizers(modules: Iterable[torch.nn.Module]) -> bool:
    return any(
        get_attached_row_optimizer(kernel) is not None for module in modules for kernel in find_fused_kernels(module)
    )


def _features_to_look_up(distributed: Any, context: Any) -> Any:
    """Features of each sharding of a module; of a dynamic module, with slots instead of ids."""
    rows: BatchRows | None = getattr(context, "rows", None)
    if rows is None:
        return distributed
    if rows.features is None:  # they could not be fetched; the wait for the output raises an error
        return [copy_kjt_with_tensors(distributed[0], values=torch.zeros_like(distributed[0].values()))]
    return [rows.features]


def _take_pinned_rows(modules: Iterable[torch.nn.Module]) -> list[BatchRows]:
    """Return the rows of dynamic tables that these modules have just looked up."""
    dynamic: Iterable[Any] = filter(is_dynamic, modules)
    return [rows for module in dynamic for rows in module.take_pinned_rows()]
