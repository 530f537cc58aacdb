"""Versions of torchrec or fbgemm that do not fit are named, with those that fit."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.environment import TORCHREC, import_torchrec, require_min_package_version, version_problem

ROOT = Path(__file__).parent.parent
FITS = "torch 2.14 with torchrec and fbgemm 1.9, torch 2.13 with torchrec and fbgemm 1.8"
NAMES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")


def install(monkeypatch: pytest.MonkeyPatch, *versions: str | None) -> None:
    """Let the environment have these versions of NAMES; None for a package that is not installed."""
    installed = dict(zip(NAMES, versions, strict=True))

    def version(name: str) -> str:
        if (found := installed[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    "versions",
    [
        ("2.14.1+cpu", "1.9.2", None, "1.9.0"),
        ("2.14.1", "1.9.2", "1.9.0", None),
        ("2.13.0", "1.8.0", None, "1.8.0"),
        ("2.11.0+cu130", "1.6.1", "1.6.0+cu130", None),
        # Not in the table, or from source without metadata: the import decides.
        ("2.16.0", "1.11.0", "1.11.0", None),
        ("2.14.0a0+git1234567", None, None, None),
        (None, "1.9.2", None, "1.9.0"),
    ],
)
def test_versions_that_fit_or_cannot_be_judged_pass(
    versions: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *versions)
    assert version_problem() is None


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        (("2.14.1+cpu", "1.9.2", "1.9.1", "1.9.0"), "are both installed, but they write the same files"),
        (("2.11.0", "1.8.0", None, "1.8.0"), "do not fit together"),
        (("2.14.1", "1.8.0", None, "1.8.0"), "do not fit together"),
        (("2.14.1", "1.9.2", None, "1.6.0"), "do not fit together"),
        (("2.14.1", "1.9.2", "1.6.0", None), "do not fit together"),
    ],
)
def test_versions_that_do_not_fit_are_named_with_those_that_do(
    versions: tuple[str | None, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, *versions)
    message = str(version_problem())
    assert problem in message
    assert ", ".join(f"{name} {found or '(not installed)'}" for name, found in zip(NAMES, versions, strict=True)) in (
        message
    )
    assert FITS in message
    with pytest.raises(SetupError) as error:
        import_torchrec()
    assert str(error.value) == message


@pytest.mark.parametrize("module", ["fbgemm_gpu", "torchrec"])
def test_an_import_that_fails_is_explained_with_its_cause(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=rf"cannot be imported \(ModuleNotFoundError: .*{module}") as error:
        import_torchrec()
    assert FITS in str(error.value)
    assert isinstance(error.value.__cause__, ImportError)


@pytest.mark.exhaustive
def test_importing_the_package_warns_of_versions_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "torchrec-1.0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrec\nVersion: 1.0.0\n")
    program = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import lightning_pipe"
    for path, expected in ((str(tmp_path), True), ("", False)):
        run = subprocess.run(
            [sys.executable, "-c", program.replace(str(tmp_path), path)], capture_output=True, text=True, check=True
        )
        assert ("UserWarning: torch, torchrec and fbgemm do not fit together" in run.stderr) == expected


@pytest.mark.parametrize(("package", "old"), [("torch", "2.11.0+cpu"), ("transformers", "4.57.6")])
def test_an_older_version_than_a_feature_needs_is_refused(
    package: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    minimum = {"torch": "2.13", "transformers": "5.23"}[package]
    for accepted in (f"{minimum}.0", "99.0.0", "unknown"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, accepted=accepted: accepted)
        require_min_package_version(package, minimum, "stages")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: old)
    expected = f"stages need {package} {minimum} or newer, but {package} {old} is installed"
    with pytest.raises(SetupError) as error:
        require_min_package_version(package, minimum, "stages")
    assert expected in str(error.value)
    assert f"pip install '{package}~={minimum}.0'" in str(error.value)


def test_the_page_about_versions_lists_those_that_are_checked() -> None:
    page = (ROOT / "docs" / "stacks.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ")[:3] for line in page.splitlines() if line.startswith("| 2.")]
    assert rows == [[torch, torchrec, torchrec] for torch, torchrec in TORCHREC.items()]
