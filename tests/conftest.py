"""What all tests share: tiny random models as folders, the way `save_pretrained` writes them, and prepared processes.

torch and transformers are imported where they are used: pytest's first process reads this file, too, and runs no test
if others do it for it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import prepared
import pytest
from _pytest.mark.expression import Expression

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# What computes with the native core: these files have the mark `numeric`, and `make test-levels` runs them at each
# instruction level that the CPU has.
NUMERIC = (
    "native/test_decoder.py",
    "native/test_kernels.py",
    "operators/test_absorbed_mla.py",
    "operators/test_cpu_*.py",
    "operators/torch_ops/test_*.py",
    "ktinject/generation/test_attention_prompts.py",
    "ktinject/generation/test_linear_prompts.py",
    "ktinject/generation/test_native_*.py",
    "ktinject/generation/test_speculation.py",
)
# What makes torch, which computes much of what results are compared with, choose as on a CPU of that level.
TORCH_LEVELS = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avxvnni": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "reference": {"ATEN_CPU_CAPABILITY": "default"},
}
VOCAB_SIZE = 257
SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    # The default of 0.02 gives logits so flat that a rounding error decides the next token.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 256,
}


def pytest_configure(config: pytest.Config) -> None:
    """What the planner chooses depends on the machine; tests are about the CPU unless GPUs are asked for: `-m gpu`."""
    if not selects_gpu_tests_alone(config.getoption("-m") or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A run in the background of a script inherits that Ctrl-C is ignored, and so would all that it starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if level := os.environ.get("KTINJECT_KERNEL"):
        os.environ |= TORCH_LEVELS.get(level, {})
        # What a test file reads about kernels while it is collected is to be what its tests find.
        from ktinject import env

        env.settings()
    # In pytest's first process, whose environment the others inherit.
    if prepared.ADDRESS not in os.environ:
        server = prepared.Server()
        os.environ[prepared.ADDRESS] = server.address
        config.add_cleanup(lambda: (server.end(), os.environ.pop(prepared.ADDRESS)))


def pytest_itemcollected(item: pytest.Item) -> None:
    if any(item.path.match(f"tests/{pattern}") for pattern in NUMERIC):
        item.add_marker("numeric")


def selects_gpu_tests_alone(expression: str) -> bool:
    """Whether `-m expression` runs a test marked gpu, and none without a mark."""
    try:
        compiled = Expression.compile(expression)
    except Exception:
        return False  # pytest itself will say what is wrong with it

    def selects(*marks: str) -> bool:
        return compiled.evaluate(lambda name, /, **_: name in marks)

    return selects("gpu") and not selects()


def pytest_collection_finish() -> None:
    """What is imported by now stays: the many collections that tests ask for need not go through it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that skipped everything has shown nothing: it ends as one that found no test."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    ran = reporter is None or any(reporter.stats.get(outcome) for outcome in ("passed", "xfailed", "xpassed"))
    if exitstatus == pytest.ExitCode.OK and not ran and not session.config.option.collectonly:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def save(folder: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> Path:
    """Write a randomly initialised model and its tokenizer to `folder`, in fp32."""
    import torch
    from byte_tokenizer import tokenizer

    torch.manual_seed(seed)
    model = model_class(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture()
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where packed caches are kept, for this test alone."""
    from ktinject import env

    monkeypatch.setenv("KTINJECT_CACHE", str(tmp_path / "cache"))
    env.settings.cache_clear()
    yield tmp_path / "cache" / "packed"
    env.settings.cache_clear()


@pytest.fixture(scope="session")
def spinning() -> Iterator[prepared.Server]:
    """Prepared processes in which OpenMP's threads wait as they do unless somebody says otherwise."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    server = prepared.Server(environ)
    yield server
    server.end()


@pytest.fixture(scope="session")
def tiny_deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLA, a dense first layer, group-limited sigmoid routing with a correction bias, a shared expert."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **SHARED,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    return save(tmp_path_factory.mktemp("models") / "tiny-deepseek-v3", DeepseekV3ForCausalLM, config)


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Softmax routing, every layer with experts, no shared expert."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SHARED,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    )
    return save(tmp_path_factory.mktemp("models") / "tiny-qwen3-moe", Qwen3MoeForCausalLM, config)
