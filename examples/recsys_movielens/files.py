"""Download, checks and parsing of the MovieLens-100K files.

The 100,000 ratings were collected by GroupLens. A wheel of the recommender library RecBole contains them as an example
dataset. pip downloads the wheel, and this module reads it as a zip file without installing it.
"""

from __future__ import annotations

import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.engine.common.errors import SetupError

REQUIREMENT = "recbole==1.2.1"
FOLDER_IN_WHEEL = "recbole/dataset_example/ml-100k"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
LICENSE = (
    "MovieLens 100K by GroupLens (https://grouplens.org/datasets/movielens/100k/), read from the PyPI wheel"
    f" {REQUIREMENT}. Its usage license allows research use with acknowledgement (F. M. Harper and J. A. Konstan, 2015,"
    " https://doi.org/10.1145/2827872), and neither redistribution nor commercial use without GroupLens' permission."
)

_DOWNLOAD_SECONDS = 120


@dataclass(frozen=True)
class Ratings:
    """The ratings, with attributes of their users and items.

    Args:
        user: user number of each rating, from 0, int64 [N].
        item: item number of each rating, from 0, int64 [N].
        stars: stars of each rating, 1 to 5, int64 [N].
        seconds: time of each rating in seconds since 1970, int64 [N].
        age: age of each user in years, int64 [users].
        gender: gender of each user, as an index into the sorted values found, int64 [users].
        occupation: occupation of each user, as gender.
        release_year: release year of each item, or 0 if unknown, int64 [items].
        genres: True if the item has the genre; genres are sorted by name, bool [items, genres].
    """

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    stars: NDArray[np.int64]
    seconds: NDArray[np.int64]
    age: NDArray[np.int64]
    gender: NDArray[np.int64]
    occupation: NDArray[np.int64]
    release_year: NDArray[np.int64]
    genres: NDArray[np.bool_]


def cache_folder() -> Path:
    """Folder for downloaded files, in ``XDG_CACHE_HOME`` (default ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning_pipe" / "movielens-100k"


def missing(folder: Path) -> list[str]:
    """Names of the files that are not in *folder*."""
    return [name for name in SHA256 if not (folder / name).is_file()]


def download(folder: Path) -> None:
    """Download the files to *folder*. Each file appears atomically, even if other processes download it too.

    Raises:
        SetupError: pip could not download the wheel, or the wheel does not hold the expected files.
    """
    with tempfile.TemporaryDirectory() as temporary:
        _pip_download(temporary)
        (path,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            for name in SHA256:
                try:
                    content = wheel.read(f"{FOLDER_IN_WHEEL}/{name}")
                except KeyError:
                    raise SetupError(
                        f"{path.name} holds no {FOLDER_IN_WHEEL}/{name}, expected the files of {REQUIREMENT}. Check"
                        " that pip's package index is a copy of PyPI"
                    ) from None
                _check_hash(content, name, path.name)
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f"{name}.{os.getpid()}.partial"
                partial.write_bytes(content)
                partial.replace(folder / name)


def read(folder: Path) -> Ratings:
    """Read the files in *folder*, with the ratings sorted by time.

    Raises:
        SetupError: a file is missing or has an unexpected hash.
    """
    if absent := missing(folder):
        raise SetupError(
            f"{folder} has no data file {' or '.join(absent)}; expected {', '.join(SHA256)}. Put them there, or leave"
            f" out data_dir: they are then extracted from the PyPI wheel {REQUIREMENT} to {cache_folder()}"
        )
    for name in SHA256:
        _check_hash((folder / name).read_bytes(), name, str(folder))

    ratings = _columns(folder / "ml-100k.inter")
    users = _columns(folder / "ml-100k.user")
    items = _columns(folder / "ml-100k.item")
    order = np.argsort(_whole_numbers(ratings["timestamp"]), kind="stable")
    item_genres = [genres.split() for genres in items["class"]]
    genre_names = sorted({genre for genres in item_genres for genre in genres})
    return Ratings(
        user=_positions(ratings["user_id"], users["user_id"])[order],
        item=_positions(ratings["item_id"], items["item_id"])[order],
        stars=_whole_numbers(ratings["rating"])[order],
        seconds=_whole_numbers(ratings["timestamp"])[order],
        age=_whole_numbers(users["age"]),
        gender=_positions(users["gender"], sorted(set(users["gender"]))),
        occupation=_positions(users["occupation"], sorted(set(users["occupation"]))),
        # Two items have a word in place of the year.
        release_year=_whole_numbers([year if year.isdigit() else "0" for year in items["release_year"]]),
        genres=np.array([[name in genres for name in genre_names] for genres in item_genres], dtype=bool),
    )


def _columns(path: Path) -> dict[str, list[str]]:
    """Columns of a file of tab-separated values by name. Headers have the form ``user_id:token``."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return {name.partition(":")[0]: list(column) for name, column in zip(header, zip(*rows, strict=True), strict=True)}


def _whole_numbers(column: Sequence[str]) -> NDArray[np.int64]:
    return np.array(column, dtype=np.float64).astype(np.int64)


def _positions(column: Sequence[str], among: Sequence[str]) -> NDArray[np.int64]:
    position = {value: index for index, value in enumerate(among)}
    return np.array([position[value] for value in column], dtype=np.int64)


def _check_hash(content: bytes, name: str, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        raise SetupError(
            f"{name} in {where} has sha256 {digest}, expected {SHA256[name]}: it is incomplete or another version."
            " Delete it and run again"
        )


def _pip_download(folder: str) -> None:
    command = ["-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary=:all:"]
    options = ["--dest", folder, "--no-input", "--disable-pip-version-check", "--timeout", "15", "--retries", "2"]
    try:
        result = subprocess.run(
            [sys.executable, *command, *options], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        output = f"no output for {_DOWNLOAD_SECONDS} s"
    else:
        if result.returncode == 0:
            return
        lines = result.stderr.strip().splitlines()
        # pip prints a long warning for every attempt before its errors.
        output = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-1:])
    raise SetupError(
        f"the MovieLens files could not be downloaded: 'python {' '.join(command)}' failed with: {output}\nThe first"
        " run needs pip with a network. Without a network, run that command on another machine, unzip"
        f" {FOLDER_IN_WHEEL}/ from the wheel, and give the folder that holds {', '.join(SHA256)} as data_dir"
    )
