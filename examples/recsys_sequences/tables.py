"""The embeddings of a history: TorchRec's tables of a fixed size, or this project's tables without a size.

Ids are 64-bit hashes. A table of a fixed size has no row for such an id, so ids are folded into its rows: some items
then share one, and are one item to the model. A dynamic table makes a row for each id that it sees.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import DynamicEmbeddingCollection, DynamicTable

# Features by table. Candidates share the history's table, so that what was rated is compared with what may come.
FEATURES = {"item_table": ["item", "candidate"], "stars_table": ["stars"]}
STARS_ROWS = 8
_DEVIATION = 0.02


def make_tables(
    width: int, item_rows: int, learning_rate: float, store: str | Path | None = None
) -> EmbeddingCollection:
    """A module that gives the embeddings of each id of the features in ``FEATURES``.

    Args:
        width: of the embeddings.
        item_rows: of the items' table; of a dynamic module, those of each table that are in memory.
        learning_rate: of row-wise Adagrad, which trains them.
        store: folder of a dynamic module's rows; None for tables of a fixed size.
    """
    tables: EmbeddingCollection
    if store is None:
        tables = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=name,
                    num_embeddings=rows_of(name, item_rows),
                    embedding_dim=width,
                    feature_names=features,
                    init_fn=partial(nn.init.normal_, std=_DEVIATION),
                )
                for name, features in FEATURES.items()
            ]
        )
    else:
        tables = DynamicEmbeddingCollection(
            [
                DynamicTable(
                    name=name,
                    embedding_dim=width,
                    feature_names=features,
                    cache_rows=item_rows,
                    initial={"normal": [0, _DEVIATION]},
                )
                for name, features in FEATURES.items()
            ],
            store,
            existing="forget",  # where no checkpoint is loaded, the example begins anew
        )
    # Tables are trained as their gradients appear, here as under a pipeline strategy.
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": learning_rate, "eps": 1e-8})
    return tables


def rows_of(table: str, item_rows: int) -> int:
    """Rows of a table of a fixed size."""
    return item_rows if table == "item_table" else STARS_ROWS


def folded(features: KeyedJaggedTensor, item_rows: int) -> KeyedJaggedTensor:
    """*features* with the rows of tables of a fixed size in place of ids."""
    keys = features.keys()
    table = {key: name for name, features in FEATURES.items() for key in features}
    rows = torch.tensor([rows_of(table[key], item_rows) for key in keys])
    return KeyedJaggedTensor(
        keys,
        features.values() % rows.repeat_interleave(torch.tensor(features.length_per_key())),
        lengths=features.lengths(),
    )
