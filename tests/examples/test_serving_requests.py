"""The example of an HTTP page: odd requests are refused with what was expected, and never end the process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flask.testing import FlaskClient

from examples.serving.server import MOST_BYTES, create_app
from lightning_pipe.recsys.serving.programs import write_torch_export
from tests.recsys.serving.test_programs import batches, expected, trained
from tests.strategies.cases import KEYS, Batch, Mixed

SAMPLE = {
    "dense": [0.1, 0.2, 0.3],
    "sparse": {"friend": [], "item": [3, 23], "past": [0], "user": [5]},
    "tags": {"tag": [7, 7]},
    "tags.weights": {"tag": [0.5, -1]},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> FlaskClient:
    file, model = tmp_path_factory.mktemp("served") / "model.pt2", trained(Mixed)
    form = write_torch_export(model, batches()[0], file)
    Path(f"{file}.inputs.json").write_text(json.dumps(form.description(batches()[0], model)))
    return create_app(str(file)).test_client()


def samples_of(batch: Batch) -> list[dict[str, Any]]:
    ids = {key: batch.sparse[key].to_dense() for key in KEYS}
    tags, weights = batch.tags["tag"].to_dense(), batch.tags["tag"].to_dense_weights()
    return [
        {
            "dense": batch.dense[row].tolist(),
            "sparse": {key: ids[key][row].tolist() for key in KEYS},
            "tags": {"tag": tags[row].tolist()},
            "tags.weights": {"tag": weights[row].tolist()},
        }
        for row in range(len(batch.dense))
    ]


def test_samples_with_any_number_of_ids_get_the_models_scores(client: FlaskClient) -> None:
    for batch, scores in zip(batches(), expected(trained(Mixed)), strict=True):
        answer = client.post("/scores", json={"samples": samples_of(batch)})
        assert answer.status_code == 200, answer.text
        assert torch.allclose(torch.tensor(json.loads(answer.text)["scores"]), scores, rtol=0, atol=1e-6)


def test_a_sample_may_have_no_ids_at_all(client: FlaskClient) -> None:
    empty = {**SAMPLE, "sparse": {key: [] for key in KEYS}, "tags": {"tag": []}, "tags.weights": {"tag": []}}
    assert client.post("/scores", json={"samples": [empty]}).status_code == 200


ODD: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "id beyond the table": (("sparse", "item"), [24], r"samples[1].sparse.item: expected int from 0 to 23, got 24"),
    "negative id": (("sparse", "user"), [-1], "sparse.user: expected int from 0 to 23, got -1"),
    "missing key": (("sparse",), {"user": [5]}, "samples[1].sparse: expected an object with 'friend', got {'user'"),
    "weights of another length": (("tags.weights", "tag"), [0.5], "expected a list of length 2, got [0.5]"),
    "too large for float32": (("dense",), [0.1, 1e39, 0.2], "got 1e+39"),
}


@pytest.mark.parametrize(("path", "value", "message"), ODD.values(), ids=ODD)
def test_an_odd_value_is_refused_with_its_place(
    client: FlaskClient, path: tuple[str, ...], value: Any, message: str
) -> None:
    odd: Any = copy.deepcopy(SAMPLE)
    inner = odd
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    answer = client.post("/scores", json={"samples": [SAMPLE, odd]})
    assert (answer.status_code, message in json.loads(answer.text)["error"]) == (400, True), answer.text
    assert client.post("/scores", json={"samples": [SAMPLE]}).status_code == 200


BODIES = {
    "no samples": (b'{"samples": []}', 400, '{"samples": [1 to 1024 objects]}, got {'),
    "no JSON": (b"dense=1", 400, "expected a body in JSON"),
    "too large": (b" " * (MOST_BYTES + 1), 413, "exceeds the capacity limit"),
}


@pytest.mark.parametrize(("body", "status", "message"), BODIES.values(), ids=BODIES)
def test_an_odd_body_is_refused(client: FlaskClient, body: bytes, status: int, message: str) -> None:
    answer = client.post("/scores", data=body)
    assert (answer.status_code, message in json.loads(answer.text)["error"]) == (status, True), answer.text
    assert client.get("/health").status_code == 200


def test_other_addresses_and_methods_are_answered_in_json(client: FlaskClient) -> None:
    assert client.get("/scores").status_code == 405
    assert "error" in json.loads(client.get("/else").text)
