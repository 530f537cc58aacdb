"""Checks of a sharded module's features, on every batch before any rank sends them.

TorchRec fixes the order of keys, among other properties, at a module's first batch and does not check it again.
Different keys later silently give wrong embeddings, and a change on one rank only makes ranks disagree about their
exchanges. The form of the first batch is therefore recorded, and each later batch is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import copy_kjt_with_tensors, set_kjt_tensors
from lightning_pipe.engine.common.errors import InputError


@dataclass(frozen=True)
class FeatureForm:
    """Properties of features that must not change from batch to batch, and must be equal on all ranks."""

    keys: tuple[str, ...]  # in the first batch's order
    weighted: bool  # True if ids have weights
    inverse_keys: tuple[str, ...] | None  # of the inverse indices, in order; None with one batch size
    dtypes: tuple[torch.dtype, ...]  # of values, lengths and, if weighted, weights

    @classmethod
    def from_features(cls, features: KeyedJaggedTensor) -> FeatureForm:
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
        """Return the same text on two ranks with compatible features; the order of keys may differ between ranks."""
        weights = "with weights" if self.weighted else "without weights"
        sizes = "one batch size" if self.inverse_keys is None else "a batch size per feature"
        return f"keys {sorted(self.keys)}, {weights}, {sizes}, dtypes {', '.join(map(str, self.dtypes))}"


def check_lengths(name: str, features: KeyedJaggedTensor, every_length: bool = False) -> None:
    """Check that a batch's lengths fit its keys, ids and weights. TorchRec and FBGEMM would read or write other memory.

    Features on a GPU are checked without a host wait, from what the host knows.
    """
    problem = _describe_kjt_length_mismatch(features, every_length)
    if problem is None and every_length:
        problem = _describe_invalid_length(features)
    if problem is not None:
        raise InputError(
            f"the features {features.keys()} of sharded module {name!r} {problem}. Correct the KeyedJaggedTensor where"
            " the batch is made: a length is the number of ids of one feature in one sample, for all samples of the"
            " first feature, then of the next."
        )


def _describe_kjt_length_mismatch(features: KeyedJaggedTensor, reads: bool) -> str | None:
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is not None:
        count = lengths.numel()
    elif offsets is not None:
        count = max(0, offsets.numel() - 1)
    else:
        return "have neither lengths nor offsets"
    samples = features.stride_per_key()
    if len(samples) != len(keys) or sum(samples) != count:
        kind = "lengths" if lengths is not None else "offsets besides the first"
        each = f"{samples} samples" if features.variable_stride_per_key() else f"{features.stride()} samples for each"
        return f"have {count} {kind}, expected {sum(samples)} for {len(keys)} keys with {each}"
    if weights is not None and weights.shape[:1] != values.shape[:1]:
        return f"have {values.numel()} ids, but {weights.numel()} weights; expected a weight for each id"
    stated = features.length_per_key_or_none()
    summed = stated
    if reads or (offsets if lengths is None else lengths).device.type == "cpu":
        # Sums that the caller stated, or that an earlier batch left in the object, are computed again.
        summed = (features if stated is None else copy_kjt_with_tensors(features).unsync()).length_per_key()
    if summed is None:
        return None
    if stated is not None and list(stated) != summed:
        return f"have length_per_key {list(stated)}, but their lengths add up to {summed}"
    if sum(summed) != values.numel():
        return f"have {values.numel()} ids, but their lengths add up to {sum(summed)}"
    offset_per_key = features.offset_per_key_or_none()
    if offset_per_key is not None and list(offset_per_key) != [0, *accumulate(summed)]:
        return f"have offset_per_key {offset_per_key}, but their lengths add up to {summed}"
    return None


def _describe_invalid_length(features: KeyedJaggedTensor) -> str | None:
    lengths, offsets = features.lengths().flatten(), features.offsets_or_none()
    negative = lengths < 0
    if bool(negative.any()):
        position = int(negative.nonzero()[0])
        ends = list(accumulate(features.stride_per_key()))
        index = next(index for index, end in enumerate(ends) if position < end)
        sample = position - ends[index] + features.stride_per_key()[index]
        return f"have the length {int(lengths[position])} for key {features.keys()[index]!r} in sample {sample}"
    if offsets is not None and offsets.numel() and bool(offsets[0] != 0):
        return f"have offsets that begin with {int(offsets[0])}, expected 0"
    if offsets is not None and offsets.numel() and not bool((offsets.diff() == lengths).all()):
        return "have offsets that differ from the sums of their lengths"
    return None


def check_features_match_tables(name: str, features: KeyedJaggedTensor, expected: Sequence[str]) -> None:
    """Check a module's first batch against its tables."""
    missing = sorted(set(expected) - set(features.keys()))
    if missing:
        raise InputError(
            f"the tables of sharded module {name!r} look up the features {list(expected)}, but the batch has"
            f" {features.keys()}: missing {missing}. Add these keys to the batch, or rename the features of the tables."
        )
    if features.values().dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"ids of sharded module {name!r} must be torch.int64 or torch.int32, got {features.values().dtype}. Convert"
            " them where the batch is made."
        )


def conform_features(name: str, features: KeyedJaggedTensor, form: FeatureForm) -> KeyedJaggedTensor:
    """Return ``features`` in the form of the first batch: the same object, or a copy with reordered keys."""
    batch_form = FeatureForm.from_features(features)
    if batch_form == form:
        return features
    missing = sorted(set(form.keys) - set(batch_form.keys))
    extra = sorted(set(batch_form.keys) - set(form.keys))
    if missing or extra or len(batch_form.keys) != len(form.keys):
        raise InputError(
            f"sharded module {name!r} expected the features of its first batch, {list(form.keys)}, got"
            f" {list(batch_form.keys)}: missing {missing}, extra {extra}. Give every batch the same keys (in any"
            " order); a feature without ids in a batch still needs its key, with lengths of 0."
        )
    if str(batch_form) != str(form) or set(batch_form.inverse_keys or ()) != set(form.inverse_keys or ()):
        raise InputError(
            f"sharded module {name!r} expected features in the form of its first batch, {form}, got {batch_form}. Give"
            " every batch the same form."
        )
    return _reorder_features(features, form)


def _reorder_features(features: KeyedJaggedTensor, form: FeatureForm) -> KeyedJaggedTensor:
    inverse = features.inverse_indices_or_none()
    with torch.no_grad():
        keys = features.keys()
        ordered = features.permute([keys.index(key) for key in form.keys])
        if inverse is not None and form.inverse_keys is not None:
            rows = torch.tensor([inverse[0].index(key) for key in form.inverse_keys], device=inverse[1].device)
            set_kjt_tensors(ordered, inverse_indices=(list(form.inverse_keys), inverse[1].index_select(0, rows)))
    return ordered


def check_has_samples(name: str, features: KeyedJaggedTensor) -> None:
    """Raise InputError for a batch without samples, for which TorchRec's sequences have no shape."""
    if not features.variable_stride_per_key() and features.stride() == 0:
        raise InputError(
            f"sharded module {name!r} looks up sequences and must get at least 1 sample, got 0 samples of the features"
            f" {features.keys()}. Leave out empty batches where they are made (drop_last=True, or a filter of the"
            " dataset before batching). A sample without ids has a length of 0 for each feature."
        )


def drop_feature_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ``features`` without weights, as a shallow copy if needed: TorchRec's sharded modules always use them."""
    return features if features.weights_or_none() is None else copy_kjt_with_tensors(features, weights=None)


def wrong_input_error(name: str, features: object, keys: Sequence[str]) -> InputError:
    """Return the error for an input other than a KeyedJaggedTensor. *keys* are the features of the module's tables."""
    return InputError(
        f"sharded module {name!r} expected a KeyedJaggedTensor with the features {list(keys)}, got a"
        f" {type(features).__name__}. Make one in the collate function, or in on_after_batch_transfer."
    )


def refuse_missing_feature_weights(name: str, features: KeyedJaggedTensor) -> None:
    """Raise InputError for features without weights, for which TorchRec's sharded modules would silently use 1."""
    if features.weights_or_none() is None:
        raise InputError(
            f"sharded module {name!r} has is_weighted=True and expected a weight for each id, got the features"
            f" {features.keys()} without weights. Add weights to the KeyedJaggedTensor, or build the module without"
            " is_weighted."
        )


def refuse_trainable_feature_weights(name: str, features: KeyedJaggedTensor) -> None:
    """Raise InputError for weights that require grad, since tables on other ranks send no gradient back."""
    weights = features.weights_or_none()
    if weights is not None and weights.requires_grad:
        raise InputError(
            f"sharded module {name!r} got features whose weights require grad, but weights are sent to the tables'"
            " ranks and get no gradient back. Use torchrec's FeatureProcessedEmbeddingBagCollection for trained"
            " weights, or pass weights.detach()."
        )


@dataclass(frozen=True)
class IdLimit:
    """The smallest table that a feature is looked up in, which limits its ids."""

    table: str
    rows: int


def check_ids(name: str, features: KeyedJaggedTensor, tables: dict[str, IdLimit]) -> None:
    """Raise InputError if an id is negative or beyond its table. Features must have passed :func:`check_lengths`.

    Reads every id once, and waits for the result on a GPU.
    """
    values = features.values()
    keys = features.keys()
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
        f"feature {key!r} has the id {int(values[position])}, but ids must be from 0 to {table.rows - 1}, since table"
        f" {table.table!r} of sharded module {name!r} has {table.rows} rows. Correct the data, or give the table more"
        " rows."
    )


def shallow_copy_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a shallow copy of ``features``, so that a feature processor does not put weights on the user's batch."""
    weights = features.weights_or_none()
    return copy_kjt_with_tensors(features, weights=None if weights is None else weights.clone())
