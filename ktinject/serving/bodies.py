"""Bodies of requests: read within a size, a time and a share of memory; and the rest of those that are refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ktinject.serving.refusal import Refusal, busy, unavailable

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_SECONDS = 60.0  # that a body may take
_SHARED_BYTES = 64 << 20  # of bodies that are not whole yet, or four of the largest
# What is read of a body that is refused, so that who sends first and reads then finds the answer.
_DISCARDED_BODIES, _DISCARD_SECONDS = 4, 10.0
_LAST_SECONDS = 1.0  # for that when the server ends
_VALUES = 50_000  # in a body, about as many as the event loop reads in the time of a token
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


@dataclass(eq=False)
class _Upload:
    client: str
    deadline: asyncio.Timeout
    bytes: int = 0
    why: Refusal | None = None

    def end(self, why: Refusal) -> None:
        self.why = self.why or why
        with suppress(RuntimeError):  # it has just ended
            self.deadline.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Reads bodies of up to `most` bytes. How many are read at once is limited by the connections alone."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._uploads: dict[_Upload, None] = {}  # the oldest first
        self._rests: set[asyncio.Timeout] = set()
        self._discard_seconds = _DISCARD_SECONDS

    async def read(self, client: str, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone. Raises Refusal."""
        parts: list[bytes] = []
        upload = _Upload(client, asyncio.timeout(_SECONDS))
        try:
            async with upload.deadline:
                self._uploads[upload] = None
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    upload.bytes += len(parts[-1])
                    if upload.bytes > self._most:
                        raise self.too_large()
                    self._share()
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            late = Refusal(408, f"the request was not there after {_SECONDS:.0f} s.")
            raise upload.why or late from None
        finally:
            self._uploads.pop(upload, None)

    def _share(self) -> None:
        """Whoever sends most at once loses the oldest of its bodies when all together are too large."""
        while sum(upload.bytes for upload in self._uploads) > max(_SHARED_BYTES, 4 * self._most):
            sent: dict[str, int] = {}
            for upload in self._uploads:
                sent[upload.client] = sent.get(upload.client, 0) + upload.bytes
            greedy = max(sent, key=sent.__getitem__)
            upload = next(one for one in self._uploads if one.client == greedy and one.bytes)
            del self._uploads[upload]
            upload.end(busy("many large requests are being read. Try again later."))

    def end(self) -> None:
        """End those that are being read, since the server ends."""
        for upload in self._uploads:
            upload.end(unavailable("the server has ended."))
        self._discard_seconds = _LAST_SECONDS
        for rest in self._rests:
            rest.reschedule(asyncio.get_running_loop().time() + _LAST_SECONDS)

    async def discard(self, receive: Receive) -> None:
        """Read on for a while, and keep nothing."""
        left = _DISCARDED_BODIES * self._most
        with suppress(TimeoutError):
            async with asyncio.timeout(self._discard_seconds) as deadline:
                self._rests.add(deadline)
                try:
                    while left > 0:
                        message = await receive()
                        if message["type"] == "http.disconnect" or not message.get("more_body"):
                            return
                        left -= len(message.get("body", b""))
                finally:
                    self._rests.discard(deadline)

    def too_large(self) -> Refusal:
        return Refusal(413, f"the request is larger than {self._most} bytes.")


def check_object(body: bytes) -> None:
    """Raises Refusal for what is no JSON object, and for one of more values than any request has."""
    if _has_more_values(body, _VALUES):
        raise Refusal(400, f"the body has more than {_VALUES:,} values. Ask for less at once.")
    try:
        if not isinstance(json.loads(body), dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not a JSON object: {error}.") from None


def _has_more_values(body: bytes, most: int) -> bool:
    """Told before it is parsed, which for millions of values would take seconds."""
    if _marks(body) <= most:
        return False
    count = at = 0
    for text in _STRING.finditer(body):  # of many commas most stand in a prompt
        count += _marks(body[at : text.start()])
        at = text.end()
        if count > most:
            return True
    return count + _marks(body[at:]) > most


def _marks(text: bytes) -> int:
    return sum(map(text.count, (b",", b"{", b"[")))
