"""Arguments, typed by the config classes of operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from rule_texts import Everything, Experts, read_rule, refused

from ktinject import rules


def typed(arguments: str) -> Any:
    return rules.check_arguments(read_rule(replace=f"{{operator: o, {arguments}}}"), Everything)


def test_arguments_become_the_config() -> None:
    found = read_rule(
        replace="{operator: cpu_experts, weights: int4, group_size: 32, numa: 2, device: 'cuda:0'}"
    )
    assert rules.check_arguments(found, Experts) == Experts("cuda:0", "int4", 32, "auto", 2)
    assert rules.check_arguments(read_rule(replace="{operator: cpu_experts}"), Experts) == Experts()


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("ratio: 1", "ratio", 1.0), ("ratio: 0.25", "ratio", 0.25), ("symmetric: false", "symmetric", False),
        ("gpu_experts: 3", "gpu_experts", 3), ("gpu_experts: 0.25", "gpu_experts", 0.25),
        ("gpu_experts: auto", "gpu_experts", "auto"), ("gpu_experts: profile.json", "gpu_experts", "profile.json"),
        ("per_layer: [1, 2]", "per_layer", [1, 2]), ("per_layer: []", "per_layer", []),
        ("per_layer: null", "per_layer", None), ("profile: null", "profile", None), ("profile: p", "profile", "p"),
        ("mixed: [1, auto]", "mixed", [1, "auto"]), ("mixed: none", "mixed", "none"),
    ],
)  # fmt: skip
def test_every_kind_of_annotation(arguments: str, name: str, value: object) -> None:
    found = getattr(typed(f"needed: x, {arguments}"), name)
    assert found == value and type(found) is type(value)


def test_a_config_that_cannot_be_written_in_yaml_is_a_bug_of_the_operator() -> None:
    @dataclass(frozen=True)
    class Bad:
        when: complex = 0j

    with pytest.raises(TypeError, match="when"):
        rules.check_arguments(read_rule(replace="{operator: o}"), Bad)


@dataclass(frozen=True)
class Arguments:
    """One argument of each kind that a refusal words differently."""

    needed: str
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    group_size: Literal[128, 64, 32] = 128
    threads: int = 1
    ratio: float = 0.5
    symmetric: bool = True
    numa: int | Literal["auto"] = "auto"
    per_layer: list[int] | None = None

    def __post_init__(self) -> None:
        if self.threads == 13:
            raise ValueError("threads is 13; any other number works. Take 12.")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("wieghts: int4", ("no argument 'wieghts'", "Did you mean 'weights'?")),
        ("Weights: int4", ("no argument 'Weights'", "Did you mean 'weights'?")),
        ("backend: llamafile", ("no argument 'backend'", "needed, weights, group_size")),
        ("weights: int44", ("weights is 'int44'", "bf16, int8 or int4", "Did you mean 'int4'?")),
        ("weights: 4", ("weights is 4",)),
        ("weights: null", ("weights is null",)),
        ("weights: [int4]", ("weights is 'int4'",)),
        ("group_size: 96", ("group_size is 96", "128, 64 or 32")),
        ("group_size: '128'", ("group_size is '128'",)),
        ("group_size: 128.0", ("group_size is 128.0",)),
        ("threads: true", ("threads is true", "a whole number")),
        ("threads: 1.5", ("threads is 1.5", "a whole number")),
        ("threads: 13", ("threads is 13; any other",)),
        ("ratio: true", ("ratio is true", "a number")),
        ("ratio: half", ("ratio is 'half'", "a number")),
        ("symmetric: 1", ("symmetric is 1", "true or false")),
        ("symmetric: yes", ("symmetric is 'yes'", "true or false")),
        ("numa: aut", ("a whole number or auto", "Did you mean 'auto'?")),
        ("per_layer: [1, x]", ("per_layer is 1 and 'x'", "a list, each a whole number or null")),
        ("per_layer: {a: 1}", ("per_layer is a mapping",)),
        ("needed: 3", ("needed is 3", "text")),
    ],
)
def test_arguments(argument: str, words: tuple[str, ...]) -> None:
    written = "\n    operator: o" + ("" if "needed" in argument else "\n    needed: x") + f"\n    {argument}"
    found = read_rule(replace=written)
    line = 8 if "needed" in argument else 9
    with refused(*words, at=f"f:{line}: rule 'r': "):
        rules.check_arguments(found, Arguments)


def test_what_is_about_no_argument_is_said_at_the_rule() -> None:
    @dataclass(frozen=True)
    class Never:
        def __post_init__(self) -> None:
            raise ValueError("nothing will do; not even this. Leave it.")

    with refused("nothing will do", at="f:4: rule 'r': "):
        rules.check_arguments(read_rule(replace="{operator: o}"), Never)


def test_a_missing_argument() -> None:
    with refused("o needs needed", at="f:4: rule 'r': "):
        rules.check_arguments(read_rule(replace="{operator: o}"), Arguments)


def test_an_unknown_operator() -> None:
    error = rules.unknown_operator(
        read_rule(replace="{operator: cpu_expert}"), ["cpu_experts", "int4_linear"]
    )
    assert str(error).startswith(
        "f:6: rule 'r': unknown operator 'cpu_expert'; registered are cpu_experts, int4_linear and keep."
    )
    assert "Did you mean 'cpu_experts'?" in str(error)
