"""Sizes, times and bandwidths as a person writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.quantities import parse_bandwidth, parse_duration, parse_size


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_size, "80GB", 80e9),
        (parse_size, " 1.5 MiB ", 1.5 * 2**20),
        (parse_size, "80 gib", 80 * 2**30),
        (parse_size, "1.5k", 1500),
        (parse_size, "2T", 2e12),
        (parse_size, "7", 7),
        (parse_size, "3MB", 3e6),
        (parse_size, "3TiB", 3 * 2**40),
        (parse_size, str(2**63 - 1), 2**63 - 1),
        (parse_duration, "5us", 5e-6),
        (parse_duration, "5 µs", 5e-6),
        (parse_duration, "5 \N{GREEK SMALL LETTER MU}s", 5e-6),
        (parse_duration, "0.25ms", 0.25e-3),
        (parse_duration, "2S", 2.0),
        (parse_duration, "1e3ns", 1e-6),
        (parse_duration, "0us", 0.0),
        (parse_bandwidth, "25GB/s", 25e9),
        (parse_bandwidth, "1GiB", 2**30),
        (parse_bandwidth, "200mbit", 25e6),
        (parse_bandwidth, "100 Gbit/s", 12.5e9),
    ],
)
def test_what_a_person_writes_is_read(parse: Callable[[str], float], text: str, expected: float) -> None:
    assert parse(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("parse", "text", "needed"),
    [
        (parse_size, "", "a number of bytes above 0, such as 80GB or 512MiB"),
        (parse_size, "80 gigs", "a number of bytes above 0, such as 80GB"),
        (parse_size, "-5GB", "a number of bytes above 0"),
        (parse_size, str(2**63), "a number of bytes above 0"),
        (parse_size, "0", "a number of bytes above 0"),
        (parse_duration, "5", "with a unit, such as 5us"),
        (parse_duration, "-5us", "a number of at least 0"),
        (parse_bandwidth, "-1GB/s", "bytes or bits per second, such as 25GB/s"),
        (parse_bandwidth, "0mbit", "bytes or bits per second"),
        (parse_bandwidth, "25GB/min", "bytes or bits per second"),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(parse: Callable[[str], float], text: str, needed: str) -> None:
    with pytest.raises(SetupError, match=needed) as refusal:
        parse(text)
    assert repr(text) in str(refusal.value)


def test_a_size_without_end_is_shown_in_part() -> None:
    with pytest.raises(SetupError, match=r"the size is '9{40,60}\.\.\.9+'; expected"):
        parse_size("9" * 500)
