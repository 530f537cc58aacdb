"""Records of a model's sharded modules: features, requirements on them, and calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torch import tree_map_only
from lightning_pipe._compat.torchrec import (
    compute_kernels,
    get_all_to_all_group,
    get_input_dist_all_to_alls,
    get_module_sharding_types,
    get_output_all_to_all,
    get_output_group,
    is_weighted,
    lookups_of,
    output_dists_of,
    sends_by_all_to_all,
    set_output_group,
    sharding_group,
    table_configs,
)
from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.recsys.batches.traversal import iterate_leaves
from lightning_pipe.recsys.kernels.fused_kernels import (
    disable_lookup_training,
    find_uvm_caching_kernels,
    hide_prefetch_queues_of_modules,
    preserve_pending_lookups,
)
from lightning_pipe.recsys.modules.call_arguments import Arguments, CallArguments, PostprocessResults
from lightning_pipe.recsys.modules.dynamic_modules import is_dynamic
from lightning_pipe.recsys.modules.feature_checks import (
    FeatureForm,
    IdLimit,
    check_features_match_tables,
    check_has_samples,
    check_ids,
    check_lengths,
    conform_features,
    refuse_missing_feature_weights,
    refuse_trainable_feature_weights,
    shallow_copy_features,
)
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire, sends_int32
from lightning_pipe.recsys.modules.output_order import wait_output
from lightning_pipe.recsys.modules.quantized_comms import has_own_codecs
from lightning_pipe.recsys.modules.row_means import ROW_SHARDED_TYPES
from lightning_pipe.recsys.rewrite.divided_lookup import DividedOutputDist
from lightning_pipe.recsys.rewrite.input_dist import FusableAllToAll, collect_outgoing_features, defer_input_dists
from lightning_pipe.recsys.rewrite.routes import KJTAllToAllRoute

_PIPELINED = (
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
    BaseShardedManagedCollisionEmbeddingCollection,
)
# Lookups in two parts stop if fewer rows of these first batches went ahead, on every rank. So many bytes take 1 ms at
# 1 Gbit/s, as the two additional messages do. Many late rows, looked up twice and merged, cost as much as they save.
_TRIED_BATCHES, _LEAST_BYTES_AHEAD, _LEAST_SHARE_AHEAD = 20, 128 * 1024, 1 / 3
_REFUSED = (ShardedEmbeddingTower, ShardedEmbeddingTowerCollection)

# Name of a module, and the arguments of a call with features replaced by their forms.
AnnouncedCall = tuple[str, Arguments]


class ShardedModuleEntry:
    """Record of one sharded module."""

    def __init__(
        self,
        name: str,
        module: ShardedModule[Any, Any, Any, Any],
        validate_ids: bool,
        ids_on_wire: IdsOnWire,
    ) -> None:
        self.name = name
        self.module: Any = module
        self.forward: Callable[..., Any] = module.forward  # the original
        self.arguments: CallArguments | None = None  # sources in a batch; None if not pipelined, or not yet
        # Why it is not pipelined, as the end of a sentence that begins with its name.
        self.reason = "has not been called in a step yet"
        self.routes: list[
            KJTAllToAllRoute
        ] = []  # of its input dist, if that sends its splits together with other modules'
        self.form: FeatureForm | None = None
        # A worker may prefetch rows during calls of the module; the lock serializes the two.
        self.lock = threading.Lock()
        # Why its lookups are not divided, as the end of a sentence that begins with its name; empty if they can be.
        self.undivided_reason = _find_undivided_reason(module)
        self._divided: list[DividedOutputDist] = []
        # Bytes of rows sent ahead to other ranks, and of all rows sent to them, of the first divided batches.
        self._sent: list[tuple[int, int]] = []
        self._output_groups: list[tuple[Any, dist.ProcessGroup]] = []  # the original ones, while they are replaced
        self._caches = find_uvm_caching_kernels([module])
        self._fusable: list[FusableAllToAll] = []
        self._changes_features = isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection)
        maps_ids = isinstance(module, BaseShardedManagedCollisionEmbeddingCollection) or is_dynamic(module)
        self._validates = validate_ids
        self._checked_tables = _tables_by_feature(module) if validate_ids and not maps_ids else {}
        self._sends_int32 = sends_int32(name, table_configs(module), maps_ids, ids_on_wire)

    @property
    def pipelinable(self) -> bool:
        return isinstance(self.module, _PIPELINED)

    @property
    def device(self) -> torch.device:
        return torch.device(getattr(self.module, "_device", None) or "cpu")

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group that it was sharded over."""
        return sharding_group(self.module)

    @cached_property
    def feature_names(self) -> list[str]:
        """Features that it looks up, in the order of its tables."""
        return list(_tables_by_feature(self.module))

    def check_and_conform_arguments(self, arguments: Arguments, checked: dict[int, object] | None = None) -> Arguments:
        """Check a call's features and convert them to the form of the first batch."""
        positional, named = arguments
        features = positional[0] if positional else named.get("features")
        if not isinstance(features, KeyedJaggedTensor):
            if self.form is None:
                return arguments
            raise InputError(
                f"sharded module {self.name!r} expected a KeyedJaggedTensor with the keys {list(self.form.keys)}, as in"
                f" its first batch, got a {type(features).__name__}. Give every batch the same structure."
            )
        if not self.pipelinable:
            return arguments
        if checked is None or id(features) not in checked:
            check_lengths(self.name, features, self._validates)
            if checked is not None:
                checked[id(features)] = features
        refuse_trainable_feature_weights(self.name, features)
        if type(self.module) is ShardedEmbeddingCollection:
            check_has_samples(self.name, features)
        elif isinstance(self.module, ShardedEmbeddingBagCollection) and is_weighted(self.module):
            refuse_missing_feature_weights(self.name, features)
        if self.form is None:
            check_features_match_tables(self.name, features, self.feature_names)
        else:
            features = conform_features(self.name, features, self.form)
        if self._checked_tables:
            check_ids(self.name, features, self._checked_tables)
        if self.form is None:
            self.form = FeatureForm.from_features(features)
        if self.form.inverse_keys is not None:
            self._refuse_variable_rows()
        if self._changes_features:
            features = shallow_copy_features(features)
        return ((features, *positional[1:]), named) if positional else ((), {**named, "features": features})

    def _refuse_variable_rows(self) -> None:
        group = self.process_group
        if group is None or group.size() == 1 or dist.get_backend(group) != "gloo":
            return
        kinds = get_module_sharding_types(self.module)
        if kinds & ROW_SHARDED_TYPES:
            dynamic = is_dynamic(self.module)  # always sharded by rows
            raise InputError(
                f"sharded module {self.name!r} got features with a batch size per feature, but has tables sharded"
                f" {', '.join(sorted(kinds & ROW_SHARDED_TYPES))}: their gradients differ in size between ranks, and"
                " Gloo cannot exchange them."
                f" {'U' if dynamic else 'Shard these tables table_wise or column_wise, or u'}se one batch size."
            )

    def get_divided_output_dists(self) -> list[DividedOutputDist]:
        """Its output dists, if its lookups can be divided. Its features are known."""
        if self._divided or self.undivided_reason:
            return self._divided
        output_dists = output_dists_of(self.module)
        if self.form is not None and self.form.inverse_keys is not None:
            self.undivided_reason = "gets features with a batch size per feature"
        elif not all(has_own_codecs(get_output_all_to_all(output_dist)) for output_dist in output_dists):
            self.undivided_reason = "has codecs for its messages that are not this project's"
        else:
            self._divided = [
                DividedOutputDist(lookup, output_dist, self.device)
                for lookup, output_dist in zip(lookups_of(self.module), output_dists, strict=True)
            ]
        return self._divided

    @property
    def sends_enough_ahead(self) -> bool:
        """False after the first batches, if too few of their rows went ahead for what the division costs."""
        if len(self._sent) != _TRIED_BATCHES:
            return True
        ahead, whole = map(sum, zip(*self._sent, strict=True))
        return bool(ahead >= max(_LEAST_BYTES_AHEAD * _TRIED_BATCHES, _LEAST_SHARE_AHEAD * whole))

    def record_sent_bytes(self, ahead: int, whole: int) -> None:
        """Record how many bytes of rows a batch has sent to other ranks ahead, and in all."""
        if len(self._sent) < _TRIED_BATCHES:
            self._sent.append((ahead, whole))

    def stop_dividing(self, reason: str = "") -> None:
        """Look up batches at their turn from now on. All ranks agree on that. The default reason is too few bytes."""
        self._divided = []
        ahead, whole = map(sum, zip(*self._sent, strict=True)) if self._sent else (0, 0)
        self.undivided_reason = reason or (
            f"has sent {ahead / len(self._sent) / 1024:.1f} KiB of rows ahead per batch to other ranks, which is"
            f" {ahead / max(1, whole):.0%} of its rows, in {_TRIED_BATCHES} batches, less than"
            f" {_LEAST_BYTES_AHEAD // 1024} KiB or {_LEAST_SHARE_AHEAD:.0%} on every rank: use larger batches for more"
            " bytes, or the plan 'base'"
        )

    def resolve_arguments(self, batch: Any, results: PostprocessResults) -> Arguments:
        """Return its call's arguments from ``batch``."""
        assert self.arguments is not None
        try:
            return self.arguments.resolve(batch, results)
        except LookupError as error:
            raise InputError(
                f"sharded module {self.name!r} gets {self.arguments} of each batch, but {error.args[0]}. Give every"
                " batch the same structure."
            ) from error

    def prefetch(
        self, features: Any, context: Any, forward_stream: torch.Stream | None, splits_backward: bool = False
    ) -> None:
        """Let cached tables prefetch the rows of distributed ``features``. Otherwise the lookup loads them."""
        if type(self.module).prefetch is ShardedModule.prefetch:
            return
        if not is_dynamic(self.module):
            # Without prefetch_pipeline, a prefetch may replace rows that a batch in flight still trains.
            unsafe = splits_backward or not all(kernel.prefetch_pipeline for kernel in self._caches)
            if self.device.type == "cpu" or (self._caches and unsafe):
                return
        with self.lock:
            self.module.prefetch(dist_input=features, ctx=context, forward_stream=forward_stream)

    def call_now(
        self,
        prepare: Callable[[], Arguments],
        group: dist.ProcessGroup | None,
        announce: Callable[[AnnouncedCall], None] | None,
    ) -> Any:
        """Make a call that no task made ahead: all its steps at once, on the module's process group."""
        with match_lookups_to_grad_mode(self.module):
            if announce is None:
                call = run_on_all_ranks(prepare, "", group, InputError)
            else:
                call = prepare()
                announce(
                    (self.name, tree_map_only(KeyedJaggedTensor, FeatureForm.from_features, call, is_leaf=_is_features))
                )
            positional, named = call
            with self._direct_call_context():
                return wait_output(self.forward(*positional, **named))

    def run_empty_lookup(self, forms: Arguments) -> None:
        """Take part in a call that other ranks have announced, with empty features. The output is discarded."""
        positional, named = tree_map_only(FeatureForm, lambda form: form.empty(self.device), forms)
        with match_lookups_to_grad_mode(self.module), self._direct_call_context():
            wait_output(self.forward(*positional, **named))

    @contextmanager
    def _direct_call_context(self) -> Iterator[None]:
        """Context of direct calls. Without grad mode, caches are restored for the backward of an earlier lookup."""
        restored = nullcontext() if torch.is_grad_enabled() else preserve_pending_lookups([self.module])
        with self.lock, hide_prefetch_queues_of_modules([self.module]), restored:
            yield

    def block_prefetch(self) -> AbstractContextManager[Any]:
        """Context of a backward: a worker does not submit the prefetch of a module with a cache meanwhile.

        FBGEMM orders the two on the device if neither is submitted in the middle of the other.
        """
        return self.lock if self._caches else nullcontext()

    def make_input_dists_fusable(self, arguments: Arguments, group: dist.ProcessGroup | None) -> str | None:
        """Prepare its input dists, which its first call built, to send their splits together with other modules'."""
        self._restore_all_to_alls()
        self.routes = []
        if group is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        all_to_alls = get_input_dist_all_to_alls(self.module)
        for all_to_all in all_to_alls:
            dist_ranks = dist.get_process_group_ranks(get_all_to_all_group(all_to_all))
            if dist_ranks != ranks:
                return f"exchanges its inputs among the ranks {dist_ranks}, but the input group has the ranks {ranks}"
        if len(ranks) == 1:
            return None
        self._fusable = [FusableAllToAll(all_to_all, group, self._sends_int32) for all_to_all in all_to_alls]
        self._install_fusable_all_to_alls()
        with defer_input_dists():
            positional, named = arguments
            request = self.module.input_dist(self.module.create_context(), *positional, **named)
        parts = collect_outgoing_features(request)
        for part in parts:
            part.route.variable = part.variable
        self.routes = [part.route for part in parts]
        return None

    def install(self, forward: Callable[..., Any], output_group: dist.ProcessGroup | None) -> None:
        """Replace the module's forward, those of its input dists if they are known, and the group of its output dists.

        Args:
            forward: replacement of the forward.
            output_group: process group for the all-to-alls of outputs over the same ranks; None for the module's own.
        """
        if "forward" in self.module.__dict__:
            raise SetupError(
                f"the forward of sharded module {self.name!r} is replaced already. Call restore() on the other rewrite,"
                " or detach() on its pipeline."
            )
        self.module.forward = forward
        if output_group is not None:
            self._replace_output_groups(output_group)
        self._install_fusable_all_to_alls()

    def restore(self) -> None:
        self.module.__dict__.pop("forward", None)
        for output_dist, group in self._output_groups:
            set_output_group(output_dist, group)
        self._output_groups.clear()
        self._restore_all_to_alls()

    def _replace_output_groups(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        for output_dist in output_dists_of(self.module):
            original = get_output_group(output_dist)
            if original is not None and dist.get_process_group_ranks(original) == ranks:
                self._output_groups.append((output_dist, original))
                set_output_group(output_dist, group)

    def _install_fusable_all_to_alls(self) -> None:
        for fusable in self._fusable:
            fusable.install()

    def _restore_all_to_alls(self) -> None:
        for fusable in self._fusable:
            fusable.restore()


def match_lookups_to_grad_mode(*modules: torch.nn.Module) -> AbstractContextManager[None]:
    """Context of lookups. Without grad mode, the kernels' step counters do not advance."""
    return nullcontext() if torch.is_grad_enabled() else disable_lookup_training(modules)


def _find_undivided_reason(module: ShardedModule[Any, Any, Any, Any]) -> str:
    """Reason that is known before the first lookup. The same on every rank."""
    group = sharding_group(module)
    if group is None or group.size() == 1:
        return "is on one rank, which sends nothing: use another plan, such as 'prefetch'"
    if not isinstance(module, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
        return f"is a {type(module).__name__}, whose lookup depends on more than the rows"
    kernels = {kernel for kernel in compute_kernels(module).values() if kernel not in ("fused", "fused_uvm")}
    if kernels:
        return f"has the compute kernels {', '.join(sorted(kernels))}"
    if not all(map(sends_by_all_to_all, output_dists_of(module))):
        types = ", ".join(sorted(get_module_sharding_types(module)))
        return f"sends in other ways than by rows (sharded {types}): shard its tables table_wise or column_wise"
    if is_dynamic(module) and any(table.ttl is not None for table in module.dynamic_tables.values()):
        return "has tables with a ttl, which counts batches that are looked up"
    return ""


def _is_features(value: Any) -> bool:
    return isinstance(value, KeyedJaggedTensor)  # without this, tree_map descends into it


def _tables_by_feature(module: ShardedModule[Any, Any, Any, Any]) -> dict[str, IdLimit]:
    tables: dict[str, IdLimit] = {}
    for config in table_configs(module):
        for feature in config.feature_names:
            smallest = tables.get(feature)
            if smallest is None or config.num_embeddings < smallest.rows:
                tables[feature] = IdLimit(config.name, config.num_embeddings)
    return tables


@contextmanager
def sum_lengths_on_host(sharded: Collection[ShardedModuleEntry], batch: Any) -> Iterator[None]:
    """Context of the copy of a batch to a GPU, where reading lengths makes the host wait.

    Lengths of the sharded modules' features are checked and summed on the host, and the copies take the sums along.
    The loader's objects do not keep them, since the loader may change its tensors later.
    """
    summed: list[KeyedJaggedTensor] = []
    try:
        for _, piece in iterate_leaves(batch):
            if not isinstance(piece, KeyedJaggedTensor) or not _has_host_lengths(piece):
                continue
            keys = set(piece.keys())
            name = next((entry.name for entry in sharded if keys.issuperset(entry.feature_names or (None,))), None)
            if name is not None:
                if piece.length_per_key_or_none() is None:
                    summed.append(piece)
                check_lengths(name, piece)
                piece.sync()
        yield
    finally:
        for piece in summed:
            piece.unsync()


def _has_host_lengths(features: KeyedJaggedTensor) -> bool:
    counts = features.offsets_or_none() if features.lengths_or_none() is None else features.lengths_or_none()
    return counts is not None and counts.device.type == "cpu"


def find_sharded_modules(
    model: torch.nn.Module, validate_ids: bool, ids_on_wire: IdsOnWire
) -> dict[str, ShardedModuleEntry]:
    """Return the sharded modules of ``model`` by name, without those inside another sharded module."""
    sharded: dict[str, ShardedModuleEntry] = {}
    for name, module in model.named_modules():
        if not isinstance(module, ShardedModule) or any(name.startswith(f"{outer}.") for outer in sharded):
            continue
        if isinstance(module, _REFUSED):
            raise SetupError(
                f"sharded module {name!r} is a {type(module).__name__}, whose interaction layers would only be trained"
                " on the ranks of one host. Use an EmbeddingBagCollection and move the interaction into the model."
            )
        sharded[name] = ShardedModuleEntry(name, module, validate_ids, ids_on_wire)
    if not sharded:
        raise SetupError(
            f"{type(model).__name__} must hold a sharded module, got none. Shard it first: torchrec's"
            " DistributedModelParallel shards the EmbeddingBagCollection and EmbeddingCollection modules of a model."
        )
    return sharded
