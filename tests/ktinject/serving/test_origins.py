"""Which pages in a browser may use a server."""

from __future__ import annotations

import json

import pytest
from test_gate import CHAT, OK, Client, answering, run

from ktinject.serving import origins
from ktinject.serving.gate import Limits

EVIL = {"origin": "https://evil.example", "host": "127.0.0.1:8000"}
OWN = {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    "headers, allowed, status",
    [
        (EVIL, (), 403),
        ({**EVIL, "sec_fetch_site": "cross-site"}, (), 403),
        ({"sec_fetch_site": "cross-site"}, (), 403),
        ({"origin": "null"}, (), 403),
        ({"origin": "http://127.0.0.1:3000", "host": "127.0.0.1:8000", "sec_fetch_site": "same-site"}, (), 403),
        (EVIL, ("https://good.example",), 403),
        (EVIL, ("https://evil.example",), 200),
        (EVIL, ("*",), 200),
        ({**EVIL, "sec_fetch_site": "cross-site"}, ("https://evil.example",), 200),
        (OWN, (), 200),
        ({**OWN, "sec_fetch_site": "same-origin"}, (), 200),
        ({"origin": "https://chat.example", "host": "127.0.0.1:8000", "sec_fetch_site": "same-origin"}, (), 200),
        ({"origin": "http://box", "host": "box:80"}, (), 200),
        ({}, (), 200),
    ],
)  # fmt: skip
def test_pages_of_others_may_not_use_a_server_unless_they_are_named(
    headers: dict[str, str], allowed: tuple[str, ...], status: int
) -> None:
    client = Client(OK, Limits(origins=frozenset(allowed)))
    for path, method in ((CHAT, "POST"), ("/metrics", "GET"), ("/v1/models", "GET")):
        found, body = run(lambda path=path, method=method: client.ask(path, method=method, **headers))
        assert found == status, body
        asked = client.headers.get(b"access-control-allow-origin")
        named = b"*" if "*" in allowed else headers.get("origin", "").encode()
        assert asked == (named if allowed and status == 200 else None)
        if status == 403:
            assert "--allow-origin" in json.loads(body)["error"]["message"]


def test_a_page_that_may_use_the_server_reads_errors_and_streams_as_well() -> None:
    limits = Limits(origins=frozenset({"https://chat.example"}), key="12345678")
    page_of = {"origin": "https://chat.example"}
    key = {"authorization": "Bearer 12345678"}
    stream = Client(answering(200, b"data: 1\n\n", b"text/event-stream"), limits)
    refusing = Client(answering(400, b'{"detail": "no"}'), limits)
    for client, more, status in ((stream, key, 200), (refusing, key, 400), (stream, {}, 401)):
        assert run(lambda client=client, more=more: client.ask(**page_of, **more))[0] == status
        assert client.headers[b"access-control-allow-origin"] == b"https://chat.example"
        assert client.headers[b"vary"] == b"origin"


def test_a_browser_that_asks_first_is_answered_without_the_key() -> None:
    limits = Limits(origins=frozenset({"https://chat.example"}), key="12345678")
    client = Client(OK, limits)
    asked = {
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type,x-stainless-os",
        "access_control_request_private_network": "true",
    }
    status, _ = run(lambda: client.ask(method="OPTIONS", origin="https://chat.example", **asked))
    assert status == 200
    assert client.headers[b"access-control-allow-headers"] == b"authorization,content-type,x-stainless-os"
    assert client.headers[b"access-control-allow-methods"] == b"GET, POST"
    assert client.headers[b"access-control-allow-private-network"] == b"true"
    assert run(lambda: client.ask(method="OPTIONS", origin="https://evil.example", **asked))[0] == 403
    assert run(lambda: client.ask(method="OPTIONS", authorization="Bearer 12345678"))[0] == 405


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_what_a_page_can_send_without_asking_is_refused(kind: str) -> None:
    status, body = run(lambda: Client(OK).ask(content_type=kind))
    assert status == 415 and "takes application/json" in json.loads(body)["error"]["message"]
    assert run(lambda: Client(OK).ask(content_type="Application/JSON; charset=utf-8"))[0] == 200


@pytest.mark.parametrize(
    "host, status",
    [
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("localhost.:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("[0:0:0:0:0:0:0:1]", 200),
        ("[::1]evil", 403),
        ("[::1]:80evil", 403),
        ("127.0.0.1:8000@evil", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:", 403),
        ("user@localhost", 403),
        ("", 403),
    ],
)
def test_names_of_this_machine_are_read_as_urls_have_them(host: str, status: int) -> None:
    client = Client(OK, Limits(hosts=origins.own_names("localhost")))
    assert run(lambda: client.ask("/health", method="GET", host=host))[0] == status


def test_http_1_0_needs_no_name() -> None:
    client = Client(OK, Limits(hosts=origins.own_names("localhost")))
    assert run(lambda: client.ask("/health", method="GET"))[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "::1", "127.0.0.2"])
def test_whoever_listens_for_this_machine_alone_looks_at_names(host: str) -> None:
    found = origins.own_names(host)
    assert found == {"localhost", "127.0.0.1", "::1", host.lower()}
    client = Client(OK, Limits(hosts=found))
    assert run(lambda: client.ask("/health", method="GET", host="evil.example"))[0] == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
def test_a_server_for_the_network_has_any_name(host: str) -> None:
    assert origins.own_names(host) is None


def test_origins_are_as_browsers_write_them() -> None:
    given = (
        "https://Chat.Example/",
        "http://localhost:3000",
        "http://box:80",
        "*",
        "null",
        "app://obsidian.md",
    )
    assert [origins.origin(text) for text in given] == [
        "https://chat.example", "http://localhost:3000", "http://box", "*", "null", "app://obsidian.md"
    ]  # fmt: skip
    for wrong in ("chat.example", "https://a/b", "https://", "https://a b", "https://u@a", ""):
        with pytest.raises(ValueError, match="is no origin"):
            origins.origin(wrong)
