"""The S3 server that the tests of object storage share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.s3_server import BUCKET, S3Server


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[S3Server]:
    import s3fs

    server = S3Server()
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment.items():
            environment.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(BUCKET)
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def s3(_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and the environment in which drivers find it. Starting it once is cheap; a client takes seconds."""
    for name, value in _s3_server.environment.items():
        monkeypatch.setenv(name, value)
    _s3_server.forget()
    return _s3_server
