"""YAML's events become nodes, one event at a time: a limit stops a document before anything is built from it, and no
input is deep enough to recurse on.

An alias is its anchor's node again, so a document of nested aliases takes little memory; but every alias counts as
what it stands for, and so does what is merged by `<<`. Nothing that reads nodes meets more of them than the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import yaml

from ktinject.rules.node import MAX_DEPTH, MAX_NODES, Node, Where, clean, scalar, too_deep, too_many
from ktinject.rules.wording import Place, Problems, show

MERGE = "<<"


@dataclass(slots=True)
class _Part:
    """A node with what it counts for.

    size    nodes in it, aliases written out
    height  levels of lists and mappings in it
    """

    node: Node
    size: int = 1
    height: int = 0


class _Open:
    """A list or mapping whose end has not been read yet."""

    __slots__ = ("anchor", "height", "items", "key", "merged", "merges", "size", "where")

    def __init__(self, items: list[Node] | dict[str, Node], where: Where, anchor: str | None) -> None:
        self.items, self.where, self.anchor = items, where, anchor
        self.key: tuple[str | None, Where] | None = None  # the key that waits for its value; None: refused
        self.merges = False  # whether that key is a merge
        self.merged: list[dict[str, Node]] = []
        self.size, self.height = 1, 1

    def wants_key(self) -> bool:
        return isinstance(self.items, dict) and self.key is None

    def close(self) -> _Part:
        """The finished node: its own entries, then the merged ones, of which the first of a name counts."""
        if isinstance(self.items, dict):
            for mapping in self.merged:
                for key, node in mapping.items():
                    self.items.setdefault(key, node)
        return _Part(Node(self.items, self.where), self.size, self.height)


class Composer:
    """Makes nodes of the events of one document.

    problems     gets what is wrong with single keys and values; the composer then goes on without them
    number_keys  whether whole numbers are keys, too: their text is
    """

    def __init__(
        self, source: str, lines: Sequence[str], problems: Problems, number_keys: bool = False
    ) -> None:
        self._number_keys = number_keys
        self._source = source
        self._lines = lines
        self._problems = problems
        self._root: Node | None = None
        self._stack: list[_Open] = []
        self._anchors: dict[str, _Part | None] = {}  # None: not finished
        self._nodes = 0

    def compose(self, events: Iterator[yaml.Event]) -> Node | None:
        """The document; None if it is empty. Raises RuleError for what is too large, and for several documents."""
        documents = 0
        for event in events:
            if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                done = self._stack.pop()
                self._add(done.close(), done.where, done.anchor)
            elif isinstance(event, yaml.NodeEvent):
                self._start(event)
            else:
                documents += isinstance(event, yaml.DocumentStartEvent)
                if documents > 1:
                    raise Place(self._where(event)).refusal(
                        "a second document; a rule file holds one. Use a file for each."
                    )
        return self._root

    def _where(self, event: yaml.Event) -> Where:
        start, end = event.start_mark, event.end_mark
        line, column = (start.line, start.column) if start else (0, 0)
        width = end.column - column if end and end.line == line else 1
        return Where(f"{self._source}:{line + 1}", line + 1, column + 1, max(1, width), self._lines)

    def _start(self, event: yaml.NodeEvent) -> None:
        where = self._where(event)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise too_many(where)
        parent = self._stack[-1] if self._stack else None
        key = parent is not None and parent.wants_key()
        if isinstance(event, yaml.AliasEvent):
            part = self._alias(event.anchor or "", where)
            if parent is not None and key:
                self._open_key(parent, part.node.value, where)
            else:
                self._add(part, where, None)
            return
        if (tag := getattr(event, "tag", None)) is not None:
            self._problems.add(
                Place(where).refusal(
                    f"the tag {show(tag)}; tags are not part of the rule language, and nothing is "
                    "constructed because a file says so. Remove it."
                )
            )
        if not isinstance(event, yaml.ScalarEvent):
            if key:
                raise Place(where).refusal("a key that is a list or mapping; keys are text. Write a word.")
            if len(self._stack) == MAX_DEPTH:
                raise too_deep(where)
            if event.anchor is not None:
                self._anchors[event.anchor] = None
            empty: list[Node] | dict[str, Node] = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._stack.append(_Open(empty, where, event.anchor))
            return
        value = scalar(event.value, where) if event.implicit[0] else event.value
        if isinstance(value, str):
            clean(value, where)
        if parent is None or not key:
            self._add(_Part(Node(value, where)), where, event.anchor)
            return
        if event.anchor is not None:
            self._anchors[event.anchor] = _Part(Node(value, where))
        self._open_key(parent, value, where, merge=event.implicit[0] and value == MERGE)

    def _alias(self, name: str, where: Where) -> _Part:
        part = self._anchors.get(name)
        if part is None:
            found = "refers to what it stands in" if name in self._anchors else "has no anchor before it"
            raise Place(where).refusal(
                f"the alias {show('*' + name)} {found}; an alias stands for an anchored value above it. "
                f"Write &{name} there."
            )
        self._nodes += part.size - 1
        if self._nodes > MAX_NODES:
            raise too_many(where)
        if len(self._stack) + part.height > MAX_DEPTH:
            raise too_deep(where)
        return part

    def _open_key(self, parent: _Open, key: object, where: Where, merge: bool = False) -> None:
        assert isinstance(parent.items, dict)
        parent.merges = merge
        parent.key = (None, where)
        if self._number_keys and type(key) is int:
            key = str(key)
        if not isinstance(key, str):
            text = "a list or mapping" if isinstance(key, list | dict) else show(key)
            self._problems.add(
                Place(where).refusal(f"the key {text} is not text; keys are text. Quote it, or use a word.")
            )
        elif key in parent.items or (merge and parent.merged):
            self._problems.add(
                Place(where).refusal(f"the key {show(key)} is given twice; a key stands once. Remove one.")
            )
        else:
            parent.key = (key, where)

    def _add(self, part: _Part, where: Where, anchor: str | None) -> None:
        """Give a finished node to what it stands in."""
        if anchor is not None:
            self._anchors[anchor] = part
        if not self._stack:
            self._root = part.node
            return
        parent = self._stack[-1]
        parent.size += part.size
        parent.height = max(parent.height, part.height + 1)
        if isinstance(parent.items, list):
            parent.items.append(Node(part.node.value, where))
        elif parent.key is not None:
            (key, at), parent.key = parent.key, None
            if key is None:
                return
            if parent.merges:
                parent.merged += self._merged(part.node, at.covering(where))
                return
            parent.items[key] = Node(part.node.value, at.covering(where), at)

    def _merged(self, node: Node, where: Where) -> list[dict[str, Node]]:
        """The mappings that `<<` names: one, or a list of them."""
        items = node.value if isinstance(node.value, list) else [node]
        found = [item.value for item in items if isinstance(item.value, dict)]
        if not items or len(found) < len(items):
            self._problems.add(
                Place(where).refusal(
                    f"<< is {show(node.value)}; it merges a mapping, or a list of mappings. Write <<: *name, of a "
                    "mapping with &name."
                )
            )
        return found
