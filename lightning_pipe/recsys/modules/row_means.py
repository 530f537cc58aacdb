"""Mean pooling of tables that are sharded by rows: the sum of the parts, divided by the length of the bag.

TorchRec's division (``_create_mean_pooling_divisor``) works per feature. If a module has a row-sharded table pooled by
mean, it also divides the outputs of tables with other sharding types. If tables pooled by sum and by mean share a
feature, one of the two outputs is wrong. Here the division works per output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from lightning_pipe.recsys.batches.transfer import move_tensor_to_device

ROW_SHARDED_TYPES = {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}


class RowWiseMeanPooling:
    """Divides the outputs of one sharded module that are means of row-sharded tables."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        sharding: Mapping[str, ParameterSharding],
        names: Sequence[str],
        widths: Sequence[int],
    ) -> None:
        features: dict[str, str] = {}
        for config, outputs in zip(configs, get_embedding_names_by_table(list(configs)), strict=True):
            if config.pooling == PoolingType.MEAN and sharding[config.name].sharding_type in ROW_SHARDED_TYPES:
                features |= dict(zip(outputs, config.feature_names, strict=True))
        self._features = [features.get(name) for name in names]
        self._widths, self._columns = torch.tensor(widths), sum(widths)

    @property
    def needs_division(self) -> bool:
        """True if any output must be divided."""
        return any(self._features)

    def divisor(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the divisor of all outputs: batch size x columns."""
        # to_dict() would return no features for a batch without samples.
        lengths = dict(zip(features.keys(), features.lengths().split(features.stride_per_key()), strict=True))
        inverse = features.inverse_indices_or_none()
        batch = inverse[1].shape[1] if inverse is not None else features.stride()
        device = features.device()
        counts = torch.ones(batch, len(self._features), device=device)
        for column, name in enumerate(self._features):
            if name is not None:
                of_feature = lengths[name]
                if inverse is not None:  # batch size per feature: inverse indices map each sample to its bag
                    of_feature = of_feature[inverse[1][inverse[0].index(name)]]
                # An empty bag's sum is zero, and so is its mean.
                counts[:, column] = of_feature.clamp(min=1)
        return counts.repeat_interleave(move_tensor_to_device(self._widths, device), dim=1, output_size=self._columns)


def divide_pooled_embeddings(sums: KeyedTensor, divisor: torch.Tensor) -> KeyedTensor:
    """Return a module's outputs, divided column by column."""
    return KeyedTensor(
        keys=sums.keys(),
        length_per_key=sums.length_per_key(),
        values=sums.values() / divisor,
        key_dim=sums.key_dim(),
    )
