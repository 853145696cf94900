"""HTTP for the user of this machine: one address with a secret in it, and GET requests only.

Other programs, and other pages in the same browser, can reach 127.0.0.1 as well. So the address contains a secret that
they do not know. The host that a request names must be this one; otherwise a foreign name that resolves to 127.0.0.1
would do. No request changes anything, and no request reads a file: `Answers` has everything there is.

Connections and the size of a request are limited, so that a program that floods the port cannot exhaust the machine.
"""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

from tensortap.errors import TensortapError
from tensortap.view.answers import Answer, Refused

__all__ = ["PageServer"]

HOST = "127.0.0.1"
MOST_CONNECTIONS = 64
"""Each has a thread. A browser opens about six."""
LONGEST_TARGET = 4096
"""Characters of a path with its query. The longest that the page asks for has about 200."""
MOST_HEADER_BYTES = 32 * 1024
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TIMEOUT = 30.0
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class PageServer(ThreadingHTTPServer):
    """Serves one page at `url` until it is closed. Several threads call `answer` at a time."""

    daemon_threads = True
    request_queue_size = 128  # a page asks for all its columns at once

    def __init__(self, answer: Callable[[str, Mapping[str, str]], Answer]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.answer = answer
        self.token = secrets.token_urlsafe(24)
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names under which a request may address this server."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no thread could be started
                self._free.release()
                raise
            return
        request.setblocking(False)  # a client that reads nothing must not hold up the others
        with suppress(OSError):
            request.send(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that has left. Print any other error where the server was started."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _BoundedLines:
    """The lines of a request, of which the headers may have MOST_HEADER_BYTES together."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.left = sys.maxsize

    def readline(self, size: int) -> bytes:
        line: bytes = self._file.readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.LineTooLong("header section")  # the base class answers 431
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "tensortap"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT

    def setup(self) -> None:
        super().setup()
        self._lines = self.rfile = _BoundedLines(self.rfile)  # type: ignore[assignment]  # no body is ever read

    def parse_request(self) -> bool:
        self._lines.left = MOST_HEADER_BYTES
        try:
            return super().parse_request()
        finally:
            self._lines.left = sys.maxsize

    def do_GET(self) -> None:
        if any(name in self.headers for name in ("Content-Length", "Transfer-Encoding")):
            self.close_connection = True  # a body follows, which must not be read as the next request
        try:
            self._send(HTTPStatus.OK, self._answer())
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except TensortapError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _not_allowed(self) -> None:
        self.close_connection = True  # a body may follow, which must not be read as the next request
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET requests are answered")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _not_allowed  # noqa: N815

    def _answer(self) -> Answer:
        own = self.server.hosts
        if self.headers.get_all("Host", []) not in [[host] for host in own]:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers under its own address only")
        if self.headers.get("Origin") not in (None, *(f"http://{host}" for host in own)):
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers its own page only")
        if len(self.path) > LONGEST_TARGET:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, f"a path has at most {LONGEST_TARGET} characters")
        if not self.path.startswith("/"):
            raise Refused(HTTPStatus.BAD_REQUEST, "the request must name a path, not a whole address")
        target, _, query = self.path.partition("?")
        token, slash, path = unquote(target).removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        return self.server.answer(path, dict(parse_qsl(query)))

    def _send(self, status: HTTPStatus, answer: Answer) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": answer.type, "Content-Length": len(answer.body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, Answer(json.dumps({"error": why}).encode(), "application/json"))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal shows the address alone."""
