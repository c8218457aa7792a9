"""Which of many texts begins as another one does: a radix tree of their tokens.

    root ──[5 9 2]──► node ──[7 7]──► text A           an edge has the tokens up to where texts part, or one ends
                        └────[4]────► text B ──[1]──► text C

To find, add, use or remove a text costs what its own tokens cost, however many others there are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Text = TypeVar("Text", bound=Hashable)


@dataclass(eq=False)
class _Node(Generic[Text]):
    """A place in texts.

    label  tokens from the parent to here
    texts  those that come through here, the least recently used one first
    ends   the text that ends here
    """

    label: list[int]
    parent: _Node[Text] | None = None
    children: dict[int, _Node[Text]] = field(default_factory=dict)
    texts: dict[Text, None] = field(default_factory=dict)
    ends: Text | None = None


@dataclass(frozen=True)
class Found(Generic[Text]):
    """What is known of a text.

    common  tokens with which another one begins as well, as many as there are
    text    of those that have so many in common, the least recently used one; None: there are no texts
    whole   texts that it begins with, the longest one last
    """

    common: int
    text: Text | None
    whole: list[Text]


class Beginnings(Generic[Text]):
    """A set of texts. Not safe from several threads."""

    def __init__(self) -> None:
        self._root: _Node[Text] = _Node([])
        self._ends: dict[Text, _Node[Text]] = {}

    def find(self, ids: list[int]) -> Found[Text]:
        node, at, whole = self._root, 0, []
        while (child := node.children.get(ids[at]) if at < len(ids) else None) is not None:
            same = _common(child.label, ids, at)
            node, at = child, at + same
            if same < len(child.label):
                break
            if child.ends is not None:
                whole.append(child.ends)
        return Found(at, next(iter(node.texts), None), whole)

    def add(self, text: Text, ids: list[int]) -> None:
        """Add a text, which is the last one used. None of the same tokens, of which there is one at least, is here."""
        node, at = self._root, 0
        node.texts[text] = None
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                child = node.children[ids[at]] = _Node(ids[at:], node)
            elif (same := _common(child.label, ids, at)) < len(child.label):
                child = self._split(child, same)
            child.texts[text] = None
            node, at = child, at + len(child.label)
        node.ends = text
        self._ends[text] = node

    def use(self, text: Text) -> None:
        """The text is the last one used."""
        node: _Node[Text] | None = self._ends[text]
        while node is not None:
            del node.texts[text]
            node.texts[text] = None
            node = node.parent

    def remove(self, text: Text) -> None:
        node = self._ends.pop(text)
        node.ends = None
        while True:
            del node.texts[text]
            parent = node.parent
            if parent is None:
                return
            if not node.texts:
                del parent.children[node.label[0]]
            elif node.ends is None and len(node.children) == 1:
                (child,) = node.children.values()
                child.label, child.parent = node.label + child.label, parent
                parent.children[child.label[0]] = child
            node = parent

    def _split(self, node: _Node[Text], at: int) -> _Node[Text]:
        """A node within the edge to `node`, after so many of its tokens."""
        assert node.parent is not None
        upper = _Node(node.label[:at], node.parent, {node.label[at]: node}, dict(node.texts))
        node.parent.children[node.label[0]] = upper
        node.label, node.parent = node.label[at:], upper
        return upper


def _common(label: list[int], ids: list[int], start: int) -> int:
    """How many tokens of `label` follow in `ids` from `start` on."""
    count = min(len(label), len(ids) - start)
    if label[:count] == ids[start : start + count]:
        return count
    return next(at for at in range(count) if label[at] != ids[start + at])
