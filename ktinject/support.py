"""The answer to "can this run?": yes or no, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """A choice and why it was made. `if support:` asks whether the answer is yes.

    ok      whether the thing in question can be done
    reason  why not, as a sentence without its full stop; if it can, empty or a remark
    """

    ok: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.ok and not self.reason:
            raise ValueError("a refusal without a reason. Say why in `reason`.")

    def __bool__(self) -> bool:
        return self.ok

    @classmethod
    def no(cls, reason: str) -> Support:
        return cls(False, reason)


SUPPORTED = Support(True)
