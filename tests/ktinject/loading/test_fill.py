"""Filling operators: in which order and in which pieces tensors are read, and how much memory that takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import prepared
import pytest
import torch
from double import EXPERTS, HeldExperts, on_meta, saved
from safetensors.torch import save_file
from test_plan import LINEAR  # registers held_linear
from transformers import PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose, WeightConverter
from waiting import LATE_SECONDS

import ktinject
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats import table
from ktinject.checkpoints.reader import Reader
from ktinject.errors import CheckpointError, OperatorError, PlanError
from ktinject.hf import models as hf
from ktinject.loading import read_ahead
from ktinject.operators.cpu_experts import CpuExperts

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture()
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """What is read from checkpoints, in order: by one thread, since several are at different tensors at once."""
    monkeypatch.setattr(read_ahead, "MOST_THREADS", 1)
    seen: list[tuple[str, int | None]] = []
    original = Reader.read

    def read(self: Reader, name: str, index: int | None = None, rows: Any = None) -> torch.Tensor:
        seen.append((name, index))
        return original(self, name, index, rows)

    monkeypatch.setattr(Reader, "read", read)
    return seen


def test_small_pieces_are_packed_by_the_threads_that_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result as by all workers together, one piece after the other."""
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    original, seen, found = CpuExperts.load, set[str](), []

    def load(self: CpuExperts, *arguments: Any) -> None:
        seen.add(threading.current_thread().name)
        original(self, *arguments)

    monkeypatch.setattr(CpuExperts, "load", load)
    for alone in (True, False):
        seen.clear()
        monkeypatch.setattr(CpuExperts, "packs_alone", alone)
        model = ktinject.load(folder, variables={"experts": "int4"}, devices="cpu", progress=False)
        assert ("ktinject-read" in seen) == alone and len(seen) == 1
        experts = next(module for module in model.modules() if isinstance(module, CpuExperts))
        found.append([experts.unpack(name) for name in ("gate_up_proj", "down_proj")])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_each_tensor_is_read_once_and_experts_in_the_order_of_the_files(
    reads: list[tuple[str, int | None]], tmp_path: Path
) -> None:
    folder = saved(models.tiny("deepseek_v3", num_hidden_layers=3), tmp_path, max_shard_size="60KB")
    model = ktinject.load(folder, [EXPERTS], progress=False)
    with Checkpoint.open(folder) as checkpoint:
        experts = [name for name in checkpoint.tensors if ".mlp.experts." in name]
        assert len({checkpoint.tensors[name].shard for name in experts}) > 2
        assert [name for name, _ in reads[: len(experts)]] == experts
        assert sorted(name for name, _ in reads) == sorted(checkpoint.names)
    assert len(model.ktinject.replacements) == 2


def test_the_format_of_a_weight_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    original = table.find

    def find(reader: Reader, key: str, *sources: Any) -> Any:
        found.append(key)
        return original(reader, key, *sources)

    monkeypatch.setattr(table, "find", find)
    folder = saved(models.tiny("deepseek_v3", num_hidden_layers=2), tmp_path)
    ktinject.load(folder, [EXPERTS], progress=False)
    with Checkpoint.open(folder) as checkpoint:
        floating = [name for name, info in checkpoint.tensors.items() if info.dtype == "F32"]
    assert sorted(found) == sorted(floating)


def test_fused_experts_are_read_one_by_one(reads: list[tuple[str, int | None]], tmp_path: Path) -> None:
    ktinject.load(saved(models.tiny("gpt_oss"), tmp_path), [EXPERTS], progress=False)
    experts = [(name, index) for name, index in reads if ".experts." in name]
    assert len(experts) == 2 * 4 * 6
    assert experts[:6] == [(experts[0][0], index) for index in range(6)]


# Forms of checkpoint that need more than putting pieces in their place


@contextmanager
def stored_as(mapping: list[Any], model: PreTrainedModel) -> Iterator[None]:
    """Let transformers believe that checkpoints of this class look otherwise."""
    with pytest.MonkeyPatch.context() as patched:
        cache = conversion_mapping._checkpoint_conversion_mapping_cache
        assert cache is not None
        patched.setitem(cache, model.config.model_type, mapping)
        yield


EXPERTS_OF = "mlp.experts"
DOWN = WeightConverter(
    f"{EXPERTS_OF}.*.down_proj.weight", f"{EXPERTS_OF}.down_proj", [MergeModulelist(dim=0)]
)
FORMS = {
    "stacked, gate and up apart": [
        WeightConverter(
            [f"{EXPERTS_OF}.gate.weight", f"{EXPERTS_OF}.up.weight"],
            f"{EXPERTS_OF}.gate_up_proj",
            [Concatenate(dim=1)],
        ),
        DOWN,
    ],
    "transposed": [
        WeightConverter(f"{EXPERTS_OF}.w13", f"{EXPERTS_OF}.gate_up_proj", [Transpose(1, 2)]),
        DOWN,
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rules", [[EXPERTS], [EXPERTS | {"replace": "keep"}]])
def test_other_forms_of_experts(form: str, rules: list[Any], tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe")
    with stored_as(FORMS[form], original):
        folder = saved(original, tmp_path)
        with Checkpoint.open(folder) as checkpoint:
            assert not any("gate_up_proj" in name for name in checkpoint.names)
        model = ktinject.load(folder, rules, progress=False)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, original(IDS).logits)


def test_a_conversion_to_another_shape_is_refused(tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe")
    with stored_as([FORMS["transposed"][0], DOWN], original):
        folder = saved(original, tmp_path)
    with stored_as(
        [WeightConverter(f"{EXPERTS_OF}.w13", f"{EXPERTS_OF}.gate_up_proj", [Transpose(0, 1)]), DOWN],
        original,
    ):
        with pytest.raises(
            CheckpointError, match=r"gate_up_proj: converted to \[40, 6, 48\], expected \[6, 48, 40\]"
        ):
            ktinject.load(folder, [EXPERTS], progress=False)


def test_what_is_stored_together_is_replaced_together(tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe", num_key_value_heads=4)
    together = [
        WeightConverter(
            "self_attn.qk_proj.weight", ["self_attn.q_proj.weight", "self_attn.k_proj.weight"], [Chunk(dim=0)]
        ),
        *conversion_mapping.get_checkpoint_conversion_mapping("qwen3_moe"),
    ]
    with stored_as(together, original):
        folder = saved(original, tmp_path)
        query = LINEAR | {"name": "query", "match": {"path": r".*\.q_proj"}}
        key = LINEAR | {"name": "key", "match": {"path": r".*\.k_proj"}}
        with pytest.raises(
            PlanError, match=r"q_proj\.weight cannot be replaced alone: .* with .*k_proj\.weight"
        ):
            ktinject.load(folder, [query], progress=False)
        for rules in ([query, key], [EXPERTS]):
            model = ktinject.load(folder, rules, progress=False)
            with torch.no_grad():
                assert torch.equal(model(IDS).logits, original(IDS).logits)


# Refusals while filling


def test_an_operator_that_does_not_take_its_weights_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)

    def load(self: HeldExperts, name: str, tensor: torch.Tensor, expert: int, part: int) -> None:
        raise OperatorError(f"{name} is not to my taste")

    monkeypatch.setattr(HeldExperts, "load", load)
    place = r"<python>:rules\[0\]: rule 'experts': model\.layers\.\d\.mlp\.experts: held_experts: "
    with pytest.raises(OperatorError, match=rf"^{place}\w+ is not to my taste$"):
        ktinject.load(folder, [EXPERTS], progress=False)


def test_an_operator_that_misses_something_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    monkeypatch.setattr(HeldExperts, "load", lambda *_: None)
    with pytest.raises(
        OperatorError, match=r": model\.layers\.0\.mlp\.experts: held_experts: gate_up_proj is not complete$"
    ):
        ktinject.load(folder, [EXPERTS], progress=False)


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(models.tiny("qwen3_moe"), tmp_path)
    model = on_meta(folder)
    original = HeldExperts.allocate

    def allocate(self: HeldExperts) -> None:
        original(self)
        with open(folder / "model.safetensors", "r+b") as file:
            file.truncate(100_000)

    monkeypatch.setattr(HeldExperts, "allocate", allocate)
    with pytest.raises(CheckpointError, match="the file changed"):
        ktinject.optimize(model, [EXPERTS], progress=False)
    assert all(parameter.is_meta for parameter in model.parameters())


# Memory and interruption, in a process of its own

PRELUDE = """
import gc, os, signal, sys, threading, time
import torch
torch.set_num_threads(1)
import ktinject
from ktinject.hf import models as hf
from ktinject.loading import read_ahead
MIB = 2**20

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

folder = sys.argv[1]
config = hf.read_config(folder)
hf.meta_model(config)(torch.zeros(1, 1, dtype=torch.long, device="meta"))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, 300 MB of bf16 in shards of 60 MB, written as published: one tensor a projection and expert."""
    folder = tmp_path_factory.mktemp("large")
    config = models.config(
        "qwen3_moe", hidden_size=512, moe_intermediate_size=768, num_experts=32, num_hidden_layers=4
    )
    config.dtype = torch.bfloat16
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    model = hf.meta_model(config, torch.bfloat16)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        path, _, leaf = name.rpartition(".")
        for expert in range(32) if path.endswith(".experts") else ():
            if leaf == "gate_up_proj":
                shapes |= {f"{path}.{expert}.{part}.weight": (768, 512) for part in ("gate_proj", "up_proj")}
            else:
                shapes[f"{path}.{expert}.down_proj.weight"] = (512, 768)
        if not path.endswith(".experts"):
            shapes[name] = tuple(tensor.shape)
    weight_map: dict[str, str] = {}
    names = sorted(shapes)
    for number in range(5):
        file = f"model-{number + 1:05d}-of-00005.safetensors"
        part = names[number * len(names) // 5 : (number + 1) * len(names) // 5]
        save_file({name: torch.randn(shapes[name]).mul_(0.02).bfloat16() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert 290e6 < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 320e6
    return folder


def measured(code: str, folder: Path) -> dict[str, float]:
    done = prepared.run(PRELUDE + code, folder)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_memory_while_filling_stays_close_to_what_is_packed(weights: str, large: Path) -> None:
    code = f"""
import json
from ktinject.loading import read_ahead
read_ahead.ROOM = 64 << 20
before = status("VmRSS")
model = ktinject.load(folder, variables={{"experts": "{weights}"}}, progress=False)
gc.collect()
peak, after = status("VmHWM"), status("VmRSS")
print(json.dumps(dict(before=before, peak=peak, after=after, bytes=model.ktinject.bytes["cpu"])))
"""
    seen = measured(code, large)
    over = (seen["peak"] - seen["before"] - seen["bytes"]) / 2**20
    left = (seen["after"] - seen["before"] - seen["bytes"]) / 2**20
    print(
        f"{weights}: {seen['bytes'] / 2**20:.0f} MiB packed; {over:.0f} MiB more while filling, {left:.0f} after"
    )
    largest_group = 3 * 512 * 768 * 2 / 2**20
    assert over < largest_group + 256
    # Of each thread that reads, the allocator keeps some.
    assert left < 96, "the bf16 copy is gone"


@pytest.mark.slow
def test_ctrl_c_takes_effect_within_a_second_and_gives_the_memory_back(large: Path) -> None:
    code = """
import json
model = hf.meta_model(config)
ids = [id(parameter) for parameter in model.parameters()]
ktinject.plan(model, "auto", checkpoint=folder)
before = status("VmRSS")
delays, left = [], []
for wait in (0.05, 0.15, 0.3, 0.5):
    sent = []
    def interrupt():
        sent.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(wait, interrupt)
    timer.start()
    try:
        ktinject.optimize(model, "auto", checkpoint=folder, progress=False)
        timer.cancel()
        model = hf.meta_model(config)  # done before the interrupt: nothing to see
        ids = [id(parameter) for parameter in model.parameters()]
    except KeyboardInterrupt:
        delays.append(time.process_time() - sent[0])
        if hasattr(model, "ktinject"):  # the call had just returned: it is done, whole
            assert not any(parameter.is_meta for parameter in model.parameters())
            model = hf.meta_model(config)
            ids = [id(parameter) for parameter in model.parameters()]
        assert [id(parameter) for parameter in model.parameters()] == ids
    gc.collect()
    # Threads that read may still give back what they had read.
    for _ in range(20):
        left_over = status("VmRSS") - before
        if left_over < 2**24:
            break
        time.sleep(0.1)
    left.append(left_over)
model = ktinject.optimize(model, "auto", checkpoint=folder, progress=False)
print(json.dumps(dict(delays=delays, left=left, before=before, rss=status("VmRSS"))))
"""
    seen: Any = measured(code, large)
    print(f"interrupted after {seen['delays']} s of computing, {[x / 2**20 for x in seen['left']]} MiB left")
    assert seen["delays"] and max(seen["delays"]) < LATE_SECONDS
    # Of each thread that reads, the allocator keeps some.
    assert max(seen["left"]) < 0.01 * seen["rss"] + 2**26
