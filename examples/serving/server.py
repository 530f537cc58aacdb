"""HTTP page with the scores of an exported recommender, in a process without the code that trained it.

    flask --app 'examples.serving.server:create_app("model.pt2")' run --port 8000

``model.pt2.inputs.json`` must be in the same folder. docs/serving.md shows a request. With ``deltas="deltas"``, folders
of ``lightning-pipe rows diff`` that appear in ``deltas`` update the program.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import fbgemm_gpu  # noqa: F401  # registers operators that programs call
import torch
from flask import Flask, request
from werkzeug.exceptions import BadRequest, HTTPException

MOST_SAMPLES, MOST_BYTES = 1024, 4 << 20  # of a request


def create_app(file: str, deltas: str | None = None) -> Flask:
    """Application for a WSGI server.

    Args:
        file: artifact of `aoti`, `torch_export` or, without *deltas*, `quantized`.
        deltas: folder of folders of `lightning-pipe rows diff` (default None: the artifact does not change).
    """
    app, form = Flask(__name__), json.loads(Path(f"{file}.inputs.json").read_text())
    app.config["MAX_CONTENT_LENGTH"] = MOST_BYTES
    if fixed := [entry["name"] for entry in form["inputs"] if not {"batch", "ids"} & set(entry["shape"])]:
        raise ValueError(f"{file}: expected inputs with a row for each sample, got {fixed}. Make them buffers")
    updates: Deltas | None = None
    newest: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if deltas is None:
        program = load(file)
    else:
        program, values = load_with_values(file)
        updates = Deltas(deltas, values, form, app.logger)
        newest = updates.newest
        with newest():
            pass

    @app.get("/health")
    def health() -> dict[str, Any]:
        with newest():
            state = {} if updates is None else {"step": updates.step, "delta_error": updates.error}
        return {"inputs": form["inputs"], **state}

    @app.post("/scores")
    @torch.inference_mode()
    def scores() -> dict[str, Any]:
        try:
            inputs = tensors(form, json.loads(request.get_data()))
        except (ValueError, RecursionError) as error:  # of json
            raise BadRequest(f"expected a body in JSON, got {error}") from error
        with newest():
            result = program(*inputs)
        if not result.isfinite().all():
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


def load_with_values(file: str) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    """Program, and the tensors that it reads by name. Changes of the tensors are changes of the program."""
    names = ZipFile(file).namelist()
    if any("/code/" in name for name in names):
        raise ValueError(f"{file}: deltas need an artifact of aoti or torch_export, whose values are those of training")
    if not (compiled := [name for name in names if "/aotinductor/" in name]):
        module = torch.export.load(file).module()
        return module, module.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        ZipFile(file).extractall(folder, compiled)
        (library,) = Path(folder).rglob("*.so")
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return lambda *inputs: runner.run(list(inputs))[0], runner.extract_constants_map(False)


class Deltas:
    """Folders of ``lightning-pipe rows diff`` in a folder, applied to a program in the order of their steps.

    Attributes:
        step: ``global_step`` of the checkpoint whose scores the program computes.
        error: reason why a folder was not applied; empty if all were.
    """

    def __init__(self, folder: str, values: dict[str, torch.Tensor], form: dict[str, Any], log: logging.Logger) -> None:
        if form.get("step") is None:
            raise ValueError("expected an inputs.json with the step of the checkpoint. Export the program again")
        import pyarrow.parquet  # noqa: F401  # raises an error at start rather than at the first delta

        self.step, self.error = int(form["step"]), ""
        self._folder, self._log, self._seen = Path(folder), log, list[Any]()
        self._values = {_plain(name.removeprefix("model.")): value for name, value in values.items()}
        self._names, self._lock = set(form["state_dict"]), threading.Lock()

    @contextlib.contextmanager
    def newest(self) -> Iterator[None]:
        """Apply new folders. Until the end of the block, the program does not change."""
        with self._lock:
            try:
                folders = sorted(entry for entry in self._folder.iterdir() if not entry.name.startswith("."))
                # After an error, a folder may be complete later.
                files = [file for folder in folders for file in folder.glob("*")] if self.error else []
                seen = [folders, sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
                if seen != self._seen:
                    self._seen = seen
                    self._apply_all(folders)
                    self.error = ""
            except Exception as error:  # of any type: the files come from elsewhere
                message = f"step {self.step} is kept: {error}"
                if message != self.error:
                    self._log.error("deltas: %s", message)
                self.error = message
            yield

    def _apply_all(self, folders: list[Path]) -> None:
        deltas = [(folder, json.loads((folder / "diff.json").read_text())) for folder in folders]
        while newer := [(folder, delta) for folder, delta in deltas if delta["step"] > self.step]:
            found = [(folder, delta) for folder, delta in newer if delta["since_step"] == self.step]
            if not found:
                others = ", ".join(f"{folder.name} since {delta['since_step']}" for folder, delta in newer)
                raise ValueError(f"expected a delta since step {self.step}, got {others}")
            folder, delta = found[0]
            try:
                changes = list(self._read(folder, delta))  # checks all of them before the first change
            except Exception as error:
                raise ValueError(f"{folder}: {error}") from error
            with torch.no_grad():
                for value, rows, new in changes:
                    value[rows] = new.to(value.dtype)
            self.step = delta["step"]

    def _read(self, folder: Path, delta: dict[str, Any]) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        """Each tensor of the program that changes, with the changed rows and their new values."""
        from pyarrow import parquet

        dense = torch.load(folder / "dense.pt", weights_only=True)
        if differing := self._names ^ {*delta["tables"], *dense}:
            raise ValueError(f"expected the values of the program, got others, such as {min(differing)!r}")
        for name, new in dense.items():
            value = self._values.get(_plain(name))  # None for values that scores do not depend on
            if value is not None and value.shape != new.shape:
                raise ValueError(f"{name}: expected the shape {list(value.shape)}, got {list(new.shape)}")
            if value is not None:
                yield value, ..., new
        for name, rows in delta["tables"].items():
            file = parquet.read_table(folder / f"{name}.parquet")
            ids = torch.tensor(file["id"].to_numpy())
            vectors = torch.tensor(file["vector"].combine_chunks().flatten().to_numpy())
            value = self._values.get(_plain(name))
            if value is None:
                continue
            width = file.schema.field("vector").type.list_size
            if [rows, width] != list(value.shape):
                raise ValueError(f"{name}: expected a table of shape {list(value.shape)}, got {[rows, width]}")
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
                raise ValueError(f"{name}: expected ids from 0 to {rows - 1}, got {int(ids.min())} to {int(ids.max())}")
            yield value, ids, vectors.view(-1, width)


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


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
