"""A small invented data set of MovieLens-100K's form: nothing here needs a network."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from examples.recsys_movielens import files
from examples.recsys_movielens.features import Features, describe
from examples.recsys_movielens.files import Ratings

USERS, ITEMS, RATINGS, HISTORY = 40, 60, 1200, 6


def write_files(folder: Path) -> None:
    """Files like MovieLens-100K's: several ratings a second, users who come back days later, a year that is a word."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    user, item = draw.integers(1, USERS + 1, RATINGS), draw.integers(1, ITEMS + 1, RATINGS)
    # Two sittings a user, a week apart; a few seconds for 15 ratings each, and for those of three other users, so that
    # many share a second, of the same user and of the same item.
    second = (
        880_000_000 + user // 4 * 1_000 + draw.integers(0, 2, RATINGS) * 7 * 24 * 3600 + draw.integers(0, 6, RATINGS)
    )
    # Odd items are liked, so that there is something to learn.
    stars = np.where(item % 2 == 1, draw.integers(4, 6, RATINGS), draw.integers(1, 5, RATINGS))
    genres = ("Action", "Comedy", "Drama")
    rows = {
        "ml-100k.inter": [
            "user_id:token\titem_id:token\trating:float\ttimestamp:float",
            *(f"{u}\t{i}\t{s}\t{t}" for u, i, s, t in zip(user, item, stars, second, strict=True)),
        ],
        "ml-100k.user": [
            "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
            *(f"{u}\t{15 + u}\t{'FM'[u % 2]}\t{('artist', 'writer')[u % 2]}\t{u:05}" for u in range(1, USERS + 1)),
        ],
        "ml-100k.item": [
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
            *(
                f'{i}\t"Title {i}\t{"V" if i == 3 else 1930 + i}\t{" ".join(genres[: 1 + i % 3])}'
                for i in range(1, ITEMS + 1)
            ),
        ],
    }
    for name, lines in rows.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of invented files, which are taken for the right ones."""
    folder = tmp_path / "invented"
    write_files(folder)
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files.SHA256}
    monkeypatch.setattr(files, "SHA256", hashes)
    return folder


@pytest.fixture
def ratings(folder: Path) -> Ratings:
    return files.read(folder)


@pytest.fixture
def features(ratings: Ratings) -> Features:
    return describe(ratings, HISTORY)
