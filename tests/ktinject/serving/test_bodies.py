"""How bodies of requests are read, and those that are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_gate import CHAT, OK, Client, run

from ktinject.serving import bodies
from ktinject.serving.gate import Gate, Limits
from ktinject.serving.metrics import Metrics

JSON = ((b"content-type", b"application/json"),)


async def post(
    gate: Gate,
    receive: Callable[[], Any],
    headers: Any = JSON,
    client: str = "10.0.0.1",
    looks: Callable[[], Any] = lambda: None,
) -> list[Any]:
    """What is sent, each with what `looks` saw then."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((message, looks()))

    scope = {"type": "http", "path": CHAT, "method": "POST", "headers": [*headers], "client": (client, 1)}
    await gate(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    "limits, headers, status",
    [
        (Limits(body=30), JSON, 413),
        (Limits(body=30), [*JSON, (b"content-length", b"100")], 413),
        (Limits(body=30, key="12345678"), JSON, 401),
        (Limits(body=30), [], 415),
    ],
)
def test_a_body_that_is_refused_is_read_on_so_that_the_answer_is_found(
    limits: Limits, headers: Any, status: int
) -> None:
    """What is left unread when a connection is closed makes it a reset, and the answer is lost."""
    parts: Iterator[int] = iter(range(9, -1, -1))
    last = 9

    async def receive() -> Any:
        nonlocal last
        last = next(parts)
        return {"type": "http.request", "body": b" " * 10, "more_body": last > 0}

    sent = asyncio.run(post(Gate(OK, Metrics(100), limits), receive, headers, looks=lambda: last))
    assert [message["type"].rpartition(".")[2] for message, _ in sent] == ["start", "body", "body"]
    assert sent[0][0]["status"] == status and sent[1][1] >= 6, "told at once"
    assert last == 0 and not sent[2][0]["more_body"], "and read to the end"


def test_a_refused_body_is_not_read_for_ever() -> None:
    count = 0

    async def receive() -> Any:
        nonlocal count
        count += 1
        return {"type": "http.request", "body": b" " * 10, "more_body": True}

    sent = asyncio.run(post(Gate(OK, Metrics(100), Limits(body=30)), receive))
    assert sent[0][0]["status"] == 413 and count < 30


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    many = b'{"a": [' + b"{}," * 60_000 + b"{}]}"
    text = json.dumps({"prompt": "a, {b} [c]" * 60_000 + '\\"', "stop": ["\\", ","]}).encode()
    assert run(lambda: Client(OK).ask(body=text))[0] == 200, "a text may have as many commas"

    def parsed(body: bytes) -> None:
        raise AssertionError("it is parsed")

    monkeypatch.setattr(bodies.json, "loads", parsed)
    with pytest.raises(bodies.Refusal, match="more than 50,000 values"):
        bodies.check_object(many)


def test_large_bodies_share_memory_and_many_small_ones_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SHARED_BYTES", 1000)

    async def scene() -> None:
        gate, go = Gate(OK, Metrics(100), Limits(body=200, queue=400)), asyncio.Event()

        def upload(client: str, size: int) -> Any:
            parts = iter([b"{" + b" " * (size - 1), b"}"])

            async def receive() -> Any:
                part = next(parts, None)
                if part is None:
                    await asyncio.get_running_loop().create_future()
                if part == b"}":
                    await go.wait()
                return {"type": "http.request", "body": part, "more_body": part != b"}"}

            headers = [*JSON, (b"expect", b"100-continue")]
            return asyncio.ensure_future(post(gate, receive, headers, client))

        one = [upload("10.0.0.1", size) for size in [1] * 100 + [190] * 4]
        await asyncio.sleep(0.05)
        other = upload("10.0.0.2", 190)
        await asyncio.sleep(0.05)
        go.set()
        statuses = [sent[0][0]["status"] for sent in await asyncio.gather(other, *one)]
        assert statuses[0] == 200, "it has sent less than the other client"
        assert 0 < statuses.count(429) and statuses.count(200) >= 4

    asyncio.run(scene())


def test_a_slow_body_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SECONDS", 0.05)

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    sent = asyncio.run(post(Gate(OK, Metrics(100), Limits()), receive))
    assert sent[0][0]["status"] == 408
