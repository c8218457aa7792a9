"""Chat templates are rendered as transformers renders them, and within limits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizer import tokenizer
from waiting import exit_code

from ktinject.errors import PlanError
from ktinject.hf import pictures, templates
from ktinject.hf.templates import TemplateError, render

HELLO = [{"role": "user", "content": "Hello"}]
LIKE_A_MODEL_S = """\
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{{- message.content | trim + '\\n' }}{% continue %}{% endif %}
    {{- '<' + message.role + '>' + message.content }}
    {%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {%- set last = namespace(role=message.role) %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if thinks %}<think>{% endif %}
{%- generation %}{{ eos_token }}{% endgeneration %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def words(template: str) -> Any:
    found = tokenizer()
    found.chat_template, found.name_or_path = template, "a/folder"
    return found


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    assert templates._process._lock.acquire(timeout=1)
    templates._process._lock.release()


def test_a_template_gives_what_it_gives_in_transformers() -> None:
    found = words(LIKE_A_MODEL_S)
    call = {"function": {"name": "now", "arguments": {"zone": "Zürich"}}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    for more in ({}, {"thinks": True}):
        want = found.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True, **more)
        assert render(found, messages, tools, more) == want
    assert "Zürich" in want and want.endswith("<think><|end|><assistant>")


def test_halves_of_characters_go_through() -> None:
    assert render(words("{{ messages[0].content }}"), [{"role": "user", "content": "a\ud83d"}]) == "a\ud83d"


def test_variables_are_those_that_may_be_chosen() -> None:
    found = words(LIKE_A_MODEL_S + "{{ raise_exception(other) if strftime_now('%Y') == documents }}")
    assert templates.variables(found) == {"thinks", "other"}


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('Roles must alternate.') }}", "refuses these messages: Roles must alternate. Change"),
        ("{{ a.b }}", "fails: UndefinedError: 'a' is undefined. Mend"),
        ("{% for", "fails: TemplateSyntaxError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "fails: SecurityError"),
        ("{{ 'ab' * 600000 }}", r"gives more than 1,00\d,\d+ characters for \d+ bytes"),
        ("{{ 'a' * 2000000000 }}", "asks for more than 256 MiB of memory"),
    ],
)  # fmt: skip
def test_a_template_that_gives_no_text_is_refused(template: str, said: str) -> None:
    with pytest.raises(TemplateError, match=f"^a/folder: its chat template {said}"):
        render(words(template), HELLO)
    assert render(words("{{ messages[0].content }}"), HELLO) == "Hello", "the next one works"


TWICE = "{% set s = s ~ s %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        *(
            pytest.param(template, marks=pytest.mark.nightly)
            for template in (
                "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
                "{{ (9 ** 99999999) % 7 }}",
                "{{ messages[0].content * 1000 | int }}{% set s = 'a' %}" + TWICE * 60,
                "{{ '%999999999d' % 1 }}",
                "{{ [1] * 999999999 }}",
                "{{ 'a'.center(99999999999) }}",
                "{% set x %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
            )
        ),
    ],
)
def test_a_template_without_end_is_refused(template: str) -> None:
    for asks in (lambda found: render(found, HELLO), templates.variables):
        try:
            asks(words(template))
        except TemplateError as error:
            assert "did not end within 1.0 s" in str(error) or "more than" in str(error)
        else:
            assert asks is templates.variables, "names are found without running it"


def test_a_processor_s_template_is_looked_at_before_it_is_rendered() -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is rendered here")

    for template, error, said in (
        ("{{ 'a' * 2000000000 }}", TemplateError, "a/folder: its chat template asks for more than 256 MiB"),
        ("{{ messages[0].content.upper() }}", PlanError, "refuses these pictures: AssertionError"),
        ("{{ messages[0].content[0].text }}", PlanError, "refuses these pictures: AssertionError"),
    ):
        processor = SimpleNamespace(tokenizer=words(""), chat_template=template, apply_chat_template=fail)
        with pytest.raises(error, match=said):
            pictures.encode(processor, HELLO)


def test_a_long_conversation_has_more_time_and_room() -> None:
    long = [{"role": "user", "content": "word " * 300_000}] * 2
    found = render(words("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"), long)
    assert len(found) == 4 * 5 * 300_000


def test_a_process_that_was_ended_is_started_anew() -> None:
    found = words("{{ messages[0].content }}")
    assert render(found, HELLO) == "Hello"
    process = templates._process._running
    assert process is not None
    process.send_signal(signal.SIGINT)  # as Ctrl-C does, which is for the process that waits
    assert render(found, HELLO) == "Hello" and templates._process._running is process
    process.terminate()
    process.wait()
    assert render(found, HELLO) == "Hello" and templates._process._running is not process


def test_threads_get_their_own_texts() -> None:
    found = words("{{ messages[0].content }}")
    texts = [f"text {number} " * 2000 for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        asked = threads.map(lambda one: render(found, [{"role": "user", "content": one}]), texts)
        assert [*asked] == texts


def test_a_fork_has_a_process_of_its_own() -> None:
    found = words("{{ messages[0].content }}")
    render(found, HELLO)
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = templates._process._running is None and render(found, HELLO) == "Hello"
            templates._process.end()
        finally:
            os._exit(0 if good else 1)
    assert exit_code(child) == 0
    assert render(found, HELLO) == "Hello"


def test_an_interrupt_leaves_no_answer_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = words("{{ messages[0].content }}")
    render(found, HELLO)
    with monkeypatch.context() as patch:

        def interrupted(stream: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(templates.template_process, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(found, [{"role": "user", "content": "not this"}])
    assert render(found, HELLO) == "Hello"


def test_no_process_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    templates._process.end()
    monkeypatch.setattr(templates.sys, "executable", "/nowhere/python")
    with pytest.raises(PlanError, match="no process can be started to render chat templates"):
        render(words("a"), HELLO)
