"""The page at a server's root: a few files, sent as they are. What it shows it asks the server for, with the key."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# It loads nothing from elsewhere, runs nothing that stands in a text, and is no part of another page.
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


def files() -> dict[str, tuple[bytes, bytes]]:
    """Path of a request → content type and content."""
    found = {f"/page/{file.name}": (_KINDS[file.suffix], file.read_bytes()) for file in _FOLDER.iterdir()}
    found["/"] = found.pop("/page/index.html")
    return found
