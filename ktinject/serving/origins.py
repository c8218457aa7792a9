"""Which pages in a browser may use a server: by the name that they call it, and by where they come from.

Programs other than browsers send neither an Origin nor Sec-Fetch-Site, and no page can leave them out.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

Headers = list[tuple[bytes, bytes]]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)*)\.?(?::\d{1,5})?", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{0,2000}", re.ASCII)
_USUAL_PORTS = {"http": ":80", "https": ":443"}


def host_name(value: str) -> str | None:
    """The name or address in a Host header, in one way of writing it; None: it is none."""
    found = _HOST.fullmatch(value)
    if found is None:
        return None
    name = found[1].lower()
    try:
        return ipaddress.ip_address(name.strip("[]")).compressed
    except ValueError:
        return None if name.startswith("[") else name


def own_names(host: str) -> frozenset[str] | None:
    """The names of a server that listens at `host`, if only this machine reaches it; else None, for any."""
    try:
        found = {
            ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host.strip("[]") or None, None)
        }
    except (OSError, UnicodeError, ValueError):
        return None
    if not found or not all(address.is_loopback for address in found):
        return None
    own = host_name(f"[{host}]" if ":" in host and not host.startswith("[") else host)
    return frozenset({"localhost", "127.0.0.1", "::1", *filter(None, (own,))})


def origin(text: str) -> str:
    """An origin as browsers send it. Raises ValueError."""
    found = text.strip().lower().removesuffix("/")
    if found in ("*", "null"):
        return found
    if not _ORIGIN.fullmatch(found):
        raise ValueError(f"{text!r} is no origin")
    return found.removesuffix(_USUAL_PORTS.get(found.partition(":")[0], "/"))


def granted(headers: Mapping[bytes, bytes], allowed: Iterable[str]) -> str | None:
    """What is said to a browser of the page that asks: its origin, or "*" for all; None: it may not ask."""
    asked = headers.get(b"origin")
    if asked is None:
        return None
    if "*" in allowed:
        return "*"
    found = asked.decode("latin-1")
    return found if found.lower() in allowed else None


def is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page asks that is not the server's own."""
    site, asked = headers.get(b"sec-fetch-site", b"").lower(), headers.get(b"origin")
    if site in (b"same-origin", b"none"):
        return False
    if asked is None:
        return bool(site)
    scheme, _, place = asked.decode("latin-1").lower().partition("://")
    usual = _USUAL_PORTS.get(scheme, "/")
    host = headers.get(b"host", b"").decode("latin-1").lower()
    return not place or place.removesuffix(usual) != host.removesuffix(usual)


def cors(found: str | None, allowed: Iterable[str]) -> Headers:
    """Headers of an answer, whatever it is."""
    vary = [(b"vary", b"origin")] if set(allowed) - {"*"} else []
    if found is None:
        return vary
    return [
        (b"access-control-allow-origin", found.encode("latin-1")),
        (b"access-control-expose-headers", b"retry-after, x-request-id"),
        *vary,
    ]


def preflight(headers: Mapping[bytes, bytes]) -> Headers:
    """Headers of the answer to the question that a browser asks before the request of a page that may ask."""
    names = headers.get(b"access-control-request-headers", b"")
    found = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-allow-headers", names if _NAMES.fullmatch(names) else b""),
        (b"access-control-max-age", b"600"),
    ]
    if headers.get(b"access-control-request-private-network") == b"true":
        found.append((b"access-control-allow-private-network", b"true"))
    return found
