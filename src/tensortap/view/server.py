"""HTTP for the person at this machine: one address, one secret in it, questions only.

Other programs, and other pages in the same browser, can reach 127.0.0.1, too. So the address has a secret in it that
they do not know; the host that a request names must be this one, or a foreign name that was made to point here would
do; nothing is ever changed by a request; and there are no files to be found, only what `Answers` says.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

from tensortap.errors import TensortapError
from tensortap.view.answers import Answer, Refused

__all__ = ["PageServer"]

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TIMEOUT = 30.0


class PageServer(ThreadingHTTPServer):
    """Serves one page at `url` until it is closed. `answer` is called by several threads at a time."""

    daemon_threads = True
    request_queue_size = 128  # a page asks for all its columns at once

    def __init__(self, answer: Callable[[str, Mapping[str, str]], Answer]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.answer = answer
        self.token = secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a request may call this server."""
        return f"{HOST}:{self.port}", f"localhost:{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has left is no error. Whatever else was not foreseen is told where the server was started."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "tensortap"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        if any(name in self.headers for name in ("Content-Length", "Transfer-Encoding")):
            self.close_connection = True  # a body follows, which nobody reads: it is no next request
        try:
            self._send(HTTPStatus.OK, self._answer())
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except TensortapError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _not_allowed(self) -> None:
        self.close_connection = True  # a body may follow, which nobody reads
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this only answers GET")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _not_allowed  # noqa: N815

    def _answer(self) -> Answer:
        own = self.server.hosts
        if self.headers.get_all("Host", []) not in [[host] for host in own]:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers under its own address only")
        if self.headers.get("Origin") not in (None, *(f"http://{host}" for host in own)):
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers its own page only")
        if not self.path.startswith("/"):
            raise Refused(HTTPStatus.BAD_REQUEST, "this server answers paths, and no whole addresses")
        asked, _, query = self.path.partition("?")
        token, slash, path = unquote(asked).removeprefix("/").partition("/")
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
        """The terminal is for the address alone."""
