"""How fast SGLang decodes a model of random weights with experts on the CPU, and where the GPU is in a step.

For bench_sglang_engine.py, whose docstring says what is measured.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_engine import environ_of, options_of

PROMPT = 2048
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
# Takes the place of a checkpoint's weights, in each of SGLang's processes.
FILLED = """
def drawn(model, *_, **__):
    import torch

    torch.manual_seed(0)  # what each process has whole must be the same in all
    for name, value in model.state_dict().items():
        if value.dim() > 1:
            value.normal_(std=1.0 if "embed_tokens" in name else 0.02)
        elif value.is_floating_point():
            value.fill_(0.0 if name.endswith("bias") else 1.0)


def register():
    import os
    import sys

    from ktinject.hf.on_import import when_imported
    from ktinject.sglang import wrapper

    # Else all layers would have the same router, and norms whose weights are about zero.
    loader = "sglang.srt.model_loader.loader"
    when_imported(loader, lambda: setattr(sys.modules[loader], "initialize_dummy_weights", drawn))

    def load_weights(self, physical_to_logical_map=None):
        import torch
        from ktinject.operators.cpu_experts import CpuExperts
        from ktinject.sglang.weights import plain_config, spec_of

        def normal(*shape):
            return (torch.randn(*shape, dtype=torch.float32) * 0.02).bfloat16()

        layer, given = self._layer, self.arguments
        hidden, inner = given.hidden_size, given.intermediate_size
        with torch.device("cpu"):
            torch.manual_seed(given.layer_idx)
            experts = CpuExperts(spec_of(given), plain_config(given, 0))
            experts.allocate()
            for half in range(2):
                experts.load("gate_up_proj", normal(inner, hidden), 0, half)
            experts.load("down_proj", normal(hidden, inner), 0, None)
            experts.repeat(0)  # all alike, each with memory of its own; also where this process has a part of them
            layer._take(experts, [*range(given.num_experts)])
        if given.layer_idx == 0:
            from ktinject import _native

            print(f"# {len(given.held)} experts of a layer here, {_native.threads()} threads", flush=True)

    wrapper.KTMoEWrapper.load_weights = load_weights
    if "KTINJECT_BENCH_PEER" in os.environ:
        import sglang_peer

        sglang_peer.take_over()
"""


def speed(given: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": given.layers}))
    (folder / "filled.py").write_text(FILLED)
    made = folder / "filled-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: filled\nVersion: 0\n")
    (made / "entry_points.txt").write_text("[sglang.srt.plugins]\nfilled = filled:register\n")
    sys.path.append(str(folder))
    found = [os.environ.get("PYTHONPATH", ""), str(folder)]
    if given.peer:
        os.environ["KTINJECT_BENCH_PEER"] = "1"
        found.append(str(Path(__file__).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(found).strip(os.pathsep)
    os.environ.update(environ_of(given.apart))
    import sglang

    begun = time.monotonic()
    running = sglang.Engine(
        model_path=str(folder),
        **options_of(
            given.device,
            True,
            given.tp,
            load_format="dummy",
            max_total_tokens=32768,
            max_running_requests=max(given.clients),
            chunked_prefill_size=PROMPT,
            disable_prefill_cuda_graph=True,  # to capture them takes longer than all that is measured
            kt_weight_path=str(folder),
            kt_method="AMXINT4",
            kt_num_gpu_experts=given.own[0],
        ),
    )
    print(
        f"# {'kt-kernel, ' if given.peer else ''}{given.layers} layers, {given.own[0]} experts of each on the GPU, "
        f"{given.tp} processes, started in "
        f"{time.monotonic() - begun:.0f} s",
        flush=True,
    )
    numbers = random.Random(0)

    def took(count: int, new: int, tokens: int = 32) -> float:
        asked = [[numbers.randrange(3, 150_000) for _ in range(tokens)] for _ in range(count)]
        sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
        before = time.monotonic()
        running.generate(input_ids=asked, sampling_params=sampling)
        return time.monotonic() - before

    for count in sorted(given.clients):
        took(count, 8)
        rates = [
            count * given.new / (took(count, given.new + 2) - took(count, 2)) for _ in range(given.turns)
        ]
        span = f"({min(rates):.1f} to {max(rates):.1f})"
        print(f"{count:3} clients: {statistics.median(rates):7.1f} tokens/s {span}", flush=True)
    if given.device != "cpu":
        took(1, 1, PROMPT)
        rates = [PROMPT / took(1, 1, PROMPT) for _ in range(given.turns)]
        print(f"a prompt of {PROMPT}: {statistics.median(rates):.0f} tokens/s", flush=True)
    if given.device != "cpu" and not given.peer:
        running.start_profile(output_dir=str(folder), num_steps=24, activities=["GPU"], with_stack=False)
        took(1, 40)
        print(parts(trace_in(folder), given.layers), flush=True)
    running.shutdown()


def trace_in(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that SGLang has written, or is writing."""
    for _ in range(300):
        for path in folder.glob("*-TP-0*.trace.json.gz"):  # the first process has experts on the CPU
            try:
                return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
            except (EOFError, ValueError):  # not whole yet
                pass
        time.sleep(0.1)
    raise SystemExit(f"no trace in {folder}")


def parts(events: list[dict[str, Any]], layers: int) -> str:
    """µs of a decode step. A step goes from the end of one last layer's experts to that of the next."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], "wait_kernel" in event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    ends = [end for _, end, waits in spans if waits]
    # The prompt's pass, and a step that may be cut off, are left out.
    steps = len(ends) // layers - 2
    if steps < 1:
        return f"too few steps in the trace: {len(ends)} kernels that wait for the CPU"
    first, last = ends[-1 - layers * steps], ends[-1]
    within = [span for span in spans if span[0] >= first and span[1] <= last]
    other = _covered([span for span in within if not span[2]])
    waiting = _covered(within) - other  # alone: what the next layer will ask for is guessed beside the wait
    step, *each = [value / steps for value in (last - first, waiting, other, last - first - waiting - other)]
    said = "{:.0f} waiting for the CPU, {:.0f} in other kernels, {:.0f} in none".format(*each)
    return f"a step of one client: {step:.0f} µs; {said}"


def _covered(spans: list[tuple[float, float, bool]]) -> float:
    """How long any of these runs, given in the order of their beginnings; kernels may run beside each other."""
    total, end = 0.0, -math.inf
    for start, stop, _ in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
