"""Who comes in, how long it may take, and what the others are told: around an application that is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ktinject.serving import gate, page
from ktinject.serving.gate import Gate, Limits
from ktinject.serving.metrics import Job, Metrics

CHAT = "/v1/chat/completions"


class Client:
    """Asks a gate as a server would."""

    def __init__(self, app: Any, limits: Limits | None = None, **arguments: Any) -> None:
        self.metrics = Metrics(100)
        self.headers: dict[bytes, bytes] = {}  # of the last answer
        self.gate = Gate(app, self.metrics, limits or Limits(), **arguments)

    async def ask(
        self,
        path: str = CHAT,
        body: bytes = b"{}",
        method: str = "POST",
        leave: Awaitable[Any] | None = None,
        client: str = "10.0.0.1",
        **headers: str,
    ) -> tuple[int, bytes]:
        """Status and body. `leave`: the client goes when that is done."""
        sent: list[Any] = []
        came = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            if (first := next(came, None)) is not None:
                return first
            await (leave or asyncio.get_running_loop().create_future())
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"content_type": "application/json", **headers}
        named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "method": method, "headers": named, "client": (client, 1)}
        await self.gate(scope, receive, send)
        if not sent:
            return 0, b""
        self.headers = dict(sent[0]["headers"])
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def answering(status: int, body: bytes, kind: bytes = b"application/json") -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


OK = answering(200, b'{"a": 1}')


def run(made: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(made())  # type: ignore[arg-type]


def test_an_answer_passes() -> None:
    client = Client(OK)
    assert run(client.ask) == (200, b'{"a": 1}')
    assert f'ktinject_requests_total{{path="{CHAT}",status="200"}} 1' in client.metrics.text()
    assert client.metrics.inflight == 0


@pytest.mark.parametrize(
    "request_, limits, status, message",
    [
        ({"path": "/reset"}, {}, 404, "/reset: there are"),
        ({"path": "/load_model", "method": "GET"}, {}, 405, "takes POST"),
        ({"path": "/load_model", "body": b"{"}, {}, 400, "not a JSON object"),
        ({"method": "GET"}, {}, 405, "takes POST"),
        ({"body": b"{"}, {}, 400, "not a JSON object"),
        ({"body": b"[" * 10_000}, {}, 400, "not a JSON object"),
        ({"body": b"[]"}, {}, 400, "it is no object"),
        ({"body": b" " * 11}, {"body": 10}, 413, "larger than 10 bytes"),
        ({"content_length": "11"}, {"body": 10}, 413, "larger than 10 bytes"),
        ({}, {"key": "12345678"}, 401, "no key, or a wrong one"),
        ({"authorization": "Bearer 1234567"}, {"key": "12345678"}, 401, "no key, or a wrong one"),
        ({"path": "/metrics", "method": "GET"}, {"key": "12345678"}, 401, "no key"),
        (
            {"host": "evil.example"},
            {"hosts": frozenset({"localhost"})},
            403,
            "'evil.example' is not this server",
        ),
    ],
)
def test_what_is_refused(request_: dict[str, Any], limits: dict[str, Any], status: int, message: str) -> None:
    found, body = run(lambda: Client(OK, Limits(**limits)).ask(**request_))
    error = json.loads(body)["error"]
    assert found == error["code"] == status and message in error["message"]


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "[::1]:8000"])
def test_a_key_and_the_own_name_let_in(host: str) -> None:
    limits = Limits(key="12345678", hosts=frozenset({"localhost", "127.0.0.1", "::1"}))
    client = Client(OK, limits)
    assert run(lambda: client.ask(authorization="Bearer 12345678", host=host))[0] == 200
    assert run(lambda: client.ask("/health", method="GET", host=host)) == (200, b'{"status": "ok"}')


@pytest.mark.parametrize(
    "status, body, message",
    [
        (400, b'{"detail": "Server is pinned"}', "Server is pinned"),
        (422, b'{"detail": [{"msg": "no"}]}', '[{"msg": "no"}]'),
        (500, b"Internal Server Error", "Internal Server Error"),
        (503, b'{"error": "dead"}', "dead"),
    ],
)
def test_errors_of_the_app_get_the_form_of_the_interface(status: int, body: bytes, message: str) -> None:
    found, said = run(Client(answering(status, body)).ask)
    assert found == status and json.loads(said)["error"]["message"] == message


def test_an_app_that_raises_is_a_500() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    status, body = run(Client(app).ask)
    assert status == 500 and "RuntimeError: broken" in json.loads(body)["error"]["message"]


def test_a_stream_gets_its_last_line() -> None:
    stream = answering(200, b"data: 1\n\n", b"text/event-stream; charset=utf-8")
    assert run(Client(stream).ask) == (200, b"data: 1\n\ndata: [DONE]\n\n")
    assert run(lambda: Client(stream).ask("/v1/responses")) == (200, b"data: 1\n\n")


class Slow:
    """An app that begins a stream, if it is to, and then waits until it is let go or ended."""

    def __init__(self, begins: bool) -> None:
        self.begins, self.ended, self.running = begins, 0, 0
        self.let_go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream")]
        self.running += 1
        try:
            if self.begins:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await self.let_go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}", "more_body": False})
        except asyncio.CancelledError:
            self.ended += 1
            raise


@pytest.mark.parametrize("begins", [False, True])
def test_work_for_which_nobody_waits_is_ended(begins: bool) -> None:
    async def scene() -> None:
        app = Slow(begins)
        client = Client(app)
        gone = asyncio.Event()
        asking = asyncio.ensure_future(client.ask(leave=gone.wait()))
        while not app.running:
            await asyncio.sleep(0)
        gone.set()
        await asking
        assert app.ended == 1 and client.metrics.inflight == 0

    run(scene)


@pytest.mark.parametrize("begins", [False, True])
def test_what_takes_too_long_is_ended(begins: bool) -> None:
    async def scene() -> None:
        app = Slow(begins)
        status, body = await Client(app, Limits(seconds=0.05)).ask()
        assert app.ended == 1 and status == (200 if begins else 504)
        said = body.rpartition(b"data: ")[2] if begins else body
        assert json.loads(said)["error"]["message"] == "not done after 0.05 s, so it was ended."

    run(scene)


def test_a_full_queue_refuses_and_takes_the_next_one_when_there_is_room() -> None:
    async def scene() -> None:
        app = Slow(False)
        client = Client(app, Limits(queue=2, door=0))
        asking = [asyncio.ensure_future(client.ask()) for _ in range(3)]
        while app.running < 3:
            await asyncio.sleep(0)
        status, body = await client.ask()
        assert status == 429 and "2 requests wait already" in json.loads(body)["error"]["message"]
        assert (await client.ask("/health", method="GET"))[0] == 200
        assert "ktinject_requests_waiting 3" in client.metrics.text()
        app.let_go.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 3
        assert (await client.ask())[0] == 200

    run(scene)


def test_a_server_that_ends_says_so() -> None:
    client = Client(OK, closing=lambda: True)
    assert run(lambda: client.ask("/health", method="GET"))[0] == 503
    assert client.headers[b"connection"] == b"close", "so that the next request is another server's"


@pytest.mark.parametrize("begins", [False, True])
def test_what_runs_when_the_server_has_ended_is_told_so(begins: bool) -> None:
    async def scene() -> None:
        app = Slow(begins)
        client = Client(app)
        asking = asyncio.ensure_future(client.ask())
        while not app.running:
            await asyncio.sleep(0)
        await client.gate.drain(0.05)
        status, body = await asking
        assert app.ended == 1 and status == (200 if begins else 503)
        said = body.rpartition(b"data: ")[2] if begins else body
        assert json.loads(said)["error"]["message"] == "the server has ended, and this request with it."

    run(scene)


def test_requests_may_end_while_the_server_does() -> None:
    async def scene() -> None:
        app = Slow(False)
        client = Client(app)
        asking = asyncio.ensure_future(client.ask())
        while not app.running:
            await asyncio.sleep(0)
        ending = asyncio.ensure_future(client.gate.drain(60))
        app.let_go.set()
        assert (await asking)[0] == 200
        await ending

    run(scene)


def test_a_client_that_does_not_read_keeps_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_LAST_SECONDS", 0.05)

    async def scene() -> None:
        app = Slow(True)
        client = Client(app)
        never = asyncio.get_running_loop().create_future()
        sent = 0

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 2:
                await never

        async def receive() -> Any:
            if sent:
                await never
            return {"type": "http.request", "body": b"{}", "more_body": False}

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "path": CHAT, "method": "POST", "headers": headers}
        asking = asyncio.ensure_future(client.gate(scope, receive, send))
        while sent < 2:
            await asyncio.sleep(0)
        await client.gate.drain(0)
        await asyncio.wait_for(asking, 5)
        assert app.ended == 1 and client.metrics.inflight == 0

    run(scene)


def test_metrics_are_what_was_done() -> None:
    metrics = Metrics(100)
    job = Job(prompt=5)
    metrics.started(job)
    job.count(1)
    job.count(1)
    assert "ktinject_cache_tokens 7\n" in metrics.text() and "ktinject_requests_running 1\n" in metrics.text()
    metrics.ended(job)
    metrics.ended(Job(prompt=3))  # it was cancelled before its first token
    text = metrics.text()
    assert 'ktinject_tokens_total{kind="prompt"} 8\n' in text
    assert 'ktinject_tokens_total{kind="generated"} 2\n' in text
    assert "ktinject_time_to_first_token_seconds_count 1\n" in text
    assert 'ktinject_time_to_first_token_seconds_bucket{le="+Inf"} 1\n' in text
    assert "expert" not in text, "no cache of experts"
    metrics.experts = lambda: {"uses": 80, "hits": 60, "fetches": 7, "bytes": 7000}
    text = metrics.text()
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("ktinject_expert")] == [
        "60", "20", "7", "7000"
    ]  # fmt: skip


def test_the_page_is_everybody_s_and_what_it_shows_needs_the_key() -> None:
    async def view() -> dict[str, int]:
        return {"layers": 3}

    client = Client(OK, Limits(key="12345678"), views={"/plan": view}, files=page.files())

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        found: tuple[int, bytes] = run(lambda: client.ask(path, method=method, **headers))
        return found

    status, body = ask("/")
    assert status == 200 and b"<main>" in body and ask("/page/main.js")[0] == 200
    paths = ("/page/gate.py", "/page/../gate.py", "/plan", "/activity", "/metrics")
    assert {ask(path)[0] for path in paths} == {401} == {ask("/", "POST")[0]}
    key = {"authorization": "Bearer 12345678"}
    assert ask("/plan", **key) == (200, b'{"layers": 3}')
    assert ask("/", "POST", **key)[0] == ask("/plan", "POST", **key)[0] == 405
    assert ask("/activity", **key)[0] == 404


def test_what_is_said_at_present() -> None:
    metrics, jobs = Metrics(100), [Job(prompt=3), Job(prompt=5)]
    for number, job in enumerate(jobs, 1):
        metrics.started(job)
        job.count(number)
    metrics.inflight = 3
    now = metrics.now()
    assert now.pop("clock") > 0
    assert now == {"generated": 3, "running": 2, "waiting": 1, "held": 11}
    for job in jobs:
        metrics.ended(job)
    metrics.inflight = 0
    now = metrics.now()
    assert (now["generated"], now["running"], now["held"]) == (3, 0, 0)
