"""docs/serving.md from its first command to an answer, in an empty folder: HTTP, C++ and quantized tables."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc
from torchrec import KeyedJaggedTensor
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES
from torchrec.datasets.utils import Batch

from examples.recsys_criteo.model import CriteoDLRM
from examples.serving.quantized_error import ScoreBounds, auc_bounds, batches, load, scores
from examples.serving.quantized_error import main as compare
from lightning_pipe.recsys.serving.programs import write_quantized
from tests.docs.pages import DOCS, ROOT, Block, blocks_of, run_command
from tests.patience import HANG

pytestmark = pytest.mark.exhaustive

REASON = "run by tests/examples/test_serving.py"
SERVER = 'flask --app \'examples.serving.server:create_app("model.pt2"'  # without and with deltas
CHECKPOINT = "logs/recsys_criteo/checkpoints/last.ckpt"


def block(beginning: str) -> Block:
    """The block of the page that this file runs and that begins with a text."""
    (found,) = (
        one for one in blocks_of(DOCS / "serving.md") if one.reason_to_skip == REASON and one.code.startswith(beginning)
    )
    return found


def run(code: str, folder: Path) -> str:
    """Run commands of the page in a folder."""
    with contextlib.chdir(folder):
        return run_command(["bash", "-e", "-o", "pipefail", "-c", code], "serving.md")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that only has the examples of a clone, after the page's commands that train and compile."""
    folder = tmp_path_factory.mktemp("serving")
    (folder / "examples").symlink_to(ROOT / "examples")
    assert "Wrote model.pt2" in run(block("RUN=").code, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CriteoDLRM:
    return load(str(folder / CHECKPOINT))


@pytest.fixture(scope="module")
def validation(folder: Path, model: CriteoDLRM) -> list[Batch]:
    (file,) = folder.glob("logs/recsys_criteo/rows_*/val.parquet")
    return list(batches(str(file), model.table_rows))


@torch.no_grad()
def scores_of(model: CriteoDLRM, given: list[Batch]) -> Tensor:
    return torch.cat([model.predict_step(batch, 0) for batch in given])


# ---------------------------------------------------------------------- over HTTP


@contextlib.contextmanager
def serving(folder: Path, command: str) -> Iterator[int]:
    """Port of a server of the page, in a process that can import neither this package nor TorchRec."""
    (folder / "without").mkdir(exist_ok=True)
    for name in ("lightning_pipe", "torchrec"):
        (folder / "without" / f"{name}.py").write_text("raise ImportError('the server must do without')\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", "exec " + command.replace("8000", str(port))],
            cwd=folder,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(folder / "without")},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + HANG
        while not healthy(port):
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until, (folder / "server.log").read_text()
            time.sleep(0.1)
        yield port
        assert server.poll() is None, (folder / "server.log").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(HANG)


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    with serving(folder, block(SERVER + ")").code) as port:
        yield port


def healthy(port: int) -> bool:
    try:
        return bool(urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG).status == 200)
    except URLError:
        return False


def answer(port: int, samples: list[Any]) -> Any:
    body = json.dumps({"samples": samples}).encode()
    return json.loads(urlopen(f"http://127.0.0.1:{port}/scores", body, timeout=HANG).read())["scores"]


def samples_of(batch: Batch) -> list[dict[str, Any]]:
    ids = {key: batch.sparse_features[key].values().tolist() for key in DEFAULT_CAT_NAMES}
    return [
        {"dense_features": dense, "sparse_features": {key: [values[row]] for key, values in ids.items()}}
        for row, dense in enumerate(batch.dense_features.tolist())
    ]


def test_the_pages_request_is_answered_with_the_trained_models_score(port: int, model: CriteoDLRM) -> None:
    heard, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(heard):
        exec(block("import json").code.replace("8000", str(port)), names)
    (found,) = json.loads(heard.getvalue())["scores"]
    values = torch.tensor([names["sample"]["sparse_features"][key] for key in DEFAULT_CAT_NAMES]).flatten()
    ids = KeyedJaggedTensor(DEFAULT_CAT_NAMES, values, lengths=torch.ones(26, dtype=torch.int32))
    batch = Batch(torch.tensor([names["sample"]["dense_features"]]), ids, torch.zeros(1))
    assert found == pytest.approx(scores_of(model, [batch]).item(), rel=0, abs=1e-6)


def test_validation_rows_are_answered_with_the_trained_models_scores(
    port: int, model: CriteoDLRM, validation: list[Batch]
) -> None:
    samples = [sample for batch in validation[:20] for sample in samples_of(batch)]
    found = [score for size in (1, 7, 1000) for score in answer(port, samples[:size])]
    exact = scores_of(model, validation[:20])
    assert exact.std() > 0.01  # it has learned something
    assert torch.allclose(torch.tensor(found), torch.cat([exact[:size] for size in (1, 7, 1000)]), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- deltas


def test_a_server_with_deltas_answers_as_one_with_an_export_of_the_newer_checkpoint(
    folder: Path, validation: list[Batch]
) -> None:
    here = folder / "deltas of the page"
    shutil.copytree(folder, here, symlinks=True, ignore=shutil.ignore_patterns(here.name))
    variables, _, export = block("RUN=").code.splitlines()
    samples = [sample for batch in validation[:10] for sample in samples_of(batch)]
    (here / "deltas").mkdir()
    with serving(here, block(SERVER + ", deltas").code) as port:
        before = answer(port, samples)
        run(f"{variables}\n{block('cp -rL').code}", here)
        after = answer(port, samples)
        assert json.loads(urlopen(f"http://127.0.0.1:{port}/health", timeout=HANG).read())["step"] == 100
    with serving(here, block(SERVER + ", deltas").code) as port:
        assert answer(port, samples) == after
    run(f"{variables}\n{export.replace('model.pt2', 'newer.pt2')}", here)
    with serving(here, block(SERVER + ")").code.replace("model.pt2", "newer.pt2")) as port:
        assert answer(port, samples) == after != before


# ---------------------------------------------------------------------- in C++


@pytest.fixture(scope="module")
def compiled(folder: Path) -> str:
    """The page's commands that compile the C++ example and set the place of PyTorch."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    run(block("TORCH=").code, folder)
    return block("TORCH=").code.splitlines()[0] + "\n"


def test_the_pages_commands_print_the_trained_models_scores_without_python(
    folder: Path, compiled: str, model: CriteoDLRM, validation: list[Batch]
) -> None:
    given = validation[0]
    with contextlib.chdir(folder):
        exec(block("import torch").code, {})
    assert len(torch.load(folder / "inputs.pt")) == 3
    (alone, with_library) = ("./score model.pt2 inputs.pt\n", "./score model.pt2 inputs.pt $(dirname")
    of_page = run(compiled + block(alone).code, folder)
    assert len(of_page.split()) == 2
    assert run(compiled + block(with_library).code, folder) == of_page
    ids = given.sparse_features
    inputs = [given.dense_features, ids.values(), ids.lengths().view(len(ids.keys()), -1)]
    torch.save(inputs, folder / "inputs.pt")
    printed = run(block(alone).code, folder)
    found = torch.tensor([float(line) for line in printed.split()])
    assert torch.allclose(found, scores_of(model, [given]), rtol=0, atol=1e-6)
    loaded = run("LD_DEBUG=files " + block(alone).code, folder)
    assert "libtorch_cpu" in loaded
    assert "libpython" not in loaded
    inputs[1][5] = 10_000
    torch.save(inputs, folder / "inputs.pt")
    run("./score model.pt2 inputs.pt || test $? -eq 1", folder)  # an error, not a signal


# ---------------------------------------------------------------------- quantized tables


# Largest derived bound of a score, and of the difference of the AUC. Both follow from the trained weights, and are not
# measured with quantized tables.
@pytest.mark.parametrize(("bits", "of_score", "of_auc"), [(8, 0.02, 0.02), (4, 0.3, 0.3)])
def test_quantized_scores_and_their_auc_are_within_derived_bounds(
    model: CriteoDLRM, validation: list[Batch], tmp_path: Path, bits: int, of_score: float, of_auc: float
) -> None:
    given = validation[:32]
    write_quantized(model, given[0], tmp_path / "model.pt", bits)
    found, exact = scores(torch.jit.load(tmp_path / "model.pt"), given), scores_of(model, given)
    bounds = ScoreBounds(model, bits)
    lower, upper = (torch.cat(ends) for ends in zip(*map(bounds, given), strict=True))
    assert bool(((lower <= found) & (found <= upper)).all())
    assert float(torch.maximum(exact - lower, upper - exact).max()) < of_score
    labels = torch.cat([batch.labels for batch in given]).long()
    least, most = auc_bounds(lower, upper, labels)
    auc = binary_auroc(exact, labels).item()
    assert least <= binary_auroc(found, labels).item() <= most
    assert max(auc - least, most - auc) < of_auc


def test_the_command_of_the_table_prints_scores_and_bounds(
    folder: Path, model: CriteoDLRM, validation: list[Batch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = folder.glob("logs/recsys_criteo/rows_*/val.parquet")
    pq.write_table(pq.read_table(file).slice(0, 128), tmp_path / "val.parquet")
    write_quantized(model, validation[0], tmp_path / "model.pt")
    compare([str(folder / CHECKPOINT), str(tmp_path / "val.parquet"), f"8={tmp_path / 'model.pt'}"])
    printed = capsys.readouterr().out
    assert "not quantized: AUC" in printed
    assert "within bounds: True" in printed
