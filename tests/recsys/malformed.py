"""Malformed keyed jagged tensors: what is made of the features of a healthy batch, and what the error says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def _rebuilt(features: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    arguments = {"values": features.values(), "lengths": features.lengths(), "weights": features.weights_or_none()}
    varying = features.stride_per_key_per_rank() if features.variable_stride_per_key() else None
    return KeyedJaggedTensor(
        features.keys(),
        **{
            **arguments,
            "stride_per_key_per_rank": varying,
            "inverse_indices": features.inverse_indices_or_none(),
            **changes,
        },
    )


def one_length_less(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _rebuilt(features, lengths=features.lengths()[:-1])


def one_id_more(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    more = {"values": torch.cat([features.values(), torch.zeros(1, dtype=torch.int64)])}
    if (weights := features.weights_or_none()) is not None:
        more["weights"] = torch.cat([weights, torch.ones(1)])
    return _rebuilt(features, **more)


def shifted_sums(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    first, *others, last = copy.copy(features).length_per_key()
    return _rebuilt(features, length_per_key=[first + 1, *others, last - 1])


def one_weight_less(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return _rebuilt(features, weights=features.weights()[:-1])


def a_negative_length(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The first two lengths, which are of one key, are -1 and one more than their sum."""
    lengths = features.lengths().clone()
    lengths[0], lengths[1] = -1, lengths[0] + lengths[1] + 1
    return _rebuilt(features, lengths=lengths)


Spoil = Callable[[KeyedJaggedTensor], KeyedJaggedTensor]
# Name: what is made of features, whether it needs ``validate_ids``, and what the error says.
MALFORMED: dict[str, tuple[Spoil, bool, str]] = {
    "one length less": (one_length_less, False, "lengths, expected"),
    "one id more": (one_id_more, False, "ids, but their lengths add up to"),
    "shifted sums": (shifted_sums, False, "have length_per_key ["),
    "a negative length": (a_negative_length, True, "have the length -1 for key"),
}
