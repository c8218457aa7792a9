"""The sockets of a server: how many there are, how long one may be without a request, and how they end.

A connection that reads a request costs a file and some memory, and whoever can reach the server can open it, without a
key. So there is a time for the head of a request, and where there are as many connections as may be, a new one takes
the place of another that reads: the oldest one of the address that has most of them. Requests that are computed stay.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from collections import Counter
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktinject.errors import PlanError
from ktinject.serving.gate import Gate
from ktinject.serving.refusal import Refusal, unavailable

logger = logging.getLogger("ktinject")

_HEAD_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 30
_MOST = 1024  # connections, besides those of the requests that are in
_MOST_FILES = 1 << 20
_LINGERING, _LINGER_SECONDS = (
    16,
    1.0,
)  # connections that were refused, and wait until the client has read that
_SPARE_FILES = 32 + _LINGERING  # for all else that a process opens meanwhile
_BACKLOG = 256
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(H11Protocol):
    """uvicorn's, with an end to reading and to their number."""

    most = _MOST
    is_refused = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.began = self.loop.time()
        self._expect_a_head()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        super().data_received(data)
        if not self._is_between_requests:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._expect_a_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def is_reading(self) -> bool:
        """No request of it is whole, so nothing is lost with it."""
        return self._is_between_requests or self.cycle.more_body

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_a_head(self) -> None:
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self._is_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if self._is_between_requests:
            self.refuse(Refusal(408, f"the head of the request was not there after {_HEAD_SECONDS:.0f} s."))

    def _make_room(self) -> None:
        there = [other for other in self.connections if not getattr(other, "is_refused", False)]
        if len(there) <= self.most:
            return
        others = [
            other
            for other in there
            if other is not self and other.is_reading and not other.transport.is_closing()
        ]
        if not others:
            self.refuse(unavailable(f"{self.most} connections are in use. Try again later."))
            return
        counts = Counter(other.address for other in others)
        greedy = max(counts, key=counts.__getitem__)
        oldest = min((other for other in others if other.address == greedy), key=lambda other: other.began)
        oldest.refuse(unavailable("too many connections wait. Try again later."))

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def refuse(self, refusal: Refusal) -> None:
        """End the connection; with an answer, where none has begun."""
        if self.is_refused or self.transport.is_closing():
            return
        self.is_refused = True
        if self.conn.our_state is not h11.IDLE:
            self.transport.close()
            return
        body = refusal.encoded
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=refusal.status, headers=headers, reason=b"Refused")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if len(self.connections) > self.most + _LINGERING:
            self.transport.close()
        else:  # what the client has sent makes a reset of a close, and the answer is lost
            self.transport.write_eof()
            self._deadline = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


class Listener(uvicorn.Server):
    """uvicorn's server, which goes on listening while it ends, so that whoever asks then learns that it does.

    From then on this process may open as many files as the system lets it.

    grace   seconds that requests get when it ends
    busy    requests that may be in at once
    """

    def __init__(self, gate: Gate, host: str, port: int, grace: int, busy: int) -> None:
        room = _files_left() - _SPARE_FILES
        backlog = max(
            1, min(_BACKLOG, room // 4)
        )  # so many are accepted before the first of them is looked at
        most = max(1, min(_MOST + busy, room - backlog))
        super().__init__(
            uvicorn.Config(
                gate,
                host=host,
                port=port,
                http=type("Connection", (Connection,), {"most": most}),
                ws="none",
                backlog=backlog,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,  # of those that `shutdown` has left, which do not read
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )
        self._gate, self._grace = gate, grace
        self._has_said = False

    async def startup(self, sockets: Any = None) -> None:
        """Raises PlanError if it cannot listen there."""
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        try:
            await super().startup(sockets)
        except SystemExit as error:  # uvicorn has said why
            raise PlanError(
                f"{self.config.host}:{self.config.port}: nothing can listen there. Name another --port."
            ) from error

    async def shutdown(self, sockets: Any = None) -> None:
        await self._gate.drain(self._grace, lambda: self.force_exit)
        for connection in [*self.server_state.connections]:
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()  # of a client that neither reads nor sends
        await asyncio.sleep(0)
        await super().shutdown(sockets)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of the loop itself. That no connection can be accepted is found a thousand times a second, and said once."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _OUT_OF_FILES):
            loop.default_exception_handler(context)
        elif not self._has_said:
            self._has_said = True
            logger.error("no connection can be accepted for the moment: %s", error)


def _files_left() -> int:
    """How many more files this process may open, after it has asked for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return (_MOST_FILES if soft == resource.RLIM_INFINITY else soft) - len(os.listdir("/proc/self/fd"))
