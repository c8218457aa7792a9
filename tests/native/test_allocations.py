"""The n-th allocation of the native core fails: MemoryError or one of our errors, and afterwards all is as it was.

native_test does the same for a layer by itself, without Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import prepared
import pytest
from trained import trained_model

pytest.importorskip("psutil")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]

COMMON = """
    import ctypes
    import psutil, torch
    import ktinject
    from ktinject import _native

    shim = ctypes.PyDLL(None)
    resident = psutil.Process().memory_info

    # nanobind writes each native object down in a table, and ends the process where there is no memory for a larger
    # one: that is in code of its own that may not throw. The table never shrinks, so it is given room here for more
    # objects than a test makes. All other allocations of the native core may fail, those of nanobind's too.
    [_native.Seen() for _ in range(4096)]

    def attempt(call, n):
        '''(what it gave, what it raised, how many allocations before one fails: < 0 if one has), on a new pool'''
        _native.set_threads(2)
        got = raised = None
        shim.arm(n)
        try:
            got = call()
        except (MemoryError, ktinject.KTInjectError) as error:
            raised = error.with_traceback(None)
        finally:
            left = shim.disarm()
        return got, raised, left
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[prepared.Server]:
    """Prepared processes whose allocations can be made to fail."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    built = tmp_path_factory.mktemp("shim") / "failing_allocations.so"
    source = HERE / "failing_allocations.cpp"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", built, "-ldl"], check=True)
    server = prepared.Server({**os.environ, "LD_PRELOAD": str(built)})
    yield server
    server.end()


def answer(shim: prepared.Server, model: Path, code: str) -> list[int]:
    """The numbers that a process prints in which allocations fail."""
    text = textwrap.dedent(COMMON) + f"PATH = {str(model)!r}\n" + textwrap.dedent(code)
    done = prepared.run(text, server=shim)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.slow
def test_every_allocation_of_a_request_may_fail(shim: prepared.Server) -> None:
    code = """
        model = ktinject.load(PATH, devices=["cpu"], progress=False)
        ids = torch.arange(5, 25)[None]
        def generate():
            mask = torch.ones_like(ids)
            return model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        want = [generate() for _ in range(3)][-1]
        n = raised = 0
        while True:
            got, error, left = attempt(generate, n)
            assert error is not None or torch.equal(got, want), n
            if left >= 0:
                break
            raised += error is not None
            if n % 4 == 0:
                got, error, _ = attempt(generate, 10**9)
                assert error is None and torch.equal(got, want), n
            n += 1
            if n == 5:
                before = resident().rss
        print(n, raised, resident().rss - before)
    """
    failed, raised, more = answer(shim, trained_model("tiny-qwen3-moe"), code)
    assert raised > 20 and raised >= failed - 5  # some allocations can be made up for
    assert more < 16 << 20


@pytest.mark.slow
@pytest.mark.parametrize("tries", [12, pytest.param(250, marks=pytest.mark.nightly)])
def test_an_allocation_of_a_load_may_fail(shim: prepared.Server, tiny_qwen3_moe: Path, tries: int) -> None:
    """Some of the many, from the first on; the model is as it was, and the next try succeeds.

    How many there are depends on which thread comes first, and some can be made up for: then the model is whole.
    """
    code = f"""
        TRIES = {tries}
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.from_pretrained(PATH)
        ids = torch.arange(5, 25)[None]
        def meta():
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        def classes(model):
            return [type(module) for module in model.modules()]
        def optimize(model):
            return ktinject.optimize(model, "auto", checkpoint=PATH, devices=["cpu"], progress=False)
        def is_whole(model):
            with torch.no_grad():
                return torch.equal(model(ids).logits, want)
        with torch.no_grad():
            want = optimize(meta())(ids).logits  # the first load also makes what later ones find made
        _, error, left = attempt(lambda: optimize(meta()), 10**9)
        assert error is None
        raised = 0
        for n in [(10**9 - left) * part // TRIES for part in range(TRIES)]:
            model = meta()
            before = classes(model)
            got, error, _ = attempt(lambda: optimize(model), n)
            raised += error is not None
            if error is None:
                assert got is model and is_whole(model), n
            else:
                assert classes(model) == before and all(p.is_meta for p in model.parameters()), n
        got, error, _ = attempt(lambda: optimize(model), 10**9) if error else (model, None, 0)
        assert got is model and error is None and is_whole(model)
        print(raised)
    """
    (raised,) = answer(shim, tiny_qwen3_moe, code)
    assert raised >= 0.8 * tries
