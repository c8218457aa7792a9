"""What SGLang asks of the object for a layer's experts: arguments, results, order, deferral, failures."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import sglang_cases
import torch
from sglang_cases import EXPERTS, LAYERS, TOP_K, arguments, expected, filled, forward, inputs, is_near

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.offload.submits import SLOTS
from ktinject.sglang import KTMoEWrapper, failures, generate_gpu_experts_masks
from ktinject.sglang import layer as sglang_layer


@pytest.fixture(
    params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_failures() -> Iterator[None]:
    sglang_cases.drop_failures()
    yield
    sglang_cases.drop_failures()


def test_the_import_starts_nothing_and_sizes_can_be_told_before() -> None:
    script = """
        import sys, threading
        import torch
        from ktinject.sglang import KTMoEWrapper, generate_gpu_experts_masks
        KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
        assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4]
        assert not torch.cuda.is_initialized() and threading.active_count() == 1
        assert "transformers" not in sys.modules and "ktinject._native" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_both_engines_arguments_are_taken_where_a_model_is_built(device: str) -> None:
    """Names of SGLang, and of its fork, while tensors are made on a GPU and in bf16 unless somebody says otherwise."""
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[[1, 6]] = True
    fork = arguments() | {
        "gpu_experts_mask": mask,
        "numa_nodes": None,
        "swiglu_limit": 0.0,
        "swiglu_alpha": 0.0,
    }
    del fork["num_gpu_experts"]
    call = inputs(5, device=device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device if device != "cpu" else "meta"):
            ours, theirs = KTMoEWrapper(**arguments(num_gpu_experts=2)), KTMoEWrapper(**fork)
            for made in (ours, theirs):
                made.load_weights(torch.arange(EXPERTS, device="cpu"))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert is_near(forward(ours, call), expected(*call, on_gpu={0, 1}))
    assert is_near(forward(theirs, call), expected(*call, on_gpu={1, 6}))
    assert (ours.num_gpu_experts, theirs.num_gpu_experts, ours.layer_idx) == (2, 2, 0)
    assert torch.equal(theirs.gpu_experts_mask, mask)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpu_experts": 3}, "unknown arguments gpu_experts"),
        ({"mode": "sft"}, "LoRA on the experts of the CPU is not served"),
        ({"lora_rank": 8}, "LoRA on the experts"),
        ({"mode": "train"}, "allowed: 'inference'"),
        ({"method": "AMXINT2"}, "allowed: AMXINT4"),
        ({"method": "SYCL_GPTQ_INT4"}, "allowed: AMXINT4"),
        ({"method": "AMXINT4_SFT"}, "LoRA"),
        ({"num_gpu_experts": None}, "--kt-num-gpu-experts: found None"),
        ({"num_gpu_experts": EXPERTS + 1}, "allowed: 0 to 8"),
        ({"gpu_experts_mask": torch.ones(3, dtype=torch.bool)}, "expected [8]"),
        ({"gpu_experts_mask": torch.ones(EXPERTS, dtype=torch.bool)}, "num_gpu_experts is 0"),
        ({"max_deferred_experts_per_token": TOP_K + 1}, "allowed: 0 to 4"),
        ({"numa_nodes": [7]}, "numactl"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        ({"hidden_size": 0}, "hidden_size: found 0"),
        ({"cpuinfer_threads": 0}, "cpuinfer_threads: found 0"),
    ],
)
def test_what_is_not_known_is_refused_when_it_is_made(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OperatorError) as refused:
        KTMoEWrapper(**arguments(**wrong))
    assert said in str(refused.value)


@pytest.mark.parametrize("m", [0, 1, 5, 32, 33, 256, pytest.param(8192, marks=pytest.mark.gpu)])
def test_results_are_those_of_the_experts(device: str, m: int) -> None:
    made = filled()
    for ids in (torch.int32, torch.int64):
        for dtype in (torch.bfloat16, torch.float16):
            call = inputs(m, device=device, dtype=dtype, ids=ids)
            out = forward(made, call)
            assert (out.shape, out.dtype, out.device) == (call[0].shape, dtype, call[0].device)
            assert is_near(out, expected(*call))


def test_places_hold_the_experts_that_a_map_says(device: str) -> None:
    order = torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    x, ids, weights = inputs(9, device=device, ids=torch.int64)
    relabelled = order.to(device)[ids]
    assert torch.equal(
        forward(filled(order=order), (x, ids, weights)), forward(filled(), (x, relabelled, weights))
    )


def test_ids_that_are_no_expert_of_the_cpu_are_skipped(device: str) -> None:
    made = filled(num_gpu_experts=3)
    for m in (6, 40):
        x, ids, weights = inputs(m, device=device)
        ids[0], ids[1], ids[2, 1], ids[3, :2] = -1, 1, EXPERTS, torch.tensor([-7, 1000], dtype=torch.int32)
        out = forward(made, (x, ids, weights))
        assert is_near(out, expected(x, ids, weights, on_gpu={0, 1, 2}))
        assert not out[:2].any() and out[4:].any()


def test_what_was_handed_over_may_be_overwritten(device: str) -> None:
    made = filled()
    for m in (4, 40):
        call = inputs(m, device=device, ids=torch.int64)
        kept = [tensor.clone() for tensor in call]
        made.submit_forward(*call)
        call[1].fill_(-1)
        call[0].fill_(7)
        call[2].zero_()
        assert is_near(made.sync_forward(call[0]), expected(*kept))


def test_the_parts_of_cpu_and_gpu_are_the_whole(device: str) -> None:
    call = inputs(7, device=device)
    for count in (0, 1, EXPERTS - 1, EXPERTS):
        on_gpu, on_cpu = {*range(count)}, {*range(count, EXPERTS)}
        part = forward(filled(num_gpu_experts=count), call)
        theirs = expected(*call, on_gpu=on_cpu) if count else torch.zeros(1)
        assert is_near(part.cpu().double() + theirs, expected(*call))
        assert is_near(part, expected(*call, on_gpu=on_gpu))


def test_a_mask_that_changes_in_place_holds_from_then_on(device: str) -> None:
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[:2] = True
    made, call = filled(num_gpu_experts=None, gpu_experts_mask=mask), inputs(6, device=device)
    assert is_near(forward(made, call), expected(*call, on_gpu={0, 1}))
    made.gpu_experts_mask.copy_(mask.flip(0))
    assert is_near(forward(made, call), expected(*call, on_gpu={6, 7}))
    made.gpu_experts_mask[:] = mask
    assert is_near(forward(made, call), expected(*call, on_gpu={0, 1}))
    held = made.gpu_experts_mask
    held |= mask.flip(0)
    assert is_near(forward(made, call), expected(*call, on_gpu={0, 1, 6, 7}))
    torch.logical_and(held, mask, out=held)
    assert is_near(forward(made, call), expected(*call, on_gpu={0, 1}))
    held[1:3].logical_not_()  # a view
    assert is_near(forward(made, call), expected(*call, on_gpu={0, 2}))


def test_weights_may_be_loaded_again(device: str, tmp_path: Path) -> None:
    values = sglang_cases.tensors()
    folder = sglang_cases.saved(values, tmp_path / "model")
    made, call = filled(weight_path=str(folder)), inputs(6, device=device)
    first = forward(made, call)
    sglang_cases.saved(
        {name: 2 * value if "down" in name else value for name, value in values.items()}, folder
    )
    made.load_weights(torch.arange(EXPERTS))
    assert torch.equal(forward(made, call), 2 * first)
    assert made.describe()["weights"] == "bf16"
    assert KTMoEWrapper(**arguments(weight_path=str(folder))).describe() == {}


def late(ids: torch.Tensor, weights: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids as they are computed at once, and those that come a layer later."""
    order = weights.abs().argsort(dim=-1, descending=True, stable=True)
    later = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, order[:, ids.shape[1] - count :], True)
    return ids.masked_fill(later, -1), ids.masked_fill(~later, -1)


@pytest.mark.parametrize("count", [1, 2, TOP_K])
@pytest.mark.parametrize("on_gpu", [0, 3])
def test_deferred_experts_come_with_the_next_layer(device: str, count: int, on_gpu: int) -> None:
    others = {"max_deferred_experts_per_token": count, "num_gpu_experts": on_gpu}
    made = [
        filled(layer, **others) for layer in range(LAYERS)
    ]  # SGLang says 0 of the last; we see that it is
    theirs = {*range(on_gpu)}
    for m in (1, 5, 40):
        calls = [inputs(m, layer, device=device) for layer in range(LAYERS)]
        for layer in (0, 1):  # a pass that is aborted leaves nothing
            forward(made[layer], calls[layer])
        outs = [forward(one, call) for one, call in zip(made, calls)]
        before = torch.zeros(1, dtype=torch.float64)
        for layer, (x, ids, weights) in enumerate(calls):
            now, then = late(ids.cpu(), weights.cpu(), 0 if layer == LAYERS - 1 else count)
            want = expected(x, now, weights, layer, theirs) + before
            assert is_near(outs[layer], want)
            before = expected(x, then, weights, layer, theirs)


def test_a_failure_is_raised_by_the_next_call_and_never_a_hang(device: str) -> None:
    made, call = filled(), inputs(3, device=device)
    forward(made, call)
    _native.set_answer_timeout(0.2)
    _native.handoff_pause(True)
    try:
        with pytest.raises(OperatorError):
            forward(made, call)
            if device != "cpu":
                torch.cuda.synchronize()
                forward(made, call)
    finally:
        _native.handoff_pause(False)
        _native.set_answer_timeout(60)
    assert is_near(forward(made, call), expected(*call))


def test_where_failures_are_kept_the_result_is_nan_and_the_server_lives(device: str) -> None:
    made, call = filled(), inputs(3, device=device)
    failures.keep()
    forward(made, call)
    _native.set_answer_timeout(0.2)
    _native.handoff_pause(True)
    try:
        out = forward(made, call)
        assert out.isnan().all()
    finally:
        _native.handoff_pause(False)
        _native.set_answer_timeout(60)
    made._layer.note_failures()
    found = failures.take()
    assert found and all(text.startswith("layer 0: ") for text in found) and not failures.take()
    assert is_near(forward(made, call), expected(*call))


def test_a_thousand_steps_of_requests_that_come_and_are_cancelled(device: str) -> None:
    """The batch of each step is of another size, and some steps end within a layer, submitted or not."""
    made = [filled(layer, max_deferred_experts_per_token=2) for layer in range(LAYERS)]
    order = random.Random(0)
    calls = {m: [inputs(m, layer, device=device) for layer in range(LAYERS)] for m in (1, 2, 7, 31, 33, 150)}
    alone = {m: [forward(one, call).clone() for one, call in zip(made, given)] for m, given in calls.items()}
    held, count = _native.pinned_bytes(), 1_000 if device != "cpu" else 250
    for step in range(count):
        m = order.choice([*calls])
        ends = order.choice([None, None, None, *range(LAYERS)])
        outs = []
        for layer, (one, call) in enumerate(zip(made, calls[m])):
            if layer == ends:
                if step % 2:
                    one.submit_forward(*call, 0)
                break
            outs.append(forward(one, call))
        if step % 10 == 0 or step == count - 1:
            assert all(torch.equal(*both) for both in zip(outs, alone[m])), (step, m, ends)
    # What steps of before still hold when another needs buffers; were each lost, it would be 10 MiB and more.
    assert _native.pinned_bytes() < held + (2 << 20)
    sglang_layer._chain.handed = None
    for one in made:
        one._layer._started = None
        handoff = one._layer._handoff
        assert handoff is not None and not failures.take()
        slots = [*handoff._own.values(), *handoff._others]
        assert all(sorted(each._free) == list(range(len(each._free))) for each in slots)
        assert all(len(each._free) == SLOTS for each in handoff._own.values())


def test_misuse_is_refused() -> None:
    made = KTMoEWrapper(**arguments())
    with pytest.raises(OperatorError, match="before load_weights"):
        made.submit_forward(*inputs(1))
    made.load_weights(None)
    with pytest.raises(OperatorError, match="without a submit_forward"):
        made.sync_forward(inputs(1)[0])
    x, ids, weights = inputs(3)
    with pytest.raises(OperatorError, match="allowed: 4, num_experts_per_tok"):
        made.submit_forward(x, ids.repeat(1, 2), weights.repeat(1, 2))
    with pytest.raises(OperatorError, match="expected 8 numbers"):
        made.load_weights(torch.arange(3))
    with pytest.raises(OperatorError, match="kt-gpu-prefill-token-threshold"):
        made.submit_write_weight_scale_to_buffer(1, 0, [0], [0], [0], [0])
    for size in (-1, None, 4):  # a hint
        unlimited = filled(chunked_prefill_size=size)
        assert is_near(forward(unlimited, inputs(5)), expected(*inputs(5)))


def test_a_signal_ends_a_process_with_work_under_way() -> None:
    done = prepared.run(
        """if True:
        import os, signal, sys
        sys.path[:0] = sys.argv[1:]
        import sglang_cases
        made = sglang_cases.filled()
        call = sglang_cases.inputs(64)
        for _ in range(3):
            sglang_cases.forward(made, call)
        made.submit_forward(*call, 0)
        os.kill(os.getpid(), signal.SIGTERM)
    """,
        *Path(__file__).parents[1:3],
    )
    assert done.returncode == -15, done.stderr


def test_masks_take_the_experts_that_are_asked_for_most() -> None:
    counts = torch.tensor([[5.0, 1.0, 0.0], [2.0, 9.0, 3.0]])
    assert generate_gpu_experts_masks(counts, 3).tolist() == [[True, False, False], [False, True, True]]
    assert not generate_gpu_experts_masks(counts, 0).any() and generate_gpu_experts_masks(counts, 99).all()


def test_tensors_in_memory_are_packed_too() -> None:
    gate, up, down = (stack.bfloat16() for stack in sglang_cases.stacks().values())
    made, call = KTMoEWrapper(**arguments(weight_path="")), inputs(5)
    made.load_weights_from_tensors(gate, up, down)
    assert is_near(forward(made, call), expected(*call))


def test_the_distribution_of_its_own_answers_to_the_name_that_sglang_imports() -> None:
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
        from ktinject import sglang
        assert KTMoEWrapper is sglang.KTMoEWrapper
        assert generate_gpu_experts_masks is sglang.generate_gpu_experts_masks
    """
    folder = Path(__file__).parents[3] / "integrations" / "kt_kernel"
    done = prepared.run(textwrap.dedent(script), folder)
    assert done.returncode == 0, done.stderr
