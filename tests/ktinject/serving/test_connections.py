"""Sockets of a server: slow ones, too many, those that send too much, and all of them when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="pip install 'ktinject[serve]'")

from ktinject.serving import connections
from ktinject.serving.connections import Listener
from ktinject.serving.gate import Gate, Limits
from ktinject.serving.metrics import Metrics

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASKED = HEAD + b"Content-Length: 2\r\n\r\n{}"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Stream:
    """An app whose answers are streams that end when they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        while not self.let_go.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})


class Server:
    def __init__(self, grace: int = 5, most: int | None = None, **limits: Any) -> None:
        self.app = Stream()
        gate = Gate(self.app, Metrics(100), Limits(**limits), closing=lambda: self.listener.should_exit)
        self.listener = Listener(gate, "127.0.0.1", 0, grace, 48)
        if most is not None:
            self.listener.config.http.most = most
        self.thread = threading.Thread(target=self.listener.run)

    def open(self, *parts: bytes) -> socket.socket:
        found = socket.create_connection(self.listener.servers[0].sockets[0].getsockname(), timeout=20)
        for part in parts:
            found.sendall(part)
        return found

    def ask(self, data: bytes) -> bytes:
        with self.open(data) as asking:
            return read(asking)


def read(from_: socket.socket, until: bytes | None = None) -> bytes:
    """What comes until the connection ends, or until some text has come."""
    found = b""
    while (until is None or until not in found) and (part := from_.recv(65536)):
        found += part
    return found


@contextlib.contextmanager
def running(**arguments: Any) -> Iterator[Server]:
    server = Server(**arguments)
    server.thread.start()
    try:
        while not server.listener.started:
            time.sleep(0.005)
        yield server
    finally:
        server.app.let_go.set()
        server.listener.should_exit = True
        server.thread.join(30)
    assert not server.thread.is_alive()


def test_a_head_that_does_not_come_is_told_so_and_the_connection_ends(monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "_HEAD_SECONDS", 0.3)
    with running() as server:
        slow = server.open(b"GET /health HTTP/1.1\r\nX-A: ")
        kept = server.open(HEALTH.replace(b"Connection: close\r\n", b""))
        assert read(kept, b"}").startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /health")
        began = time.monotonic()
        for asking in (slow, kept):
            with contextlib.suppress(OSError):
                for _ in range(100):  # a byte now and then gives it no more time
                    asking.sendall(b"a")
                    time.sleep(0.02)
                    if time.monotonic() - began > 5:
                        pytest.fail("the connection is still there")
        with server.open(ASKED) as stream:
            read(stream, b"data: 1")
            time.sleep(0.5)
            server.app.let_go.set()
            assert b"data: 2" in read(stream, b"[DONE]"), "a request that runs has no such time"


def test_a_slow_head_gets_a_status(monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "_HEAD_SECONDS", 0.1)
    with running() as server:
        found = server.ask(b"GET /health HTTP/1.1\r\n")
        assert found.startswith(b"HTTP/1.1 408")
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


def test_many_connections_without_a_request_do_not_keep_others_out() -> None:
    with running(most=8) as server:
        stream = server.open(ASKED)
        read(stream, b"data: 1")
        idle = [server.open() for _ in range(10)]
        heads = [server.open(b"GET /health HTTP/1.1\r\nX-A: ") for _ in range(10)]
        parts = [server.open(HEAD + b"Content-Length: 9\r\n\r\n{") for _ in range(10)]
        for _ in range(3):
            assert server.ask(HEALTH).startswith(b"HTTP/1.1 200")
        assert len(server.listener.server_state.connections) <= 8 + 16
        server.app.let_go.set()
        assert b"data: 2" in read(stream, b"[DONE]"), "what is computed stays"
        for asking in (*idle, *heads, *parts, stream):
            asking.close()


def test_where_all_connections_compute_a_new_one_is_told_so() -> None:
    with running(most=3) as server:
        streams = [server.open(ASKED) for _ in range(3)]
        for stream in streams:
            read(stream, b"data: 1")
        assert server.ask(HEALTH).startswith(b"HTTP/1.1 503")
        server.app.let_go.set()
        for stream in streams:
            read(stream, b"[DONE]")
            stream.close()
        assert server.ask(HEALTH).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("more", [b"Connection: close\r\n", b""])
def test_whoever_sends_too_much_reads_why(more: bytes) -> None:
    body = b" " * 3_000_000
    for head in (
        HEAD + more + b"Content-Length: 3000000\r\n\r\n",
        HEAD + more + b"Transfer-Encoding: chunked\r\n\r\n2dc6c0\r\n",
    ):
        with running(body=1_000_000) as server, server.open(head, body) as asking:
            assert read(asking, b"}}").startswith(b"HTTP/1.1 413")


def test_while_it_ends_new_requests_are_told_so_and_streams_say_that_they_were_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(grace=1) as server:
        streams = [server.open(ASKED) for _ in range(3)]
        upload = server.open(HEAD + b"Content-Length: 9\r\n\r\n{")
        for stream in streams:
            read(stream, b"data: 1")
        server.listener.should_exit = True
        time.sleep(0.3)
        for data in (HEALTH, ASKED):
            assert server.ask(data).startswith(b"HTTP/1.1 503"), "while others run"
        for stream in streams:
            said = read(stream).rpartition(b"data: ")[2].partition(b"\n")[0]
            assert json.loads(said)["error"]["message"].startswith("the server has ended")
        assert read(upload).startswith(b"HTTP/1.1 503")
        server.thread.join(20)
    assert "Traceback" not in caplog.text and "Exception" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_does_not_read_does_not_keep_the_server() -> None:
    with running(grace=0) as server:
        stream = server.open(ASKED)  # whose buffers are never full here: what is tested is that it ends
        time.sleep(0.2)
        server.listener.should_exit = True
        server.thread.join(10)
        assert not server.thread.is_alive()
        stream.close()


def test_that_no_connection_can_be_accepted_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server, others = Server(), []

    class Loop:
        def default_exception_handler(self, context: Any) -> None:
            others.append(context)

    loop: Any = Loop()
    with caplog.at_level(logging.ERROR, "ktinject"):
        for _ in range(1000):
            server.listener._on_error(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
        server.listener._on_error(loop, {"message": "other"})
    assert len(caplog.records) == 1 and others == [{"message": "other"}]


@pytest.mark.parametrize("limit, most", [(256, 256 - 100 - 48 - 27), (4096, 1024 + 48), (64, 1)])
def test_there_are_fewer_connections_than_files(limit: int, most: int, monkeypatch: Any) -> None:
    asked = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (min(limit, 64), limit))
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, to: asked.append(to))
    monkeypatch.setattr(connections.os, "listdir", lambda _: range(100))
    config = Server().listener.config
    assert config.http.most == most and config.backlog >= 1
    assert asked == ([(limit, limit)] if limit > 64 else [])
    assert resource.RLIMIT_NOFILE
