"""What is said to those who get no answer of the model, in the form that clients of OpenAI's interface read."""

from __future__ import annotations

import json
from typing import Any


class Refusal(Exception):
    """A request that is answered without the app."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind

    @property
    def encoded(self) -> bytes:
        return json.dumps(error_of(self.message, self.status, self.kind)).encode()


def error_of(message: str, status: int = 500, kind: str = "server_error") -> dict[str, Any]:
    """An error as clients of OpenAI's interface read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def busy(message: str) -> Refusal:
    return Refusal(429, message, "rate_limit_error")


def unavailable(message: str) -> Refusal:
    return Refusal(503, message, "server_error")
