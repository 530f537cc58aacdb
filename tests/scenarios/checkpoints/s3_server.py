"""moto's S3 server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BUCKET = "checkpoints"
URL = f"s3://{BUCKET}/run"
SECRET = "aSecretOfTheTests"


@contextmanager
def s3_server() -> Iterator[None]:
    """A server with an empty bucket. The environment of this process, and of those that it starts, leads to it."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "moto's server did not start"
        os.environ.update(environment(port))
        _fs().mkdir(BUCKET)
        yield
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


def _serve() -> None:
    import logging

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
