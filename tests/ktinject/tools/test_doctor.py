"""ktinject.tools.doctor: each thing that is not used has its reason."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from ktinject import env, measured
from ktinject.machine import Gpu, Kernel, Machine, Node
from ktinject.operators.fp8_linear import has_scaled_product
from ktinject.operators.int4_linear import Int4Linear, Int4LinearConfig
from ktinject.operators.offload import links, prefill_rates
from ktinject.tools import doctor

GIB = 2**30


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setattr(env, "settings", env.Settings)


def kernel(name: str, isa: str, reason: str = "", automatic: bool = True) -> Kernel:
    return Kernel(name, name.split("_")[-1], isa, not reason, automatic, reason)


PLAIN = Machine(
    cpu="Made Up 9000",
    cpus=tuple(range(8)),
    cpu_count=8,
    cpu_quota=None,
    threads=8,
    nodes=(Node(0, tuple(range(8)), 64 * GIB, 32 * GIB),),
    virtual_nodes=None,
    memory_bytes=64 * GIB,
    memory_available_bytes=48 * GIB,
    memory_limit_bytes=None,
    huge_pages="madvise",
    cpu_features={"avx2": True, "avx512f": True, "amx_tile": False},
    amx_permission="absent",
    kernels=(
        kernel("amx_bf16", "avx512f amx_tile", reason="this CPU has no AMX"),
        kernel("amx_int8", "avx512f amx_tile", reason="this CPU has no AMX"),
        kernel("avx512_bf16", "avx512f"),
        kernel("reference_bf16", ""),
        kernel("modelled_amx_int8", "", automatic=False),
    ),
    gpus=(),
    no_gpu="no CUDA device is visible",
    cuda_built=False,
    versions={"torch": "2.13.0"},
)


def explained(**changes) -> dict[str, doctor.Finding]:
    found = doctor.doctor(dataclasses.replace(PLAIN, **changes))
    return {finding.subject: finding for finding in found.findings}


def test_all_of_a_plain_machine_is_used():
    findings = explained()
    for subject in ("CPU", "memory", "NUMA", "huge pages"):
        assert findings[subject].reason == ""
    assert findings["CPU"].uses == "8 threads"


def test_affinity_quota_and_threads(monkeypatch):
    assert explained(cpus=(0, 5))["CPU"].reason == "the affinity mask leaves 2 of 8 CPUs"
    assert explained(cpu_quota=1.5)["CPU"].reason == "the cgroup quota is 1.5 CPUs"
    monkeypatch.setattr(env, "settings", lambda: env.Settings(threads=3))
    assert explained(threads=3)["CPU"].reason == "KTINJECT_THREADS=3"


def test_memory_limit():
    assert explained(memory_limit_bytes=8 * GIB)["memory"].reason == "the cgroup limit is 8.0 GiB"


def test_nodes():
    nodes = (Node(0, (0, 1), GIB, GIB), Node(2, (2, 3), GIB, GIB), Node(5, (), GIB, GIB))
    finding = explained(nodes=nodes, cpus=(2,))["NUMA"]
    assert finding.uses.endswith("on node 2")
    assert "node 0 has no CPU that the affinity mask leaves us" in finding.reason
    assert "node 5 has memory and no CPU" in finding.reason
    virtual = explained(virtual_nodes=4)["NUMA"]
    assert virtual.uses.startswith("4 virtual nodes")
    assert virtual.reason == "KTINJECT_NUMA=4"


def test_huge_pages():
    assert explained(huge_pages="never")["huge pages"].reason.endswith("says never")
    assert "no transparent huge pages" in explained(huge_pages="absent")["huge pages"].reason


def test_kernels():
    findings = explained()
    assert findings["bf16 weights"].uses == "avx512_bf16"
    assert findings["bf16 weights"].reason == "amx_bf16: this CPU has no AMX"
    # A kernel that only runs when it is named is no answer to a format without another one.
    assert findings["int8 weights"] == doctor.Finding(
        "int8 weights", "", "none", "amx_int8: this CPU has no AMX"
    )
    assert findings["instructions"].uses == "avx512f"
    assert findings["instructions"].reason == "no chosen kernel needs avx2; CPU or system lack amx_tile"


@pytest.mark.parametrize("name", ["reference_bf16", "modelled_amx_int8"])
def test_forced_kernel(monkeypatch, name):
    monkeypatch.setattr(env, "settings", lambda: env.Settings(kernel=name))
    finding = explained()[f"{name.split('_')[-1]} weights"]
    assert (finding.uses, finding.reason) == (name, f"KTINJECT_KERNEL={name}")


def test_a_level(monkeypatch):
    monkeypatch.setattr(env, "settings", lambda: env.Settings(level="avx2"))
    found = explained()
    assert found["bf16 weights"].reason == "KTINJECT_KERNEL=avx2"
    assert found["instructions"].reason.endswith("KTINJECT_KERNEL=avx2 allows no others")
    assert "lack" not in found["instructions"].reason


def test_refused_amx_permission():
    reason = explained(amx_permission="refused: arch_prctl: EPERM")["instructions"].reason
    assert "AMX refused: arch_prctl: EPERM, so AVX-512 does its work" in reason


def test_gpus():
    assert explained()["GPU"].reason == "no CUDA device is visible"
    finding = explained(gpus=(big(),))["GPU"]
    assert finding.has == "cuda:0 Big One, 80.0 GiB, 79.0 GiB free, sm_90"
    assert finding.uses.startswith("nothing; torch's kernels") and "without nvcc" in finding.reason
    assert "GPU int4" not in explained(gpus=(big(),))


def big(index: int = 0, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(index, "Big One", 80 * GIB, 79 * GIB, capability)


def on_gpus(*gpus: Gpu, cuda: str = "13.0") -> dict[str, doctor.Finding]:
    return explained(gpus=gpus, cuda_built=True, versions={"CUDA": cuda})


def test_what_makes_a_gpu_slower_or_shortens_waits():
    assert on_gpus(big())["GPU"].reason == "", "not known"
    roomy = dataclasses.replace(big(), block_shared_bytes=227 << 10)
    assert on_gpus(roomy)["GPU"].reason == ""
    small = dataclasses.replace(big(1, (12, 0)), block_shared_bytes=99 << 10, ends_long_kernels=True)
    reason = on_gpus(roomy, small)["GPU"].reason
    assert "cuda:1 has 99 KiB of shared memory a thread block, not 227" in reason and "cuda:0" not in reason
    assert "the driver of cuda:1 ends kernels that run for seconds" in reason
    assert "a captured step waits 1.5 s at most for the CPU's experts" in reason


def test_kernels_of_gpus():
    hopper = on_gpus(big())
    assert hopper["GPU"].uses == "our kernels and torch's"
    assert hopper["GPU int4"] == doctor.Finding(
        "GPU int4", "int4_few_sm90, int4_many_sm90; int4_linear_sm80", "int4_few_sm90, int4_many_sm90"
    )
    assert hopper["GPU fp8"].uses == "scaled product of cuBLAS"
    reason = on_gpus(big(), cuda="12.8")["GPU fp8"].reason
    assert reason == "scaled product of cuBLAS: torch was built with CUDA 12.8, not 12.9 or newer"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_kernels_of_hopper_run_on_nothing_else(capability):
    findings = on_gpus(big(capability=capability))
    version = ".".join(map(str, capability))
    assert findings["GPU int4"] == doctor.Finding(
        "GPU int4",
        "int4_linear_sm80",
        "int4_linear_sm80",
        f"int4_few_sm90, int4_many_sm90: cuda:0 has compute capability {version}, not 9.0 alone",
    )
    assert findings["GPU fp8"].uses == "unpacked when loaded, cuBLAS"
    assert findings["GPU experts"].reason == findings["GPU decode"].reason == ""


def test_a_gpu_that_is_too_old_and_one_beside_it():
    old = on_gpus(big(capability=(7, 5)))
    assert {old[f"GPU {of}"].uses for of in ("experts", "decode", "int4", "fp8")} == {"none"}
    assert "7.5, not 8.0 or newer" in old["GPU experts"].reason
    both = on_gpus(big(), big(1, (7, 5)))["GPU experts"]
    assert both.uses == "cuda:0: handoff, resident, streamed; cuda:1: none"


@pytest.mark.gpu
def test_this_gpu_runs_what_the_operators_say():
    findings = {finding.subject: finding.uses for finding in doctor.doctor().findings}
    int4 = Int4Linear.build(torch.nn.Linear(128, 64).bfloat16(), Int4LinearConfig("cuda:0")).describe()[
        "kernel"
    ]
    assert ("sm90" in findings["GPU int4"]) == ("sm90" in int4)
    assert ("scaled" in findings["GPU fp8"]) == has_scaled_product("cuda:0")


def test_what_was_measured_for_long_prompts(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "settings", lambda: env.Settings(cache=tmp_path))
    gpu = {"gpus": (big(),), "cuda_built": True}
    assert "long prompts" not in explained()
    nothing = explained(**gpu)["long prompts"]
    assert nothing.uses == "not measured yet" and str(tmp_path) in nothing.reason
    rates = prefill_rates.Rates(0.0057, ((128, 0.0041), (2048, 0.0146)), 1e-7, slowed=(1.25, 1.0))
    here = measured.this_machine("cuda:0", dataclasses.replace(PLAIN, **gpu))
    for key, values in (
        ({"machine": here, "weights": "int4 group 128", "top_k": 8}, rates.values()),
        ({"machine": here | {"driver": "older"}, "weights": "bf16", "top_k": 8}, rates.values()),
        ({"machine": here, "weights": "fp8", "top_k": 8}, {"bus_s": 0}),
    ):
        measured.save(prefill_rates.SUBJECT, key, values)
    found = explained(**gpu)["long prompts"]
    assert found.has == (
        "int4 group 128, 8 experts a token: 5.7 ms a layer over the bus, on the CPU 4.1 ms for 128, 14.6 ms for 2048 "
        "tokens; beside each other 1.25 and 1.00 times as long"
    )
    assert found.reason.startswith("2 of 3 files are damaged, or of another machine")
    assert "fastest" in found.uses
    carried = links.LinkRates(50e9, (45e9, 44e9), 200e9)
    measured.save(links.SUBJECT, {"machine": here, "bytes": 64 << 20}, carried.values())
    found = explained(**gpu)["long prompts"]
    assert found.has.endswith(
        "; chunks of 64 MiB: 50.0 GB/s over one link alone, 45.0 and 44.0 over 2 at once, 200.0 between the GPUs"
    )
    assert found.reason.startswith("2 of 4 files")


def test_as_text_and_json():
    found = doctor.doctor(PLAIN)
    lines = str(found).splitlines()
    assert "this machine has" in lines[0] and lines == [line.rstrip() for line in lines]
    assert "amx_bf16: this CPU has no AMX" in " ".join(str(found).split())
    data = json.loads(json.dumps(found.to_dict()))
    assert data["machine"]["threads"] == 8
    assert data["machine"]["kernels"][0]["reason"] == "this CPU has no AMX"
    assert set(data["findings"][0]) == {"subject", "has", "uses", "reason"}


def test_this_machine():
    assert {finding.subject for finding in doctor.doctor().findings} >= {"CPU", "bf16 weights", "GPU"}
