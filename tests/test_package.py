"""What is installed is whole: a wheel built from nothing but the source distribution, away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.patience import HANG

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def run(*command: str, folder: Path, **environment: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy of what git has, so that nothing else gets into it."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "checkout"
    run("git", "clone", "-q", "--no-hardlinks", str(ROOT), str(copy), folder=folder)
    name = run(sys.executable, "-c", BUILD, "build_sdist", str(folder), folder=copy).splitlines()[-1]
    return folder / name


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    name = run(sys.executable, "-c", BUILD, "build_wheel", str(folder), folder=source).splitlines()[-1]
    return folder / name


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site"),
        str(wheel), folder=folder)  # fmt: skip
    return folder


def python(installed: Path, code: str) -> str:
    """What *code* prints where the package is the installed one."""
    return run(sys.executable, "-c", code, folder=installed, PYTHONPATH=str(installed / "site"))


def without(*missing: str) -> str:
    """Code for a process that cannot import these."""
    return f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"


@pytest.mark.exhaustive
def test_the_wheel_has_every_file_of_the_package_that_git_has(wheel: Path) -> None:
    files = run("git", "ls-files", "lightning_pipe", folder=ROOT).splitlines()
    with zipfile.ZipFile(wheel) as packed:
        missing = {one for one in files if (ROOT / one).exists()} - set(packed.namelist())
    assert not missing


@pytest.mark.exhaustive
def test_types_and_the_compiled_library_are_in_it(installed: Path) -> None:
    package = installed / "site" / "lightning_pipe"
    assert (package / "py.typed").is_file()
    assert list((package / "recsys" / "kernels" / "csrc").glob("_native*.so"))
    code = (
        "from lightning_pipe.recsys.kernels import native;"
        " print(native.__file__, native.load_native_library() is not None)"
    )
    assert python(installed, code).split() == [str(package / "recsys" / "kernels" / "native.py"), "True"]


@pytest.mark.exhaustive
def test_its_command_is_there(installed: Path) -> None:
    command = installed / "site" / "bin" / "lightning-pipe"
    said = run(sys.executable, str(command), "strategies", folder=installed, PYTHONPATH=str(installed / "site"))
    assert "recsys_prefetch_pipeline" in said


@pytest.mark.exhaustive
def test_language_models_need_no_torchrec_which_is_asked_for_where_it_is_needed(installed: Path) -> None:
    code = without("torchrec", "fbgemm_gpu") + (
        "import lightning.pytorch as pl, lightning_pipe\n"
        "from lightning_pipe.strategies import LLMPipelineStrategy\n"
        "trainer = pl.Trainer(strategy='llm_1f1b_pipeline', accelerator='cpu', logger=False)\n"
        "print(type(trainer.strategy).__name__)\n"
        "try:\n"
        "    from lightning_pipe.recsys import TrainPipeline\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    first, *rest = python(installed, code).strip().splitlines()
    assert first == "LLMPipelineStrategy"
    assert "torchrec" in " ".join(rest)
    assert "install" in " ".join(rest)


@pytest.mark.exhaustive
def test_recommenders_need_no_transformers_which_is_asked_for_where_it_is_needed(installed: Path) -> None:
    code = without("transformers") + (
        "import lightning.pytorch as pl, lightning_pipe\n"
        "from lightning_pipe.recsys import TrainPipeline\n"
        "trainer = pl.Trainer(strategy='recsys_prefetch_pipeline', accelerator='cpu', logger=False)\n"
        "print(type(trainer.strategy).__name__)\n"
        "try:\n"
        "    from lightning_pipe.strategies import HFCausalLM\n"
        "    HFCausalLM({'model_type': 'llama'})\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    first, *rest = python(installed, code).strip().splitlines()
    assert first == "RecsysPipelineStrategy"
    assert "transformers" in " ".join(rest)
    assert "install" in " ".join(rest)
