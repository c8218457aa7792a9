"""The server over a socket, with the client that people use."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai", reason="pip install 'ktinject[serve]'")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import urllib.error  # noqa: E402
import urllib.request  # noqa: E402

from trained import trained_model  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import ktinject  # noqa: E402
from ktinject.errors import PlanError  # noqa: E402
from ktinject.serving import manager, stock  # noqa: E402
from ktinject.serving.batches import Batches  # noqa: E402
from ktinject.serving.gate import Limits  # noqa: E402
from ktinject.serving.server import Server, Settings, context_of  # noqa: E402

MODEL = trained_model("tiny-qwen3-moe")
PROMPTS = ["def f(", "class Queue:\n    def", "import os\n", "for i in range("]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    + (MODEL / "chat_template.jinja").read_text()
)


@dataclasses.dataclass
class Running:
    """A server in a thread of this process."""

    address: str
    model: Any
    tokenizer: Any
    server: Server

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="12345678", max_retries=0, timeout=60)

    def written(self, prompt: str, tokens: int) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.model.device)
        found = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return str(self.tokenizer.decode(found, skip_special_tokens=True))

    def get(self, path: str, data: bytes | None = None) -> tuple[int, str]:
        headers = {"Authorization": "Bearer 12345678", "Content-Type": "application/json"}
        asked = urllib.request.Request(self.address + path, data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def counted(self, name: str) -> float:
        lines = dict(line.rsplit(" ", 1) for line in self.get("/metrics")[1].splitlines() if line[0] != "#")
        return float(lines[name])


@contextlib.contextmanager
def running(model: Any, tokenizer: Any, **settings: Any) -> Iterator[Running]:
    server, addresses = Server(model, tokenizer, "tiny", Settings(port=0, grace=5, **settings)), []
    thread = threading.Thread(target=server.run, args=[addresses.append])
    thread.start()
    try:
        while not addresses and thread.is_alive():
            time.sleep(0.01)
        yield Running(addresses[0], model, tokenizer, server)
    finally:
        server.stop()
        thread.join(60)
    assert not thread.is_alive()


def slowed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have tokens given slowly; here will be the names of what ends requests early."""
    put, ended = manager._Watch.put, []

    def slow(watch: Any, value: torch.Tensor) -> None:
        try:
            put(watch, value)
        except Exception as error:
            ended.append(type(error).__name__)
            raise
        time.sleep(0.02)

    monkeypatch.setattr(manager._Watch, "put", slow)
    return ended


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    model = ktinject.load(MODEL, devices="cpu", progress=False)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    limits = Limits(queue=3, key="12345678", body=20_000)
    with running(model, tokenizer, most=200, batch=1, limits=limits) as found:
        yield found


def test_several_clients_get_what_generate_writes(server: Running) -> None:
    want = {prompt: server.written(prompt, 8) for prompt in PROMPTS}

    def ask(number: int) -> tuple[str, str]:
        prompt, client = PROMPTS[number % 4], server.client
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        messages = [{"role": "user", "content": prompt}]
        if number % 3 == 0:
            answer = client.completions.create(prompt=prompt, **asked)
            assert answer.usage.completion_tokens == 8
            return answer.choices[0].text, want[prompt]
        if number % 3 == 1:
            answer = client.chat.completions.create(messages=messages, **asked)
            assert answer.choices[0].finish_reason == "length" and answer.model == "tiny"
            return answer.choices[0].message.content, want[prompt]
        usage = {"include_usage": True}
        *pieces, last = client.chat.completions.create(
            messages=messages, stream=True, stream_options=usage, **asked
        )
        assert last.usage.completion_tokens == 8 and not last.choices
        return "".join(piece.choices[0].delta.content or "" for piece in pieces), want[prompt]

    with ThreadPoolExecutor(4) as clients:  # of which three wait
        found = [*clients.map(ask, range(9))]
    assert [one for one, _ in found] == [other for _, other in found]
    answer = server.client.responses.create(
        model="tiny", input=PROMPTS[0], max_output_tokens=8, temperature=0
    )
    assert answer.output_text == want[PROMPTS[0]]
    assert [model.id for model in server.client.models.list()] == ["tiny"]


def test_sampling_stop_and_tools(server: Running) -> None:
    client = server.client
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 8}
    one, two = (client.completions.create(seed=7, temperature=1.5, **asked).choices[0].text for _ in range(2))
    other = client.completions.create(seed=8, temperature=1.5, **asked).choices[0].text
    assert one == two != other
    long = {**asked, "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**long).choices[0].text
    stopped = client.completions.create(stop=["):"], **long).choices[0]
    assert stopped.text == whole[: whole.index("):")] and stopped.finish_reason == "stop"
    function = {"type": "function", "function": {"name": "what_time", "parameters": {}}}
    messages = [{"role": "user", "content": "def f("}]
    plain, tools = (
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=1, **more
        ).usage.prompt_tokens
        for more in ({}, {"tools": [function]})
    )
    assert tools > plain, "the template has seen them"


def test_refusals_and_the_next_request_works(server: Running) -> None:
    client = server.client
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 1}
    for changed, message in (
        ({"model": "other"}, "Server is pinned to 'tiny'"),
        ({"max_tokens": 201}, "this server writes at most 200"),
        ({"prompt": "a b " * 1000}, r"there is room for 1024, the answer included"),
        ({"n": 2}, "n: 2 is not served"),
        ({"prompt": "a" * 30_000}, "larger than 20000 bytes"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**{**asked, **changed})
        assert message in refused.value.message
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(**asked)
    for data in (b"", b"{", b"null", b'{"prompt": 3}', b'{"messages": 1}', b"\xff\xfe"):
        assert server.get("/v1/completions", data)[0] == 400
        assert server.get("/v1/chat/completions", data)[0] == 400
    assert server.get("/reset", b"{}")[0] == 404
    long = client.completions.create(**{**asked, "prompt": "a b " * 511, "max_tokens": 8})
    assert long.usage.total_tokens <= 1024
    assert client.completions.create(**asked).usage.completion_tokens == 1
    assert '"status": "ok"' in server.get("/health")[1]


def test_a_client_that_vanishes_ends_its_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = slowed(monkeypatch)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 200}
    with server.client.completions.create(stream=True, **asked) as stream:
        next(iter(stream))
    assert server.client.completions.create(**{**asked, "max_tokens": 1}).usage.completion_tokens == 1
    with pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=1).completions.create(**asked)
    assert server.client.completions.create(**{**asked, "max_tokens": 1}).usage.completion_tokens == 1
    assert ended == ["_Cancelled", "_Cancelled"]


def test_a_full_queue_is_429(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, generate = threading.Event(), Batches.generate

    def held(*arguments: Any) -> Any:
        let_go.wait(60)
        return generate(*arguments)

    monkeypatch.setattr(Batches, "generate", held)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 1}
    with ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(server.client.completions.create, **asked) for _ in range(4)]
        while server.counted("ktinject_requests_waiting") < 4:
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="3 requests wait already"):
            server.client.completions.create(**asked)
        let_go.set()
        assert [answer.result().usage.completion_tokens for answer in waiting] == [1] * 4
    assert server.client.completions.create(**asked).usage.completion_tokens == 1


def test_a_model_without_a_chat_template_says_so(server: Running) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = None
    with running(server.model, tokenizer) as plain:
        with pytest.raises(openai.BadRequestError, match="this model has no chat template"):
            plain.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        answer = plain.client.completions.create(model="tiny", prompt="def f(", max_tokens=2)
        assert answer.usage.completion_tokens == 2


def test_a_context_that_does_not_fit_is_said_before_the_first_request(server: Running) -> None:
    plan, model = server.model.ktinject, server.model
    assert context_of(plan, model, None) == (1024, [])
    assert context_of(plan, model, 100) == (100, [])
    with pytest.raises(PlanError, match="a context of 2000 tokens: the model was made for 1024"):
        context_of(plan, model, 2000)

    class Small:
        """The plan, with room for so many tokens."""

        def __init__(self, room: int) -> None:
            found = next(iter(plan.runtime_memory.values()))
            self.runtime_memory = {"cpu": dataclasses.replace(found, longest_request=room)}

    small: Any = Small(300)
    context, (note,) = context_of(small, model, None)
    assert context == 300 and "requests may have 300 tokens, not the 1024" in note
    with pytest.raises(PlanError, match="beside the weights, cpu has room for 300"):
        context_of(small, model, 400)
    none: Any = Small(3)
    with pytest.raises(PlanError, match="cpu has room for 3 tokens of a request"):
        context_of(none, model, None)


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "PACKAGES", ("fastapi", "not_there"))
    with pytest.raises(PlanError, match=r"needs not_there\. .*pip install 'ktinject\[serve\]'"):
        stock.require_packages()


@pytest.mark.gpu
def test_on_a_gpu_requests_run_in_the_server_s_thread() -> None:
    model = ktinject.load(MODEL, devices="cuda:0", progress=False)
    with running(model, AutoTokenizer.from_pretrained(MODEL), batch=1) as found:
        want = [found.written(prompt, 8) for prompt in PROMPTS]
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
        with ThreadPoolExecutor(4) as clients:
            answers = clients.map(
                lambda prompt: found.client.completions.create(prompt=prompt, **asked), PROMPTS
            )
        assert [answer.choices[0].text for answer in answers] == want
