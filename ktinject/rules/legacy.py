"""KTransformers 0.x rule files: what one says, rule by rule, and the mistakes in it.

A file is a list of rules. Keys: `match.name` (searched for in the dotted path, unanchored), `match.class` (an import
path), `replace.class` (an import path, or `default`: the module stays, and is only placed), `replace.kwargs`, and
`recursive`. The first rule that matches wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from ktinject.errors import RuleError
from ktinject.rules.files import mapping
from ktinject.rules.node import Node
from ktinject.rules.pattern import Patterns, compiled
from ktinject.rules.wording import Place, Problems, did_you_mean, listing, show

DEFAULT = "default"
_MAX_RULES = 500

# What a class of the authors is for; the last part of its import path tells.
CLASSES = {
    "KTransformersLinear": "linear",
    **dict.fromkeys(("KTransformersExperts", "KTransformersExpertsV2"), "experts"),
    **dict.fromkeys(
        ("KDeepseekV2MoE", "KDeepseekV3MoE", "KDeepseekV3MoEV2", "KQwen2MoeSparseMoeBlock",
         "KQwen2MoeSparseMoeBlockV2", "KQwen3MoeSparseMoeBlockV2", "KQwen3NextSparseMoeBlockV2",
         "KMistralSparseMoEBlock", "KSmallthinkerMoeBlock", "KGlm4MoeMoE"), "block"
    ),
    "KDeepseekV2Attention": "attention",
    "KMoEGate": "router",
    **dict.fromkeys(
        ("YarnRotaryEmbedding", "YarnRotaryEmbeddingV3", "RotaryEmbedding", "RotaryEmbeddingV2", "RotaryEmbeddingV3",
         "RotaryEmbeddingV4"), "rotary"
    ),
    "RMSNorm": "norm",
    "kDeepseekV3MLP": "mlp",
    **dict.fromkeys(("KDeepseekV2Model", "KQwen2MoeModel", "KLlamaModel"), "model"),
    DEFAULT: "default",
}  # fmt: skip
# Operator → what it computes for, and the format of its weights.
OPS = {
    "KLinearMarlin": ("linear", "int4"),
    "VLinearMarlin": ("linear", "int4"),
    "KLinearTorch": ("linear", "bf16"),
    "KLinearFP8": ("linear", "fp8"),
    "KLinearQ8": ("linear", "int8"),
    "KLinearCPUInfer": ("linear", "bf16"),
    "KExpertsCPU": ("experts", ""),
    "KExpertsMarlin": ("experts", "int4"),
    "KExpertsTorch": ("experts", "bf16"),
}
_NAMED = {"linear": "linear layers", "experts": "experts"}
BACKENDS = {"llamafile": "int4", "AMXInt8": "int8", "AMXBF16": "bf16"}
KWARGS = (
    "generate_device", "prefill_device", "generate_op", "prefill_op", "out_device", "backend", "absorb_for_prefill",
    "per_layer_prefill_intput_threshold", "transfer_map", "device",
)  # fmt: skip
DEVICE_KEYS = ("generate_device", "prefill_device", "out_device", "device")
_PREFILLING = ("linear", "experts")  # only these have an operator for prompts
_DEVICE = regex.compile(r"(cpu|cuda|xpu|npu)(:[0-9]{1,3})?")
_FAMILY = regex.compile(r"modeling_(\w+)")


@dataclass
class LegacyRule:
    """One rule.

    number      from 1
    kind        what its class is for: a value of CLASSES
    name        the pattern, as written
    path        the same for whole paths; None without a pattern
    of_class    the last part of the import path that is matched
    arguments   the kwargs that are known, nulls left out
    notes       what is to be said above the rule in the new file
    """

    number: int
    where: str
    kind: str
    class_name: str
    name: str | None = None
    path: str | None = None
    of_class: str | None = None
    family: str | None = None
    recursive: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def place(self, argument: str = "") -> Place:
        return Place(self.places.get(argument, self.where), f"rule {self.number}")

    @property
    def device(self) -> str:
        """Where the module computes."""
        return str(self.arguments.get("generate_device", self.arguments.get("device", "cuda:0")))


def is_legacy(root: Node) -> bool:
    """Whether a document is such a file: a list, of which one item at least has what only these have."""
    return isinstance(root.value, list) and any(_is_rule(item.value) for item in root.value)


def _is_rule(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    match, replace = (item[key].value if key in item else None for key in ("match", "replace"))
    told = isinstance(replace, dict) and {"class", "kwargs"} & replace.keys()
    named = isinstance(match, dict) and {"name", "class"} & match.keys() and "name" not in item
    return bool(told or (named and "replace" not in item) or "recursive" in item)


def read(root: Node, problems: Problems) -> list[LegacyRule]:
    """The rules that can be understood. `problems` gets what is wrong with each, and with the others."""
    assert isinstance(root.value, list)
    if len(root.value) > _MAX_RULES:
        raise Place(root.where).refusal(
            f"{len(root.value)} rules; at most {_MAX_RULES} are read. Split them."
        )
    rules: list[LegacyRule] = []
    patterns = Patterns()
    for number, item in enumerate(root.value, 1):
        with problems.kept():
            rules.append(_rule(item, number, patterns, problems))
    return rules


def _rule(node: Node, number: int, patterns: Patterns, problems: Problems) -> LegacyRule:
    place = Place(node.where, f"rule {number}")
    entries = mapping(node, place, "a rule", ("match", "replace", "recursive"), problems)
    for key in ("match", "replace"):
        if key not in entries:
            raise place.refusal(f"no {key}; a rule has a match and a replace. Add it.")
    at = place.moved(entries["replace"].where)
    replace = mapping(entries["replace"], at, "replace", ("class", "kwargs"), problems)
    if "class" not in replace or not isinstance(replace["class"].value, str):
        raise at.refusal("replace has no class; it has an import path, or default. Write class: default.")
    class_name = replace["class"].value.rpartition(".")[2]
    if class_name not in CLASSES:
        raise at.moved(replace["class"].where).refusal(
            f"class {show(replace['class'].value)} is none that is known; known are {listing(CLASSES, 'and')}. "
            f"Correct it, or write the rule in version 1.{did_you_mean(class_name, CLASSES)}"
        )
    rule = LegacyRule(number, node.where, CLASSES[class_name], class_name)
    recursive = entries.get("recursive")
    if recursive is not None and not isinstance(recursive.value, bool):
        problems.add(
            place.moved(recursive.where).refusal(
                f"recursive is {show(recursive.value)}; it is true or false. Correct it."
            )
        )
    rule.recursive = recursive is None or recursive.value is not False
    _match(entries["match"], rule, patterns, problems)
    if "kwargs" in replace and replace["kwargs"].value is not None:
        kwargs = replace["kwargs"]
        if not isinstance(kwargs.value, dict):
            raise at.moved(kwargs.where).refusal(
                f"kwargs is {show(kwargs.value)}; it is a mapping. Correct it."
            )
        for key, item in kwargs.value.items():
            with problems.kept():
                _argument(key, item, rule, problems)
    _check_prefill(rule, problems)
    return rule


def _match(node: Node, rule: LegacyRule, patterns: Patterns, problems: Problems) -> None:
    entries = mapping(node, rule.place().moved(node.where), "match", ("name", "class"), problems)
    if not entries:
        raise rule.place().moved(node.where).refusal("match has no name and no class; it needs one. Add it.")
    for key, item in entries.items():
        at = rule.place().moved(item.where)
        if not isinstance(item.value, str) or not item.value:
            raise at.refusal(f"{key} is {show(item.value)}; it is text. Correct it.")
        rule.places[key] = item.where
    if "class" in entries:
        written = str(entries["class"].value)
        rule.of_class = written.rpartition(".")[2]
        family = _FAMILY.search(written)
        rule.family = family[1] if family else None
        if not rule.of_class.isidentifier():
            raise rule.place("class").refusal(
                f"class {show(written)} is no import path. Correct it; rules name one."
            )
    if "name" in entries:
        rule.name = str(entries["name"].value)
        if not rule.name.isprintable() or "${" in rule.name:
            raise rule.place("name").refusal(
                f"name {show(rule.name)} has a line break, a tab or ${{; no path has one. Correct it."
            )
        rule.path = anchored(rule.name)
        try:
            if not patterns.has_room(rule.path):
                raise ValueError("is too large, with those before")
            compiled(rule.path)
        except ValueError as error:
            raise rule.place("name").refusal(
                f"name {show(rule.name)} {error}; version 1 cannot have it. Write another pattern."
            ) from error


def anchored(name: str) -> str:
    """The pattern for a whole path that matches where `re.search` finds this one."""
    depth, alternatives = 0, False
    for token in regex.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", name[:2000], flags=regex.DOTALL):
        depth += (token == "(") - (token == ")")
        alternatives = alternatives or (token == "|" and depth == 0)
    if alternatives:
        return f".*(?:{name}).*"
    start = name[1:] if name.startswith("^") else f".*{name}" if not name.startswith(".*") else name
    if start.endswith("$") and (len(start) - len(start[:-1].rstrip("\\"))) % 2 == 1:
        return start[:-1]
    return start if start.endswith(".*") and not start.endswith("\\.*") else f"{start}.*"


def _argument(key: str, item: Node, rule: LegacyRule, problems: Problems) -> None:
    at, value = rule.place().moved(item.where), item.value
    if key not in KWARGS:
        raise at.moved(item.key or item.where).refusal(
            f"unknown argument {show(key)}; known are {listing(KWARGS, 'and')}. "
            f"Correct or remove it.{did_you_mean(key, KWARGS)}"
        )
    rule.places[key] = item.where
    if value is None:
        return
    if value == "None":
        problems.add(
            at.refusal(
                f"{key} is the text 'None', which YAML does not read as null; null is meant. Write null."
            )
        )
        return
    if key in DEVICE_KEYS and not (isinstance(value, str) and _DEVICE.fullmatch(value)):
        raise at.refusal(
            f"{key} is {show(value)}; it is cpu, or cuda, xpu or npu with a number. Write cuda:0."
        )
    if key in ("generate_op", "prefill_op"):
        _check_op(key, value, rule, at)
    if key == "backend" and (not isinstance(value, str) or value not in BACKENDS):
        raise at.refusal(
            f"backend {show(value)} does not exist; there are {listing(BACKENDS, 'and')}. "
            f"Name one.{did_you_mean(value, BACKENDS)}"
        )
    if key == "absorb_for_prefill" and not isinstance(value, bool):
        raise at.refusal(f"{key} is {show(value)}; it is true or false. Write one.")
    if key == "per_layer_prefill_intput_threshold" and (type(value) is not int or value < 0):
        raise at.refusal(f"{key} is {show(value)}; it is a number of tokens. Write one; 0 turns it off.")
    if key == "transfer_map":
        _check_transfer(item, at)
        rule.arguments[key] = item.plain()
        return
    rule.arguments[key] = value


def _check_op(key: str, value: object, rule: LegacyRule, at: Place) -> None:
    if not isinstance(value, str) or value not in OPS:
        raise at.refusal(
            f"{key} {show(value)} does not exist; there are {listing(OPS, 'and')}. Name one.{did_you_mean(value, OPS)}"
        )
    if OPS[value][0] != rule.kind:
        raise at.refusal(
            f"{key} {value} is for {_NAMED[OPS[value][0]]}, which {rule.class_name} is not; "
            f"it has {listing(op for op, (kind, _) in OPS.items() if kind == rule.kind) or 'none'}. Correct it."
        )


def _check_transfer(item: Node, at: Place) -> None:
    # Its keys are numbers of layers, which version 1 would not have for keys; they are quoted while reading.
    if not isinstance(item.value, dict) or any(
        not key.isdecimal() or not isinstance(node.value, str) or not _DEVICE.fullmatch(node.value)
        for key, node in item.value.items()
    ):
        raise at.refusal(
            "transfer_map is not a mapping of layers to devices. Write {30: cuda:1}; layers are numbers."
        )


def _check_prefill(rule: LegacyRule, problems: Problems) -> None:
    """What is said about prompts and has no effect."""
    has_op = "prefill_op" in rule.arguments
    if "prefill_op" in rule.places and not has_op and "prefill_device" in rule.arguments:
        problems.add(
            rule.place("prefill_device").refusal(
                "prefill_device has no effect: prefill_op is null; a device is for an operator. Remove it, or name one."
            )
        )
    device = rule.arguments.get("prefill_device")
    if rule.kind not in _PREFILLING and device is not None and device != rule.device:
        problems.add(
            rule.place("prefill_device").refusal(
                f"prefill_device has no effect: {rule.class_name} computes on {rule.device}, prompts too; only linear "
                "layers and experts have a device for prompts. Remove it."
            )
        )


def devices(rules: Iterable[LegacyRule]) -> list[str]:
    """All devices that the rules name, the GPUs by number."""
    found: set[str] = set()
    for rule in rules:
        found |= {str(rule.arguments[key]) for key in DEVICE_KEYS if key in rule.arguments}
        moved = rule.arguments.get("transfer_map")
        found |= {str(device) for device in moved.values()} if isinstance(moved, Mapping) else set()
    numbered = {device if ":" in device or device == "cpu" else f"{device}:0" for device in found}
    return sorted(numbered, key=lambda device: (device.partition(":")[0], int(device.partition(":")[2] or 0)))


def refused_document(root: Node) -> RuleError:
    """The refusal of a document that is no such file."""
    return Place(root.where).refusal(
        "not a KTransformers 0.x rule file; that is a list of rules with match and replace, whose classes are import "
        "paths. Give one; files of version 1 are read as they are."
    )
