"""What stands before transformers' server: who may come in, how many, how long, and what is said to the others.

    request ──► key, host, path, size ──► queue ──► transformers' app ──► answer
                    401 403 404 413        429        504 after a while; nobody waits: the work is ended

It is an ASGI application around another one. Errors are of the form that clients of OpenAI's interface read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktinject.serving import page
from ktinject.serving.metrics import Metrics

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
_CLIENT_GONE, _UPLOADS, _UPLOAD_SECONDS = 499, 64, 60.0


@dataclass(frozen=True)
class Limits:
    """What a server takes.

    queue    requests that wait while others run
    running  requests that run at once
    seconds  until a request is ended
    body     bytes of a request
    key      that every request but /health must bring; None: no key
    hosts    names by which the server may be called, so that no page in a browser calls it by one of its own; None: any
    """

    queue: int = 32
    running: int = 1
    seconds: float = 600.0
    body: int = 8 << 20
    key: str | None = None
    hosts: frozenset[str] | None = None


class Refusal(Exception):
    """A request that is answered without the app."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind


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
        self._uploads = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path = scope["path"]
        answer = _Answer(send, path)
        try:
            self._check(scope)
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
            await answer.refuse(refusal)
        finally:
            known = path if path in self._known else "other"
            self._metrics.answered(known, answer.status or _CLIENT_GONE)

    def _check(self, scope: Any) -> None:
        """Raises Refusal for what is seen without the body."""
        path, headers = scope["path"], dict(scope["headers"])
        if self._limits.hosts is not None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
            if name not in self._limits.hosts:
                raise Refusal(403, f"host {name!r} is not this server; it is called by localhost.")
        if self._closing():
            raise Refusal(503, "the server is about to end.", "server_error")
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
        if int(headers.get(b"content-length") or 0) > self._limits.body:
            raise self._too_large()

    async def _pass(self, scope: Any, receive: Receive, answer: _Answer) -> None:
        """Let the app answer. Raises Refusal."""
        posted = self._known[scope["path"]] == "POST"
        body = await self._body(receive) if posted else b""
        if body is None:
            return
        if scope["path"] not in GENERATING:
            await self._run(scope, body, receive, answer)
            return
        if self._metrics.inflight >= self._limits.queue + self._limits.running:
            raise Refusal(
                429, f"{self._limits.queue} requests wait already. Try again later.", "rate_limit_error"
            )
        self._metrics.inflight += 1
        try:
            await self._run(scope, body, receive, answer)
        finally:
            self._metrics.inflight -= 1

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone. Raises Refusal."""
        if self._uploads >= _UPLOADS:
            raise Refusal(429, f"{_UPLOADS} requests are being read. Try again later.", "rate_limit_error")
        self._uploads += 1
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(_UPLOAD_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    if sum(map(len, parts)) > self._limits.body:
                        raise self._too_large()
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(408, f"the request was not there after {_UPLOAD_SECONDS:.0f} s.") from None
        finally:
            self._uploads -= 1
        body = b"".join(parts)
        try:
            if not isinstance(json.loads(body), dict):
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not a JSON object: {error}.") from None
        return body

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
        try:
            done, _ = await asyncio.wait(
                {work, watcher}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if work not in done:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                if watcher not in done:
                    message = f"not done after {self._limits.seconds:g} s, so it was ended."
                    await answer.break_off(Refusal(504, message, "server_error"))
                return
        finally:
            work.cancel()
            watcher.cancel()
        if (error := work.exception()) is not None:
            logger.error("%s failed: %s: %s", scope["path"], type(error).__name__, error)
            if not answer.started:
                raise Refusal(500, f"the server failed: {type(error).__name__}: {error}", "server_error")

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the request is larger than {self._limits.body} bytes.")


class _Answer:
    """Sends one answer: the app's as it is, but for errors, which get their form, and a mark at the end of a stream."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self._path = send, path
        self.status = 0
        self.started = self._streams = False
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

    async def refuse(self, refusal: Refusal) -> None:
        await self.json(refusal.status, _error(refusal))

    async def break_off(self, refusal: Refusal) -> None:
        """Say so in the stream if it has begun."""
        if not self.started:
            await self.refuse(refusal)
            return
        body = f"data: {json.dumps(_error(refusal))}\n\n".encode() if self._streams else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def json(self, status: int, value: Any) -> None:
        await self.whole(status, json.dumps(value).encode(), b"application/json")

    async def whole(self, status: int, body: bytes, kind: bytes, more: Headers = ()) -> None:
        self.status, self.started = status, True
        headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def error_of(message: str, status: int = 500, kind: str = "server_error") -> dict[str, Any]:
    """An error as clients of OpenAI's interface read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(refusal: Refusal) -> dict[str, Any]:
    return error_of(refusal.message, refusal.status, refusal.kind)


def _said(body: bytes) -> str:
    """What an error of the app says."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    found = found.get("detail", found.get("error", found)) if isinstance(found, dict) else found
    return found if isinstance(found, str) else json.dumps(found)
