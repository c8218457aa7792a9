"""Several requests at once: continuous batching in the server, over a socket, beside requests that run alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_server import MODEL, TEMPLATE, Running, openai, running, slowed
from transformers import AutoTokenizer, GenerationConfig

import ktinject
from ktinject.generation import batching
from ktinject.generation.batching_sampling import Choice, _Choices
from ktinject.serving import server as serving
from ktinject.serving.batches import PAGE, Batches
from ktinject.serving.gate import Limits
from ktinject.support import Support

PROMPTS = ["def f(", "class Queue:\n    def", "import os\n", "for i in range(", "x = [", "try:\n"]
TOKENS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    model = ktinject.load(MODEL, devices="cpu", progress=False, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    limits = Limits(queue=12, key="12345678", body=20_000)
    with running(model, tokenizer, most=200, batch=4, limits=limits) as found:
        assert found.server.notes == []
        yield found


@pytest.fixture(scope="module")
def want(server: Running) -> dict[str, str]:
    return {prompt: server.written(prompt, TOKENS) for prompt in PROMPTS}


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> threading.Barrier:
    """Requests wait until so many are there."""
    barrier, generate = threading.Barrier(3), Batches.generate

    def held(*arguments: Any) -> Any:
        barrier.wait(60)
        return generate(*arguments)

    monkeypatch.setattr(Batches, "generate", held)
    return barrier


def ask(server: Running, prompt: str, stream: bool = False, **more: Any) -> str:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        **more,
    }
    if stream:
        return "".join(
            piece.choices[0].text for piece in server.client.completions.create(stream=True, **asked)
        )
    return str(server.client.completions.create(**asked).choices[0].text)


def batched(server: Running) -> int:
    """How many requests went through a batch so far."""
    return server.server._batches._number


def test_requests_at_once_are_written_as_alone(server: Running, want: dict[str, str]) -> None:
    before = batched(server)
    with ThreadPoolExecutor(12) as clients:
        found = clients.map(lambda number: ask(server, PROMPTS[number % 6], number % 2 == 0), range(14))
    assert [*found] == [want[PROMPTS[number % 6]] for number in range(14)]
    assert batched(server) > before
    running_now, waiting = (server.counted(f"ktinject_requests_{state}") for state in ("running", "waiting"))
    assert (running_now, waiting) == (0, 0)


def test_a_request_alone_runs_in_generate(server: Running, want: dict[str, str]) -> None:
    before, requests = batched(server), sum(server.model.ktinject_decoding.requests.values())
    assert ask(server, PROMPTS[0]) == want[PROMPTS[0]]
    assert batched(server) == before
    assert sum(server.model.ktinject_decoding.requests.values()) == requests + 1


def test_what_a_batch_cannot_do_is_done_between_batches(
    server: Running, want: dict[str, str], together: threading.Barrier
) -> None:
    alone = server.client.completions.create
    seeded: dict[str, Any] = {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "seed": 3,
        "temperature": 1.5,
        "max_tokens": 8,
    }
    penalised = {**seeded, "seed": None, "temperature": 0, "frequency_penalty": 0.8}
    with ThreadPoolExecutor(6) as clients:
        first = [clients.submit(alone, **seeded), clients.submit(alone, **penalised)]
        others = [clients.submit(ask, server, prompt) for prompt in PROMPTS[:4]]
        assert [other.result() for other in others] == [want[prompt] for prompt in PROMPTS[:4]]
        texts = [one.result().choices[0].text for one in first]
    with ThreadPoolExecutor(3) as clients:
        again = [clients.submit(alone, **each) for each in (seeded, penalised)]
        ask(server, PROMPTS[1])
        assert [one.result().choices[0].text for one in again] == texts


def test_stop_ends_a_request_of_a_batch(server: Running, together: threading.Barrier) -> None:
    with ThreadPoolExecutor(3) as clients:
        found = [
            clients.submit(
                server.client.completions.create,
                model="tiny",
                prompt=p,
                max_tokens=40,
                temperature=0,
                stop=stop,
            )
            for p, stop in ((PROMPTS[0], ["):"]), (PROMPTS[1], None), (PROMPTS[2], None))
        ]
        stopped = found[0].result().choices[0]
    whole = server.written(PROMPTS[0], 40)
    assert stopped.text == whole[: whole.index("):")] and stopped.finish_reason == "stop"
    assert found[1].result().usage.completion_tokens == 40


def test_a_client_that_vanishes_leaves_the_batch(
    server: Running, want: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = slowed(monkeypatch)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 200}
    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(ask, server, PROMPTS[1])
        with server.client.completions.create(stream=True, **asked) as stream:
            next(iter(stream))
            third = clients.submit(ask, server, PROMPTS[2])
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.5).completions.create(**asked)
        assert (other.result(), third.result()) == (want[PROMPTS[1]], want[PROMPTS[2]])
    assert ask(server, PROMPTS[0]) == want[PROMPTS[0]]
    while server.counted("ktinject_requests_running"):
        time.sleep(0.01)
    assert ended == ["_Cancelled", "_Cancelled"]


def test_a_next_turn_in_a_batch_reads_what_is_new(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to whole pages of the paged cache, of prompt and answer; two others keep the batch busy."""
    first = "".join(f"def f{number}(x):\n    return x + {number}\n" for number in range(24))
    count = len(server.tokenizer(first)["input_ids"])
    first_pages, cached = count // PAGE, 'ktinject_tokens_total{kind="cached"}'
    assert first_pages >= 1
    slowed(monkeypatch)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 0, "stream": True}
    before = batched(server)
    with ThreadPoolExecutor(2) as clients:
        streams = [clients.submit(server.client.completions.create, prompt=p, **asked) for p in PROMPTS[:2]]
        others = [stream.result() for stream in streams]
        while batched(server) < before + 2:
            time.sleep(0.01)
        read = [server.counted(cached)]
        turns = [first]
        for _ in range(2):
            answer = ask(server, turns[-1])
            read.append(server.counted(cached))
            turns.append(turns[-1] + answer + "\nimport os\n")
        for stream in others:
            stream.close()
    assert batched(server) == before + 4
    assert read[1] == read[0] and read[2] - read[1] == first_pages * PAGE
    monkeypatch.undo()
    assert turns[2] == turns[1] + server.written(turns[1], TOKENS) + "\nimport os\n"


def test_a_batch_that_fails_fails_its_requests_alone(
    server: Running,
    want: dict[str, str],
    together: threading.Barrier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = batching._Step.__call__
    with monkeypatch.context() as patch:
        patch.setattr(batching._Step, "__call__", lambda *_, **__: 1 / 0)
        with ThreadPoolExecutor(3) as clients:
            found = [clients.submit(ask, server, prompt) for prompt in PROMPTS[:3]]
            errors = [each.exception() for each in found]
        # Who came last may have been alone.
        assert sum(error is not None for error in errors) >= 2
        for error in filter(None, errors):
            assert isinstance(error, openai.InternalServerError)
    end = time.monotonic() + 10  # the server says so in its log when clients have their answers
    while "the batch failed" not in caplog.text and time.monotonic() < end:
        time.sleep(0.01)
    assert "the batch failed: division by zero" in caplog.text
    assert batching._Step.__call__ is step
    with ThreadPoolExecutor(3) as clients:
        assert [*clients.map(lambda p: ask(server, p), PROMPTS[:3])] == [want[p] for p in PROMPTS[:3]]


def test_a_model_that_cannot_is_served_one_request_after_the_other(
    server: Running, want: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.batching, "support", lambda model: Support.no("it has states"))
    with running(server.model, server.tokenizer, limits=Limits(key="12345678")) as found:
        assert found.server.notes == [
            "requests are computed one after the other, not in batches: it has states"
        ]
        with ThreadPoolExecutor(4) as clients:
            assert [*clients.map(lambda p: ask(found, p), PROMPTS)] == [want[p] for p in PROMPTS]
        assert batched(found) == 0


@pytest.mark.parametrize(
    "config, choice",
    [
        ({}, Choice()),
        ({"do_sample": True, "top_k": 0}, Choice(1)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, Choice(1, 0.7, 50, 0.9)),
        ({"do_sample": True, "min_p": 0.1}, None),
        ({"repetition_penalty": 1.2}, None),
        ({"num_beams": 2}, None),
        ({"min_new_tokens": 3}, None),
    ],
    ids=str,
)
def test_what_a_request_of_a_batch_may_ask(
    server: Running, config: dict[str, Any], choice: Choice | None
) -> None:
    assert Choice.of(server.model, GenerationConfig(**{"do_sample": False, "top_k": 50, **config})) == choice


def test_requests_of_a_step_choose_each_in_its_way() -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 40)
    choices = [Choice(), Choice(1, 1.0, 1), Choice(1, 1e-4), Choice(1, 1.0, 0, 1e-6), Choice(1, 50.0)]
    rows = [choice.arguments(40) for choice in choices]
    floats = {
        name: torch.tensor([row[name] for row in rows]).view(torch.int32) for name in ("temperature", "top_p")
    }
    ints = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.int32) for name in ("top_k", "samples")
    }
    arguments = torch.stack([floats["temperature"], ints["top_k"], floats["top_p"], ints["samples"]])
    chooser, found = _Choices(40), []
    for _ in range(20):
        found.append(chooser.choose(scores, arguments))
    drawn = torch.stack(found)
    assert (drawn[:, :4] == scores.argmax(-1)[:4]).all()
    assert len(drawn[:, 4].unique()) > 5
