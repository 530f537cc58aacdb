"""What a sharded module's features must be like, checked on every batch before any rank sends them.

TorchRec fixes the order of keys, and much else, at a module's first batch and does not look again: other keys later
give wrong embeddings without a word, and a change on one rank alone makes ranks disagree about what they exchange. So
the first batch's form is kept and each later batch is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import put_tensors, with_tensors
from lightning_pipe.engine.common.errors import InputError

__all__ = [
    "FeatureForm",
    "TableRows",
    "check_first",
    "check_ids",
    "check_samples",
    "conform",
    "other_inputs",
    "refuse_missing_weights",
    "refuse_trained_weights",
    "without_side_effects",
    "without_weights",
]


@dataclass(frozen=True)
class FeatureForm:
    """What must stay the same from batch to batch, and on every rank.

    Attributes:
        keys: the features in the first batch's order.
        weighted: whether ids come with weights.
        inverse_keys: with a batch size per feature, the features of its inverse indices in order; else None.
        dtypes: of values, lengths and, if weighted, weights.
    """

    keys: tuple[str, ...]
    weighted: bool
    inverse_keys: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, features: KeyedJaggedTensor) -> FeatureForm:
        variable = features.variable_stride_per_key()
        inverse = features.inverse_indices_or_none() if variable else None
        tensors = (features.values(), features.lengths(), features.weights_or_none())
        return cls(
            keys=tuple(features.keys()),
            weighted=features.weights_or_none() is not None,
            inverse_keys=tuple(inverse[0] if inverse is not None else ()) if variable else None,
            dtypes=tuple(tensor.dtype for tensor in tensors if tensor is not None),
        )

    def empty(self, device: torch.device) -> KeyedJaggedTensor:
        """Return features of this form without ids: one sample, or one per feature for variable batch sizes."""
        values, lengths, *weights = self.dtypes
        variable: dict[str, Any] = {}
        if self.inverse_keys is not None:
            variable["stride_per_key_per_rank"] = [[1]] * len(self.keys)
            if self.inverse_keys:
                indices = torch.zeros(len(self.inverse_keys), 1, dtype=torch.int64, device=device)
                variable["inverse_indices"] = (list(self.inverse_keys), indices)
        return KeyedJaggedTensor(
            keys=list(self.keys),
            values=torch.empty(0, dtype=values, device=device),
            weights=torch.empty(0, dtype=weights[0], device=device) if self.weighted else None,
            lengths=torch.zeros(len(self.keys), dtype=lengths, device=device),
            **variable,
        )

    def __str__(self) -> str:
        """The same text on two ranks whose features go together; the order of keys is each rank's own."""
        weights = "with weights" if self.weighted else "without weights"
        sizes = "one batch size" if self.inverse_keys is None else "a batch size per feature"
        return f"keys {sorted(self.keys)}, {weights}, {sizes}, dtypes {', '.join(map(str, self.dtypes))}"


def check_first(name: str, features: KeyedJaggedTensor, wanted: Sequence[str]) -> None:
    """Checks a module's first batch against its tables.

    Args:
        name: the sharded module's, for the message.
        features: what the batch holds for it.
        wanted: the features that its tables look up.

    Raises:
        InputError: a feature is missing, or ids are not integers.
    """
    missing = sorted(set(wanted) - set(features.keys()))
    if missing:
        raise InputError(
            f"sharded module {name!r} got the features {features.keys()}, and its tables look up {list(wanted)}:"
            f" missing {missing}. Give the batch those keys, or name the features of the tables as the batch has them."
        )
    if features.values().dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"sharded module {name!r} got ids of dtype {features.values().dtype}; needed is torch.int64 or torch.int32:"
            " convert them where the batch is made."
        )


def conform(name: str, features: KeyedJaggedTensor, form: FeatureForm) -> KeyedJaggedTensor:
    """``features`` in the form of the first batch: the same object if it has it, else with its keys re-ordered.

    Args:
        name: the sharded module's, for the message.
        features: what the batch holds for it.
        form: the first batch's.

    Raises:
        InputError: keys are missing or extra, or weights, batch sizes or dtypes are not what they were.
    """
    found = FeatureForm.of(features)
    if found == form:
        return features
    missing = sorted(set(form.keys) - set(found.keys))
    extra = sorted(set(found.keys) - set(form.keys))
    if missing or extra or len(found.keys) != len(form.keys):
        raise InputError(
            f"sharded module {name!r} got the features {list(found.keys)} and needs those of its first batch,"
            f" {list(form.keys)}: missing {missing}, extra {extra}. Give every batch the same keys (in any order); a"
            " feature without ids in a batch still needs its key, with lengths of 0."
        )
    if str(found) != str(form) or set(found.inverse_keys or ()) != set(form.inverse_keys or ()):
        raise InputError(
            f"sharded module {name!r} got features with {found} and needs what its first batch had: {form}. Give"
            " every batch the same form."
        )
    return _reorder(features, form)


def _reorder(features: KeyedJaggedTensor, form: FeatureForm) -> KeyedJaggedTensor:
    inverse = features.inverse_indices_or_none()
    with torch.no_grad():
        keys = features.keys()
        ordered = features.permute([keys.index(key) for key in form.keys])
        if inverse is not None and form.inverse_keys is not None:
            rows = torch.tensor([inverse[0].index(key) for key in form.inverse_keys], device=inverse[1].device)
            put_tensors(ordered, inverse_indices=(list(form.inverse_keys), inverse[1].index_select(0, rows)))
    return ordered


def check_samples(name: str, features: KeyedJaggedTensor) -> None:
    """Raises InputError for a batch without samples, of which TorchRec's sequences know no shape."""
    if not features.variable_stride_per_key() and features.stride() == 0:
        raise InputError(
            f"sharded module {name!r} got the features {features.keys()} of 0 samples; needed is at least 1, since it"
            " looks up sequences: leave empty batches out where they are made (drop_last=True, or a filter of the"
            " dataset before it is batched). A sample without ids has a length of 0 for each feature."
        )


def without_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """``features``, or a shallow copy that has no weights: TorchRec's sharded modules use them unasked."""
    return features if features.weights_or_none() is None else with_tensors(features, weights=None)


def other_inputs(name: str, features: object, keys: Sequence[str]) -> InputError:
    """The error for what is no KeyedJaggedTensor; *keys* are the features of the module's tables."""
    return InputError(
        f"sharded module {name!r} got a {type(features).__name__}; expected a KeyedJaggedTensor with the features"
        f" {list(keys)}: make one in the collate function, or in on_after_batch_transfer"
    )


def refuse_missing_weights(name: str, features: KeyedJaggedTensor) -> None:
    """Raises InputError for features without weights: TorchRec's sharded modules would take each for 1."""
    if features.weights_or_none() is None:
        raise InputError(
            f"sharded module {name!r} has is_weighted=True, and got the features {features.keys()} without weights;"
            " needed is one for each id: give the KeyedJaggedTensor its weights, or build the module without"
            " is_weighted"
        )


def refuse_trained_weights(name: str, features: KeyedJaggedTensor) -> None:
    """Raises InputError for weights that require grad: a table on another rank could not send them any."""
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise InputError(
            f"sharded module {name!r} got features whose weights require grad; weights travel to the tables' ranks"
            " and get no gradient back. Use torchrec's FeatureProcessedEmbeddingBagCollection for trained weights, or"
            " pass weights.detach()."
        )


@dataclass(frozen=True)
class TableRows:
    """The table that limits a feature's ids: the smallest it is looked up in."""

    table: str
    rows: int


def check_ids(name: str, features: KeyedJaggedTensor, tables: dict[str, TableRows]) -> None:
    """Raises InputError if an id is negative or beyond its table, or if lengths do not add up to the number of ids.

    Reads every id once (a wait, on a device).

    Args:
        name: the sharded module's, for the message.
        features: ids per feature.
        tables: the limiting table of each feature; other features are not checked.
    """
    values = features.values()
    keys = features.keys()
    if sum(features.length_per_key()) != values.numel():
        raise InputError(
            f"the features {keys} of sharded module {name!r} have {values.numel()} ids, but their lengths add up to"
            f" {sum(features.length_per_key())}. Mend what makes the batch: lengths say how many ids each row has"
        )
    largest = torch.iinfo(values.dtype).max
    rows = torch.tensor([tables[key].rows if key in tables else largest for key in keys], device=values.device)
    counts = torch.tensor(features.length_per_key(), device=values.device)
    limits = torch.repeat_interleave(rows, counts)
    checked = torch.repeat_interleave(torch.tensor([key in tables for key in keys], device=values.device), counts)
    wrong = checked & ((values < 0) | (values >= limits))
    if not bool(wrong.any()):
        return
    position = int(wrong.nonzero()[0])
    offsets = features.offset_per_key()
    key = next(key for index, key in enumerate(keys) if offsets[index] <= position < offsets[index + 1])
    table = tables[key]
    raise InputError(
        f"feature {key!r} has the id {int(values[position])}, but table {table.table!r} of sharded module {name!r} has"
        f" {table.rows} rows: ids must be from 0 to {table.rows - 1}. Mend the data, or give the table more rows."
    )


def without_side_effects(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A shallow copy of ``features`` that a feature processor may put weights on; the user's batch stays as it is."""
    weights = features.weights_or_none()
    return with_tensors(features, weights=None if weights is None else weights.clone())
