"""Embeddings of a history: TorchRec's tables of a fixed size, or this project's dynamic tables.

Ids are 64-bit hashes. A table of a fixed size cannot have a row for each possible id, so ids are folded into its rows.
Some items then share a row, and the model cannot distinguish them. A dynamic table creates a row for each id that it
sees.
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

# Features by table. Candidates share the history's table, so that rated items and candidates have the same embeddings.
FEATURES = {"item_table": ["item", "candidate"], "stars_table": ["stars"]}
STARS_ROWS = 8
_DEVIATION = 0.02


def make_tables(
    width: int, item_rows: int, learning_rate: float, store: str | Path | None = None
) -> EmbeddingCollection:
    """Build the embedding module for the features in ``FEATURES``.

    Args:
        width: width of the embeddings.
        item_rows: number of rows of the item table; for a dynamic module, rows of each table in memory.
        learning_rate: learning rate of row-wise Adagrad, which trains the tables.
        store: folder for the rows of a dynamic module (default None: tables of a fixed size).
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
            existing_rows="forget",  # without a checkpoint, the example restarts with an empty store
        )
    # The tables are updated in backward, both without and under a pipeline strategy.
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": learning_rate, "eps": 1e-8})
    return tables


def rows_of(table: str, item_rows: int) -> int:
    """Number of rows of a table of a fixed size."""
    return item_rows if table == "item_table" else STARS_ROWS


def folded(features: KeyedJaggedTensor, item_rows: int) -> KeyedJaggedTensor:
    """Copy of *features* with ids replaced by row numbers of tables of a fixed size."""
    keys = features.keys()
    table = {key: name for name, features in FEATURES.items() for key in features}
    rows = torch.tensor([rows_of(table[key], item_rows) for key in keys])
    return KeyedJaggedTensor(
        keys,
        features.values() % rows.repeat_interleave(torch.tensor(features.length_per_key())),
        lengths=features.lengths(),
    )
