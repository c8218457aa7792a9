"""Recorded steps of layers with compressed keys, beside transformers' own on the caches that grow with each token.

Models of one layer, whose logits differ by roundings alone; test_layer_kinds.py has one of all kinds of layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import stock
from test_layer_kinds import COMPRESSED, HEAVY, SPARSE, assert_same_windows, gpu, model_of, request
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation import compressed, compressed_probe, several
from ktinject.generation.cache import FixedCache
from ktinject.generation.cache_layers import kinds_of, tensors_of
from ktinject.generation.compressed import Steps
from ktinject.hf import compat
from ktinject.model_class import Methods, put_before
from ktinject.operators.probes.answer import Memory
from ktinject.support import SUPPORTED

torch.set_num_threads(1)
KINDS = ("sliding_attention", HEAVY, SPARSE)
# Of a row's logits. Experts round their inputs to bf16, where sums in another order become another rounding.
TOLERANCE = 1e-3
# On a GPU, of layers that take each other's roundings on. Seen: 1.8e-3.
GPU_TOLERANCE = 5e-3
V4 = pytest.mark.skipif(not compat.support("compressed"), reason="another DeepSeek-V4")


def of_kinds(*kinds: str, device: str = "cpu", **changes: Any) -> PreTrainedModel:
    routers = ["hash_moe", *["moe"] * (len(kinds) - 1)]
    given = {"num_hidden_layers": len(kinds), "layer_types": [*kinds], "mlp_layer_types": routers}
    model = model_of("deepseek_v4", {**COMPRESSED, **given, **changes}, device)
    if device == "cpu":
        model.ktinject_decoding.graphs = SUPPORTED  # its steps run on a graph's tensors
    return model


def answers(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """What recorded steps answer, and transformers' own loop."""
    asked = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**arguments, **asked), stock(model, **arguments, **asked)


def assert_same_logits(found: Any, wanted: Any, what: str, tolerance: float = TOLERANCE) -> None:
    for step, (ours, theirs) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert error.max() <= tolerance, f"{what}: step {step}, rows differ by {error.tolist()}"
    assert torch.equal(found.sequences, wanted.sequences), what


def assert_same_caches(ours: Any, theirs: Any, what: str, tolerance: float = 1e-3) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length(), what
    for mine, its in zip(ours.layers, theirs.layers, strict=True):
        for a, b in zip(tensors_of(mine), tensors_of(its), strict=True):
            assert a.shape == b.shape and (a - b).norm() <= tolerance * b.norm(), what
        assert_same_windows(mine, its)


@V4
@pytest.mark.parametrize("kind", [HEAVY, SPARSE])
def test_logits_over_many_windows(kind: str) -> None:
    """Of texts that begin in, at the end of, and before the first window; with padding, which windows count, too."""
    model = of_kinds(kind)
    for batch, length, padding in ((1, 17, 0), (3, 15, 4), (2, 2, 1), (3, 30, 7)):
        found, wanted = answers(model, request(batch, length, 20, padding=padding))
        assert model.ktinject_decoding.reason == "cpu has no CUDA graphs"
        assert_same_logits(found, wanted, f"{batch} rows of {length} tokens")
        assert_same_caches(found[compat.CACHE], wanted[compat.CACHE], f"{batch} rows of {length} tokens")


@V4
def test_a_cache_that_grows_beyond_its_first_bucket() -> None:
    model = of_kinds(HEAVY, SPARSE, max_position_embeddings=512)
    found, wanted = answers(model, request(2, 245, 30))
    assert model.ktinject_decoding.runners[2].cache.capacity == 512
    assert_same_logits(found, wanted, "two buckets")


@V4
def test_a_caller_s_cache_goes_in_and_out_at_any_token_of_a_window() -> None:
    model = of_kinds(*KINDS)
    ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
    ids = request(1, 3, 0)["input_ids"]
    for new in (2, 5, 1, 7, 3, 4):
        arguments = {**request(1, 1, new), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found = model.generate(**arguments, **{compat.CACHE: ours})
        assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: theirs}))
        assert_same_caches(ours, theirs, f"{new} tokens to {found.shape[1]}")
        ids = torch.cat([found, ids[:, :2]], dim=1)


@V4
def test_a_request_that_raises_leaves_the_windows_of_the_caller_s_cache() -> None:
    class Interrupted:
        def put(self, _: Any) -> None:
            raise KeyboardInterrupt

    model = of_kinds(HEAVY, SPARSE)
    cache, like = (DynamicCache(config=model.config) for _ in range(2))
    arguments = request(1, 9, 6, padding=0)
    found = model.generate(**arguments, **{compat.CACHE: cache})
    stock(model, **arguments, **{compat.CACHE: like})
    ids = torch.cat([found, found[:, :4]], dim=1)
    arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(KeyboardInterrupt):
        model.generate(**arguments, streamer=Interrupted(), **{compat.CACHE: cache})
    assert_same_caches(cache, like, "as before")


@V4
def test_beams_take_their_windows_along() -> None:
    model = of_kinds(*KINDS)
    arguments = {**request(2, 16, 9, padding=3), "num_beams": 3}
    found = model.generate(**arguments)
    assert "beam" in model.ktinject_decoding.last and "cpu has no" in model.ktinject_decoding.reason
    layer = DynamicCache(config=model.config).layers[-1]
    if "reorder_cache" in vars(type(layer)):  # transformers 5.17 leaves the windows of other beams
        assert torch.equal(found, stock(model, **arguments))


def test_what_a_step_does_twice_it_does_once() -> None:
    """As where a step is run before it is captured: its state is put back in between."""
    model = of_kinds(SPARSE)
    ids = request(1, 11, 0)["input_ids"]
    with torch.no_grad():
        held = model(input_ids=ids, use_cache=True)[compat.CACHE]
    cache = FixedCache(held, 256, 1, torch.device("cpu"), kinds_of(model.config))
    cache.begin(held, 11, None, None)  # the next token is the last one of a window
    steps, view = Steps(model), cache.bucket(256)

    def step() -> Tensor:
        mask = torch.where(view.masks[12], 0.0, torch.finfo(torch.float32).min)
        inputs = {"input_ids": ids[:, :1], "position_ids": cache.positions, "attention_mask": mask}
        with torch.no_grad():
            return steps(**inputs, use_cache=True, **{compat.CACHE: view}).logits

    before = [tensor.clone() for tensor in cache.state]
    first = step()
    assert any(not torch.equal(a, b) for a, b in zip(before, cache.state)), "a window was completed"
    for tensor, value in zip(cache.state, before):
        tensor.copy_(value)
    assert torch.equal(step(), first)


@V4
class TestProbe:
    def test_of_a_swapped_model(self) -> None:
        model, before = of_kinds(*KINDS), torch.get_rng_state()
        assert compressed_probe.support(model) == SUPPORTED
        assert torch.equal(torch.get_rng_state(), before), "nobody's random numbers are used up"

    def test_of_a_model_that_stands_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its passes ask its plan for devices, and a small model of the same class has none."""

        class Planned(Methods):
            def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
                assert self.ktinject.to_load
                run: Any = super()
                return run.__call__(*args, **kwargs)

        monkeypatch.setattr(compressed_probe, "_ANSWERS", Memory())
        model = of_kinds(*KINDS)
        put_before(model, Planned)
        assert compressed_probe.support(model) == SUPPORTED

    def test_sees_keys_that_are_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compressed_probe, "_ANSWERS", Memory())
        monkeypatch.setattr(compressed, "with_hidden", lambda forward: forward)
        found = compressed_probe.support(of_kinds(HEAVY))
        assert found.reason.startswith("its steps on caches of fixed size differ from its own: relative diff")

    def test_says_what_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compressed_probe, "_ANSWERS", Memory())
        monkeypatch.delattr(compressed.CompressedLayer, "update_overlap_state")
        assert "update_overlap_state" in compressed_probe.support(of_kinds(SPARSE)).reason


@V4
class TestRefused:
    def reason(self, model: PreTrainedModel) -> str:
        return compressed.model_support(model).reason

    def test_attention_that_hides_no_keys(self) -> None:
        model = of_kinds(HEAVY)
        model.config._attn_implementation = "sdpa"
        assert self.reason(model) == "attention runs as 'sdpa', which hides no compressed keys"

    def test_positions_that_depend_on_the_length(self) -> None:
        model = of_kinds(HEAVY)
        model.config.rope_parameters["compress"]["rope_type"] = "dynamic"
        assert self.reason(model).startswith("positions turn by rope_type 'dynamic'")

    def test_a_cache_of_other_windows(self) -> None:
        model = of_kinds(HEAVY)
        held = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=request(1, 11, 0)["input_ids"], **{compat.CACHE: held})
        assert compressed.length_support(held.layers, 11)
        held.layers[0].entry_count["compressor"] += 1
        found = compressed.length_support(held.layers, 11)
        assert found.reason == "layer 0: its compressed keys are not those of 11 tokens"

    def test_positions_beyond_the_tokens(self) -> None:
        model = of_kinds(HEAVY)
        arguments = request(1, 11, 4, padding=0)
        arguments["position_ids"] = torch.arange(7, 18)[None]
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert "a greater position" in model.ktinject_decoding.reason

    def test_candidates_of_prompt_lookup(self) -> None:
        model = of_kinds(HEAVY)
        arguments = {**request(1, 11, 9, padding=0)}
        wanted = stock(model, **arguments)
        assert torch.equal(model.generate(**arguments, prompt_lookup_num_tokens=3), wanted)
        found = several.known_support(model.ktinject_decoding.runners[1], None)
        assert found.reason == "a layer's compressed keys are not taken back"


@V4
class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("kinds", [*[(kind,) for kind in KINDS], KINDS], ids=[*KINDS, "all"])
    def test_captured_steps_have_the_logits_of_eager_ones(self, kinds: tuple[str, ...], batch: int) -> None:
        model = of_kinds(*kinds, device="cuda")
        for length, padding in ((17, 0), (2, 1), (30, 7)):
            arguments = request(batch, length, 24, "cuda", padding=padding if batch > 1 else 0)
            found, wanted = answers(model, arguments)
            decoding = model.ktinject_decoding
            assert decoding.last == "graph loop", decoding.reason
            what = f"{batch} rows of {length} tokens; refused parts: {decoding.fused.refused}"
            assert_same_logits(found, wanted, what, GPU_TOLERANCE)
            assert_same_caches(found[compat.CACHE], wanted[compat.CACHE], what, 1e-2)
        assert sum(runner.captures for runner in decoding.runners.values()) == 2  # steps, and the choice

    def test_a_caller_s_cache_goes_in_and_out(self) -> None:
        model = of_kinds(*KINDS, device="cuda")
        ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
        ids = request(1, 3, 0, "cuda")["input_ids"]
        for new in (2, 5, 1, 7, 3, 4):
            arguments = {
                **request(1, 1, new, "cuda"),
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
            }
            found = model.generate(**arguments, **{compat.CACHE: ours})
            assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: theirs}))
            assert new == 1 or model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
            assert_same_caches(ours, theirs, f"{new} tokens to {found.shape[1]}", 1e-2)
            ids = torch.cat([found, ids[:, :2]], dim=1)
