"""HTTP page with the scores of an exported recommender, in a process without the code that trained it.

    flask --app 'examples.serving.server:create_app("model.pt2")' run --port 8000

``model.pt2.inputs.json`` must be in the same folder. docs/serving.md shows a request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import fbgemm_gpu  # noqa: F401  # registers operators that programs call
import torch
from flask import Flask, request
from werkzeug.exceptions import BadRequest, HTTPException

MOST_SAMPLES, MOST_BYTES = 1024, 4 << 20  # of a request


def create_app(file: str) -> Flask:
    """Application for a WSGI server. *file* is an artifact of `aoti`, `torch_export` or `quantized`."""
    app, program, form = Flask(__name__), load(file), json.loads(Path(f"{file}.inputs.json").read_text())
    app.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    if fixed := [entry["name"] for entry in form["inputs"] if not {"batch", "ids"} & set(entry["shape"])]:
        raise ValueError(f"{file}: expected inputs with a row for each sample, got {fixed}. Make them buffers")

    @app.get("/health")
    def health() -> dict[str, Any]:
        return {"inputs": form["inputs"]}

    @app.post("/scores")
    @torch.inference_mode()
    def scores() -> dict[str, Any]:
        try:
            inputs = tensors(form, json.loads(request.get_data()))
        except (ValueError, RecursionError) as error:  # of json
            raise BadRequest(f"expected a body in JSON, got {error}") from error
        if not (result := program(*inputs)).isfinite().all():
            raise BadRequest("expected values whose scores are finite, got a score that is not")
        return {"scores": result.tolist()}

    @app.errorhandler(HTTPException)
    def failed(error: HTTPException) -> tuple[dict[str, Any], int]:
        return {"error": error.description}, error.code or 500

    return app


def load(file: str) -> Any:
    if "/aotinductor/" in (names := "\n".join(ZipFile(file).namelist())):
        return torch._inductor.aoti_load_package(file)
    return torch.jit.load(file) if "/code/" in names else torch.export.load(file).module()


def tensors(form: dict[str, Any], body: Any) -> list[torch.Tensor]:
    """Inputs of the program. Every value is checked: some programs score an id beyond a table as another id."""
    samples = body.get("samples") if isinstance(body, dict) else None
    if not isinstance(samples, list) or not 0 < len(samples) <= MOST_SAMPLES:
        raise BadRequest(f'expected {{"samples": [1 to {MOST_SAMPLES} objects]}}, got {body!r:.60}')
    return [_tensor(form, samples, **entry) for entry in form["inputs"]]


def _tensor(form: dict[str, Any], samples: list[Any], name: str, type: str, shape: list[Any]) -> torch.Tensor:
    places, dtype, rows = range(len(samples)), getattr(torch, type), form["rows"]
    owner, _, part = name.rpartition(".")
    if owner not in form["keys"]:
        return torch.tensor(
            [_numbers(*_field(samples, place, name), shape[1:], dtype) for place in places], dtype=dtype
        )
    cells = [(key, place) for key in form["keys"][owner] for place in places]  # ids are sorted by key, then by sample
    lists = [_numbers(*_field(samples, place, owner, key), ["any"], torch.int64, rows.get(key)) for key, place in cells]
    if part == "lengths":
        return torch.tensor([len(ids) for ids in lists], dtype=dtype).view(-1, len(samples))
    if part == "weights":
        pairs = zip(cells, lists, strict=True)
        lists = [_numbers(*_field(samples, place, name, key), [len(ids)], dtype) for (key, place), ids in pairs]
    return torch.tensor([value for values in lists for value in values], dtype=dtype)


def _field(samples: list[Any], place: int, *names: str) -> tuple[Any, str]:
    value, where = samples[place], f"samples[{place}]"
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise BadRequest(f"{where}: expected an object with {name!r}, got {value!r:.60}")
        value, where = value[name], f"{where}.{name}"
    return value, where


def _numbers(value: Any, where: str, shape: list[Any], dtype: torch.dtype, rows: int | None = None) -> Any:
    if shape:
        if not isinstance(value, list) or shape[0] not in ("any", len(value)):
            raise BadRequest(f"{where}: expected a list of length {shape[0]}, got {value!r:.60}")
        return [_numbers(item, where, shape[1:], dtype, rows) for item in value]
    kinds, limits = ((int, float), torch.finfo(dtype)) if dtype.is_floating_point else ((int,), torch.iinfo(dtype))
    low, high = (0, rows - 1) if rows else (limits.min, limits.max)
    if type(value) not in kinds or not low <= value <= high:
        raise BadRequest(f"{where}: expected {kinds[-1].__name__} from {low} to {high}, got {value!r:.60}")
    return value
