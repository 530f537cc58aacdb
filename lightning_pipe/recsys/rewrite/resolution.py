"""Decides once which sharded modules are pipelined: finds their inputs and makes all ranks agree on them."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.common.options import check_choice
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, raise_together
from lightning_pipe.recsys.batches.traversal import format_path, iterate_leaves
from lightning_pipe.recsys.modules.call_arguments import (
    Arguments,
    BatchArgument,
    CallArguments,
    PostprocessResults,
)
from lightning_pipe.recsys.modules.feature_checks import FeatureForm
from lightning_pipe.recsys.rewrite.call_recorder import Recorder
from lightning_pipe.recsys.rewrite.sharded_modules import ShardedModuleEntry
from lightning_pipe.recsys.rewrite.step_tracer import COMPUTED, find_arguments_by_trace

Method = Literal["auto", "record", "direct", "fx"]

Candidates = dict[str, CallArguments | str]


class ArgumentResolver:
    """Finds the input of each module by the chosen method, and sets it in the modules' records."""

    def __init__(
        self,
        model: torch.nn.Module,
        method: Method,
        step: str,
        sharded: dict[str, ShardedModuleEntry],
        agree_group: dist.ProcessGroup | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        check_choice("method", method, ("auto", "record", "direct", "fx"))
        self.done = False  # True if every module is either pipelined or has a reason
        self._model = model
        self._method = method
        self._step = step
        self._sharded = sharded
        self._agree_group = agree_group
        self._group = group

    @property
    def needs_recording(self) -> bool:
        return self._method in ("auto", "record")

    def check_first_batch_and_resolve(self, batch: Any) -> None:
        """Compare the ranks' first batches and, unless the first step must be observed, resolve."""
        jagged = {
            format_path(path): str(FeatureForm.from_features(piece))
            for path, piece in iterate_leaves(batch)
            if isinstance(piece, KeyedJaggedTensor)
        }
        check_agreement(
            sorted(jagged.items()), "form of the KeyedJaggedTensors", self._agree_group, error_class=InputError
        )
        if self.needs_recording:
            return  # the step may make its features from other tensors
        try:
            self.resolve_without_step(batch)  # post-processing may make features from a batch without jagged tensors
        except InputError as error:
            if jagged:
                raise
            raise self._missing_features_error(batch) from error
        if not jagged and all(entry.arguments is None for entry in self._sharded.values()):
            self.done = False
            raise self._missing_features_error(batch)

    def _missing_features_error(self, batch: Any) -> InputError:
        pieces = ", ".join(f"{format_path(path)} ({type(piece).__name__})" for path, piece in iterate_leaves(batch))
        return InputError(
            f"a batch must hold a KeyedJaggedTensor for the sharded modules {', '.join(self._sharded)}, got a"
            f" {type(batch).__name__} with {pieces or 'no tensor'}. Put the sparse features of each batch into a"
            " torchrec KeyedJaggedTensor (in the collate function, or in on_after_batch_transfer)."
        )

    def resolve_without_step(self, batch: Any) -> None:
        """Resolve directly or by fx, from a batch before any step."""
        candidates: Candidates = {}
        names = [name for name, entry in self._sharded.items() if entry.pipelinable]
        if self._method == "direct":
            candidates = {name: find_arguments_by_keys(batch, self._sharded[name].feature_names) for name in names}
        else:
            candidates = find_arguments_by_trace(self._model, self._step, names)
        agreed = self._select_agreed_arguments(candidates)
        results = PostprocessResults(self._get_postprocess_forwards(agreed))
        calls: dict[str, Arguments] = {}
        error: Exception | None = None
        try:
            for name, arguments in agreed.items():
                entry = self._sharded[name]
                entry.arguments = arguments
                calls[name] = entry.check_and_conform_arguments(entry.resolve_arguments(batch, results))
        except Exception as problem:
            error = problem
            for entry in self._sharded.values():
                entry.arguments = None
        raise_together(error, "", self._agree_group, InputError)
        for name, (positional, named) in calls.items():  # TorchRec builds a module's input dist at its first batch
            module = self._sharded[name].module
            module.input_dist(module.create_context(), *positional, **named).wait().wait()
        self._apply_agreed_arguments(agreed, calls)

    def resolve_from_recording(self, recorder: Recorder) -> None:
        """Resolve from the recorded first step, or by fx for modules whose argument the step made."""
        names = [name for name, entry in self._sharded.items() if entry.pipelinable]
        candidates: Candidates = {name: recorder.arguments(name) for name in names}
        made_in_step = [
            name
            for name, candidate in candidates.items()
            if isinstance(candidate, str) and recorder.get_recorded_arguments(name) is not None
        ]
        if self._method == "auto" and any(all_gather_objects(bool(made_in_step), self._agree_group)):
            traced = find_arguments_by_trace(self._model, self._step, names)
            for name in made_in_step:
                why = traced[name]
                if isinstance(why, str):
                    # The recorder's reason already states that the step computes it.
                    comma = "," if why.startswith(COMPUTED) else ";"
                    why = f"{candidates[name]}{comma} {why.removeprefix(COMPUTED)}"
                candidates[name] = why
        agreed = self._select_agreed_arguments(candidates)
        calls: dict[str, Arguments] = {}
        for name, arguments in agreed.items():
            call = recorder.get_recorded_arguments(name)
            assert call is not None
            self._sharded[name].arguments = arguments
            calls[name] = self._sharded[name].check_and_conform_arguments(call)
        self._apply_agreed_arguments(agreed, calls)

    def _select_agreed_arguments(self, candidates: Candidates) -> dict[str, CallArguments]:
        """Return the inputs that are equal on all ranks, and set the reasons of the other modules."""
        for name, entry in self._sharded.items():
            if not entry.pipelinable:
                candidates[name] = f"is a {type(entry.module).__name__}, a type that cannot be pipelined"
        texts = {name: (isinstance(candidate, CallArguments), str(candidate)) for name, candidate in candidates.items()}
        by_rank = all_gather_objects(texts, self._agree_group)
        agreed: dict[str, CallArguments] = {}
        for name, candidate in candidates.items():
            views = [of_rank[name] for of_rank in by_rank]
            all_known = all(is_known for is_known, _ in views)
            if isinstance(candidate, CallArguments) and all_known and len(set(views)) == 1:
                agreed[name] = candidate
            elif all_known:
                parts = (f"rank {rank}: {text}" for rank, (_, text) in enumerate(views))
                self._sharded[name].reason = f"is fed differently on different ranks ({'; '.join(parts)})"
            else:
                rank, text = next((rank, text) for rank, (is_known, text) in enumerate(views) if not is_known)
                self._sharded[name].reason = text if len(set(views)) == 1 else f"{text} (rank {rank})"
        return agreed

    def _apply_agreed_arguments(self, agreed: dict[str, CallArguments], calls: dict[str, Arguments]) -> None:
        by_rank = all_gather_objects(
            {name: self._sharded[name].make_input_dists_fusable(calls[name], self._group) for name in agreed},
            self._agree_group,
        )
        for rank, problems in enumerate(by_rank):
            for name, problem in problems.items():
                entry = self._sharded[name]
                if problem is not None and entry.arguments is not None:
                    entry.arguments, entry.reason = None, f"{problem} (rank {rank})"
        self.done = True
        left_out = [f"{name!r} {entry.reason}" for name, entry in self._sharded.items() if entry.arguments is None]
        if left_out and (self._agree_group is None or self._agree_group.rank() == 0):
            reasons = "; ".join(left_out)
            if "the step made it" in reasons:
                reasons += (
                    ". To pipeline them, make each module's KeyedJaggedTensor in the collate function or in"
                    " on_after_batch_transfer"
                )
            warnings.warn(
                f"These sharded modules are not pipelined and do all their work inside the step: {reasons}",
                stacklevel=2,
            )

    def _get_postprocess_forwards(self, agreed: dict[str, CallArguments]) -> dict[str, Any]:
        names = {name for arguments in agreed.values() for name in arguments.collect_postprocess_calls()}
        return {name: self._model.get_submodule(name).forward for name in names}


def find_arguments_by_keys(batch: Any, features: list[str]) -> CallArguments | str:
    """Return the only keyed jagged tensor of the batch that has all *features*, or the reason why it is unknown."""
    feature_set = set(features)
    jagged = [(path, piece) for path, piece in iterate_leaves(batch) if isinstance(piece, KeyedJaggedTensor)]
    fitting = [(path, piece) for path, piece in jagged if feature_set <= set(piece.keys())]
    exact = [(path, piece) for path, piece in fitting if feature_set == set(piece.keys())]
    if len({id(piece) for _, piece in exact}) == 1:
        fitting = exact
    if len({id(piece) for _, piece in fitting}) == 1:
        return CallArguments((BatchArgument(fitting[0][0]),))
    if fitting:
        places = ", ".join(format_path(path) for path, _ in fitting)
        return f"several keyed jagged tensors of the batch have its features {sorted(feature_set)}: {places}"
    places = ", ".join(f"{format_path(path)} with {piece.keys()}" for path, piece in jagged)
    return (
        f"no keyed jagged tensor of the batch has all of its features {sorted(feature_set)}; found: {places or 'none'}"
    )
