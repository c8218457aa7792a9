"""Who may come in when all places are taken: clients that have less than their share, and then first who came first.

    request ──► a place is free, or the client has less than its share? ──► in
                   └──► door, a few seconds ──► in, when a place is free, or refused

A client is an address: an IPv4 address, or a network of IPv6. Its share is that of the places, divided by the clients.
Requests take as long as they take, so it is not waited for others' to end: there may be twice as many as places.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Any

from ktinject.serving.refusal import busy


def client_of(scope: Any) -> str:
    """Whom a request is counted for. One machine has a whole /64 of IPv6 for itself."""
    address = (scope.get("client") or ("",))[0]
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return str(address)
    if found.version == 4:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False).network_address)


class Places:
    """Counts requests that are in. Use it in the thread of the event loop.

    count    places
    seconds  that a request waits at the door for one; as many wait there as there are places
    message  of a refusal
    """

    def __init__(self, count: int, seconds: float, message: str) -> None:
        self._count, self._seconds, self._message = count, seconds, message
        self._held: Counter[str] = Counter()
        self._door: list[tuple[str, asyncio.Future[bool]]] = []  # in the order of their coming

    @property
    def taken(self) -> int:
        return self._held.total()

    async def take(self, client: str) -> None:
        """Returns when there is a place, which is the client's until `give`. Raises Refusal."""
        if self.taken < self._count or self._has_less_than_its_share(client):
            self._held[client] += 1
            return
        if len(self._door) >= self._count and not self._turn_away(client):
            raise busy(self._message)
        waits: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (client, waits)
        self._door.append(entry)
        try:
            await asyncio.wait({waits}, timeout=self._seconds)
        except asyncio.CancelledError:
            if waits.done() and waits.result():
                self.give(client)
            raise
        finally:
            if entry in self._door:
                self._door.remove(entry)
        if not waits.done() or not waits.result():
            raise busy(self._message)

    def give(self, client: str) -> None:
        """Give a place back: to whom of those at the door has fewest."""
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        if self._door and self.taken < self._count:
            entry = min(self._door, key=lambda entry: self._held[entry[0]])
            self._door.remove(entry)
            self._held[entry[0]] += 1
            entry[1].set_result(True)

    def _has_less_than_its_share(self, client: str) -> bool:
        clients = len(self._held.keys() | {client})
        return self._held[client] < self._count // clients and self.taken < 2 * self._count

    def _turn_away(self, client: str) -> bool:
        """Make room at a full door for a client that has fewer there: the last one of who has most goes."""
        waiting = Counter(name for name, _ in self._door)
        greedy = max(waiting, key=waiting.__getitem__)
        if waiting[greedy] <= waiting[client] + 1:
            return False
        entry = next(entry for entry in reversed(self._door) if entry[0] == greedy)
        self._door.remove(entry)
        entry[1].set_result(False)
        return True
