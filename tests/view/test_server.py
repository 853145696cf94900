"""The server: accepted and refused requests, and shutdown."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

import pytest

from tensortap.errors import RunUnreadable
from tensortap.view.answers import Answer, Refused
from tensortap.view.server import LONGEST_TARGET, MOST_CONNECTIONS, PageServer


class Reply(NamedTuple):
    status: int
    body: bytes
    headers: Mapping[str, str]


def answer(path: str, asked: Mapping[str, str]) -> Answer:
    if path == "gone":
        raise RunUnreadable("the file is gone")
    if path == "no":
        raise Refused(HTTPStatus.CONFLICT, "not kept")
    return Answer(json.dumps([path, dict(asked)]).encode(), "application/json")


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(answer) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> Reply:
    """`path` beneath the secret, unless it begins with a slash; `Host_` and others are headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    given = {name.rstrip("_"): value for name, value in headers.items()}
    target = path if path.startswith("/") else f"/{server.token}/{path}"
    connection.putrequest(method, target, skip_host="Host" in given)
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    reply = Reply(response.status, response.read(), dict(response.getheaders()))
    connection.close()
    return reply


def test_the_page_is_at_the_printed_address(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/{server.token}/"
    assert server.server_address[0] == "127.0.0.1"
    reply = ask(server, "detail?row=3&window=a%2Cb")
    assert reply.status == 200
    assert json.loads(reply.body) == ["detail", {"row": "3", "window": "a,b"}]
    assert json.loads(ask(server, "").body) == ["", {}]


def test_every_answer_has_headers_that_forbid_sharing(server: PageServer) -> None:
    for path in ("", "no", "/elsewhere"):
        headers = ask(server, path).headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("path", ["/", "/{token}", "/{other}/", "/{token}x/", "/etc/passwd", "/{short}/"])
def test_without_the_secret_there_is_nothing(server: PageServer, path: str) -> None:
    target = path.format(token=server.token, other="x" * len(server.token), short=server.token[:-1])
    reply = ask(server, target)
    assert reply.status == 404
    assert server.token.encode() not in reply.body


def test_each_server_has_a_secret_of_its_own(server: PageServer) -> None:
    with PageServer(answer) as other:
        assert other.token != server.token
        assert len(other.token) >= 32
        assert other.port != server.port


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""])
def test_a_request_under_another_name_is_refused(server: PageServer, host: str) -> None:
    assert ask(server, "", Host=host.format(port=server.port)).status == 403


def test_localhost_is_this_machine(server: PageServer) -> None:
    assert ask(server, "", Host=f"localhost:{server.port}").status == 200


def test_two_hosts_are_one_too_many(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("GET", f"/{server.token}/", skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.port}")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_another_pages_scripts_are_not_answered(server: PageServer) -> None:
    assert ask(server, "", Origin="http://evil.example").status == 403
    assert ask(server, "", Origin="null").status == 403
    assert ask(server, "", Origin=f"http://127.0.0.1:{server.port}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_questions_are_answered(server: PageServer, method: str) -> None:
    assert ask(server, "", method).status == 405


def test_an_unknown_method_is_refused(server: PageServer) -> None:
    assert ask(server, "", "BREW").status == 501


def test_refusals_and_errors_have_a_reason(server: PageServer) -> None:
    reply = ask(server, "no")
    assert (reply.status, json.loads(reply.body)) == (409, {"error": "not kept"})
    reply = ask(server, "gone")
    assert (reply.status, json.loads(reply.body)) == (500, {"error": "the file is gone"})


def test_one_that_takes_long_does_not_hold_up_the_others() -> None:
    begun, done = threading.Event(), threading.Event()

    def slow(path: str, asked: Mapping[str, str]) -> Answer:
        if path == "slow":
            begun.set()
            assert done.wait(10)
        return Answer(b"", "text/plain")

    with PageServer(slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        asker = threading.Thread(target=ask, args=(server, "slow"))
        thread.start()
        asker.start()
        assert begun.wait(10)
        assert ask(server, "").status == 200
        done.set()
        asker.join()
        server.shutdown()
        thread.join()


def raw(server: PageServer, text: str) -> bytes:
    """All that comes back before the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(text.format(token=server.token, port=server.port).replace("\n", "\r\n").encode())
        return connection.makefile("rb").read()


@pytest.mark.parametrize("target", ["http://[x/", "http://127.0.0.1:{port}/{token}/", "{token}/"])
def test_a_target_that_is_not_a_path_is_refused(
    server: PageServer, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reply = raw(server, f"GET {target} HTTP/1.1\nHost: 127.0.0.1:{{port}}\nConnection: close\n\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("header", ["Content-Length: 26", "Transfer-Encoding: chunked"])
def test_a_body_is_not_the_next_request(server: PageServer, header: str) -> None:
    reply = raw(
        server, f"GET /{{token}}/ HTTP/1.1\nHost: 127.0.0.1:{{port}}\n{header}\n\nGET /{{token}}/no HTTP/1.1\n\n"
    )
    assert reply.count(b"HTTP/1.1 ") == 1


# --- limits --------------------------------------------------------------------------------------------------------
def test_connections_are_limited_and_freed(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(MOST_CONNECTIONS)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as further:
        assert further.makefile("rb").read().startswith(b"HTTP/1.1 503 ")
    assert threading.active_count() <= before + MOST_CONNECTIONS
    for connection in idle:
        connection.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ask(server, "").status == 200
    assert capfd.readouterr().err == ""


def test_a_long_path_is_refused(server: PageServer) -> None:
    assert ask(server, "x" * (LONGEST_TARGET - 100)).status == 200
    assert ask(server, "x" * LONGEST_TARGET).status == 414


def test_large_headers_are_refused(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    headers = "".join(f"X-{number}: {'x' * 1000}\n" for number in range(50))
    reply = raw(server, f"GET /{{token}}/ HTTP/1.1\nHost: 127.0.0.1:{{port}}\n{headers}\n")
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert capfd.readouterr().err == ""


def test_many_requests_on_one_connection_are_answered(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(40):
        connection.request("GET", f"/{server.token}/", headers={"X-Padding": "x" * 2000})
        assert connection.getresponse().read()
    connection.close()
