"""Candidates from the text itself: what followed the last time that its last tokens came.

transformers' generator searches the whole text at each step, and takes what followed the first time. This keeps, of
each run of tokens, where it came last, so that a token costs the same in a text of any length, and what a text repeats
now counts, not what it began with. Tokens do not depend on it: it is for greedy texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_Run = tuple[int, ...]


class Lookup:
    """The tokens of one text, and where each run of some of them came last.

    text  all tokens
    """

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        """longest  tokens of a run that is searched for; shorter ones are, where it is not found"""
        self.text = [*tokens[:-1]]
        parts = [self.text[at:] for at in range(longest)]
        # Of equal runs, the last one stays. The text's own last one is not among them, or it would find itself.
        self._behind: list[dict[_Run, int]] = [
            dict(zip(zip(*parts[:size]), range(size, len(self.text) + 1))) for size in range(1, longest + 1)
        ]
        self._found = [0] * longest  # where the text goes on behind the last run of each length; 0: nowhere
        self.extend(tokens[-1:])

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        text = self.text
        for token in tokens:
            text.append(token)
            end = len(text)
            for size, behind in enumerate(self._behind, start=1):
                if size > end:
                    break
                run = tuple(text[end - size :])
                self._found[size - 1] = behind.get(run, 0)
                behind[run] = end

    def candidates(self, most: int) -> Sequence[int]:
        """Up to so many tokens that the text may go on with; a text that repeats its last tokens goes on repeating."""
        start = next((at for at in reversed(self._found) if at), 0)
        if not start:
            return ()
        period = len(self.text) - start
        return [self.text[start + at % period] for at in range(most)]
