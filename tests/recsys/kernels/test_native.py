"""The compiled library: built here, and done without where it is not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_pipe.recsys.kernels import native


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    native.load_native_library.cache_clear()
    yield
    native.load_native_library.cache_clear()


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    found = native.load_native_library()
    assert isinstance(found, ctypes.CDLL)


def test_the_environment_can_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PIPE_NATIVE", "0")
    assert native.load_native_library() is None


def test_a_library_of_another_version_is_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_VERSION", 0)
    with pytest.warns(UserWarning, match="must have version 0, got"):
        assert native.load_native_library() is None


def test_a_broken_file_is_left_alone_with_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    suffix = native.importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / f"_native{suffix}").write_bytes(b"no library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert native.load_native_library() is None
