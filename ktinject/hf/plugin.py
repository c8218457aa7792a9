"""What a caller of `from_pretrained`, or a config.json, says: which rules, which devices.

It is a plug-in of transformers' quantisation: `quant_method` is "ktinject".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktinject import rules as language
from ktinject.errors import PlanError, shown
from ktinject.rules import document
from ktinject.rules.wording import did_you_mean

METHOD = "ktinject"
_ARGUMENTS = (
    *(
        "rules",
        "devices",
        "budget",
        "variables",
        "check_tensors",
        "tp",
        "context",
        "ignore",
        "cache",
        "stored",
    ),
)


class KTInjectConfig(QuantizationConfigMixin):
    """Load a model with operators by transformers' `from_pretrained(..., quantization_config=KTInjectConfig(...))`.

    The result is what `ktinject.load` of the same arguments gives. In a config.json it is
    `"quantization_config": {"quant_method": "ktinject", "rules": …}`; after `import ktinject` such a folder loads
    without an argument.

    rules          a path, the name of bundled rules, "auto", a rule document as a dict, or a list of rules
    devices, budget, variables, check_tensors, tp, context, ignore, cache   as `ktinject.optimize` takes them; `cache`
                   is not saved, as it is a matter of the machine, nor is `ignore`, which is one of the checkpoint
    stored         what config.json says of quantised weights, where "ktinject" has taken its place there: the
                   `quantization_config` that the checkpoint came with
    Raises         PlanError for an argument that is unknown, or whose value no config.json can hold
    """

    def __init__(
        self,
        rules: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] = "auto",
        devices: str | Sequence[str] | None = None,
        budget: Mapping[Any, int | str] | None = None,
        variables: Mapping[str, Any] | None = None,
        check_tensors: bool = False,
        tp: bool = False,
        context: int | None = None,
        ignore: Sequence[str] | None = None,
        cache: str | None = None,
        stored: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        method = others.pop("quant_method", METHOD)
        if method != METHOD:
            raise PlanError(
                f"KTInjectConfig: found quant_method {shown(method)}; it is {METHOD!r}. Leave it out."
            )
        if others:
            first = next(iter(others))
            raise PlanError(
                f"KTInjectConfig: found {', '.join(map(shown, others))}; arguments are {', '.join(_ARGUMENTS)}. "
                f"Correct the name.{did_you_mean(str(first), _ARGUMENTS)}"
            )
        self.quant_method = METHOD
        self.rules = _of(
            "rules", rules, str | Path | Mapping | list | tuple, "a path, a name, a dict or a list"
        )
        self.devices = _of("devices", devices, str | list | tuple | None, "a device or a list of devices")
        self.budget = _of("budget", budget, Mapping | None, "a dict such as {'cuda:0': '24GiB'}")
        self.variables = _of("variables", variables, Mapping | None, "a dict of names and values")
        self.check_tensors = _of("check_tensors", check_tensors, bool, "true or false")
        self.tp = _of("tp", tp, bool, "true or false")
        self.context = _of("context", context, int | None, "a number of tokens")
        self.ignore = _of("ignore", ignore, list | tuple | None, "a list of patterns of whole names")
        self.cache = _of("cache", cache, str | None, "auto")
        self.stored = _of("stored", stored, Mapping | None, "a quantization_config of a config.json")

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds: all that differs from the defaults."""
        rules = str(self.rules) if isinstance(self.rules, Path) else self.rules
        found: dict[str, Any] = {"quant_method": self.quant_method, "rules": _plain(rules)}
        found |= {name: _plain(getattr(self, name)) for name in _ARGUMENTS[1:] if getattr(self, name)}
        return found

    def whole(self) -> KTInjectConfig:
        """The same, with rules of a file written out, and of weights that are stored as floats: what is saved.

        Raises  RuleError as reading the file does
        """
        values = {**self.to_dict(), "stored": None, "cache": None, "ignore": None}
        if isinstance(self.rules, str | Path) and not is_name(self.rules):
            values["rules"] = document.from_file(*language.locate(self.rules)).plain()
        return KTInjectConfig(**values)

    @classmethod
    def of_file(cls, values: Mapping[str, Any]) -> KTInjectConfig:
        """What a config.json says. It names no file of rules, which would be one somewhere on this machine.

        Raises  PlanError
        """
        found = cls(**{name: value for name, value in values.items() if name != "cache"})
        if isinstance(found.rules, str) and not is_name(found.rules):
            raise PlanError(
                f"config.json: quantization_config: found rules {shown(found.rules)}; allowed are auto, a bundled "
                f"name ({', '.join(language.bundled())}), or the rules themselves. Write the rules there as JSON."
            )
        return found


def is_ours(values: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of this plug-in."""
    return values.get("quant_method") == METHOD


def stored(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a `quantization_config` of ours says of the weights that are stored; None if it says nothing."""
    found = values.get("stored")
    return dict(found) if isinstance(found, Mapping) and found else None


def is_name(rules: object) -> bool:
    """Whether rules are given by a name that means the same on every machine."""
    return rules == "auto" or (isinstance(rules, str) and rules in language.bundled())


def _of(name: str, value: Any, kinds: Any, allowed: str) -> Any:
    if not isinstance(value, kinds):
        raise PlanError(f"KTInjectConfig: {name}: found {shown(value)}; allowed is {allowed}. Write that.")
    return value


def _plain(value: Any) -> Any:
    """A copy of the types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


class HandedOver(PlanError):
    """transformers is about to load a folder that is ours to load; pretrained/load.py catches it.

    Only who calls transformers' inside without its `from_pretrained` sees it.
    """

    def __init__(self, config: KTInjectConfig) -> None:
        super().__init__(
            "quantization_config: ktinject loads by PreTrainedModel.from_pretrained, and by nothing else of "
            "transformers. Use that, or ktinject.load."
        )
        self.config = config


class KTInjectQuantizer(HfQuantizer):
    """What transformers makes of our config: it hands over before anything is built or read."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        raise HandedOver(KTInjectConfig.of_file(self.quantization_config.to_dict()))

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False
