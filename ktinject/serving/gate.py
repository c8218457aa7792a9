"""What stands before transformers' server: who may come in, how many, how long, and what is said to the others.

    request ──► host, page, key, path, kind, size ──► place ──► transformers' app ──► answer
                  403        401 404   415  413        429        504 after a while; nobody waits: the work is ended

It is an ASGI application around another one. Errors are of the form that clients of OpenAI's interface read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ktinject.serving import bodies, origins, page
from ktinject.serving.metrics import Metrics
from ktinject.serving.places import Places, client_of
from ktinject.serving.refusal import Refusal, unavailable

logger = logging.getLogger("ktinject")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]
View = Callable[[], Awaitable[Any]]
Headers = Sequence[tuple[bytes, bytes]]

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
LOAD = "/load_model"  # asked by clients of `transformers serve` before they begin
_OTHERS = {"/v1/models": "GET", LOAD: "POST", "/health": "GET", "/metrics": "GET"}
_ENDED_BY = ("/v1/chat/completions", "/v1/completions")  # whose streams end with a mark
_CLIENT_GONE = 499
_LAST_SECONDS = 2.0  # that the last words of an answer may take to be sent


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    queue    requests that wait while others run
    running  requests that run at once
    seconds  until a request is ended
    body     bytes of a request
    key      that every request but /health must bring; None: no key
    hosts    names by which the server may be called, so that no page in a browser calls it by one of its own; None: any
    origins  pages that may use it besides its own, as browsers name them in Origin; "*": all
    door     seconds that a request waits for a place when all are taken
    """

    queue: int = 32
    running: int = 1
    seconds: float = 600.0
    body: int = 8 << 20
    key: str | None = None
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    door: float = 5.0


class Gate:
    """The application that the server runs.

    app       transformers' application
    state     what /health says beside "ok"
    closing   whether the server is about to end
    views     path → what a GET of it answers, as JSON
    files     path → content type and content, which everybody may have: the page, whose data needs the key
    """

    def __init__(
        self,
        app: App,
        metrics: Metrics,
        limits: Limits,
        state: dict[str, Any] | None = None,
        closing: Callable[[], bool] = lambda: False,
        views: Mapping[str, View] | None = None,
        files: Mapping[str, tuple[bytes, bytes]] | None = None,
    ) -> None:
        self._app, self._metrics, self._limits = app, metrics, limits
        self._state, self._closing = state or {}, closing
        self._views, self._files = views or {}, files or {}
        self._known = {**dict.fromkeys(GENERATING, "POST"), **_OTHERS, **dict.fromkeys(self._views, "GET")}
        self._bodies = bodies.Bodies(limits.body)
        self._places = Places(
            limits.queue + limits.running,
            limits.door,
            f"{limits.queue} requests wait already. Try again later.",
        )
        self._active = 0
        self._cut = asyncio.Event()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        self._active += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._active -= 1

    async def drain(self, seconds: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Let the requests that run end within a time, and break off the others. New ones are refused by `closing`."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while self._active and clock() < end and not is_urgent():
            await asyncio.sleep(0.05)
        self._cut.set()
        self._bodies.end()
        end = clock() + _LAST_SECONDS
        while self._active and clock() < end:
            await asyncio.sleep(0.02)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        page_of = origins.granted(headers, self._limits.origins)
        answer = _Answer(send, path, origins.cors(page_of, self._limits.origins))
        try:
            self._check_caller(scope, headers, page_of is not None)
            if page_of is not None and _is_preflight(scope, headers):
                await answer.whole(200, b"", b"text/plain", origins.preflight(headers))
                return
            self._check(scope, headers)
            if path == "/health":
                await answer.json(200, {"status": "ok", **self._state})
            elif path == "/metrics":
                await answer.whole(200, self._metrics.text().encode(), b"text/plain; version=0.0.4")
            elif path in self._views:
                await answer.json(200, await self._views[path]())
            elif path in self._files:
                kind, content = self._files[path]
                await answer.whole(200, content, kind, page.HEADERS)
            else:
                await self._pass(scope, receive, answer)
        except Refusal as refusal:
            # Whoever sends a body first reads the answer after it.
            sends = b"expect" not in headers and not answer.has_read and refusal.status != 408
            await answer.refuse(refusal, self._bodies.discard(receive) if sends else None)
        finally:
            known = path if path in self._known else "other"
            self._metrics.answered(known, answer.status or _CLIENT_GONE)

    def _check_caller(self, scope: Any, headers: Mapping[bytes, bytes], is_granted: bool) -> None:
        """Raises Refusal for a name or a page that is not this server's."""
        host = headers.get(b"host")  # which browsers always send, and HTTP/1.0 need not
        if self._limits.hosts is not None and host is not None:
            name = origins.host_name(host.decode("latin-1"))
            if name not in self._limits.hosts:
                raise Refusal(
                    403, f"host {host.decode('latin-1')!r} is not this server; it is called by localhost."
                )
        is_open = scope["method"] == "GET" and (scope["path"] == "/health" or scope["path"] in self._files)
        if not is_open and not is_granted and origins.is_foreign(headers):
            said = headers.get(b"origin", b"another site").decode("latin-1")
            raise Refusal(
                403, f"a page of {said} may not use this server; --allow-origin names those that may."
            )

    def _check(self, scope: Any, headers: Mapping[bytes, bytes]) -> None:
        """Raises Refusal for what is seen without the body."""
        path = scope["path"]
        if self._closing():
            raise unavailable("the server is about to end.")
        if path == "/health" or (path in self._files and scope["method"] == "GET"):
            return
        if self._limits.key is not None:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(given.strip(), self._limits.key.encode())
            if scheme.lower() != b"bearer" or not same:
                raise Refusal(401, "no key, or a wrong one: send `Authorization: Bearer <key>`.")
        wanted = "GET" if path in self._files else self._known.get(path)
        if wanted is None:
            raise Refusal(404, f"{path}: there are {', '.join(self._known)}.")
        if scope["method"] != wanted:
            raise Refusal(405, f"{path} takes {wanted}.")
        if wanted == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":  # a browser asks first before it sends that from another page
                said = kind.decode("latin-1")[:80] or "none"
                raise Refusal(415, f"the Content-Type is {said}; {path} takes application/json.")
        if int(headers.get(b"content-length") or 0) > self._limits.body:
            raise self._bodies.too_large()

    async def _pass(self, scope: Any, receive: Receive, answer: _Answer) -> None:
        """Let the app answer. Raises Refusal."""
        client = client_of(scope)
        is_posted = self._known[scope["path"]] == "POST"
        body = await self._bodies.read(client, receive) if is_posted else b""
        if body is None:
            return
        answer.has_read = True
        if is_posted:
            bodies.check_object(body)
        if scope["path"] not in GENERATING:
            await self._run(scope, body, receive, answer)
            return
        await self._places.take(client)
        self._metrics.inflight += 1
        try:
            await self._run(scope, body, receive, answer)
        finally:
            self._metrics.inflight -= 1
            self._places.give(client)

    async def _run(self, scope: Any, body: bytes, receive: Receive, answer: _Answer) -> None:
        gone, given = asyncio.Event(), False

        async def received() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        work = asyncio.ensure_future(self._app(scope, received, answer.send))
        watcher = asyncio.ensure_future(watch())
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            done, _ = await asyncio.wait(
                {work, watcher, cut}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if work not in done:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                if watcher not in done:
                    message = f"not done after {self._limits.seconds:g} s, so it was ended."
                    late = Refusal(504, message, "server_error")
                    ended = unavailable("the server has ended, and this request with it.")
                    with suppress(TimeoutError):  # of a client that does not read
                        async with asyncio.timeout(_LAST_SECONDS):
                            await answer.break_off(ended if cut in done else late)
                return
        finally:
            for each in (work, watcher, cut):
                each.cancel()
        if (error := work.exception()) is not None:
            logger.error("%s failed: %s: %s", scope["path"], type(error).__name__, error)
            if not answer.started:
                raise Refusal(500, f"the server failed: {type(error).__name__}: {error}", "server_error")


class _Answer:
    """Sends one answer: the app's as it is, but for errors, which get their form, and a mark at the end of a stream."""

    def __init__(self, send: Send, path: str, headers: Headers = ()) -> None:
        """headers   of each answer, also of those that are the app's"""
        self._send, self._path, self._headers = send, path, headers
        self.status = 0
        self.started = self._streams = self.has_read = False
        self._held: tuple[Message, list[bytes]] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kind = dict(message["headers"]).get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            if self.status >= 400:
                self._held = (message, [])
                return
            self.started = True
            message = {**message, "headers": [*message["headers"], *self._headers]}
        elif message["type"] == "http.response.body":
            if self._held is not None:
                self._held[1].append(message.get("body", b""))
                if not message.get("more_body"):
                    held, self._held = b"".join(self._held[1]), None
                    server = "server_error" if self.status >= 500 else "invalid_request_error"
                    await self.refuse(Refusal(self.status, _said(held), server))
                return
            if self._streams and not message.get("more_body") and self._path in _ENDED_BY:
                message = {**message, "body": message.get("body", b"") + b"data: [DONE]\n\n"}
        await self._send(message)

    async def refuse(self, refusal: Refusal, rest: Awaitable[None] | None = None) -> None:
        """rest   is awaited before the answer ends, so that the connection stays open until then"""
        await self.whole(refusal.status, refusal.encoded, b"application/json", rest=rest)

    async def break_off(self, refusal: Refusal) -> None:
        """Say so in the stream if it has begun."""
        if not self.started:
            await self.refuse(refusal)
            return
        body = f"data: {refusal.encoded.decode()}\n\n".encode() if self._streams else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, value: Any) -> None:
        await self.whole(status, json.dumps(value).encode(), b"application/json")

    async def whole(
        self,
        status: int,
        body: bytes,
        kind: bytes,
        more: Headers = (),
        rest: Awaitable[None] | None = None,
    ) -> None:
        self.status, self.started = status, True
        headers = [
            (b"content-type", kind),
            (b"content-length", str(len(body)).encode()),
            *self._headers,
            *more,
        ]
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status == 503:  # the next request of this client is another server's
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": rest is not None})
        if rest is not None:
            await rest
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _is_preflight(scope: Any, headers: Mapping[bytes, bytes]) -> bool:
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers


def _said(body: bytes) -> str:
    """What an error of the app says."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    found = found.get("detail", found.get("error", found)) if isinstance(found, dict) else found
    return found if isinstance(found, str) else json.dumps(found)
