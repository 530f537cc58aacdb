"""moto's S3 server in a process of its own, which refuses requests, or stops at one, when a test says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKET = "checkpoints"
URL = f"s3://{BUCKET}/run"
SECRET = "aSecretOfTheTests"
# File in the server's folder.
THROTTLED = "throttled"


class Throttle:
    """Answers two of three requests with S3's request to slow down while a file exists."""

    def __init__(self, app: Any, folder: Path) -> None:
        self._app, self._folder, self._count = app, folder, 0

    def __call__(self, environment: dict[str, Any], start: Any) -> Any:
        self._count += 1
        if (self._folder / THROTTLED).exists() and self._count % 3:
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Type", "application/xml")])
            return [
                b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"
            ]
        return self._app(environment, start)


@contextmanager
def s3_server(folder: Path) -> Iterator[Path]:
    """A server with an empty bucket. The environment of this process, and of those that it starts, leads to it."""
    process = subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "moto's server did not start"
        os.environ.update(environment(port))
        _fs().mkdir(BUCKET)
        yield folder
    finally:
        process.kill()
        process.wait()


def environment(port: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def _fs() -> Any:
    from fsspec.core import url_to_fs

    return url_to_fs(URL, use_listings_cache=False)[0]


def objects(below: str = URL) -> list[str]:
    """Names of all objects below a URL, without the bucket and the folder."""
    root = below.removeprefix("s3://")
    return sorted(name.removeprefix(f"{root}/") for name in _fs().find(root))


def unfinished_uploads() -> list[Any]:
    return list(_fs().list_multipart_uploads(BUCKET))


def _serve(folder: Path) -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Throttle(DomainDispatcherApplication(create_backend_app), folder)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
