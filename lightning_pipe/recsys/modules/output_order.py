"""Outputs of sharded modules: a wait for them, and modules that return them in the order of unsharded modules.

TorchRec orders a sharded module's outputs by the placement of its tables. A model that reads each output by its key is
not affected. A model that uses ``KeyedTensor.values()`` as one feature vector would silently feed permuted columns to
its dense layers, in an order that depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding, ShardingEnv
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe._compat.torch import register_pytree_node
from lightning_pipe._compat.torchrec import disable_mean_pooling, module_name
from lightning_pipe.recsys.modules.feature_checks import (
    FeatureForm,
    check_features_match_tables,
    conform_features,
    drop_feature_weights,
    wrong_input_error,
)
from lightning_pipe.recsys.modules.quantized_comms import QuantizedComms
from lightning_pipe.recsys.modules.row_means import RowWiseMeanPooling, divide_pooled_embeddings


def _list_embedding_names(configs: list[Any]) -> list[str]:
    return [name for names in get_embedding_names_by_table(configs) for name in names]


def _list_feature_names(configs: Sequence[BaseEmbeddingConfig]) -> list[str]:
    return [feature for config in configs for feature in config.feature_names]


class OrderedKeyedTensor(KeyedTensor):
    """A ``KeyedTensor`` with its columns in another order. They are copied when first read as a whole.

    Models that read each feature by its key, as most do, never pay for the copy.
    """

    def __init__(self, source: KeyedTensor, names: list[str]) -> None:
        lengths = dict(zip(source.keys(), source.length_per_key(), strict=True))
        super().__init__(names, [lengths[name] for name in names], source.values(), source.key_dim())
        self.source = source
        self._ordered: torch.Tensor | None = None

    # KeyedTensor's own methods read this attribute.
    @property
    def _values(self) -> torch.Tensor:
        if self._ordered is None:
            columns = self.source.to_dict()
            self._ordered = torch.cat([columns[name] for name in self.keys()], dim=self.key_dim())
        return self._ordered

    @_values.setter
    def _values(self, values: torch.Tensor) -> None:
        """Ignore the values from the base class's constructor, which are the source's."""

    # After the copy is made, it takes precedence over the source: users may have changed it in place.
    def __getitem__(self, key: str) -> torch.Tensor:
        values: torch.Tensor = self.source[key] if self._ordered is None else super().__getitem__(key)
        return values

    def to_dict(self) -> dict[str, torch.Tensor]:
        if self._ordered is not None:
            return super().to_dict()
        columns = self.source.to_dict()
        return {name: columns[name] for name in self.keys()}

    def size_in_bytes(self) -> int:
        return self.source.size_in_bytes()

    def device(self) -> torch.device:
        return self.source.device()

    def record_stream(self, stream: Any) -> None:
        self.source.record_stream(stream)
        if self._ordered is not None:
            self._ordered.record_stream(stream)


# The same tree as a plain KeyedTensor: its values, and its keys and lengths.
register_pytree_node(
    OrderedKeyedTensor,
    lambda tensor: ([tensor.values()], (tensor.keys(), tensor.length_per_key())),
    lambda values, context: KeyedTensor(context[0], context[1], next(iter(values))),
    serialized_type_name="lightning_pipe.recsys.modules.output_order.OrderedKeyedTensor",
)


class _OrderedOutputMixin:
    """The parts that both classes share: features in the form of the first batch, outputs in the unsharded order."""

    prepare_features: Callable[[Any, KeyedJaggedTensor], KeyedJaggedTensor]
    _add_output_callbacks: Callable[[Any, LazyAwaitable[Any]], LazyAwaitable[Any]]

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """TorchRec's input dist, of features in the form of the first batch."""
        awaitable: Awaitable[Awaitable[KJTList]] = super().input_dist(ctx, self.prepare_features(ctx, features))  # type: ignore[misc]
        return awaitable

    def output_dist(self, ctx: Any, output: list[torch.Tensor]) -> LazyAwaitable[Any]:
        """TorchRec's output dist, with outputs in the unsharded order."""
        return self._complete_output(ctx, super().output_dist(ctx, output))  # type: ignore[misc]

    def compute_and_output_dist(self, ctx: Any, input: KJTList) -> LazyAwaitable[Any]:
        """TorchRec's lookup and output dist, with outputs in the unsharded order."""
        return self._complete_output(ctx, super().compute_and_output_dist(ctx, input))  # type: ignore[misc]

    def _complete_output(self, ctx: Any, awaitable: LazyAwaitable[Any]) -> LazyAwaitable[Any]:
        drop_added_sample_from_output(ctx, awaitable)
        return self._add_output_callbacks(ctx, awaitable)


class OrderedEmbeddingBagCollection(_OrderedOutputMixin, ShardedEmbeddingBagCollection):
    """Pooled embeddings with columns in the unsharded order and correct means of row-sharded tables."""

    def __init__(
        self,
        module: EmbeddingBagCollectionInterface,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        *arguments: Any,
        **named: Any,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, *arguments, **named)
        self._configs, self._uses_weights = module.embedding_bag_configs(), module.is_weighted()
        self._row_means = RowWiseMeanPooling(
            self._configs, table_name_to_parameter_sharding, *disable_mean_pooling(self)
        )

    def prepare_features(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features to distribute; the divisor of means is computed here, where the lengths of bags are known."""
        features = _add_sample_if_none(ctx, _conform_to_first_batch(self, self._configs, features, self._uses_weights))
        if self._row_means.needs_division:
            ctx.divisor = self._row_means.divisor(features)
        return features

    def _add_output_callbacks(
        self, ctx: EmbeddingBagCollectionContext, awaitable: LazyAwaitable[KeyedTensor]
    ) -> LazyAwaitable[KeyedTensor]:
        if ctx.divisor is not None:
            awaitable.callbacks.append(partial(divide_pooled_embeddings, divisor=ctx.divisor))
        awaitable.callbacks.append(self._reorder)
        return awaitable

    def _reorder(self, output: KeyedTensor) -> KeyedTensor:
        names = _list_embedding_names(self._configs)
        return output if output.keys() == names else OrderedKeyedTensor(output, names)


class OrderedEmbeddingCollection(_OrderedOutputMixin, ShardedEmbeddingCollection):
    """Sequence embeddings as a dictionary in the unsharded order."""

    def __init__(self, module: EmbeddingCollectionInterface, *arguments: Any, **named: Any) -> None:
        super().__init__(module, *arguments, **named)
        self._configs = module.embedding_configs()

    def prepare_features(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features to distribute."""
        return _add_sample_if_none(ctx, _conform_to_first_batch(self, self._configs, features, False))

    def _add_output_callbacks(
        self, ctx: EmbeddingCollectionContext, awaitable: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        awaitable.callbacks.append(lambda output: {name: output[name] for name in _list_embedding_names(self._configs)})
        return awaitable


def _add_sample_if_none(ctx: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features; for a batch without samples, those of a sample without ids, since outputs need a shape."""
    ctx.has_samples = features.variable_stride_per_key() or features.stride() > 0
    return features if ctx.has_samples else FeatureForm.from_features(features).empty(features.device())


def drop_added_sample_from_output(ctx: Any, awaitable: Awaitable[Any]) -> None:
    """Let an output, or the remapped features, for a batch without samples be those of no sample."""
    if not ctx.has_samples:
        awaitable.callbacks.append(_drop_sample)


def _drop_sample(output: Any) -> Any:
    if isinstance(output, dict):  # sequences
        return {name: _drop_sample(sequences) for name, sequences in output.items()}
    if isinstance(output, JaggedTensor):
        return JaggedTensor(output.values(), lengths=output.lengths()[:0], weights=output.weights_or_none())
    if isinstance(output, KeyedJaggedTensor):
        return KeyedJaggedTensor(output.keys(), output.values(), output.weights_or_none(), output.lengths()[:0])
    if isinstance(output, KeyedTensor):
        return KeyedTensor(output.keys(), output.length_per_key(), output.values()[:0], output.key_dim())
    return output  # None: no remapped features


class OrderedSharder:
    """What the sharders of these modules have in common."""

    kind: Callable[..., Any]

    def __init__(self, comms: QuantizedComms) -> None:
        super().__init__(qcomm_codecs_registry=comms.registry())  # type: ignore[call-arg]  # TorchRec's, the next base
        self._comms = comms

    def choose_sharded_class(self, module_fqn: str | None) -> Callable[..., Any]:
        """Class of the sharded module with this name."""
        return self.kind

    def kernel_arguments(self) -> dict[str, Any] | None:
        """Arguments of FBGEMM's kernels, besides those that TorchRec chooses."""
        arguments: dict[str, Any] | None = self.fused_params  # type: ignore[attr-defined]
        return arguments

    def shard(
        self, module: Any, params: Any, env: ShardingEnv, device: Any = None, module_fqn: str | None = None
    ) -> Any:
        return self.choose_sharded_class(module_fqn)(
            module,
            params,
            env,
            fused_params=self.kernel_arguments(),
            device=device,
            qcomm_codecs_registry=self._comms.registry(params),
            module_fqn=module_fqn,
        )


def _conform_to_first_batch(
    module: torch.nn.Module, configs: Sequence[BaseEmbeddingConfig], features: KeyedJaggedTensor, uses_weights: bool
) -> KeyedJaggedTensor:
    """Return features in the form of the module's first batch, since TorchRec's input dist supports no other form."""
    if not isinstance(features, KeyedJaggedTensor):
        raise wrong_input_error(module_name(module), features, _list_feature_names(configs))
    features = features if uses_weights else drop_feature_weights(features)
    form = module.__dict__.get("_first_form")
    if form is not None:
        return conform_features(module_name(module), features, form)
    check_features_match_tables(module_name(module), features, _list_feature_names(configs))
    module.__dict__["_first_form"] = FeatureForm.from_features(features)
    return features


def wait_output(output: Any) -> Any:
    """Wait for the output dist."""
    if isinstance(output, tuple):
        return tuple(wait_output(part) for part in output)
    return output.wait() if isinstance(output, Awaitable) else output


def detach_output(output: Any) -> Any:
    """Return an output of a sharded module with the same values and without gradients."""
    return map_output_tensors(output, lambda tensor, _: tensor.detach())


def map_output_tensors(output: Any, change: Callable[[torch.Tensor, str], torch.Tensor], name: str = "") -> Any:
    """Return an output of a sharded module with each tensor replaced by ``change(tensor, name of its feature)``."""
    if isinstance(output, torch.Tensor):
        return change(output, name)
    if isinstance(output, OrderedKeyedTensor):
        return OrderedKeyedTensor(map_output_tensors(output.source, change, name), output.keys())
    if isinstance(output, KeyedTensor):
        return KeyedTensor(
            keys=output.keys(),
            length_per_key=output.length_per_key(),
            values=change(output.values(), name),
            key_dim=output.key_dim(),
            offset_per_key=output.offset_per_key(),
        )
    if isinstance(output, JaggedTensor):
        return JaggedTensor(
            values=change(output.values(), name),
            weights=output.weights_or_none(),
            lengths=output.lengths_or_none(),
            offsets=output.offsets_or_none(),
        )
    if isinstance(output, dict):
        return {key: map_output_tensors(value, change, str(key)) for key, value in output.items()}
    if isinstance(output, tuple):
        return tuple(map_output_tensors(value, change, name) for value in output)
    assert output is None or isinstance(output, KeyedJaggedTensor), type(output)  # ids: not differentiable
    return output
