"""Finds the modules that rules replace, each with its operator, its arguments and its formats in the checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ktinject import rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Format
from ktinject.errors import KTInjectError, OperatorError, RuleError
from ktinject.hf.key_map import KeyMap
from ktinject.hf.layers import Layers, class_names, has_routed_experts
from ktinject.operators import REGISTRY, Operator, plugins
from ktinject.operators.expert_formats import FLOATS, K_QUANTS
from ktinject.operators.probes.roles import Roles
from ktinject.rules import Rule, RuleSet

_SHOWN = 5


@dataclass(frozen=True)
class MatchedModule:
    """A module that a rule replaces.

    config   the rule's checked arguments; `device` may still be "auto"
    source   the format in which the checkpoint stores the parameter `weight`; None without a checkpoint or a `weight`
    sources  returns the formats of all parameters of the module in the checkpoint, each (parameter, format, part)
    """

    path: str
    module: nn.Module
    rule: Rule
    operator: type[Operator]
    config: Any
    asked: Any = None
    source: Format | None = None
    sources: Callable[[], Collection[tuple[str, Format, int | None]]] = field(default=tuple, compare=False)

    def fitted(self, operator: type[Operator], config: Any) -> Any:
        """The arguments for an operator, changed to those of the checkpoint if it loads that format undecoded."""
        if self.source is None or not self.source.is_taken(operator.native_formats):
            return config
        return operator.use_checkpoint_format(config, self.source)

    def weight_formats(self, config: Any) -> Sequence[tuple[int, Any]]:
        """`Operator.weight_formats` for a config, with what the checkpoint has."""
        stored = [(name, form) for name, form, _ in self.sources()] if _leaves_open(config) else []
        with blaming(self.rule, self.path, self.operator.name):
            found = self.operator.weight_formats(config, stored)
            if not found or getattr(config, "weights", None) != "kept":
                return found
            return [next((choice for choice in found if self._can_keep(choice[1])), found[-1])]

    def _can_keep(self, config: Any) -> bool:
        """Whether an operator of this config would take the checkpoint's weights as they are, where they are such."""
        if config.weights not in ("fp8", *FLOATS, *K_QUANTS):
            return True
        made = self.operator.build(self.module, dataclasses.replace(config, device="cpu"))
        sources = [source for source in self.sources() if source[1].is_taken(made.native_formats)]
        if config.weights in FLOATS and not sources:
            return False  # rows of the other dimension
        return not any(made.misfit_of(*source) for source in sources)


def _leaves_open(config: Any) -> bool:
    """Whether formats in the checkpoint are to be looked for, which takes a moment for a model of many tensors."""
    return getattr(config, "weights", None) in ("auto", "kept")


@contextmanager
def blaming(rule: Rule, where: str, operator: str) -> Iterator[None]:
    """Inside the `with` block, an operator's errors get the rule's line, the module and the operator in front.

    where   path of the module, or several paths

    An exception of another package becomes an OperatorError, since it comes from the operator's code. RuleError,
    PlanError, CheckpointError and MemoryError pass unchanged.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, KTInjectError) and not isinstance(error, OperatorError):
            raise
        text = str(error) if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"
        named = text if text.startswith(f"{operator}:") else f"{operator}: {text}"
        raise OperatorError(str(rule.place().refusal(f"{where}: {named}"))) from error


def find_modules(
    model: PreTrainedModel, ruleset: RuleSet
) -> tuple[list[MatchedModule], dict[str, tuple[str, ...]]]:
    """Find the modules that rules replace.

    Returns  the modules, in the order of the model; and rule name → paths of all modules that the rule matches
    Raises   RuleError for an unknown operator, a wrong argument, or a rule that matches nothing
    """
    configs: dict[str, Any] = {
        rule.name: rules.check_arguments(rule, _operator_of(rule).Config) for rule in ruleset.rules
    }
    modules = dict(model.named_modules())
    try:
        assignment = rules.assign(ruleset, described(model), keeps=keeps(), has_role=Roles(model).has)
    except RuleError as error:
        if "matches nothing" not in str(error) or has_routed_experts(model):
            raise
        raise RuleError(f"{error}\n{without_experts(model)}, which may be why.") from error
    matched = [
        MatchedModule(path, modules[path], rule, REGISTRY[rule.operator], configs[rule.name])
        for path, rule in assignment.rules.items()
        if REGISTRY[rule.operator].replaces
    ]
    return matched, assignment.matched


def described(model: PreTrainedModel) -> list[rules.Module]:
    """The modules of a model as rules see them."""
    layers = Layers(model)
    return [(path, class_names(module), layers.of(path)) for path, module in model.named_modules()]


def keeps() -> dict[str, tuple[str, ...]]:
    """Operator → the children that it keeps of the module that it replaces."""
    return {name: operator.keeps for name, operator in REGISTRY.items()}


def _operator_of(rule: Rule) -> type[Operator]:
    """The operator that a rule names. Raises RuleError if there is none, OperatorError if it cannot be imported."""
    try:
        operator = plugins.operator_named(rule.operator)
    except OperatorError as error:
        raise OperatorError(str(rule.place().refusal(str(error)))) from error
    if operator is None:
        raise rules.unknown_operator(rule, {*REGISTRY, *plugins.installed()})
    return operator


def without_experts(model: PreTrainedModel) -> str:
    """The first half of a sentence about a model without routed experts, for which there are no bundled rules."""
    return f"{type(model).__name__} (model type {model.config.model_type!r}) has no routed experts"


def with_checkpoint_format(matched: MatchedModule, checkpoint: Checkpoint, mapping: KeyMap) -> MatchedModule:
    """The module with its formats in the checkpoint, and with the arguments that fit them. Raises CheckpointError."""

    @functools.cache
    def sources() -> Collection[tuple[str, Format, int | None]]:
        parameters = matched.module.named_parameters()
        names = [name for name, parameter in parameters if parameter.is_floating_point()]
        pieces = (
            (name, piece) for name in names for piece in mapping.targets.get(f"{matched.path}.{name}", ())
        )
        found = ((name, checkpoint.format_of(p.key), p.part) for name, p in pieces)
        # Thousands of plain weights have no companions to leave out.
        return {
            (name, dataclasses.replace(form, companions=()) if form.companions else form, part): None
            for name, form, part in found
        }

    matched = dataclasses.replace(matched, sources=sources)
    keys = [piece.key for piece in mapping.targets.get(f"{matched.path}.weight", ())]
    if not keys:
        return matched
    matched = dataclasses.replace(matched, source=checkpoint.format_of(keys[0]), asked=matched.config)
    return dataclasses.replace(matched, config=matched.fitted(matched.operator, matched.config))


def for_ranks(matched: MatchedModule, style: str | None, ranks: int) -> MatchedModule:
    """The module of a tensor-parallel group: `kept` decodes what a rank's part would divide, as blocks of fp8.

    style   how its layer is cut; None: not at all
    """
    module: Any = matched.module
    if style is None or matched.source is None or not _leaves_open(matched.asked):
        return matched
    dim, size = (0, module.out_features) if style.startswith("colwise") else (1, module.in_features)
    if matched.source.is_whole_in(dim, size // ranks):
        return matched
    return dataclasses.replace(matched, config=matched.asked, source=None)


def some(paths: Sequence[str]) -> str:
    """The first paths, and the number of the others: `a, b, c, d, e and 7 more`."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
