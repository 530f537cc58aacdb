"""Batches from columns: the same from every kind of column, and errors that name column and row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from lightning_pipe.data import JaggedCollator
from lightning_pipe.engine import InputError, SetupError

ROWS: dict[str, list[Any]] = {
    "user": [7, 0, 3],
    "genres": [[1, 2], [], [9]],
    "strength": [[0.5, 1.5], [], [2.0]],
    "age": [20.0, 31.5, 44.0],
    "position": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "label": [1, 0, 1],
}
TABLE = pa.table(ROWS)


def by_row() -> list[dict[str, Any]]:
    return [{name: column[row] for name, column in ROWS.items()} for row in range(3)]


def of_tensors() -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor(value) for name, value in row.items()} for row in by_row()]


def jagged(column: list[list[Any]]) -> JaggedTensor:
    return JaggedTensor(
        torch.tensor([one for row in column for one in row]), lengths=torch.tensor([len(row) for row in column])
    )


FORMS: dict[str, Callable[[], Any]] = {
    "table": lambda: TABLE,
    "table in chunks": lambda: pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
    "slice": lambda: pa.concat_tables([TABLE, TABLE, TABLE]).slice(3, 3),
    "record batch": lambda: TABLE.to_batches()[0],
    "data frame": lambda: pd.DataFrame(ROWS),
    "lists": lambda: ROWS,
    "rows": by_row,
    "rows of arrays": lambda: [{name: np.asarray(value) for name, value in row.items()} for row in by_row()],
    "rows of tensors": of_tensors,
    "arrays": lambda: {
        **{name: np.asarray(ROWS[name]) for name in ("user", "age", "position", "label")},
        "genres": pa.array(ROWS["genres"], pa.large_list(pa.uint16())),
        "strength": pa.array(ROWS["strength"], pa.list_(pa.float16())),
    },
    "tensors": lambda: {
        **{name: torch.tensor(ROWS[name]) for name in ("user", "age", "position", "label")},
        **{
            name: torch.nested.nested_tensor([torch.tensor(row, dtype=kind) for row in ROWS[name]], layout=torch.jagged)
            for name, kind in (("genres", torch.int64), ("strength", torch.float32))
        },
    },
    "jagged tensors": lambda: {**ROWS, "genres": jagged(ROWS["genres"]), "strength": jagged(ROWS["strength"])},
    "fixed lists and a dictionary": lambda: {
        **ROWS,
        "user": pa.array(ROWS["user"]).dictionary_encode(),
        "position": pa.array(ROWS["position"], pa.list_(pa.float64(), 2)),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_each_kind_of_column_gives_the_same_batch(form: str) -> None:
    batch = JaggedCollator(["user", "genres"], ["age", "position"])(FORMS[form]())
    assert batch.dense_features.tolist() == [[20.0, 1.0, 2.0], [31.5, 3.0, 4.0], [44.0, 5.0, 6.0]]
    assert batch.labels.tolist() == [1.0, 0.0, 1.0]
    assert batch.dense_features.dtype == batch.labels.dtype == torch.float32
    ids = batch.sparse_features
    assert (ids.keys(), ids.stride(), ids.weights_or_none()) == (["user", "genres"], 3, None)
    assert ids.values().tolist() == [7, 0, 3, 1, 2, 9]
    assert ids.lengths().tolist() == [1, 1, 1, 2, 0, 1]
    assert (ids.values().dtype, ids.lengths().dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("form", ["table", "rows", "tensors", "jagged tensors"])
def test_ids_can_have_weights_and_rows_several_labels(form: str) -> None:
    collator = JaggedCollator(
        ["genres"], labels=["label", "age"], weights={"genres": "strength"}, make_batch=lambda *of: of
    )
    dense, ids, labels = collator(FORMS[form]())
    assert dense.shape == (3, 0)
    assert ids.weights().tolist() == [0.5, 1.5, 2.0]
    assert labels.tolist() == [[1.0, 20.0], [0.0, 31.5], [1.0, 44.0]]


def test_missing_values_get_their_columns_default() -> None:
    lacking = pa.table(
        {
            "user": pa.array([2**62, None]),
            "genres": pa.array([None, [1, None]], pa.list_(pa.int64())),
            "age": [None, float("nan")],
            "label": [1.0, 0.0],
        }
    )
    batch = JaggedCollator(["user", "genres"], ["age"], defaults={"user": 0, "genres": 5, "age": -1.0})(lacking)
    assert batch.sparse_features.values().tolist() == [2**62, 0, 5, 1, 5]
    assert batch.sparse_features.lengths().tolist() == [1, 1, 1, 2]
    assert batch.dense_features.tolist() == [[-1.0], [-1.0]]
    empty = {"genres": [None, [3, 4], None], "label": [0, 0, 0]}
    assert JaggedCollator(["genres"], defaults={"genres": ()})(empty).sparse_features.lengths().tolist() == [0, 2, 0]
    two = JaggedCollator(["genres"], defaults={"genres": [8, 9]})(empty).sparse_features
    assert (two.lengths().tolist(), two.values().tolist()) == ([2, 2, 2], [8, 9, 3, 4, 8, 9])


@pytest.mark.parametrize("rows", [lambda column: column, lambda column: pa.table(column)], ids=["lists", "table"])
def test_columns_without_any_value_are_collated(rows: Callable[[Any], Any]) -> None:
    given: dict[str, Any] = {"user": [None, None], "genres": [[], []], "strength": [[], []], "age": [None, None]}
    given |= {"label": [0, 1], "tags": [None, None]}
    defaults: dict[str, Any] = {"user": 4, "age": -1.0, "tags": ()}
    batch = JaggedCollator(["user", "genres", "tags"], ["age"], defaults=defaults)(rows(given))
    assert batch.sparse_features.values().tolist() == [4, 4]
    assert batch.sparse_features.lengths().tolist() == [1, 1, 0, 0, 0, 0]
    assert batch.dense_features.tolist() == [[-1.0], [-1.0]]
    weighted = JaggedCollator(["genres"], weights={"genres": "strength"})(rows(given)).sparse_features
    assert (weighted.weights().tolist(), weighted.lengths().tolist()) == ([], [0, 0])


def with_rows(**columns: Any) -> dict[str, Any]:
    return {**ROWS, **columns}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (with_rows(user=[1, -2, 3]), "column 'user', row 1: the id -2 is negative"),
        (with_rows(genres=[[1], [2, 3], [4, -1]]), "column 'genres', row 2: the id -1 is negative"),
        (with_rows(user=[1, 2, None]), "column 'user', row 2: the value is missing"),
        (with_rows(genres=[[1], [], [4, None]]), "column 'genres', row 2: the value is missing"),
        (with_rows(genres=[[1], None, [4]]), "column 'genres', row 1: the list is missing"),
        (with_rows(user=[1.0, 2.5, 3.0]), "column 'user', row 1: 2.5 is no id"),
        (with_rows(user=np.array([0, 2**63, 1], np.uint64)), "row 1: the id 9223372036854775808 does not fit"),
        (with_rows(age=[1.0, None, 2.0]), "column 'age', row 1: the value is missing"),
        (with_rows(age=[[1.0], [1.0, 2.0], [3.0]]), "column 'age', row 1: 2 numbers, but row 0 has 1"),
        (with_rows(user=["a", "b", "c"]), "column 'user' holds object, expected numbers"),
        (with_rows(user=np.array([1, 2, 2**24 + 2], np.float32)), "row 2: 16777218.0 is no id"),
        (with_rows(user=[None, None, None]), "column 'user', row 0: the value is missing"),
        (with_rows(genres=torch.nested.nested_tensor([torch.ones(1)] * 3)), "'genres' is a strided nested tensor"),
        (with_rows(user=[1, [2], 3]), "column 'user' cannot be read"),
        (with_rows(user=np.zeros((3, 1, 1), int)), "column 'user' has the shape"),
        (with_rows(user=[1, 2]), "columns must have the same number of rows"),
        ({"label": [1]}, "the data has no column user, genres, age, only label"),
        ([{"user": 1}, {}], "not every row has the column 'user'"),
        ([], "got 'list' without rows"),
        (5, "expected a table, a mapping of columns"),
    ],
    ids=str,
)
def test_data_that_cannot_be_collated_is_refused_by_column_and_row(rows: Any, said: str) -> None:
    with pytest.raises(InputError) as raised:
        JaggedCollator(["user", "genres"], ["age"])(rows)
    assert said in str(raised.value)


def test_weights_of_another_number_than_ids_are_refused() -> None:
    with pytest.raises(InputError, match=r"column 'strength', row 1: 1 weights for the 0 ids of 'genres'"):
        JaggedCollator(["genres"], weights={"genres": "strength"})(with_rows(strength=[[1.0, 2.0], [3.0], [4.0]]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sparse": []}, "sparse not empty"),
        ({"sparse": "user"}, "must be lists of columns"),
        ({"sparse": ["user", "user"]}, "named twice: user"),
        ({"sparse": ["user", "genres"], "weights": {"genres": "strength"}}, "expected all columns of ids or none"),
        ({"sparse": ["user"], "defaults": {"age": 0}}, "not collated: age"),
        ({"sparse": ["user"], "defaults": {"user": 0.5}}, "ids are whole numbers"),
    ],
    ids=str,
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        JaggedCollator(**arguments)
