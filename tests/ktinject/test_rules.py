"""What the rule language means: reading, choosing, assigning, typing, the schema, the command line, the docs."""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY
from ktinject.rules import document
from ktinject.rules.pattern import compiled
from ktinject.rules.variables import Variables
from ktinject.rules.wording import Place

ROOT = Path(__file__).parents[2]

FAMILIES = {
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "deepseek_v2": "deepseek-v2",
    "qwen3_moe": "qwen3-moe",
    "qwen2_moe": "qwen2-moe",
    "mixtral": "mixtral",
    "glm4_moe": "glm4-moe",
}

DESIGN_EXAMPLE = r"""
# yaml-language-server: $schema=rules.schema.json
version: 1
model_types: [deepseek_v3, kimi_k2]
variables: {experts: int4, deferred: 2}
rules:
  - name: routed experts
    match:
      path: 'model\.layers\.\d+\.mlp\.experts'
      class: DeepseekV3Experts
      layers: 3-60
    replace:
      operator: hybrid_experts
      weights: ${variables.experts}
      gpu_experts: auto
  - name: keep the router exact
    match: {path: '.*\.mlp\.gate'}
    replace: keep
    optional: true
"""


@dataclass(frozen=True)
class Experts:
    """Arguments as `cpu_experts` has them."""

    device: str = "auto"
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    group_size: Literal[128, 64, 32] = 128
    kernel: str = "auto"
    numa: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.kernel == "never":
            raise ValueError("kernel 'never' does not run int4; use another one.")


@dataclass(frozen=True)
class Everything:
    """One argument for each kind of annotation."""

    needed: str
    ratio: float = 0.5
    symmetric: bool = True
    gpu_experts: int | float | Literal["auto"] | str = 0
    per_layer: list[int] | None = None
    profile: Optional[str] = None  # noqa: UP045
    mixed: list[int | Literal["auto"]] | Literal["none"] = "none"


def text(rules_yaml: str, head: str = "version: 1\n") -> bytes:
    return f"{head}rules:\n{rules_yaml}".encode()


def rule(match: str = "{path: x}", replace: str = "keep", name: str = "r") -> str:
    return f"- name: {name}\n  match: {match}\n  replace: {replace}\n"


def one(match: str = "{path: x}", replace: str = "keep", head: str = "version: 1\n") -> rules.Rule:
    return rules.parse(text(rule(match, replace), head), "f").rules[0]


# Reading


def test_the_design_example() -> None:
    found = rules.parse(DESIGN_EXAMPLE.encode(), "f.yaml")
    assert found.model_types == ("deepseek_v3", "kimi_k2")
    assert found.variables == {"experts": "int4", "deferred": 2}
    experts, router = found.rules
    assert (experts.name, experts.operator, experts.optional) == ("routed experts", "hybrid_experts", False)
    assert experts.arguments == {"weights": "int4", "gpu_experts": "auto"}
    assert experts.match == rules.Match(
        r"model\.layers\.\d+\.mlp\.experts", "DeepseekV3Experts", frozenset(range(3, 61))
    )
    assert experts.where == "f.yaml:7"
    assert experts.argument_where == {"weights": "f.yaml:14", "gpu_experts": "f.yaml:15"}
    assert (router.operator, router.arguments, router.optional, router.where) == (
        "keep",
        {},
        True,
        "f.yaml:16",
    )
    with pytest.raises(FrozenInstanceError):
        router.name = "x"  # type: ignore[misc]


def test_a_bom_and_windows_line_ends_are_fine() -> None:
    data = b"\xef\xbb\xbf" + DESIGN_EXAMPLE.replace("\n", "\r\n").encode()
    assert rules.parse(data, "f.yaml").rules[1].where == "f.yaml:16"


def test_json_is_read_too() -> None:
    data = json.dumps({"version": 1, "rules": [{"name": "a", "match": {"class": "B"}, "replace": "keep"}]})
    assert rules.parse(data.encode(), "f").rules[0].match.class_name == "B"


@pytest.mark.parametrize("parser", [yaml.SafeLoader, document.PARSER])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3), ("-1", -1), ("0.25", 0.25), (".5", 0.5), ("1e3", 1000.0), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None), ("'3'", "3"), ('"true"', "true"), ("yes", "yes"), ("off", "off"),
        ("0o17", "0o17"), ("0x1f", "0x1f"), ("1_000", "1_000"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01"),
        ("010", "010"), (".inf", ".inf"), (".nan", ".nan"), ("[1, a]", [1, "a"]), ("{k: 1}", {"k": 1}),
    ],
)  # fmt: skip
def test_plain_scalars_have_the_types_of_yaml_1_2(written: str, value: object, parser: Any) -> None:
    found = document.from_bytes(f"a: {written}\n".encode(), "f", parser).plain()["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("3-6", {3, 4, 5, 6}), ("3", {3}), ("0", {0}), ("[3, 5, 7]", {3, 5, 7}), ("'3-4,9-10'", {3, 4, 9, 10}),
        ("1, 3", {1, 3}), ("7-7", {7}),
    ],
)  # fmt: skip
def test_layers(written: str, layers: set[int]) -> None:
    match = f"\n    path: x\n    layers: {written}"
    assert one(match).match.layers == layers


def test_dicts_say_where_by_path() -> None:
    written = [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "weights": "int4"}}]
    for source in (written, {"version": 1, "rules": written}):
        found = rules.read(source).rules[0]
        assert found.where == "<python>:rules[0]"
        assert found.argument_where == {"weights": "<python>:rules[0].replace.weights"}
        assert found.arguments == {"weights": "int4"}


def test_a_rule_set_is_returned_as_it_is() -> None:
    found = rules.read("mixtral")
    assert rules.read(found) is found


def test_files_by_path(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(DESIGN_EXAMPLE)
    for source in (file, str(file)):
        found = rules.read(source)
        assert found.source == str(file)
        assert found.rules[0].where == f"{file}:7"


@pytest.mark.parametrize(
    "source", ["rules/deepseek-v3.yaml", Path("nowhere/deepseek-v3"), "./deepseek-v3.yaml"]
)
def test_an_absent_path_with_a_bundled_name_says_what_it_uses(
    source: str | Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ktinject"):
        assert rules.read(source) == rules.read("deepseek-v3")
    assert [record.name for record in caplog.records] == ["ktinject"]
    assert str(source) in caplog.text and "bundled" in caplog.text


def test_a_bundled_name_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral").write_text("not rules")
    (tmp_path / "qwen3-moe").mkdir()
    assert rules.read("mixtral").model_types == ("mixtral",)
    assert rules.read("qwen3-moe").model_types == ("qwen3_moe",)
    assert not caplog.records
    with pytest.raises(RuleError, match="a rule file is 'not rules'"):
        rules.read("./mixtral")


# Variables


def test_a_reference_alone_keeps_the_type_and_inside_text_becomes_text() -> None:
    head = "version: 1\nvariables: {i: 7, f: 0.5, b: true, s: a b}\n"
    found = one(
        r"{path: 'layers\.${variables.i}\.x'}",
        '{operator: o, i: "${variables.i}", f: "${variables.f}", b: "${variables.b}", s: "${variables.s}", '
        't: "<${variables.i}${variables.s}>", l: ["${variables.i}", 1]}',
        head,
    )
    assert found.match.path == r"layers\.7\.x"
    assert found.arguments == {"i": 7, "f": 0.5, "b": True, "s": "a b", "t": "<7a b>", "l": [7, 1]}
    assert type(found.arguments["b"]) is bool


def test_filling_in_is_plain_replacement() -> None:
    """OmegaConf has a grammar of its own; no text may come out otherwise than by replacing the reference."""
    random_ = random.Random(1)
    values = {"x": "int4", "y": 12, "z": "a'b\\c"}
    declared = Variables(document.from_python(values, "f", "variables"), {}, "f")
    for _ in range(400):
        pieces = [random_.choice(["${variables.x}", "${variables.y}", "${variables.z}", *r"\.d+ {}()[]'\":,$a\\%#"])
                  for _ in range(random_.randint(1, 8))]  # fmt: skip
        written = "".join(pieces)
        if "${" not in written or "\\${" in written or "${" in re.sub(r"\$\{variables\.[xyz]\}", "", written):
            continue
        found = declared.fill(document.Node(written, "f"), Place("f"))
        assert str(found) == re.sub(r"\$\{variables\.([xyz])\}", lambda m: str(values[m[1]]), written)


@pytest.mark.parametrize(
    ("default", "value"),
    [("a", "b"), ("auto", 16), ("auto", 0.25), (1, 2), (0, 0.25), (0.5, 1), (0, "auto"), (True, False)],
)
def test_overrides(default: object, value: object) -> None:
    source = {
        "version": 1,
        "variables": {"v": default},
        "rules": [{"name": "r", "match": {"path": "x"}, "replace": {"operator": "o", "a": "${variables.v}"}}],
    }
    found = rules.read(source, variables={"v": value})
    assert found.variables == {"v": value}
    assert found.rules[0].arguments == {"a": value}
    assert rules.read(source).rules[0].arguments == {"a": default}


def test_overrides_of_a_command_line() -> None:
    assert rules.parse_overrides(["a=int8", "b=64", "c=0.5", "d=true", "e=x=y", "f="]) == {
        "a": "int8", "b": 64, "c": 0.5, "d": True, "e": "x=y", "f": None,
    }  # fmt: skip


# Bundled files


def test_bundled_files_are_the_promised_ones() -> None:
    assert set(rules.bundled()) == {*FAMILIES.values(), "moe-auto"}
    assert all(path.is_file() for path in rules.bundled().values())


def test_choose() -> None:
    for model_type, name in FAMILIES.items():
        assert rules.choose(model_type) == name
        assert model_type in rules.read(name).model_types
    for other in ("olmoe", "llama", "gpt_oss", ""):
        assert rules.choose(other) == "moe-auto"
    assert rules.read("moe-auto").model_types == ()


@pytest.mark.parametrize("name", rules.bundled())
def test_bundled_files_hold_no_device_number_and_only_known_arguments(name: str) -> None:
    assert not re.search(
        r"\b(cuda|cpu|xpu|npu)\b(?!_experts)|:\d+['\"]?$",
        rules.bundled()[name].read_text().replace("CPU", ""),
        re.M,
    )
    for weights in ("bf16", "int8", "int4"):
        values: dict[str, Any] = {"experts": weights, "group_size": 32}
        declared = rules.read(name).variables
        values |= {variable: weights for variable in ("dense", "head") if variable in declared}
        for found in rules.read(name, variables=values).rules:
            if found.operator == rules.KEEP:
                continue
            config = rules.check_arguments(found, REGISTRY[found.operator].Config)
            assert found.operator in (
                "hybrid_experts",
                "dense_linear",
                "absorbed_mla",
                "cpu_router",
                "rms_norm",
            )
            if found.operator in ("hybrid_experts", "dense_linear"):
                assert (config.weights, config.group_size) == (weights, 32)


TINY = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def modules_of(model_type: str) -> list[rules.Module]:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def layer(path: str) -> int | None:
        found = re.search(r"layers\.(\d+)", path)
        return int(found[1]) if found else None

    return [(path, [c.__name__ for c in type(m).__mro__], layer(path)) for path, m in model.named_modules()]


@pytest.mark.parametrize("model_type", [*FAMILIES, "olmoe", "granitemoe", "phimoe", "gpt_oss", "minimax_m2"])
def test_bundled_files_find_the_experts_of_transformers_models(model_type: str) -> None:
    modules = modules_of("deepseek_v3" if model_type == "kimi_k2" else model_type)  # which has its modules
    experts = {path for path, _, _ in modules if path.endswith(".experts")}
    assert len(experts) >= 2
    keeps = {name: operator.keeps for name, operator in REGISTRY.items()}
    for name in {rules.choose(model_type), "moe-auto"}:
        found = rules.assign(rules.read(name), modules, keeps=keeps)
        assert set(found.matched["routed experts"]) == experts
        assert {path for path, rule in found.rules.items() if rule.operator == "hybrid_experts"} == experts
        if name == "moe-auto":
            continue
        # Every linear layer but the matrix that absorbed_mla reads itself is somebody's.
        linears = {
            path for path, classes, _ in modules if "Linear" in classes and not path.endswith("kv_b_proj")
        }
        assert linears == {path for path in found.rules if path in linears}
        attention = {path for path, rule in found.rules.items() if rule.operator == "absorbed_mla"}
        assert attention == {
            path for path, _, _ in modules if path + ".kv_b_proj" in {p for p, _, _ in modules}
        }


# Assigning

SMALL: list[rules.Module] = [
    ("", ("Model", "Module"), None),
    ("model.embed", ("Embedding", "Module"), None),
    *(
        (f"model.layers.{n}{tail}", names, n)
        for n in range(12)
        for tail, names in (
            (".mlp", ("MoE", "Module")),
            (".mlp.gate", ("Router", "Linear", "Module")),
            (".mlp.experts", ("Experts", "Module")),
            (".mlp.experts.act_fn", ("SiLU", "Module")),
            (".mlp.shared_experts.up_proj", ("Linear", "Module")),
        )
    ),
]


def assign(*written: str, **more: Any) -> rules.Assignment:
    return rules.assign(rules.parse(text("".join(written)), "f"), SMALL, **more)


def test_the_first_rule_wins_and_both_views_agree() -> None:
    found = assign(
        rule(r"{path: '.*\.experts', layers: 0-3}", "{operator: a}", "first"),
        rule(r"{class: Experts}", "{operator: b}", "second"),
    )
    assert found.matched["first"] == tuple(f"model.layers.{n}.mlp.experts" for n in range(4))
    assert found.matched["second"] == tuple(f"model.layers.{n}.mlp.experts" for n in range(4, 12))
    assert {path: r.name for path, r in found.rules.items()} == {
        path: name for name, paths in found.matched.items() for path in paths
    }
    assert list(found.rules) == [path for path, _, _ in SMALL if path in found.rules]


def test_conditions_all_hold_and_bases_count() -> None:
    assert len(assign(rule("{class: Linear}")).rules) == 24
    assert len(assign(rule(r"{class: Linear, path: '.*\.gate'}")).rules) == 12
    assert set(assign(rule(r"{class: Linear, path: '.*\.gate', layers: [2, 11]}")).rules) == {
        "model.layers.2.mlp.gate",
        "model.layers.11.mlp.gate",
    }


def test_a_path_is_matched_whole_and_the_root_never() -> None:
    assert set(assign(rule(r"{path: 'model\.embed'}")).rules) == {"model.embed"}
    with pytest.raises(RuleError, match="matches nothing"):
        assign(rule("{path: 'model'}"))
    assert "" not in assign(rule("{path: '.*'}")).rules


def test_modules_outside_of_layers_have_no_number() -> None:
    assert not rules.Match(class_name="Embedding", layers=frozenset({0})).matches(
        "model.embed", ["Embedding"], None
    )


def test_optional_rules_may_match_nothing_or_be_shadowed() -> None:
    nothing = rule("{class: Nope}") + "  optional: true\n"
    shadowed = rule("{class: Router}", name="s") + "  optional: true\n"
    assert assign(rule("{class: Linear}", name="all"), nothing, shadowed).matched["s"] == ()


def test_an_operator_may_keep_children_that_other_rules_replace() -> None:
    block = rule("{class: MoE}", "{operator: block}", "block")
    inside = rule("{class: Linear}", "{operator: linear}", "inside")
    with pytest.raises(RuleError, match=r"goes away with 'model.layers.0.mlp'"):
        assign(block, inside)
    with pytest.raises(
        RuleError, match=r"'model.layers.0.mlp.shared_experts.up_proj' \(and 11 more\) goes away"
    ):
        assign(block, inside, keeps={"block": ("gate",)})
    found = assign(block, inside, keeps={"block": ("gate", "shared_experts")})
    assert len(found.matched["inside"]) == 24


def test_keep_does_not_hold_for_what_lies_inside() -> None:
    found = assign(
        rule("{class: MoE}", "keep", "block"), rule("{class: Experts}", "{operator: o}", "experts")
    )
    assert len(found.matched["experts"]) == 12


def test_a_large_model_is_assigned_in_no_time() -> None:
    modules = [
        (f"model.layers.{n}.mlp.{part}", ("Linear", "Module"), n) for n in range(61) for part in range(30)
    ]
    written = "".join(rule(rf"{{path: 'model\.layers\.\d+\.mlp\.{i}'}}", name=f"r{i}") for i in range(30))
    found = rules.parse(text(written), "f")
    rules.assign(found, modules)

    started = time.perf_counter()
    rules.assign(found, modules)
    assert time.perf_counter() - started < 2


# Arguments


def typed(arguments: str) -> Any:
    return rules.check_arguments(one(replace=f"{{operator: o, {arguments}}}"), Everything)


def test_arguments_become_the_config() -> None:
    found = one(replace="{operator: cpu_experts, weights: int4, group_size: 32, numa: 2, device: 'cuda:0'}")
    assert rules.check_arguments(found, Experts) == Experts("cuda:0", "int4", 32, "auto", 2)
    assert rules.check_arguments(one(replace="{operator: cpu_experts}"), Experts) == Experts()


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
        rules.check_arguments(one(replace="{operator: o}"), Bad)


# Schema


def valid(document_: object, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft7Validator(schema).is_valid(document_)


def test_the_schema_accepts_what_is_bundled_and_the_design_example() -> None:
    schema = rules.schema({"cpu_experts": Experts, "hybrid_experts": Everything})
    bundled = rules.schema(
        {name: operator.Config for name, operator in REGISTRY.items() if name != rules.KEEP}
    )
    jsonschema.Draft7Validator.check_schema(schema)
    json.dumps(schema)
    for path in rules.bundled().values():
        jsonschema.validate(document.from_file(path, path.name).plain(), bundled, jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"rules": []}, {"extra": 1}, {"variables": {"a b": 1}}, {"variables": {"a": [1]}},
        {"rules": [{"name": "a", "match": {"path": "x"}}]},
        {"rules": [{"name": "a", "match": {"layers": 3}, "replace": "keep"}]},
        {"rules": [{"name": "a", "match": {"path": "x", "layers": "3-"}, "replace": "keep"}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": "default"}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "nope"}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "keep", "a": 1}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "weights": "int3"}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "group_size": 96}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "wieghts": "int4"}}]},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_reading_refuses(change: dict[str, Any]) -> None:
    schema = rules.schema({"o": Experts})
    replace = {"operator": "o", "weights": "${variables.w}", "group_size": 64}
    good = {
        "version": 1,
        "variables": {"w": "int4"},
        "rules": [{"name": "a", "match": {"path": "x", "layers": "3-9, 12"}, "replace": replace}],
    }
    assert valid(good, schema)
    rules.check_arguments(rules.read(good).rules[0], Experts)
    assert not valid({**good, **change}, schema)
    with pytest.raises(RuleError):
        for found in rules.read({**good, **change}).rules:
            if found.operator != "o":
                raise rules.unknown_operator(found, ["o"])
            rules.check_arguments(found, Experts)


def test_every_registered_operator_has_a_schema() -> None:
    operators = pytest.importorskip("ktinject.operators")
    configs = {name: operator.Config for name, operator in operators.REGISTRY.items()}
    schema = rules.schema(configs)
    jsonschema.Draft7Validator.check_schema(schema)
    for name in configs:
        found = {
            "version": 1,
            "rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": name}}],
        }
        assert valid(found, schema)


# The command line


def cli(*arguments: str) -> tuple[int, str, str]:
    from ktinject.cli.rules import app

    found = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = pytest.importorskip("ktinject.operators")
    stand_in = type("CpuExperts", (), {"Config": Experts})
    monkeypatch.setitem(operators.REGISTRY, "cpu_experts", stand_in)


def test_cli_list() -> None:
    code, out, _ = cli("list")
    assert code == 0 and all(name in out for name in rules.bundled())
    code, out, _ = cli("list", "--json")
    assert code == 0 and set(json.loads(out)) == set(rules.bundled())


def test_cli_show(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(DESIGN_EXAMPLE)
    assert cli("show", "mixtral") == (0, rules.bundled()["mixtral"].read_text(), "")
    assert cli("show", str(file)) == (0, DESIGN_EXAMPLE, "")
    code, out, _ = cli("show", str(file), "--json")
    assert code == 0 and json.loads(out)["rules"][0]["match"]["layers"][0] == 3


def test_cli_show_refuses() -> None:
    code, out, err = cli("show", "mixtrall")
    assert (code, out) == (2, "") and "Did you mean 'mixtral'?" in err


@pytest.mark.usefixtures("registry")
def test_cli_check(tmp_path: Path) -> None:
    code, out, _ = cli("check", "deepseek-v3", "--set", "experts=int4")
    assert code == 0 and "weights=int4" in out and "7 rules for deepseek_v3, kimi_k2" in out
    code, out, _ = cli("check", "deepseek-v3", "--json")
    assert code == 0 and json.loads(out)["rules"][1]["arguments"] == {
        "weights": "bf16",
        "group_size": 128,
        "gpu_experts": 0,
    }
    file = tmp_path / "own.yaml"
    file.write_bytes(
        text(
            rule(replace="{operator: cpu_expert}", name="a")
            + rule(replace="{operator: cpu_experts, x: 1}", name="b")
        )
    )
    code, out, err = cli("check", str(file))
    assert (code, out) == (2, "")
    assert (
        f"{file}:3: rule 'a': unknown operator 'cpu_expert'" in err and "Did you mean 'cpu_experts'?" in err
    )
    assert f"{file}:8: rule 'b': cpu_experts has no argument 'x'" in err
    code, out, err = cli("check", str(file), "--json")
    assert (code, err) == (2, "") and len(json.loads(out)["problems"]) == 2


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("override", ["experts", "experts=[", "nope=1", "group_size=int4"])
def test_cli_check_refuses_overrides(override: str) -> None:
    code, out, err = cli("check", "deepseek-v3", "--set", override)
    assert (code, out) == (2, "") and err


@pytest.mark.usefixtures("registry")
def test_cli_schema() -> None:
    code, out, _ = cli("schema")
    schema = json.loads(out)
    jsonschema.Draft7Validator.check_schema(schema)
    assert code == 0 and valid(document.from_file(rules.bundled()["mixtral"], "f").plain(), schema)


# The rest


def test_reading_imports_no_torch() -> None:
    code = (
        "import sys, types\n"
        "package = types.ModuleType('ktinject'); package.__path__ = [sys.argv[1]]; sys.modules['ktinject'] = package\n"
        "import ktinject.rules\n"
        "ktinject.rules.parse(open(sys.argv[2], 'rb').read(), 'f')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    arguments = [str(ROOT / "ktinject"), str(rules.bundled()["mixtral"])]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def test_patterns_of_the_dialect() -> None:
    for pattern in (
        r"(?i)a",
        r"(?i:a)|b",
        r"(?:a)(?=b)(?!c)(?<=a)(?<!b)b*",
        r"[(?{]\(\{",
        r"a{2}b{1,3}c{2,}",
        r"[]{]\\",
        "(a|b)+",
    ):
        assert compiled(pattern)


REFERENCE = ROOT / "docs" / "reference" / "rules.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def test_the_examples_of_the_reference() -> None:
    """Whole documents are read, lists of rules too, Python is run, and the refusals are those of the text."""
    blocks = BLOCK.findall(REFERENCE.read_text("utf-8"))
    kinds = [kind for kind, _ in blocks]
    assert kinds.count("yaml") >= 4 and kinds.count("python") >= 1
    refused = 0
    for number, (kind, body) in enumerate(blocks):
        if kind == "yaml":
            data = (
                body
                if body.lstrip().startswith(("version:", "# yaml-language-server"))
                else f"version: 1\nrules:\n{body}"
            )
            following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            if following[0] == "text" and following[1].startswith("rules.yaml:"):
                refused += 1
                with pytest.raises(RuleError) as error:
                    for found in rules.parse(data.encode(), "rules.yaml").rules:
                        rules.check_arguments(found, REGISTRY[found.operator].Config)
                assert str(error.value).split() == following[1].split()
            else:
                for found in rules.parse(data.encode(), "rules.yaml").rules:
                    if found.operator in REGISTRY:
                        rules.check_arguments(found, REGISTRY[found.operator].Config)
        elif kind == "python":
            exec(compile(body, "rules.md", "exec"), {})
    assert refused >= 1
