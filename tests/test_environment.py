"""A broken torchrec installation is named, with the versions found and the commands that mend it."""

from __future__ import annotations

import importlib.metadata
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.environment import (
    Installed,
    check_environment,
    find_problem,
    import_torchrec,
    require_release,
    require_torch,
    stacks,
    warn_of_clash,
)

ON_CPU = Installed(torch="2.14.1+cpu", torchrec="1.9.2", fbgemm_gpu=None, fbgemm_gpu_cpu="1.9.0")
ON_GPU = Installed(torch="2.14.1", torchrec="1.9.2", fbgemm_gpu="1.9.0", fbgemm_gpu_cpu=None)


def complaint(installed: Installed, gpu: bool = False) -> str:
    with pytest.raises(SetupError) as error:
        check_environment(installed, gpu=gpu)
    return str(error.value)


def commands(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines() if line.startswith("    pip ")]


@pytest.mark.parametrize(
    "installed",
    [
        ON_CPU,
        ON_GPU,
        Installed("2.11.0", "1.6.1", None, "1.6.0"),
        Installed("2.12.1+cu130", "1.7.0", "1.7.0+cu130", None),
        Installed("2.13.0", "1.8.0", None, "1.8.0"),
        Installed("2.15.0", "1.10.0", "1.10.0", None),
        Installed("2.15.0", "unknown", "unknown", None),
        Installed("2.16.0", "1.11.0", "1.11.0", None),
        Installed("2.14.0a0+git1234567", "unknown", "unknown", None),
        replace(ON_CPU, torch=None),
    ],
    ids=str,
)
def test_versions_that_fit_or_cannot_be_judged_pass(installed: Installed) -> None:
    assert find_problem(installed) is None
    check_environment(installed)


def test_both_fbgemm_distributions_are_named_and_both_removed_before_the_right_one_comes_back() -> None:
    message = complaint(replace(ON_CPU, fbgemm_gpu="1.9.1"))
    assert "fbgemm-gpu 1.9.1 and fbgemm-gpu-cpu 1.9.0 are both installed" in message
    assert commands(message) == [
        "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu",
        "pip install --no-deps torchrec~=1.9.0 fbgemm-gpu-cpu~=1.9.0",
        "pip install torchmetrics==1.0.3 tensordict pyre-extensions tqdm",
    ]


def test_with_a_gpu_the_cuda_build_comes_back() -> None:
    message = complaint(replace(ON_GPU, fbgemm_gpu_cpu="1.9.0"), gpu=True)
    assert commands(message) == [
        "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu",
        "pip install torchrec~=1.9.0 fbgemm-gpu~=1.9.0",
    ]


def test_missing_torchrec_is_installed_to_fit_the_torch_that_is_there() -> None:
    message = complaint(Installed("2.11.0+cpu", None, None, None))
    assert "need torchrec, which is not installed" in message
    assert "torch 2.11.0+cpu" in message
    assert commands(message) == [
        "pip install --no-deps torchrec~=1.6.0 fbgemm-gpu-cpu~=1.6.0",
        "pip install torchmetrics==1.0.3 tensordict pyre-extensions tqdm iopath",
    ]


def test_torchrec_without_fbgemm_is_named() -> None:
    message = complaint(replace(ON_CPU, fbgemm_gpu_cpu=None))
    assert "torchrec 1.9.2 is installed without fbgemm" in message


@pytest.mark.parametrize(
    ("torch", "torchrec"), [("2.11.0", "1.8.0"), ("2.13.0", "1.6.1"), ("2.14.0", "1.8.0"), ("2.16.0", "1.9.2")]
)
def test_a_torch_and_a_torchrec_of_different_pairs_are_named_with_the_pairs(torch: str, torchrec: str) -> None:
    message = complaint(Installed(torch, torchrec, None, torchrec))
    assert f"torch {torch} and torchrec {torchrec} are not compatible" in message
    assert "torch 2.11 needs torchrec 1.6" in message
    assert "torch 2.13 needs torchrec 1.8" in message


def test_mending_a_pair_keeps_the_torch_that_is_there() -> None:
    message = complaint(Installed("2.11.0", "1.8.0", None, "1.8.0"))
    assert commands(message)[:2] == [
        "pip uninstall -y fbgemm-gpu-cpu",
        "pip install --no-deps torchrec~=1.6.0 fbgemm-gpu-cpu~=1.6.0",
    ]


@pytest.mark.parametrize("torch", ["2.9.1", "2.16.0"])
def test_a_torch_that_no_known_torchrec_fits_is_replaced(torch: str) -> None:
    message = complaint(Installed(torch, "1.8.0", None, "1.8.0"))
    assert torch in message
    assert "pip install torch~=2.14.0" in commands(message)


@pytest.mark.parametrize("torchrec", ["1.8.0", "1.9.2", None])
def test_a_torch_without_an_fbgemm_is_named_with_the_one_that_has_it_and_the_reason(torchrec: str | None) -> None:
    message = complaint(Installed("2.15.0", torchrec, None, torchrec))
    assert "need torch 2.14 until a newer fbgemm exists, got torch 2.15.0: no fbgemm is built for it" in message
    assert "c10::report_overflow" in message
    uninstall = ["pip uninstall -y fbgemm-gpu-cpu"] if torchrec else []
    assert commands(message) == [
        *uninstall,
        "pip install torch~=2.14.0",
        "pip install --no-deps torchrec~=1.9.0 fbgemm-gpu-cpu~=1.9.0",
        "pip install torchmetrics==1.0.3 tensordict pyre-extensions tqdm",
    ]


def test_a_torch_below_the_oldest_supported_is_called_too_old() -> None:
    message = complaint(Installed("2.9.1", "1.4.0", "1.4.0", None), gpu=True)
    assert "torch must be 2.11 or newer, got torch 2.9.1" in message


def test_a_fbgemm_of_another_version_than_torchrec_is_named() -> None:
    message = complaint(replace(ON_CPU, fbgemm_gpu_cpu="1.6.0"))
    assert "torchrec 1.9.2 and fbgemm 1.6.0 are not compatible" in message


def test_versions_are_read_from_the_metadata_of_the_packages_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in [("fbgemm_gpu", "1.8.7"), ("fbgemm_gpu_cpu", "1.8.6"), ("torchrec", "1.8.5")]:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed = Installed.read()
    assert (installed.torchrec, installed.fbgemm_gpu, installed.fbgemm_gpu_cpu) == ("1.8.5", "1.8.7", "1.8.6")
    assert installed.torch == importlib.metadata.version("torch")


def test_a_module_without_a_known_distribution_counts_as_there_but_is_not_judged() -> None:
    def version(distribution: str) -> str:
        if distribution == "torch":
            return "2.13.0"
        raise importlib.metadata.PackageNotFoundError(distribution)

    from_source = Installed.read(version, has_module=lambda name: True)
    assert from_source == Installed("2.13.0", "unknown", "unknown", None)
    assert find_problem(from_source) is None
    assert Installed.read(version, has_module=lambda name: False) == Installed("2.13.0", None, None, None)


def fails_to_load(name: str) -> ModuleType:
    try:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
    except OSError as cause:
        raise OSError("Could not load this library: fbgemm_gpu_py.so") from cause


def test_a_cuda_build_that_cannot_be_loaded_is_named_with_its_cause_and_replaced_by_the_cpu_build() -> None:
    with pytest.raises(SetupError, match=r"fbgemm-gpu 1\.9\.0 is a CUDA build.*libnvidia-ml\.so\.1") as error:
        import_torchrec(fails_to_load, installed=ON_GPU, gpu=False)
    assert isinstance(error.value.__cause__, OSError)
    assert commands(str(error.value))[:2] == [
        "pip uninstall -y fbgemm-gpu",
        "pip install --no-deps torchrec~=1.9.0 fbgemm-gpu-cpu~=1.9.0",
    ]


@pytest.mark.parametrize("installed", [ON_CPU, replace(ON_GPU, torch="2.14.1+cpu", fbgemm_gpu="1.9.0+cpu")], ids=str)
def test_a_cpu_build_whose_files_were_removed_is_installed_anew(installed: Installed) -> None:
    def files_are_gone(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}")

    with pytest.raises(SetupError, match="No module named 'fbgemm_gpu'") as error:
        import_torchrec(files_are_gone, installed=installed, gpu=False)
    assert "CUDA build" not in str(error.value)
    assert commands(str(error.value))[0].startswith("pip uninstall -y fbgemm-gpu")


def test_a_clash_is_reported_before_any_import_is_tried() -> None:
    def must_not_be_called(name: str) -> ModuleType:
        raise AssertionError(f"imported {name}")

    with pytest.raises(SetupError, match="are both installed"):
        import_torchrec(must_not_be_called, installed=replace(ON_CPU, fbgemm_gpu="1.9.0"), gpu=False)


def test_importing_the_package_warns_of_a_clash_and_is_silent_where_nothing_clashes_or_torchrec_is_not_there() -> None:
    with pytest.warns(UserWarning, match=r"are both installed(.|\n)*pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu"):
        warn_of_clash(replace(ON_CPU, fbgemm_gpu="1.9.0"), gpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_clash(ON_CPU)
        warn_of_clash(replace(ON_CPU, torchrec=None, fbgemm_gpu_cpu=None))


def test_an_older_torch_than_is_needed_is_named_with_what_needs_it() -> None:
    require_torch("2.12", "stages", "2.12.0+cpu")
    require_torch("2.11", "stages")
    with pytest.raises(
        SetupError, match=r"stages need torch 2\.12 or newer.*torch 2\.11\.0 is installed. Run: pip install"
    ):
        require_torch("2.12", "stages", "2.11.0")
    with pytest.raises(SetupError, match=r"graphs need torch 2\.13 or newer, where they end, but torch 2\.12\.1 is"):
        require_torch("2.13", "graphs", "2.12.1", reason="where they end")


def test_the_command_for_a_newer_torch_keeps_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    default, commands = stacks().default, []
    for installed in (replace(ON_CPU, torchrec=None, fbgemm_gpu_cpu=None), replace(ON_CPU, torch="2.11.0")):
        monkeypatch.setattr(Installed, "read", lambda installed=installed: installed)
        with pytest.raises(SetupError) as raised:
            require_torch("2.12", "stages", "2.11.0")
        commands.append(str(raised.value).split("Run: ")[1])
    assert commands[0] == f"pip install 'torch~={default}.0'"
    assert commands[1].startswith(f"{commands[0]}, pip uninstall")
    assert f"torchrec~={stacks().of_torch[default].torchrec}.0" in commands[1]


@pytest.mark.parametrize(("package", "old"), [("lightning", "2.4.0"), ("transformers", "4.57.6")])
def test_an_older_release_is_refused_with_the_command(package: str, old: str) -> None:
    with pytest.raises(SetupError, match=rf"need {package} [\d.]+ or newer, but {package} {old} is .* '{package}>="):
        require_release(package, "strategies", old)
    for accepted in ("99.0.0", "unknown", None):
        require_release(package, "strategies", accepted)


def test_the_table_of_versions_is_read_once_and_has_the_default() -> None:
    assert stacks() is stacks()
    assert stacks().default in stacks().pairs


def test_the_environment_that_runs_the_tests_has_a_torchrec_that_loads() -> None:
    assert import_torchrec().__name__ == "torchrec"
