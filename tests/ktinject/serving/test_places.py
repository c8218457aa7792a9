"""Who comes in when all places are taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ktinject.serving.places import Places, client_of
from ktinject.serving.refusal import Refusal


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scene())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_client_may_have_all_places_and_another_one_gets_its_share_at_once() -> None:
    async def scene() -> None:
        places = Places(4, 60, "full")
        for client in ("a", "a", "a", "a", "b", "b", "c"):
            await asyncio.wait_for(places.take(client), 5)
        assert places._held == {"a": 4, "b": 2, "c": 1}
        waiting = [asyncio.ensure_future(places.take(client)) for client in ("a", "b", "d", "e")]
        await settle()
        assert [one.done() for one in waiting] == [False, False, True, False], (
            "at most twice as many as places"
        )
        for one in waiting:
            one.cancel()

    run(scene)


def test_a_place_that_is_free_goes_to_who_has_fewest_and_came_first() -> None:
    async def scene() -> None:
        places = Places(2, 60, "full")
        for client in ("a", "a", "b"):
            await places.take(client)
        waiting = [asyncio.ensure_future(places.take(client)) for client in ("a", "b")]
        await settle()
        places.give("b")
        await settle()
        assert not any(one.done() for one in waiting), "there were more than places"
        places.give("a")
        await settle()
        assert [one.done() for one in waiting] == [False, True]
        places.give("b")
        await settle()
        assert waiting[0].done()

    run(scene)


def test_clients_of_one_address_come_in_as_they_came() -> None:
    """Whoever asks again at once after a refusal does not overtake who waits."""

    async def scene() -> None:
        places = Places(1, 60, "full")
        await places.take("a")
        order: list[int] = []

        async def wait(number: int) -> None:
            await places.take("a")
            order.append(number)

        waiting = asyncio.ensure_future(wait(1))
        await settle()
        late = asyncio.ensure_future(wait(2))
        await settle()
        assert late.done(), "no more wait at the door than there are places"
        with pytest.raises(Refusal, match="full"):
            late.result()
        places.give("a")
        await waiting
        assert order == [1]

    run(scene)


def test_nobody_waits_longer_than_said_and_a_full_door_turns_away_who_has_most_there() -> None:
    async def scene() -> None:
        places = Places(3, 0.05, "full")
        for _ in range(3):
            await places.take("a")
        greedy = [asyncio.ensure_future(places.take("a")) for _ in range(3)]
        await settle()
        await places.take("b")  # its share
        other = asyncio.ensure_future(places.take("b"))
        await settle()
        assert [one.done() for one in greedy] == [False, False, True], "the last that came"
        found = await asyncio.gather(*greedy, other, return_exceptions=True)
        assert all(isinstance(one, Refusal) and one.status == 429 for one in found)
        assert places.taken == 4 and not places._door

    run(scene)


def test_a_client_that_goes_while_it_waits_leaves_no_place_taken() -> None:
    async def scene() -> None:
        places = Places(1, 60, "full")
        await places.take("a")
        waiting = asyncio.ensure_future(places.take("b"))
        await settle()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        places.give("a")
        assert places.taken == 0 and not places._door
        await places.take("a")
        waiting = asyncio.ensure_future(places.take("b"))
        await settle()
        places.give("a")  # it is the other's now, who goes before it knows
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert places.taken == 0

    run(scene)


def test_a_client_is_an_address_or_a_network() -> None:
    def named(address: str) -> str:
        return client_of({"client": (address, 1)})

    assert named("10.0.0.1") != named("10.0.0.2")
    assert named("2001:db8::1") == named("2001:db8::ffff") != named("2001:db8:0:1::1")
    assert client_of({"client": None}) == client_of({}) == ""
