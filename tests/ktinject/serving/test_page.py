"""The page in a real browser: chat, what it shows beside it, keyboard, small screens, contrast.

Needs playwright and a Chromium: `pip install playwright`, then `apt-get install chromium` or `playwright install
chromium`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytest.importorskip("openai", reason="pip install 'ktinject[serve]'")

import torch  # noqa: E402
from test_server import MODEL, TEMPLATE, Running, running  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import ktinject  # noqa: E402
from ktinject.serving.gate import Limits  # noqa: E402

pytestmark = pytest.mark.browser
KEY = "a key of this test"
# Of every text that is seen: the least ratio of its colour to what is behind it, and what it is.
CONTRAST = """() => {
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const parts = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  let least = [99, ""];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.closest(":disabled, .hidden, .skip")) continue;
    let behind = node;
    while (behind && (parts(getComputedStyle(behind).backgroundColor)[3] ?? 1) === 0) behind = behind.parentElement;
    const ground = behind ? parts(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, walk.currentNode.data.trim()];
  }
  return least;
}"""
# What can be used and has no name.
NAMELESS = """() => [...document.querySelectorAll(
    "button, input, textarea, summary, [tabindex], a[href], svg[role], canvas")]
  .filter((one) => one.checkVisibility() && one.id !== "map" && one.ariaHidden !== "true")
  .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    model = ktinject.load(MODEL, devices="cpu", progress=False)
    with running(model, tokenizer, most=400, limits=Limits(key=KEY)) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = tools.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, server: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of the server, with the key; nothing is written to its console but what the test expects."""
    context = browser.new_context(**getattr(request, "param", {"viewport": {"width": 1360, "height": 860}}))
    context.add_init_script(f"sessionStorage.setItem('ktinject-key', {json.dumps(KEY)})")
    found = context.new_page()
    wrong: list[str] = []
    refused = "Failed to load resource"  # what a server refuses, as tests let it
    found.on(
        "console",
        lambda one: wrong.append(one.text) if one.type == "error" and refused not in one.text else None,
    )
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("requestfailed", lambda one: None if "/v1/" in one.url else wrong.append(one.url))
    found.goto(server.address)
    found.locator("#model", has_text="tiny").wait_for()
    yield found
    context.close()
    assert not wrong


def ask(page: Any, text: str, tokens: int) -> Any:
    """Asks, and gives the last answer, which is still being written."""
    if not page.locator("#settings").get_attribute("open") == "":
        page.click("#settings summary")
    page.fill("#most", str(tokens))
    page.fill("#temperature", "0")
    page.fill("#question", text)
    page.press("#question", "Enter")
    return page.locator(".turn.model").last


def test_an_answer_and_what_it_took(page: Any, server: Running) -> None:
    answer = ask(page, "def f(", 40)
    answer.locator(".foot").wait_for()
    given = {
        "model": "tiny",
        "max_tokens": 40,
        "temperature": 0,
        "messages": [{"role": "user", "content": "def f("}],
    }
    wanted = (
        server.client.with_options(api_key=KEY).chat.completions.create(**given).choices[0].message.content
    )
    flat = re.compile(r"\s+|[`*_]")
    assert flat.sub("", answer.locator(".text").inner_text()) == flat.sub("", wanted)
    assert re.search(r"40 tokens · first after .* tokens/s · cut at the limit of tokens", answer.inner_text())
    assert "Answer ended: 40 tokens" in page.locator("#said").inner_text()
    assert answer.get_attribute("aria-busy") is None
    page.locator("#step").wait_for()
    assert "Experts on the CPU" in page.locator("#shares").get_attribute("aria-label")
    layers = server.model.config.num_hidden_layers
    assert page.locator("#lanes .is-cpu").count() == layers
    page.locator("text=As a table").click()
    assert page.locator("#layers tr").count() == layers
    chosen = int(re.sub(r"\D", "", page.locator("#map-legend").inner_text()))
    assert chosen >= 40 * layers * server.model.config.num_experts_per_tok
    page.click("text=New chat")
    assert page.locator(".turn").count() == 0 and page.locator("#empty").is_visible()


def test_by_keyboard_alone(page: Any) -> None:
    assert page.evaluate("document.activeElement.id") == "question"
    found = []
    for _ in range(14):
        page.keyboard.press("Tab")
        found.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
            )
        )
    order = ["SUMMARY", "anew", "live", "map", "map-frame", "SUMMARY"]
    assert [name for name in found if name in order][: len(order)] == order
    page.focus("#map-frame")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.locator("#cell").inner_text().startswith("Layer 1, expert 1: on the CPU as bf16; chosen ")
    page.focus("input[name=map]:checked")
    page.keyboard.press("ArrowRight")
    assert "on a GPU" in page.locator("#map-legend").inner_text()
    answer = ask(page, "class Queue:", 400)
    answer.locator(".text p").first.wait_for()
    page.keyboard.press("Escape")
    answer.locator(".foot").wait_for()
    assert "stopped" in answer.inner_text()


def test_what_the_server_refuses_is_shown(page: Any) -> None:
    page.route(
        "**/v1/**", lambda route: route.fulfill(status=413, json={"error": {"message": "too <b>large</b>"}})
    )
    answer = ask(page, "a question", 8)
    assert answer.locator(".problem").inner_text() == "too <b>large</b>"
    assert page.input_value("#question") == "a question", "to be changed and asked again"


def test_a_key_is_asked_for(browser: Any, server: Running) -> None:
    page = browser.new_page()
    page.goto(server.address)
    page.wait_for_selector("#key[open]")
    page.fill("#secret", KEY)
    page.keyboard.press("Enter")
    page.locator("#model", has_text="tiny").wait_for()
    page.close()


@pytest.mark.parametrize(
    "page",
    [
        {"viewport": {"width": 1360, "height": 860}},
        {"viewport": {"width": 1360, "height": 860}, "color_scheme": "dark", "reduced_motion": "reduce"},
        {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
    ],
    indirect=True,
    ids=["desktop", "dark", "phone"],
)
def test_everybody_can_use_it(page: Any) -> None:
    ask(page, "import os", 12).locator(".foot").wait_for()
    small = page.locator(".views").is_visible()
    for view in ("chat", "inside") if small else ("chat",):
        if small:
            page.click(f"[data-show={view}]")
        if view == "inside":
            page.locator("#rate", has_text="0").wait_for()
        ratio, text = page.evaluate(CONTRAST)
        assert ratio >= 4.5, text
        assert page.evaluate(NAMELESS) == []
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, "nothing is scrolled sideways"
    if small:
        targets = page.evaluate(
            "[...document.querySelectorAll('.views button, #send')].map((one) => one.getBoundingClientRect())"
            ".filter((one) => one.height && one.height < 40).length"
        )
        assert targets == 0
