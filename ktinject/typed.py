"""Text that somebody typed: an argument of a command, or a line of stdin."""

from __future__ import annotations

import os

from ktinject.errors import PlanError


def text(typed: str, where: str) -> str:
    """What was typed, in whole characters.

    Python reads arguments and stdin in the locale's encoding, and leaves bytes that are not in it as halves of
    characters, which no tokenizer takes. Under LANG=C those may be any of UTF-8, and are read as that.

    where    what a refusal names
    Raises   PlanError if they are not UTF-8 either
    """
    try:
        typed.encode()
        return typed
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(typed).decode()
    except UnicodeError as error:
        raise PlanError(
            f"{where}: the text is not in UTF-8: {str(error).partition(': ')[2] or error}. Give it in UTF-8, or set "
            "the locale to the encoding that it is in."
        ) from None
