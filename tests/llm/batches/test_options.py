"""Options of batches are checked by name."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import InputError, SetupError
from lightning_pipe.llm.batches.options import Batching


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_length": -5}, "batching.max_length is -5; expected a whole number, 1 or more"),
        ({"pad_to_multiple_of": 0}, "batching.pad_to_multiple_of is 0"),
        ({"schedule_cache_bytes": "x"}, "batching.schedule_cache_bytes is 'x'"),
        ({"length_buckets": []}, r"batching.length_buckets is \[\]; expected .*above 0"),
        ({"length_buckets": [4, 0]}, "expected a list of whole numbers above 0"),
        ({"pad_values": [1]}, r"batching.pad_values is \[1\]; expected a mapping"),
        ({"chunk_dims": ["bias"]}, r"batching.chunk_dims is \['bias'\]; expected a mapping"),
        ({"chunk_dims": {"bias": -1}}, "chunk_dims is {'bias': -1}; expected .* whole numbers from 0, or None"),
        ({"chunk_dims": {"bias": "replicate"}}, "expected a mapping from keys of the batch to dimensions"),
        ({"detect_nan": 1}, "batching.detect_nan is 1; expected one of True, False"),
        ({"strict_batches": "no"}, "batching.strict_batches is 'no'; expected one of True, False"),
        ({"variable_lengths": False}, "batching.max_length is None.*variable_lengths is False"),
        (
            {"variable_lengths": False, "max_length": 10, "pad_to_multiple_of": 4},
            "max_length is 10.*a multiple of 4 .*to 12",
        ),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_by_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        Batching(**given)


def test_lengths_are_a_multiple_of_what_both_padding_and_context_parallelism_need() -> None:
    assert Batching(pad_to_multiple_of=6).length_multiple(4) == 12
    fixed = Batching(variable_lengths=False, max_length=12, pad_to_multiple_of=3)
    assert fixed.length_multiple(2) == 6
    with pytest.raises(SetupError, match=r"max_length is 12.*a multiple of 15 .*and 5 for context.*to 15"):
        fixed.length_multiple(5)


def test_the_target_is_the_smallest_bucket_that_holds_the_sequence_and_a_multiple() -> None:
    buckets = Batching(length_buckets=(64, 16, 32))
    assert [buckets.padded_length(length) for length in (1, 16, 17, 64)] == [16, 16, 32, 64]
    assert Batching(length_buckets=(16, 32), pad_to_multiple_of=48).padded_length(17) == 48


def test_the_own_maximum_comes_before_the_models_and_is_the_target_of_fixed_lengths() -> None:
    assert Batching().padded_length(100, maximum=100) == 100
    assert Batching(max_length=50).padded_length(46, 3, 10) == 48
    assert Batching(variable_lengths=False, max_length=50).padded_length(7, maximum=10) == 50


def test_a_sequence_beyond_the_buckets_or_the_models_maximum_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match=r"has 65 tokens.*longest bucket has 64.*at least 65"):
        Batching(length_buckets=(32, 64)).padded_length(65)
    with pytest.raises(InputError, match=r"has 101 tokens; the model's maximum is 100"):
        Batching().padded_length(101, maximum=100)
    with pytest.raises(InputError, match=r"has 97 tokens, 112 once padded to a multiple of 16.*is 100"):
        Batching(pad_to_multiple_of=16).padded_length(97, maximum=100)
