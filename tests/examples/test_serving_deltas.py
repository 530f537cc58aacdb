"""The example of an HTTP page with deltas: after them, its scores are those of the newer checkpoint's program."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from flask.testing import FlaskClient
from torch import Tensor, nn

from examples.serving.server import create_app
from lightning_pipe.checkpoints.folder_writing import META
from lightning_pipe.recsys.serving.programs import write_aoti, write_quantized, write_torch_export
from lightning_pipe.recsys.serving.row_diff import write_row_diff
from tests.examples.test_serving_requests import samples_of
from tests.recsys.serving.test_programs import batches
from tests.strategies.cases import Batch, Clicks, Dlrm, Mixed

WRITERS = {"torch_export": write_torch_export, "aoti": write_aoti, "quantized": write_quantized}


class WithSmallValues(Mixed):
    """Values that a compiler might write into its code: uniform, small or shared ones, and one that scores ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unread = nn.Parameter(torch.ones(())), nn.Linear(2, 2)
        self.one, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
        nn.init.zeros_(self.one.bias)
        self.other.weight = self.one.weight

    def forward(self, batch: Batch) -> Tensor:
        score = super().forward(batch)[:, None] * self.scale
        return (self.one(score) + self.other(score))[:, 0]


def trained(step: int) -> Clicks:
    """The model after some steps, each of which changes two rows of each table and all other values."""
    module = Clicks(WithSmallValues)
    for number in range(1, step):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for name, value in module.state_dict().items():
                rows = [number, 5] if ".embedding_bags." in name else ...
                if value.is_floating_point():
                    value[rows] += 0.1 + torch.rand(value[rows].shape, generator=generator)
    return module.eval()


def save(folder: Path, module: nn.Module, step: int) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that there is one rank
        dcp.save({"model": module.state_dict()}, checkpoint_id=folder / f"{step}.ckpt")
    torch.save({"global_step": step}, folder / f"{step}.ckpt" / META)
    return folder / f"{step}.ckpt"


def export(folder: Path, step: int, kind: str = "torch_export") -> str:
    """What the command writes for a checkpoint."""
    file, module = folder / f"{kind}.{step}.pt2", trained(step)
    if file.exists():
        return str(file)
    form = WRITERS[kind](module, batches()[0], file).description(batches()[0], module)
    form |= {"step": step, "state_dict": sorted(module.state_dict())}
    Path(f"{file}.inputs.json").write_text(json.dumps(form))
    return str(file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with deltas named by their steps, and programs."""
    folder = tmp_path_factory.mktemp("deltas")
    places = {step: save(folder, trained(step), step) for step in (1, 2, 3)}
    for older, newer in ((1, 2), (2, 3), (1, 3)):
        write_row_diff(places[newer], places[older], folder / f"{older} to {newer}")
    return folder


class Served:
    """A server of the program of step 1, and its folder of deltas."""

    def __init__(self, made: Path, folder: Path, kind: str = "torch_export") -> None:
        self.made, self.deltas = made, folder / "deltas"
        self.deltas.mkdir()
        self.kind = kind

    def start(self, step: int = 1) -> FlaskClient:
        self.client = create_app(export(self.made, step, self.kind), str(self.deltas)).test_client()
        return self.client

    def add(self, name: str) -> Path:
        return Path(shutil.copytree(self.made / name, self.deltas / name))

    @property
    def health(self) -> tuple[int, str]:
        found = json.loads(self.client.get("/health").text)
        return found["step"], found["delta_error"]


@pytest.fixture
def served(made: Path, tmp_path: Path) -> Served:
    return Served(made, tmp_path)


def scores(client: FlaskClient) -> list[float]:
    found = []
    for batch in batches():
        answer = client.post("/scores", json={"samples": samples_of(batch)})
        assert answer.status_code == 200, answer.text
        found += json.loads(answer.text)["scores"]
    return found


def scores_of_program(file: str) -> list[float]:
    return scores(create_app(file).test_client())


@pytest.mark.parametrize("kind", ["torch_export", pytest.param("aoti", marks=pytest.mark.exhaustive)])
def test_scores_after_deltas_are_those_of_the_newer_program_to_the_bit(kind: str, made: Path, tmp_path: Path) -> None:
    exact = [scores_of_program(export(made, step, kind)) for step in (1, 2, 3)]
    assert len({tuple(found) for found in exact}) == 3
    served = Served(made, tmp_path, kind)
    client = served.start()
    assert scores(client) == exact[0]
    served.add("1 to 2")
    assert scores(client) == exact[1]
    served.add("2 to 3")
    assert scores(client) == exact[2]
    assert served.health == (3, "")
    assert scores(served.start()) == exact[2]  # both at start
    assert scores(served.start(3)) == exact[2]  # the program has them
    assert served.health == (3, "")


def test_a_delta_that_comes_early_waits_for_the_one_before(served: Served) -> None:
    before = scores(served.start())
    served.add("2 to 3")
    assert scores(served.client) == before
    assert served.health == (1, "step 1 is kept: expected a delta since step 1, got 2 to 3 since 2")
    served.add("1 to 2")
    assert scores(served.client) == scores_of_program(export(served.made, 3))
    assert served.health == (3, "")


def test_a_folder_that_is_still_copied_is_applied_when_it_is_complete(served: Served) -> None:
    before = scores(served.start())
    table = served.add("1 to 3") / "network.bags.embedding_bags.people.weight.parquet"
    whole = table.read_bytes()
    for part in (b"", whole[:-1]):
        table.write_bytes(part)
        assert scores(served.client) == before
        step, error = served.health
        assert (step, "step 1 is kept: " in error, "1 to 3: " in error) == (1, True, True)
    table.write_bytes(whole)
    assert scores(served.client) == scores_of_program(export(served.made, 3))
    assert served.health == (3, "")


def with_thirty_people(step: int) -> Clicks:
    """The model with a table of another size."""
    module = trained(step)
    network: Any = module.network
    network.bags.embedding_bags["people"].weight = nn.Parameter(torch.full((30, 8), float(step)))
    return module


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda step: Clicks(Dlrm), "expected the values of the program, got others, such as 'network."),
        (with_thirty_people, "people.weight: expected a table of shape [24, 8], got [30, 8]"),
    ],
    ids=["model", "size"],
)
def test_a_delta_of_another_model_or_size_changes_nothing(
    model: Any, message: str, served: Served, tmp_path: Path
) -> None:
    older, newer = (save(tmp_path, model(step), step) for step in (1, 2))
    before = scores(served.start())
    write_row_diff(newer, older, served.deltas / "1 to 2")
    assert scores(served.client) == before
    step, error = served.health
    assert (step, message in error) == (1, True), error


def test_an_id_beyond_the_table_changes_nothing(served: Served, tmp_path: Path) -> None:
    before = scores(served.start())
    larger = [save(tmp_path, with_thirty_people(step), step) for step in (1, 2)]
    write_row_diff(larger[1], larger[0], tmp_path / "larger")
    shutil.copytree(served.made / "1 to 2", tmp_path / "diff")
    name = "network.bags.embedding_bags.people.weight.parquet"
    shutil.copy(tmp_path / "larger" / name, tmp_path / "diff" / name)
    (tmp_path / "diff").rename(served.deltas / "diff")
    assert scores(served.client) == before
    step, error = served.health
    assert (step, "people.weight: expected ids from 0 to 23, got 0 to 29" in error) == (1, True), error


def test_no_request_sees_half_a_delta(served: Served) -> None:
    app, found, done = served.start().application, list[list[float]](), threading.Event()

    def ask() -> None:
        while not done.is_set():
            found.append(scores_in_one_request(app.test_client()))

    expected = [scores_in_one_request(create_app(export(served.made, step)).test_client()) for step in (1, 2, 3)]
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for name in ("1 to 2", "2 to 3"):
        shutil.copytree(served.made / name, served.deltas / f".{name}")
        (served.deltas / f".{name}").rename(served.deltas / name)
        found.append(scores_in_one_request(app.test_client()))
    done.set()
    for thread in threads:
        thread.join()
    assert all(answer in expected for answer in found)
    assert scores_in_one_request(app.test_client()) == expected[-1]


def scores_in_one_request(client: FlaskClient) -> list[float]:
    answer = client.post("/scores", json={"samples": samples_of(batches()[1])})
    return list(json.loads(answer.text)["scores"])


def test_a_program_without_a_step_or_of_quantized_tables_takes_no_deltas(served: Served, tmp_path: Path) -> None:
    file = export(tmp_path, 1, "quantized")
    with pytest.raises(ValueError, match="deltas need an artifact of aoti or torch_export"):
        create_app(file, str(served.deltas))
    whole = export(served.made, 1)
    shutil.copy(whole, tmp_path / "old.pt2")
    form = json.loads(Path(f"{whole}.inputs.json").read_text())
    (tmp_path / "old.pt2.inputs.json").write_text(json.dumps({**form, "step": None}))
    with pytest.raises(ValueError, match=r"inputs.json with the step of the checkpoint. Export the program again"):
        create_app(str(tmp_path / "old.pt2"), str(served.deltas))
