"""A real S3 server of moto on this machine, which counts requests and bytes, and can be stopped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["BUCKET", "SECRET", "S3Server"]

BUCKET = "bucket"
SECRET = "wJalrXUtnFEMI/not-a-real-secret"


class S3Server:
    """Serves on 127.0.0.1. `denied` answers all requests with 403."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self.denied = False
        self._port = 0
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "tensortap-test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def start(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", self._port, self._counted(application), threaded=True)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening. Buckets stay in the memory of this process."""
        assert self._thread is not None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def is_reachable(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def forget(self) -> None:
        self.requests, self.sent = [], 0

    def _counted(self, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterator[bytes]]:
        def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterator[bytes]:
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
            if self.denied:
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                yield b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
                return
            for part in application(environ, start_response):
                self.sent += len(part)
                yield part

        return serve
