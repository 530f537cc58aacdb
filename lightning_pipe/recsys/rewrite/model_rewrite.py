"""Splits the call of every sharded module into steps that a plan can place: input dist, lookup, use, backward.

The rewrite replaces each sharded module's ``forward``. What it replaces is the same in training, in evaluation and in a
direct call; which of three things it does then depends on whether a step is being *served*:

1. served, and the module is pipelined: hand on the output that was looked up ahead for this batch;
2. served otherwise (not pipelined, a second call, the recorded first step): look up now, hand on the cut output;
3. not served: what the module does by itself, waited for.

All state of a batch is in the objects that the methods return; the rewrite itself holds only what was found once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module

from lightning_pipe._compat.torchrec import release_sent
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.together import any_of, on_all_ranks, raise_gathered, raise_together
from lightning_pipe.engine.runtime.record_use import record_use
from lightning_pipe.recsys.dynamic.tables.batch_rows import BatchRows
from lightning_pipe.recsys.dynamic.tables.sharded_tables import ShardedDynamicModule
from lightning_pipe.recsys.kernels.fused import (
    fused_kernels,
    moves_rows_at_zero_gradient,
)
from lightning_pipe.recsys.kernels.kernel_calls import (
    LookupCalls,
    can_follow_rates,
    capture_calls,
    check_capturable,
)
from lightning_pipe.recsys.kernels.row_optimizer import row_optimizer
from lightning_pipe.recsys.modules.call_arguments import Arguments, PostprocessResults, same_arguments
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.modules.output_order import wait_output
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, Features, Inputs, Requests, Splits
from lightning_pipe.recsys.rewrite.boundary import without_gradient
from lightning_pipe.recsys.rewrite.direct_calls import Announced, call_now, join_call, lookup_mode
from lightning_pipe.recsys.rewrite.early_release import EarlyRelease, own_objects
from lightning_pipe.recsys.rewrite.find_record import Recorder
from lightning_pipe.recsys.rewrite.input_dist import answer_without_splits, fusing, send_splits
from lightning_pipe.recsys.rewrite.replaced_forwards import ReplacedForwards
from lightning_pipe.recsys.rewrite.resolution import Method, Resolution
from lightning_pipe.recsys.rewrite.sharded_modules import Sharded, find_sharded
from lightning_pipe.recsys.rewrite.table_backward import TableBackward

__all__ = ["ModelRewrite"]

_ADVICE = " Or evaluate batch by batch, as the step comes: the strategy's rewrite: {evaluation: false}."


class ModelRewrite(ReplacedForwards):
    """Replaces the forwards of a model's sharded modules until ``restore``.

    Args:
        model: holds sharded modules, at any depth; a wrapper (``DistributedModelParallel``, DDP) is looked through.
        method: how to find what feeds each module: ``record`` (watch the first batch train), ``direct`` (by keys),
            ``fx`` (trace the step); ``auto`` records, then traces for the modules whose argument the step made.
        step: name of the model's method that a batch is trained with; its first argument is the batch.
        input_group: sends input dists, and nothing else while they are under way. None: the modules' own group.
        status_group: over all ranks, where the input group is not: says in time that a batch of any cannot be trained,
            and is used for nothing else. None: the input group.
        agree_group: over all ranks, for comparing what ranks found and for the texts of errors; used by the calling
            thread. None: the input group.
        validate_ids: check every id against its table before it is sent.
        ids_on_wire: what the ids of pipelined modules travel as; see ``ids_on_wire.sends_int32``.
        split_backward: keep what the lookups were called with, so that ``tables_backward`` can stop in front of them.
            Where tables are trained by a row optimiser, that is so anyway.
        look_ahead: keep it, as far as can be, for lookups before the batch before is trained: learning rates may change
            until the batch's own turn.
        free_features_early: let go of ids that only pipelined modules are fed once they are sent.

    Attributes:
        splits_backward: whether it is.
        looks_ahead: as ``look_ahead``, if all modules can, on all ranks.
        agrees_unused: what ``agree_unused`` of ``backward`` is to be: an output that no rank used has a gradient of
            zero, at which an optimiser on any rank changes a row.
        tables_backward: what ``backward`` calls, and its two halves.
        announce: called with the argument of :meth:`join` before each lookup, if some ranks must join it.

    Raises:
        SetupError: no sharded module, one that cannot be trained here, whose backward cannot be split if it is to be,
            whose ids do not fit what they shall travel as, or a model rewritten already.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        method: Method = "auto",
        step: str = "forward",
        input_group: dist.ProcessGroup | None = None,
        agree_group: dist.ProcessGroup | None = None,
        validate_ids: bool = False,
        ids_on_wire: IdsOnWire = "auto",
        split_backward: bool = False,
        look_ahead: bool = False,
        free_features_early: bool = False,
        status_group: dist.ProcessGroup | None = None,
    ) -> None:
        model = get_unwrapped_module(model)
        sharded = find_sharded(model, validate_ids, ids_on_wire)
        first = next(iter(sharded.values()))
        group = input_group if input_group is not None else first.own_group
        self._agree_group = agree_group if agree_group is not None else group
        super().__init__(model, sharded, Resolution(model, method, step, sharded, self._agree_group, group))
        self._early_release = EarlyRelease(self._sharded) if free_features_early else None
        self._device = first.device
        self._group = group if group is not None and group.size() > 1 else None
        status = status_group if status_group is not None else group
        self._status_group = status if status is not None and status.size() > 1 else None
        # A rank knows the kernels of its own shards alone, and all ranks must do alike.
        modules = self.modules.values()
        by_rows, some_cannot_follow, self.agrees_unused = any_of(
            [
                _has_row_optimizers(modules),
                not all(map(can_follow_rates, modules)),
                any(map(moves_rows_at_zero_gradient, modules)),
            ],
            self._agree_group,
        )
        self.splits_backward = split_backward or by_rows
        if self.splits_backward:
            on_all_ranks(lambda: check_capturable(self.modules), "", self._agree_group, InputError)
        self.looks_ahead = look_ahead and not some_cannot_follow
        self.tables_backward = TableBackward(self.modules, self._agree_group)
        self._serving: Embeddings | None = None
        self._recorder: Recorder | None = None
        self.announce: Callable[[Announced], None] | None = None
        self.attach()

    @property
    def has_peers(self) -> bool:
        """Whether other ranks take part: what one rank does not do, they would wait for."""
        return self._status_group is not None

    @contextmanager
    def recording(self, batch: Any) -> Iterator[Embeddings]:
        """Around the user's step on the first batch: sharded modules look up as they are called, and are watched.

        Yields:
            the embeddings of the step, for ``backward``.
        """
        with self.serving(Embeddings(self._inputs(batch)), batch) as embeddings:
            yield embeddings

    def transferred(self, before: Any, after: Any) -> None:
        """A batch was moved to the device: what it has in common with the loader's is not to be let go of."""
        if self._early_release is not None:
            self._early_release.transferred(before, after)

    def start_input_dist(self, batch: Any, error: Exception | None = None) -> Splits:
        """Takes the pipelined modules' arguments out of the transferred batch and submits all splits together.

        Until the model is resolved no splits are submitted; ``direct`` and ``fx`` resolve it here, at the first batch.

        Args:
            batch: the transferred batch.
            error: what went wrong with this rank's batch before, if anything did: it is raised as one found here is.

        Raises:
            InputError: what is wrong with this rank's batch, if it is alone. Among several ranks ``wait_splits``
                raises it, on all of them.
        """
        if not self.resolved:
            raise_together(error, "", self._agree_group, InputError)
            self._resolution.before_first_step(batch)
            self._attach_postprocesses()
        splits = Splits(self._inputs(batch))
        pipelined = [entry for entry in self._sharded.values() if entry.arguments is not None]
        requests: dict[str, Any] = {}
        try:
            if error is not None:
                raise error
            prepared = [self._arguments(entry, splits.inputs) for entry in pipelined]
            if self._early_release is not None:
                prepared = [own_objects(call) for call in prepared]
            with fusing():
                for entry, (positional, named) in zip(pipelined, prepared, strict=True):
                    context = splits.inputs.contexts[entry.name] = entry.module.create_context()
                    requests[entry.name] = entry.module.input_dist(context, *positional, **named)
        except Exception as problem:
            if self._status_group is None:
                raise
            splits.error = problem
        length = sum(entry.splits for entry in pipelined)
        with_splits = bool(length) and self._status_group is not None and self._status_group is self._group
        if self._status_group is not None and not with_splits:
            failed = torch.tensor([splits.error is not None], dtype=torch.int32, device=self._device)
            work = dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._status_group, async_op=True)
            splits.status = work, failed
        if not pipelined:
            return splits
        if splits.error is None:
            splits.request = send_splits(requests, splits.inputs.contexts, with_splits)
            if self._early_release is not None:
                self._early_release.release(splits.inputs)
        elif self._group is not None:
            splits.answer = answer_without_splits(length, self._group, self._device, with_splits)
        return splits

    def inputs_again(self, batch: Any, contexts: dict[str, Any]) -> Inputs:
        """The pipelined modules' arguments in a batch whose features are distributed already.

        Args:
            batch: the transferred batch, with the features of the one that was distributed.
            contexts: of that one.
        """
        inputs = self._inputs(batch)
        inputs.contexts = contexts
        for entry in self._sharded.values():
            if entry.arguments is not None:
                inputs.arguments[entry.name] = entry.take_arguments(batch, inputs.postprocessed)
        return inputs

    def wait_splits(self, splits: Splits) -> Requests:
        """Waits for the splits and submits the tensors of all modules.

        Raises:
            InputError: on every rank, if the batch of any cannot be trained; names the rank.
        """
        any_failed = splits.error is not None
        if splits.status is not None:
            work, failed = splits.status
            work.wait()
            any_failed = bool(failed.item())
        elif splits.request is not None:
            any_failed = splits.request.any_failed()
        if any_failed:
            if splits.answer is not None:
                splits.answer.wait()
            raise_gathered(splits.error, "", self._agree_group, InputError)
        return Requests(splits.inputs, {} if splits.request is None else splits.request.wait())

    def wait_inputs(self, requests: Requests, forward_stream: torch.Stream | None = None) -> Features:
        """Waits for the tensors, and lets modules with cached tables fetch what the lookup will need.

        Safe on a worker thread: it submits nothing to a process group.

        Args:
            requests: of ``wait_splits``.
            forward_stream: the device stream that ``lookup`` will run on, if it is another than the current one.
        """
        inputs = requests.inputs
        distributed: dict[str, Any] = {}
        for name, tensors in requests.tensors.items():
            release_sent(tensors)
            features = distributed[name] = tensors.wait()
            record_use([features, inputs.contexts[name]])
            self._sharded[name].prefetch(features, inputs.contexts[name], forward_stream)
        return Features(inputs, distributed)

    def lookup(self, features: Features) -> Embeddings:
        """Looks up for all modules, then waits for the output dist of each, and cuts what they return.

        Without grad mode (evaluation) nothing is cut and the kernels' step counters stay.
        """
        inputs = features.inputs
        record_use([features.distributed, inputs.contexts])
        embeddings = Embeddings(inputs)
        modules = {name: self._sharded[name].module for name in features.distributed}
        awaitables: dict[str, Any] = {}
        captured: dict[str, LookupCalls | None] = {}
        with lookup_mode(*modules.values()):
            for name, module in modules.items():
                with self._capturing(module) as captured[name]:
                    awaitables[name] = module.compute_and_output_dist(inputs.contexts[name], features.distributed[name])
            outputs = {name: wait_output(awaitable) for name, awaitable in awaitables.items()}
        embeddings.hold_rows(_claim_rows(modules.values()))
        for name, output in outputs.items():
            embeddings.keep_ready(name, output, captured[name])
        return embeddings

    @contextmanager
    def serving(self, embeddings: Embeddings, batch: Any) -> Iterator[Embeddings]:
        """Around the user's step on a batch: sharded modules return what was looked up for it.

        Until the model is resolved this records, as ``recording`` does, and resolves at its end (a collective).

        Args:
            embeddings: of ``lookup``.
            batch: as the step gets it.

        Raises:
            InputError: in the step, where it passes a module something else than was distributed for it.
        """
        if self._serving is not None:
            raise SetupError("a step is being served already; end its serving() before the next one's begins.")
        recorder = self._recorder = None if self.resolved else Recorder(batch)
        self._serving = embeddings
        record_use(embeddings.inputs.postprocessed.everything())
        try:
            yield embeddings
        finally:
            self._serving = self._recorder = None
        if recorder is not None:
            self._resolution.after_step(recorder)
            self._attach_postprocesses()

    def backward(
        self, embeddings: Embeddings, scale: torch.Tensor | float | None = None, *, agree_unused: bool = False
    ) -> None:
        """Sends the gradients that the dense backward left at the cuts through output dists and lookups, at once.

        Optimisers fused into the lookups step here. An output that this rank did not use sends zeros, so that no
        rank waits alone. After ``tables_backward.begin``, only what that left to do.

        Args:
            embeddings: of the step; it lets go of its outputs and gradients.
            scale: multiplies every gradient.
            agree_unused: leave out a module whose output no rank used (one small collective); for optimisers that
                change a row at a zero gradient (momentum, weight decay). All ranks must pass the same.
        """
        self.tables_backward.run(embeddings, scale, agree_unused)

    def _called(self, entry: Sharded, call: Arguments) -> Any:
        embeddings = self._serving
        if embeddings is not None and embeddings.is_ready(entry.name):
            if not same_arguments(call, embeddings.inputs.arguments[entry.name]):
                raise InputError(
                    f"sharded module {entry.name!r} was called with something else than was distributed for it ahead of"
                    f" the step: {entry.arguments}. Pass it that piece of the batch, unchanged; or find its input with"
                    " method='record', which takes it out of the pipeline if the step makes it."
                    + ("" if torch.is_grad_enabled() else _ADVICE)
                )
            output = embeddings.take(entry.name)
            record_use(output)
            return output if torch.is_grad_enabled() else without_gradient(output)
        if self._recorder is not None:
            self._recorder.called(entry.name, *call)
        if embeddings is None:
            return self._call_now(entry, call)
        with self._capturing(entry.module) as lookups:
            output = self._call_now(entry, call)
        embeddings.hold_rows(_claim_rows([entry.module]))
        return embeddings.add(entry.name, output, lookups)

    def _call_now(self, entry: Sharded, call: Arguments) -> Any:
        return call_now(entry, lambda: self._prepare(entry, call), self._agree_group, self.announce)

    def join(self, announced: Announced) -> None:
        """Run a lookup that other ranks have announced, with empty features. The output is discarded.

        Args:
            announced: name of the module, and the arguments of the call with features replaced by their form.
        """
        name, forms = announced
        join_call(self._sharded[name], forms, self._device)

    def _postprocess(self, name: str, forward: Callable[..., Any], call: Arguments) -> Any:
        if self._serving is not None and self._serving.inputs.postprocessed.matches(name, *call):
            return self._serving.inputs.postprocessed.result(name)
        positional, named = call
        return forward(*positional, **named)

    def _inputs(self, batch: Any) -> Inputs:
        return Inputs(batch, PostprocessResults(self._postprocess_forwards))

    def _arguments(self, entry: Sharded, inputs: Inputs) -> Arguments:
        assert entry.arguments is not None
        call = inputs.arguments[entry.name] = entry.take_arguments(inputs.batch, inputs.postprocessed)
        record_use(call)
        return self._prepare(entry, call)

    def _prepare(self, entry: Sharded, call: Arguments) -> Arguments:
        call = entry.prepare(call)
        if self.splits_backward and entry.form is not None and entry.form.inverse_keys is not None:
            raise InputError(
                f"sharded module {entry.name!r} got features with a batch size per feature, which the norm of its"
                " tables' gradients is not known for. Give one batch size, or train without gradient clipping."
            )
        return call

    def _capturing(self, module: torch.nn.Module) -> AbstractContextManager[LookupCalls | None]:
        captures = self.splits_backward or self.looks_ahead
        return capture_calls(module) if captures and torch.is_grad_enabled() else nullcontext()


def _has_row_optimizers(modules: Iterable[torch.nn.Module]) -> bool:
    return any(row_optimizer(kernel) is not None for module in modules for kernel in fused_kernels(module))


def _claim_rows(modules: Iterable[torch.nn.Module]) -> list[BatchRows]:
    """The rows of dynamic tables that these modules have just looked up."""
    return [rows for module in modules if isinstance(module, ShardedDynamicModule) for rows in module.claim_rows()]
