"""`ktinject plan` on tiny models."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import save_file
from trained import trained_model

from ktinject.rules import read as read_rules

EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in (1, 2)]


def test_as_table(ktinject, tiny_deepseek_v3):
    text = ktinject("plan", tiny_deepseek_v3).stdout
    assert "2 × DeepseekV3Experts" in text and "hybrid_experts" in text and "(everything else)" in text


def test_as_json(as_json, tiny_deepseek_v3):
    plan = as_json("plan", tiny_deepseek_v3)
    experts = [module for module in plan["modules"] if module["operator"] == "hybrid_experts"]
    assert [module["path"] for module in experts] == EXPERTS
    assert {module["runs"]["weights"] for module in experts} == {"bf16"}
    assert plan["problems"] == []


def test_variables(as_json, tiny_qwen3_moe):
    plan = as_json("plan", tiny_qwen3_moe, "--set", "experts=int4", "--set", "group_size=32")
    experts = [module for module in plan["modules"] if module["operator"] == "hybrid_experts"]
    assert {module["runs"]["weights"] for module in experts} == {"int4 group 32"}


def test_rules_of_ones_own(as_json, tiny_qwen3_moe, tmp_path):
    rules = tmp_path / "mine.yaml"
    rules.write_text(
        """version: 1
rules:
  - name: first layer only
    match: {class: Qwen3MoeExperts, layers: 0-0}
    replace: {operator: cpu_experts, weights: int8}
"""
    )
    plan = as_json("plan", tiny_qwen3_moe, "--rules", rules)
    assert [module["path"] for module in plan["modules"]] == ["model.layers.0.mlp.experts"]


def test_index_alone(as_json, tiny_deepseek_v3, tmp_path):
    """The plan of a model whose weights were never downloaded."""
    shutil.copy(tiny_deepseek_v3 / "config.json", tmp_path)
    from safetensors import safe_open

    with safe_open(tiny_deepseek_v3 / "model.safetensors", "pt") as weights:
        index = {
            "metadata": {},
            "weight_map": dict.fromkeys(weights.keys(), "model-00001-of-00001.safetensors"),
        }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = as_json("plan", tmp_path)
    assert {*EXPERTS} <= {module["path"] for module in plan["modules"]}
    assert any("index" in note for note in plan["notes"])


def test_a_plan_that_does_not_fit_is_shown_and_refused(ktinject, tiny_deepseek_v3):
    for option, read in (((), str), (("--json",), lambda text: json.loads(text)["problems"][0])):
        result = ktinject("plan", tiny_deepseek_v3, "--budget", "cpu=1KiB", *option, exit_code=2)
        assert "but the budget is 1.0 KiB" in read(result.stdout)
        assert result.stderr.startswith("ktinject: the plan does not fit:\n  cpu needs ")


def test_budgets_in_bytes_and_in_one_list(as_json, tiny_deepseek_v3):
    assert as_json("plan", tiny_deepseek_v3, "--budget", "cpu=500000000")["limits"] == {"cpu": 500_000_000}
    listed = as_json(
        "plan", tiny_deepseek_v3, "--machine", "cpu=3GB,cuda:0=2GB", "--budget", "cpu=1GB,cuda:0=1000"
    )
    assert listed["limits"] == {"cpu": 10**9, "cuda:0": 1000}


def test_a_budget_above_what_is_free_is_said(as_json, tiny_deepseek_v3):
    plan = as_json("plan", tiny_deepseek_v3, "--budget", "cpu=512TiB")
    (note,) = (note for note in plan["notes"] if "budget" in note)
    assert note.startswith("cpu: the budget is 512.0 TiB, and ") and "--machine" in note


def test_the_dtype_of_the_rest(as_json, tiny_deepseek_v3):
    sizes = [
        as_json("plan", tiny_deepseek_v3, "--dtype", dtype)["rest"]["bytes"]["cpu"]
        for dtype in ("float32", "bfloat16")
    ]
    assert sizes[1] < sizes[0]


def test_for_a_machine_that_is_not_here(ktinject, as_json, tiny_deepseek_v3):
    """More memory than this one has, and GPUs, which this one has not."""
    machine = ("--machine", "cpu=512GiB,cuda:0=24GiB,cuda:1=10GiB")
    plan = as_json("plan", tiny_deepseek_v3, *machine)
    assert plan["limits"] == {"cpu": 512 * 2**30, "cuda:0": 24 * 2**30, "cuda:1": 10 * 2**30}
    assert {module["device"] for module in plan["modules"]} == {"cuda:0"} and plan["problems"] == []
    assert any("planned for another machine" in note for note in plan["notes"])
    spread = as_json("plan", tiny_deepseek_v3, *machine, "--device", "cuda:0", "--device", "cuda:1")
    assert {module["device"] for module in spread["modules"]} == {"cuda:0", "cuda:1"}
    for values in (
        ("dense=int4", "gpu_experts=0.5", "experts=int4", "group_size=32"),
        ("dense=fp8", "gpu_experts=auto"),
    ):
        variables = [word for value in values for word in ("--set", value)]
        plan = as_json("plan", trained_model("tiny-qwen3-moe"), *machine, *variables)
        assert {"int4_linear", "fp8_linear"} & {module["operator"] for module in plan["modules"]}
    small = ktinject("plan", tiny_deepseek_v3, "--machine", "cpu=1KiB", exit_code=2)
    assert "cpu needs" in small.stderr and "cuda" not in small.stdout


@pytest.mark.gpu
def test_for_more_gpus_than_are_here(as_json):
    """What a GPU can is not asked of one that is not there."""
    count = torch.cuda.device_count() + 1
    machine = "cpu=512GiB," + ",".join(f"cuda:{index}=24GiB" for index in range(count))
    devices = [word for index in range(count) for word in ("--device", f"cuda:{index}")]
    for values in (("dense=int4", "group_size=64"), ("dense=fp8", "gpu_experts=auto"), ("gpu_experts=0.5",)):
        variables = [word for value in values for word in ("--set", value)]
        plan = as_json("plan", trained_model("tiny-qwen3-moe"), "--machine", machine, *devices, *variables)
        assert f"cuda:{count - 1}" in plan["bytes"]


OWN = """
import ktinject
from ktinject.operators import cpu_experts


@ktinject.register_operator("{name}")
class Own(cpu_experts.CpuExperts):
    pass
"""
RULES = (
    "version: 1\nrules:\n  - {{name: e, match: {{class: Qwen3MoeExperts}}, replace: {{operator: {name}}}}}\n"
)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Rules that name operators of one's own, and what registers these: a file, and a module of the current folder."""
    from ktinject.operators import REGISTRY

    before, modules = dict(REGISTRY), set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, file in (("own_by_file", "plugin.py"), ("own_by_name", "plugged.py")):
        (tmp_path / file).write_text(OWN.format(name=name))
        (tmp_path / f"{name}.yaml").write_text(RULES.format(name=name))
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    for name in {*sys.modules} - modules:
        if "plug" in name:
            del sys.modules[name]


@pytest.mark.usefixtures("own")
def test_operators_of_ones_own(ktinject, as_json, tiny_qwen3_moe):
    for rules, plugin in (("own_by_file", "./plugin.py"), ("own_by_name", "plugged")):
        assert (
            f"'{rules}'" in ktinject("plan", tiny_qwen3_moe, "--rules", f"{rules}.yaml", exit_code=2).stderr
        )
        plan = as_json("plan", tiny_qwen3_moe, "--rules", f"{rules}.yaml", "--plugin", plugin)
        assert {module["operator"] for module in plan["modules"]} == {rules}
        assert rules in ktinject("rules", "check", f"{rules}.yaml", "--plugin", plugin).stdout
    # Once more in one process: the file is not executed again, which would register its operator twice.
    ktinject("rules", "check", "own_by_file.yaml", "--plugin", "plugin.py")
    assert "own_by_name" in ktinject("rules", "schema", "--plugin", "plugged").stdout
    run = ("--rules", "own_by_file.yaml", "--plugin", "plugin.py", "--no-compare", "--max-new-tokens", 2)
    assert "own_by_file" in ktinject("run", tiny_qwen3_moe, *run).stdout


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "plugin, says",
    [
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("no_such_file.py", "FileNotFoundError"),
        ("./broken.py", "ZeroDivisionError"),
        ("a/b", "ModuleNotFoundError"),
    ],
)
def test_plugins_that_cannot_be_imported(ktinject, tmp_path, tiny_qwen3_moe, plugin, says):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for command in (("plan", tiny_qwen3_moe), ("rules", "check", "mixtral")):
        result = ktinject(*command, "--plugin", plugin, exit_code=2)
        assert (
            result.stderr.startswith(f"ktinject: --plugin {plugin}: importing it failed: ")
            and says in result.stderr
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rules", "deepseek-v9"], "deepseek-v9"),
        (["--set", "experts=int9"], "int9"),
        (["--set", "expert=int8"], "experts"),
        (["--set", "experts"], "name=value"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--budget", "24GiB"], "DEVICE=SIZE"),
        (["--budget", "cpu=1GiB", "--budget", "cpu=2GiB"], "twice"),
        (["--budget", "cpu=much"], "much"),
        (["--machine", "512GiB"], "--machine '512GiB': allowed is DEVICE=SIZE"),
        (["--machine", "cpu=1GiB,cuda:1=1GiB"], "counted from cuda:0"),
        (["--machine", "gpu=1GiB"], "found 'gpu'"),
        (["--machine", "cpu=1GiB", "--device", "cuda:0"], "the machine that is planned for has none"),
    ],
)
def test_refused(ktinject, tiny_deepseek_v3, arguments, says):
    result = ktinject("plan", tiny_deepseek_v3, *arguments, exit_code=2)
    assert says in result.stderr and result.stderr.startswith("ktinject: ") and not result.stdout
    result = ktinject("plan", tiny_deepseek_v3, *arguments, "--json", exit_code=2)
    answer = json.loads(result.stdout)
    assert answer["ok"] is False and says in "\n".join(answer["problems"])


def test_a_path_that_is_not_there(ktinject, tiny_deepseek_v3):
    """A typo of a path is no name of the Hub; every command takes the latter."""
    mistyped = tiny_deepseek_v3.with_name("tiny-deepseek")
    said = ktinject("plan", mistyped, exit_code=2).stderr
    assert "Did you mean 'tiny-deepseek-v3'?" in said and f"hf download {mistyped}" not in said
    for command in ("plan", "fit", "run", "eval", "bench", "modules", "chat", "serve"):
        said = ktinject(command, "nobody/nothing", exit_code=2).stderr
        assert "Download it with `hf download nobody/nothing`" in said


def test_what_is_asked_for_is_named(ktinject, tiny_deepseek_v3):
    said = ktinject("plan", tiny_deepseek_v3, "--context", 999_999_999, exit_code=2)
    assert "no room for 999,999,999 tokens" in said.stdout + said.stderr
    cut = ktinject("fit", tiny_deepseek_v3, "--budget", "cpu=50000GiB")
    assert "cpu: the budget is 50,000.0 GiB, and" in cut.stderr or "cpu: the budget is" in cut.stderr


def test_no_model_in_the_folder(ktinject, tmp_path):
    assert str(tmp_path) in ktinject("plan", tmp_path, exit_code=2).stderr


def test_where_each_line_comes_from(ktinject, as_json, tiny_qwen3_moe, tmp_path):
    rules = tmp_path / "mine.yaml"
    rules.write_text(
        "version: 1\nextends: qwen3-moe\nrules:\n"
        "  - name: first\n    match: {class: Qwen3MoeExperts, layers: 0}\n    replace: {operator: cpu_experts}\n"
    )
    options = ("plan", tiny_qwen3_moe, "--rules", rules, "--set", "routed experts.prefill=cpu")
    text = ktinject(*options).stdout
    assert "routed experts: prefill = cpu is set\n" in text
    attention = next(rule for rule in read_rules("qwen3-moe").rules if rule.name == "attention")
    lines = {line.split("  ")[0].strip(): line.rpartition("  ")[2].strip() for line in text.splitlines()}
    plan = as_json(*options)
    assert lines["first"].endswith(":4") and lines["attention"] == attention.where
    assert plan["extends"] == ["qwen3-moe.yaml", "auto.yaml"]
    assert plan["from"]["first"] == {"file": str(rules), "line": 4, "arguments": {}}
    assert plan["from"]["routed experts"]["arguments"]["prefill"] == "override 'routed experts.prefill'"
    assert {module["rule"]: module["where"] for module in plan["modules"]}["first"] == f"{rules}:4"


def test_explain(ktinject, as_json, tiny_deepseek_v3):
    text = ktinject("plan", tiny_deepseek_v3, "--explain", r"model\.layers\.\d+\.mlp\.experts").stdout
    router, experts, *others = read_rules("deepseek-v3").rules
    assert text.splitlines()[0] == f"{', '.join(EXPERTS)}: DeepseekV3Experts"
    assert text.splitlines()[1].startswith(f"1. 'router, exact' ({router.where}): its role is not router: ")
    assert text.splitlines()[2:4] == [
        f"2. 'routed experts' ({experts.where}): matches",
        f"{len(others)} more rules come after it",
    ]
    assert text.splitlines()[4].startswith("→ 'routed experts' replaces it by hybrid_experts: ")
    (kept,) = as_json("plan", tiny_deepseek_v3, "--explain", "model.rotary_emb")["explained"]
    assert (kept["taken_by"], kept["untried"], len(kept["tried"])) == (None, 0, 2 + len(others))
    assert all(step["why_not"] for step in kept["tried"]) and kept["outcome"].startswith("no rule takes it")


def test_explain_a_refusal(ktinject, tiny_deepseek_v3):
    """Where the plan is refused, too, one wants to know why."""
    result = ktinject(
        "plan", tiny_deepseek_v3, "--set", "routed experts.replace=keep", "--explain", EXPERTS[0]
    )
    assert "→ 'routed experts' keeps it as it is" in result.stdout
    options = ("--set", "norms.operator=cpu_linear", "--explain", "model.norm")
    result = ktinject("plan", tiny_deepseek_v3, *options, exit_code=2)
    assert "→ 'norms' would replace it by cpu_linear; refused: cpu_linear cannot replace a" in result.stdout
    assert "cannot replace a" in result.stderr
    result = ktinject("plan", tiny_deepseek_v3, "--explain", "model.layers.99", exit_code=2)
    assert "no module has this path" in result.stderr and "The closest are" in result.stderr
    result = ktinject("plan", tiny_deepseek_v3, "--explain", "(", exit_code=2)
    assert "is not a regular expression" in result.stderr


@pytest.mark.parametrize(
    ("method", "weights", "values"),
    [
        ("AMXINT4", "int4 group 32", "fp32, rounded"),
        ("amxint8", "int8", "fp32, rounded"),
        ("BF16", "bf16", "fp32, rounded"),
    ],
)
def test_the_plan_of_a_server_is_what_it_loads(as_json, tiny_qwen3_moe, method, weights, values):
    from ktinject.sglang import KTMoEWrapper

    plan = as_json("plan", tiny_qwen3_moe, "--kt-method", method, "--kt-num-gpu-experts", "1")
    config = json.loads((tiny_qwen3_moe / "config.json").read_text())
    experts = config.get("num_experts") or config["num_local_experts"]
    assert [layer["layer"] for layer in plan["layers"]] == [*range(config["num_hidden_layers"])]
    first = plan["layers"][0]
    made = KTMoEWrapper(
        layer_idx=first["layer"],
        num_experts=experts,
        num_experts_per_tok=config["num_experts_per_tok"],
        hidden_size=config["hidden_size"],
        moe_intermediate_size=config["moe_intermediate_size"],
        weight_path=str(tiny_qwen3_moe),
        num_gpu_experts=1,
        method=method,
    )
    made.load_weights()
    said = made.describe()
    assert (first["weights"], first["kernel"]) == (said["weights"], said["kernel"])
    assert first["weights"].startswith(weights.split()[0])
    assert first["experts"] == experts - 1
    assert first["values"] == values or "kept" in first["values"]
    assert 0 < first["bytes"] < made._layer._experts.footprint()["cpu"]
    assert plan["bytes"] == sum(layer["bytes"] for layer in plan["layers"])


def test_layers_that_are_alike_are_a_line(ktinject, tiny_qwen3_moe):
    text = " ".join(ktinject("plan", tiny_qwen3_moe, "--kt-method", "AMXINT8").stdout.split())
    assert (
        "layers 0 to " in text and "experts as int8" in text and "of RAM, on the GPU 0 of each layer" in text
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kt-method", "INT3"), "allowed: AMXINT4"),
        (("--kt-method", "FP8"), "allowed: fp8"),
        (("--kt-method", "BF16", "--kt-num-gpu-experts", "1000"), "the experts of a layer"),
        (("--kt-num-gpu-experts", "1"), "it needs --kt-method"),
        (("--kt-method", "BF16", "--rules", "auto"), "--rules cannot go with it"),
    ],
)
def test_a_plan_of_a_server_refuses_as_the_server(ktinject, tiny_qwen3_moe, arguments, said):
    result = ktinject("plan", tiny_qwen3_moe, *arguments, exit_code=2)
    assert said in " ".join(result.stderr.split())


def test_experts_that_sglang_does_not_hand_over(ktinject, tmp_path):
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    result = ktinject("plan", tmp_path, "--kt-method", "BF16", exit_code=2)
    assert "its experts have biases" in " ".join(result.stderr.split())
