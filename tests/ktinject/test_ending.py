"""The interpreter ends while another thread computes: at once, with its own exit code, and nothing on stderr."""

from __future__ import annotations

from pathlib import Path

import models
import prepared
import pytest
from double import saved

# Each end in a child of its own, forked off when all is imported. Computing starts in the thread's first step.
CODE = """
import os, sys, threading, time
import torch
import ktinject
from ktinject import optimize

folder = sys.argv[1]

def generate(model, going):
    class Streamer:
        def put(self, tokens): going.set()
        def end(self): pass
    while True:
        model.generate(torch.arange(3, 8)[None], max_new_tokens=300, streamer=Streamer())

def read(model, going):
    while True:
        going.set()
        with torch.no_grad():
            model(torch.arange(3, 90)[None])

def one_long_call(model, going):
    tokens = 200_000
    experts = model.model.layers[1].mlp.experts
    x, ids = torch.ones(tokens, 64), torch.zeros(tokens, 2, dtype=torch.int64)
    weights = torch.ones(tokens, 2)
    going.set()
    with torch.no_grad():
        while True:
            experts(x, ids, weights)

def end(work, how):
    model = ktinject.load(folder, devices="cpu", progress=False)
    going = threading.Event()
    threading.Thread(target=work, args=(model, going), daemon=True).start()
    going.wait()
    time.sleep(0.05)
    how(7)

for work, how in [(generate, sys.exit), (read, sys.exit), (one_long_call, sys.exit), (generate, os._exit)]:
    child = os.fork()
    if child == 0:
        end(work, how)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    size = {
        "hidden_size": 64,
        "moe_intermediate_size": 1024,
        "num_experts": 4,
        "max_position_embeddings": 512,
    }
    return saved(models.tiny("qwen3_moe", **size, eos_token_id=None), tmp_path_factory.mktemp("model"))


def test_a_daemon_thread_that_computes_lets_the_interpreter_end(folder: Path) -> None:
    found = prepared.run(CODE, folder)
    assert (found.stdout.split(), found.stderr) == (["7"] * 4, ""), found.stderr
