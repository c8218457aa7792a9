"""Mutate rule documents and see that nothing but RuleError comes out.

    python tests/fuzz/fuzz_rules.py --runs 1000000 --seed 1

Every document is read; what can be read is assigned to the modules of a small model, and its arguments are
typed. One of seven is a file of KTransformers 0.x, which is migrated. Half of the mutations work on bytes, half on
tokens: the YAML layer and the meaning behind it.
A failure prints the seed, the run and the document.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY
from ktinject.rules import document
from ktinject.rules.files import Document
from ktinject.rules.language import rule_set
from ktinject.rules.migrate import migrate_bytes
from ktinject.rules.sources import with_bases
from ktinject.rules.wording import Problems
from ktinject.support import SUPPORTED, Support

SEEDS = [
    rb"""version: 1
model_types: [deepseek_v3]
variables: {experts: int4, size: 128}
rules:
  - name: routed
    match: {path: 'model\.layers\.\d+\.mlp\.experts', class: Experts, layers: 1-3}
    replace:
      operator: cpu_experts
      weights: ${variables.experts}
      group_size: ${variables.size}
""",
    rb"""version: 1
rules:
  - name: a
    match: {path: '.*\.gate'}
    replace: keep
    optional: true
  - name: b
    match: {class: Linear, layers: [1, 2]}
    replace: {operator: cpu_experts, kernel: auto, numa: 2, ratio: 0.25}
""",
    rb'''{"version": 1, "rules": [
{"name": "a", "match": {"path": "(?:model|x)\\.(a|b)*[a-z]{1,9}"}, "replace": "keep"}]}''',
    rb"""version: 1
rules:
- name: all
  match:
    path: >-
      .*experts
    layers: "1-2,3"
  replace:
    operator: cpu_experts
    per_layer: [1, 2, auto]
    device: null
""",
    rb"""version: 1
extends: base
variables: {w: int8}
rules:
  - name: merged
    match: &m {class: Experts, layers: 1}
    replace: &r {operator: cpu_experts, weights: "${variables.w}"}
  - name: aliased
    match: {<<: *m, layers: [2, 3]}
    replace: {<<: [*r, {numa: 1}], kernel: auto}
  - name: by role
    match: {role: router, inside: moe_block, path: '.*'}
    replace: keep
    optional: true
""",
    rb"""version: 1
extends: inner/middle.yaml
""",
]  # fmt: skip
# Files of KTransformers 0.x.
LEGACY = [
    rb"""- match: {name: "^model\\.layers\\.(?!.*kv_b_proj).*$", class: torch.nn.Linear}
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs: &k {generate_device: "cuda:0", prefill_device: "cuda:0", generate_op: KLinearMarlin, prefill_op: null}
- match: {name: "mlp\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {<<: *k, generate_op: KExpertsCPU, prefill_op: None, generate_device: cpu, backend: AMXInt8}
  recursive: False
- match: {name: "^model$"}
  replace:
    class: ktransformers.operators.models.KDeepseekV2Model
    kwargs: {per_layer_prefill_intput_threshold: 0, transfer_map: {30: "cuda:1"}}
- match: {name: "^model.embed_tokens|^lm_head"}
  replace: {class: default, kwargs: {generate_device: cpu}}
""",
    rb"""- match:
    class: ktransformers.models.modeling_deepseek_v3.MoEGate
  replace:
    class: ktransformers.operators.gate.KMoEGate
    kwargs:
      generate_device: "cuda:1"
- match:
    name: "^model\\.layers\\.([012])\\.self_attn$"
  replace:
    class: ktransformers.operators.attention.KDeepseekV2Attention
    kwargs: {absorb_for_prefill: true}
""",
]  # fmt: skip
# What a document may extend, in a folder of its own: "a" and "b" extend each other.
FILES = {
    "base": b"version: 1\nvariables: {w: int4}\nrules:\n- {name: base, match: {class: Linear}, replace: keep}\n",
    "inner/middle.yaml": b"version: 1\nextends: ../base\n",
    "a": b"version: 1\nextends: b\n",
    "b": b"version: 1\nextends: a\n",
    "broken": b"version: 1\nrules: [",
}
WORDS = rb"""
version model_types variables rules name match path class layers replace operator optional keep default recursive
kwargs weights group_size kernel numa device ratio Experts Linear experts mlp torch.nn.Linear ktinject.x:Y a.b.C
auto true false null None ~ yes 0 1 -1 128 1e999 010 .5 0x1f 99999999999999999999 1-3 3-1 0-99999 2-9
[1,2] ??? 0-3,90-95
extends base a b broken inner/middle.yaml .. / inner nope role inside routed_experts moe_block norm *m *r *k &m &r &k <<
generate_device prefill_op KLinearMarlin KExpertsCPU KTransformersLinear default backend llamafile transfer_map
^model $ | ^ None cuda:0 cuda xpu:1
${variables.experts} ${variables.nope} ${oc.env:HOME} ${rules} ${variables.${variables.a}} ${ \${variables.a} $
{ } [ ] , : - ? & * ! | > ' " @ % &a *a << !!python/name:os.system !!str !x --- ... %YAML
\d+ .* ( ) (?R) (?:a|a)* (a+)+ {1,99} {9} \x85 \xff "\u0000" "\ud800"
"""
TOKENS = [
    *WORDS.split(),
    *(b"", b": ", b"- ", b"\n", b"\n  ", b"\n    ", b"\n- ", b" #", b"\t", b"\r", b"\0"),
    *(b"\x85", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xed\xa0\x80"),
]
MODULES: list[rules.Module] = [
    ("", ("Model",), None),
    *(
        (f"model.layers.{layer}{tail}", (name, "Module"), layer)
        for layer in range(4)
        for tail, name in ((".mlp.gate", "Linear"), (".mlp.experts", "Experts"), (".mlp.experts.act", "SiLU"))
    ),
]
_SPLIT = re.compile(rb"(\s+|[\[\]{},:'\"]|[\w.-]+)")


@dataclass(frozen=True)
class Config:
    """Arguments of every kind that an operator may have."""

    device: str | None = "auto"
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    group_size: Literal[128, 64, 32] = 128
    kernel: str = "auto"
    numa: int | Literal["auto"] = "auto"
    ratio: float = 0.5
    per_layer: list[int | Literal["auto"]] | None = None


def mutate(data: bytes, random_: random.Random) -> bytes:
    """The document with one to four changes, to its bytes or to its tokens."""
    if random_.random() < 0.5:
        changed = bytearray(data)
        for _ in range(random_.randint(1, 4)):
            at = random_.randrange(len(changed) + 1)
            end = min(len(changed), at + random_.randint(0, 8))
            kind = random_.randrange(5)
            if kind == 0:
                changed[at:end] = b""
            elif kind == 1:
                changed[at:at] = random_.randbytes(random_.randint(1, 3))
            elif kind == 2 and at < len(changed):
                changed[at] ^= 1 << random_.randrange(8)
            elif kind == 3:
                changed[at:at] = changed[at:end] * random_.randint(1, 3)
            else:
                changed[at:at] = random_.choice(TOKENS)
        return bytes(changed)
    tokens = _SPLIT.split(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(tokens))
        kind = random_.randrange(4)
        if kind == 0:
            tokens[at] = random_.choice(TOKENS)
        elif kind == 1:
            tokens.insert(at, random_.choice(TOKENS))
        elif kind == 2:
            other = random_.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        else:
            tokens[at] = tokens[at] * random_.randint(0, 3)
    return b"".join(tokens)


def has_role(path: str, role: str) -> Support:
    """Roles by name, in place of the probes that find them in a model."""
    wanted = {"routed_experts": ".experts", "router": ".gate", "moe_block": ".mlp"}.get(role, "?")
    return SUPPORTED if path.endswith(wanted) else Support.no("it is something else")


def run(data: bytes, parser: Any) -> str:
    """How far the document came. Raises nothing unless there is a bug."""
    stage = "read"
    try:
        problems = Problems()
        root = document.from_bytes(data, "f", parser, problems)
        found = rule_set(with_bases(Document(root, "f")), None, None, problems)
        stage = "assign"
        rules.assign(found, MODULES, has_role=has_role)
        beyond = [
            rule for rule in found.rules if (rule.match.layers or {0}) - {0, 1, 2, 3} and not rule.optional
        ]
        assert not beyond, beyond
        rules.explain(found, MODULES, [MODULES[1][0], MODULES[-1][0]], has_role=has_role)
        stage = "arguments"
        for rule in found.rules:
            if rule.operator == "cpu_experts":
                rules.check_arguments(rule, Config)
    except RuleError as error:
        check(error)
        return f"refused by {stage}"
    return "accepted"


def check(error: RuleError) -> None:
    """Every refusal names a file, and can be shown with its line."""
    names = ("f:", *(f"{name}:" for name in FILES), "inner/../base:")
    for part in error.parts or (error,):
        if not str(part).startswith(names):
            raise AssertionError(f"no place in: {part}") from error
    rules.pointed(error)
    rules.places(error)


def run_legacy(data: bytes, parser: Any) -> str:
    """What became of a file of KTransformers 0.x: what comes out of `migrate` is read again."""
    try:
        found = migrate_bytes(data, "f", parser)
    except RuleError as error:
        check(error)
        return "refused by migrate"
    for problem in found.problems:
        check(problem)
    again = rules.parse(found.text.encode(), "f")
    for rule in again.rules:
        if rule.operator != rules.KEEP:
            rules.check_arguments(rule, REGISTRY[rule.operator].Config)
    return "migrated with mistakes" if found.problems else "migrated"


def fuzz(runs: int, seed: int, parser: Any = document.PARSER) -> Counter[str]:
    """Run documents that follow from the seed; counts by outcome."""
    random_ = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with files():
        for number in range(runs):
            is_legacy = random_.random() < 0.15
            data = mutate(random_.choice(LEGACY if is_legacy else SEEDS), random_)
            started = time.thread_time()
            try:
                outcomes[run_legacy(data, parser) if is_legacy else run(data, parser)] += 1
            except BaseException:
                print(f"run {number} of seed {seed}: {data!r}", file=sys.stderr)
                raise
            if time.thread_time() - started > 1.0:
                outcomes["over a second"] += 1
                print(f"slow: run {number} of seed {seed}: {data!r}", file=sys.stderr)
    return outcomes


@contextmanager
def files() -> Iterator[None]:
    """A working directory with what documents extend."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in FILES.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(data)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pure", action="store_true", help="PyYAML's own parser in place of libyaml")
    options = parser.parse_args()
    started = time.perf_counter()
    outcomes = fuzz(options.runs, options.seed, yaml.SafeLoader if options.pure else document.PARSER)
    seconds = time.perf_counter() - started
    print(f"{options.runs:,} documents in {seconds:.0f} s, seed {options.seed}")
    for outcome, count in outcomes.most_common():
        print(f"  {outcome}: {count:,}")


if __name__ == "__main__":
    main()
