"""Who waits for the pool holds nothing that others need: no GIL, no lock that a fork would take along."""

from __future__ import annotations

import inspect
import itertools
import os
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from attention import grouped
from silu_layers import silu_experts
from test_arrays import delta
from torch import Tensor
from waiting import exit_code

from ktinject import _native

SHAPE = {"gate": (48, 64), "up": (48, 64), "down": (64, 48)}


def experts(
    weights: str = "bf16", has_bias: bool = True, hidden: int = 64, inner: int = 48, group_size: int = 0
) -> _native.Experts:
    return silu_experts(3, hidden, inner, weights, group_size, has_bias)


def linear(out_features: int, in_features: int, weights: str = "bf16", group_size: int = 0) -> _native.Linear:
    return _native.Linear(
        out_features=out_features,
        in_features=in_features,
        weights=weights,
        group_size=group_size,
        has_bias=True,
        kernel="auto",
    )


def allocated(made: Any) -> Any:
    """With zeros as weights."""
    made.allocate()
    made.mark_loaded()
    return made


def forward(layer: _native.Experts, tokens: int = 3) -> Tensor:
    x = torch.linspace(-1, 1, tokens * layer.hidden_size).reshape(tokens, -1)
    out = torch.empty_like(x)
    layer.forward(x, torch.arange(tokens)[:, None] % 3, torch.ones(tokens, 1), out)
    return out


def decoder() -> Callable[[], Tensor]:
    """A step of one layer."""
    made = _native.Decoder(64, "float32")
    norm = _native.Norm(torch.ones(64), 1e-6)
    parts = [allocated(linear(64, 64)) for _ in range(4)]
    attention = _native.GroupedAttention(**grouped(*parts, heads=4, groups=4, size=16))
    unit = _native.GatedUnit(*(allocated(linear(64, 64)) for _ in range(3)))
    made.add(norm, attention, norm, unit)
    keys, values = torch.randn(2, 1, 4, 32, 16).unbind()
    cache = _native.DecoderCache([keys], [values])

    def step() -> Tensor:
        x = torch.linspace(-1, 1, 64)[None]
        out = torch.empty_like(x)
        made.forward(
            x=x,
            cos=None,
            sin=None,
            mask=None,
            position=7,
            cache=cache,
            first=0,
            last=1,
            final_norm=norm,
            out=out,
        )
        return out

    return step


def token_step() -> Callable[[], bool]:
    """From a token's number to its logits."""
    made, norm = _native.Decoder(64, "float32"), _native.Norm(torch.ones(64), 1e-6)
    unit = _native.GatedUnit(*(allocated(linear(64, 64)) for _ in range(3)))
    made.add(norm, None, None, unit)
    empty = torch.zeros(1, 1, 8, 1)
    step = _native.TokenStep(
        decoder=made,
        cache=_native.DecoderCache([empty], [empty.clone()]),
        norm=norm,
        head=allocated(linear(9, 64)),
        embeddings=torch.ones(9, 64),
        ids=torch.tensor([[5]]),
        positions=torch.tensor([[3]]),
        mask=torch.ones(8, dtype=torch.bool),
        logits=torch.zeros(1, 9),
        turns=False,
    )
    return lambda: step.run(3)


def choice() -> Any:
    result = torch.tensor([[-1], [1]])
    ends = torch.zeros(9, dtype=torch.bool)
    return _native.TokenChoice(
        ids=result[:1].clone(), result=result, length=torch.zeros(1, dtype=torch.int64), ends=ends, pad=None
    )


def taken_back() -> Callable[[], None]:
    """All but one token of a step with states of linear attention, which are then computed once more."""
    made, norm = _native.Decoder(64, "float32"), _native.Norm(torch.ones(64), 1e-6)
    unit = _native.GatedUnit(*(allocated(linear(64, 64)) for _ in range(3)))
    made.add(norm, _native.GatedDelta(**delta()), norm, unit)
    cache = _native.DecoderCache([torch.zeros(1, 96, 4)], [torch.zeros(1, 2, 16, 16)])
    call = {"cos": None, "sin": None, "mask": None, "position": 7, "first": 0, "last": 1, "final_norm": norm}
    made.forward(x=torch.ones(3, 64), cache=cache, consecutive=True, out=torch.empty(3, 64), **call)
    return lambda: made.keep(cache=cache, kept=1)


WHOLE = allocated(experts())
WHOLE.mark_loaded()
LAYER, BLOCKS, DENSE = allocated(experts()), allocated(experts("fp8")), allocated(linear(64, 48))
INTEGERS = allocated(experts("int4", inner=64, group_size=32))
FOURS = allocated(experts("nvfp4", inner=64))
SUPERBLOCKS = allocated(experts("q4_k", hidden=256, inner=256)), allocated(linear(64, 256, "q4_k"))
LAYERS = {
    name: allocated(linear(64, 64, name, 32 if name == "int4" else 0)) for name in ("fp8", "nvfp4", "int4")
}
STATE = torch.Generator().manual_seed(0).get_state()

# Each takes a turn at the pool.
TAKE: dict[str, Callable[[], Any]] = {
    "empty_call_us": lambda: _native.empty_call_us(1, 0.0, False),
    "read_bandwidth": lambda: _native.read_bandwidth(4096),
    "multiply_rate": lambda: _native.multiply_rate(_native.multiply_units()[-1]),
    "norm_rows": lambda: _native.norm_rows(
        x=torch.ones(2, 64), weight=torch.ones(64), epsilon=1e-6, out=torch.empty(2, 64)
    ),
    "choose": lambda: [
        _native.choose(scores=torch.randn(1, 9), generator=state, tokens=torch.zeros(1, dtype=torch.int64))
        for state in (None, STATE)
    ],
    "Experts.not_placed": lambda: LAYER.not_placed,
    "Experts.allocate": lambda: experts().allocate(),
    "Experts.load": lambda: LAYER.load("gate", 0, torch.ones(SHAPE["gate"])),
    "Experts.load_fp8": lambda: BLOCKS.load_fp8(
        "up", 1, torch.ones(SHAPE["up"], dtype=torch.uint8), torch.ones(1, 1)
    ),
    "Experts.load_nvfp4": lambda: FOURS.load_nvfp4(
        "up", 1, torch.ones(64, 32, dtype=torch.uint8), torch.ones(64, 4, dtype=torch.uint8), 1.0
    ),
    "Experts.load_integers": lambda: INTEGERS.load_integers(
        "up", 1, torch.ones(64, 64, dtype=torch.uint8), torch.ones(64, 2)
    ),
    "Experts.load_blocks": lambda: SUPERBLOCKS[0].load_blocks(
        "up", 1, torch.zeros(256, 144, dtype=torch.uint8)
    ),
    "Experts.load_bias": lambda: LAYER.load_bias("up", 2, torch.ones(48)),
    "Experts.repeat": lambda: LAYER.repeat(0),
    "Experts.absent": lambda: LAYER.absent(1),
    "Experts.touch": lambda: LAYER.touch(),
    "Experts.mark_loaded": lambda: LAYER.mark_loaded(),
    "Experts.release": lambda: WHOLE.release(0),
    "Experts.unpack": lambda: LAYER.unpack("down", 0, torch.empty(SHAPE["down"])),
    "Experts.unpack_bias": lambda: LAYER.unpack_bias("down", 0, torch.empty(64)),
    "Experts.forward": lambda: forward(LAYER),
    "Experts.fetch_ahead": lambda: LAYER.fetch_ahead([0]),
    "Linear.has_weight": lambda: DENSE.has_weight,
    "Linear.has_bias": lambda: DENSE.has_bias,
    "Linear.allocate": lambda: linear(64, 48).allocate(),
    "Linear.load": lambda: DENSE.load(torch.ones(64, 48)),
    "Linear.load_fp8": lambda: LAYERS["fp8"].load_fp8(
        torch.ones(64, 64, dtype=torch.uint8), torch.ones(1, 1)
    ),
    "Linear.load_nvfp4": lambda: LAYERS["nvfp4"].load_nvfp4(
        torch.ones(64, 32, dtype=torch.uint8), torch.ones(64, 4, dtype=torch.uint8), 1.0
    ),
    "Linear.load_integers": lambda: LAYERS["int4"].load_integers(
        torch.ones(64, 64, dtype=torch.uint8), torch.ones(64, 2)
    ),
    "Linear.load_blocks": lambda: SUPERBLOCKS[1].load_blocks(torch.zeros(64, 144, dtype=torch.uint8)),
    "Linear.load_bias": lambda: DENSE.load_bias(torch.ones(64)),
    "Linear.mark_loaded": lambda: DENSE.mark_loaded(),
    "Linear.unpack": lambda: DENSE.unpack(torch.empty(64, 48)),
    "Linear.unpack_bias": lambda: DENSE.unpack_bias(torch.empty(64)),
    "Linear.forward": lambda: DENSE.forward(torch.ones(2, 48), torch.empty(2, 64)),
    "convolve_prompt": lambda: _native.convolve_prompt(
        x=torch.ones(1, 3, 8), weight=torch.ones(4, 8), bias=None, silu=True, out=torch.empty(1, 3, 8)
    ),
    "delta_prompt": lambda: _native.delta_prompt(
        **dict.fromkeys("qkv", torch.ones(1, 3, 2, 8)),
        **dict.fromkeys(("g", "beta"), torch.zeros(1, 3, 2)),
        unit_length=True,
        scale=1.0,
        states=torch.zeros(1, 2, 8, 8),
        out=torch.empty(1, 3, 2, 8),
    ),
    "attend_prompt": lambda: _native.attend_prompt(
        **dict.fromkeys("qkv", torch.ones(1, 3, 2, 8)),
        mask=None,
        lowest=0.0,
        sinks=None,
        scale=1.0,
        out=torch.empty(1, 3, 2, 8),
    ),
    "Decoder.forward": lambda: decoder()(),
    "Decoder.keep": taken_back(),
    "TokenStep.run": lambda: token_step()(),
    "TokenChoice.choose": lambda: choice().choose(scores=torch.randn(1, 9), generator=STATE),
}
# These do not, or a thread of their own does it for them. A new binding belongs to one of the two.
DO_NOT = set(
    """
    cpu_features amx_permission kernels default_threads set_threads compute_alone threads sessions set_nodes nodes
    find_nodes take_outliers allowed_cpus affinity_refused memory_headroom address_headroom level2_share
    multiply_units trace_start trace_stop cuda_built cuda_devices device_limits pretend_device linear_shape int4_shape
    attention_shared_bytes blocks_at_once kernel_wait_seconds next_quiet_ns
    why_no_flags read_device handoff_wake handoff_pause
    rms_norm set_answer_timeout answer_timeout int4_blocks int4_is_measured fp8_quantise attention latent
    attention_scratch decode_linear
    fetched_bytes
    force_kernel restrict_to levels
    handoff_naps Seen.first_change choose_on_gpu exchange_state advance rotation route route_grouped
    add_from_host handoff_entries pinned_bytes gated_delta mamba2 short_convolution
    hyper_connection mix_streams compress sink_softmax turn_heads
    allow_workspace Experts.workspace_bytes uses_start uses_stop uses
    packed_version Experts.packed Linear.packed
    Experts.hidden_size Experts.count Experts.down_kernels Experts.id Experts.bytes Experts.kernels
    Experts.kernel_for Experts.shards Experts.guesses Experts.released_bytes
    Linear.bytes Linear.kernels Task.submit Task.wait Task.done Decoder.add TokenStep.turn TokenChoice.take
    NextPlace.advance
    Slots.bytes Channel.submit Channel.wait Channel.foresee Channel.check
    ExpertCache.join ExpertCache.leave ExpertCache.step ExpertCache.places ExpertCache.hold ExpertCache.release
    ExpertCache.counts CacheCounts.uses CacheCounts.hits CacheCounts.fetches CacheCounts.bytes CacheCounts.gain
    CacheCounts.moves ReusePolicy.count ReusePolicy.exchange ReusePolicy.exchanges ReusePolicy.pays ReusePolicy.gain
    ReusePolicy.uses ReusePolicy.hits
    Resident.bytes Resident.inner_width Resident.copy Resident.forward
    Int4Linear.scratch Int4Linear.forward Int4Linear.dequantise
    Streamed.packed_bytes Streamed.copy Streamed.unpack Streamed.unpack_resident Streamed.activate Streamed.sum
    """.split()
)


def bindings() -> set[str]:
    found = set()
    for name, value in vars(_native).items():
        if inspect.isclass(value):
            found |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
        elif callable(value) and not name.startswith("_"):  # not a constant
            found.add(name)
    return found


def test_it_is_known_of_every_binding_whether_it_waits_for_the_pool() -> None:
    assert bindings() == TAKE.keys() | DO_NOT


@pytest.mark.parametrize("name", TAKE)
def test_who_takes_a_turn_at_the_pool_lets_go_of_the_gil(name: str) -> None:
    """The native core refuses a turn to a caller that holds it: RuntimeError."""
    before = _native.sessions()
    TAKE[name]()
    assert _native.sessions() > before


LONG = """
    import faulthandler, math, os, sys, threading, time
    import torch
    from ktinject import _native
    sys.path[:0] = HERE
    from test_waiting import SHAPE, allocated, experts, forward

    big = allocated(experts(has_bias=False, hidden=512, inner=2048))
    def seconds(tokens):
        start = time.monotonic()
        forward(big, tokens)
        return time.monotonic() - start
    tokens = 256
    while seconds(tokens) < 0.25:  # long enough to look for Ctrl-C more than once
        tokens *= 2
    rounds = 3
    def long():
        for _ in range(rounds):
            forward(big, tokens)
    thread = threading.Thread(target=long)
"""


def alone(code: str) -> str:
    """What a process prints that may hang, but not us."""
    text = textwrap.dedent(LONG).replace(
        "HERE", repr([*map(str, Path(__file__).parents[:2])])
    ) + textwrap.dedent(code)
    answer = prepared.run(text)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_a_long_computation_and_short_ones_in_another_thread() -> None:
    """The long one asks for the GIL while it has the pool; the others wait for the pool, destructors too."""
    code = """
        small = allocated(experts())
        x, out = torch.ones(1, 64), torch.empty(1, 64)
        ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        scores, chosen, weight = torch.randn(1, 1000), torch.zeros(1, dtype=torch.int64), torch.empty(SHAPE["up"])
        turns = 0
        thread.start()
        while thread.is_alive():
            _native.choose(scores=scores, generator=None, tokens=chosen)
            small.unpack("up", 0, weight)
            task = _native.Task(small, x.data_ptr(), 0, ids.data_ptr(), True, weights.data_ptr(), out.data_ptr(), 1, 1)
            task.submit()
            del task
            turns += 1
        print(turns)
    """
    assert int(alone(code)) > 0


def test_two_threads_look_for_ctrl_c_for_the_first_time() -> None:
    """What one of them runs for it may give the GIL to the other, which must not wait for it with the GIL."""
    code = """
        import faulthandler, sys, threading, time
        sys.path[:0] = HERE
        from test_waiting import allocated, experts, forward

        big, small = allocated(experts(has_bias=False, hidden=512, inner=2048)), allocated(experts())
        looked = []
        def slow(frame, event, argument):
            if frame.f_code.co_filename == "<string>" and not looked:
                looked.append(1)
                time.sleep(0.5)  # the other thread has the GIL, and looks, too
        def long():
            sys.settrace(slow)
            end = time.monotonic() + 20
            while not looked and time.monotonic() < end:
                forward(big, 8192)
        faulthandler.dump_traceback_later(60, exit=True)
        first, second = threading.Thread(target=long), threading.Thread(target=forward, args=(small,))
        first.start()
        time.sleep(0.02)
        second.start()
        first.join()
        second.join()
        print("ended", len(looked))
    """
    here = repr([*map(str, Path(__file__).parents[:2])])
    answer = prepared.run(textwrap.dedent(code).replace("HERE", here))
    assert (answer.stdout, answer.returncode) == ("ended 1\n", 0), answer.stderr


def test_a_prompt_of_several_passes_lets_others_in_between() -> None:
    """With 64 slots a token the working memory is full early."""
    layer, other = allocated(experts(has_bias=False, hidden=8, inner=8)), allocated(experts(has_bias=False))
    x, ids, weights = torch.ones(60_000, 8), torch.full((60_000, 64), -1), torch.ones(60_000, 64)
    ids[:, :2] = 0
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            forward(other, 1)

    _native.trace_start()
    thread = threading.Thread(target=others)
    thread.start()
    try:
        layer.forward(x, ids, weights, torch.empty_like(x))
    finally:
        done.set()
        thread.join()
        spans = sorted(_native.trace_stop())
    order = [owner for _, _, owner, _ in spans]
    passes = [place for place, owner in enumerate(order) if owner == layer.id]
    assert len(passes) > 1
    assert passes[-1] - passes[0] >= len(passes)  # some of the others' lie between
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def in_a_child(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return exit_code(child)


def test_a_fork_with_a_task_under_way() -> None:
    """The child has no dispatcher to wait for: the task is lost there, and all else works."""
    small = allocated(experts())
    want = forward(small)
    x, out = torch.ones(1, 64), torch.empty(1, 64)
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)

    def submitted() -> _native.Task:
        task = _native.Task(
            small, x.data_ptr(), 0, ids.data_ptr(), True, weights.data_ptr(), out.data_ptr(), 1, 1
        )
        task.submit()
        return task

    _native.handoff_pause(True)
    try:
        task = submitted()

        def work() -> bool:
            nonlocal task
            with pytest.raises(RuntimeError, match="forked off while its parent computed"):
                task.wait()
            del task  # which waits for tasks that are under way
            mine = submitted()
            mine.wait()
            return torch.equal(forward(small), want)

        assert in_a_child(work) == 0
    finally:
        _native.handoff_pause(False)
    task.wait()


def test_forks_within_a_decode_step() -> None:
    step = decoder()
    want = step()
    stop = threading.Event()

    def decode() -> None:
        while not stop.is_set():
            step()

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        codes = [in_a_child(lambda: torch.equal(step(), want)) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    assert codes == [0] * 20
