"""`run --image`, `chat --image` and /image: what is written is what transformers' own recipe gives."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pictured
import prepared
import pytest
import torch
from test_cli_chat import COMMAND
from transformers import AutoModelForMultimodalLM, AutoProcessor, PreTrainedModel

import ktinject as package
from ktinject.cli.measure import Measurement, measure_unswapped
from ktinject.errors import PlanError
from ktinject.hf import pictures
from ktinject.serving.conversation import Conversation

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictured")
    pictured.write(folder)
    for seed, name in enumerate("ab"):
        pictured.picture(folder / f"{name}.png", seed)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return package.load(folder, devices="cpu", progress=False)


def asked(folder: Path, *messages: tuple[str, str, str]) -> dict[str, Any]:
    """What transformers' own recipe makes of (role, text, pictures)."""
    found = [
        {
            "role": role,
            "content": [
                *({"type": "image", "path": str(folder / f"{name}.png")} for name in names),
                {"type": "text", "text": text},
            ],
        }
        for role, text, names in messages
    ]
    processor = AutoProcessor.from_pretrained(folder)
    return processor.apply_chat_template(
        found, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def written(model: PreTrainedModel, inputs: dict[str, Any]) -> list[int]:
    out = model.generate(
        **{**inputs, "pixel_values": inputs["pixel_values"].bfloat16()}, max_new_tokens=5, do_sample=False
    )
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def test_run(ktinject, folder: Path, model: PreTrainedModel) -> None:
    words = AutoProcessor.from_pretrained(folder).tokenizer
    texts = []
    for name in "ab":
        image = folder / f"{name}.png"
        out = ktinject(
            "run", folder, "--image", image, "--max-new-tokens", 5, "--no-compare", "--device", "cpu"
        )
        wanted = written(model, asked(folder, ("user", "What is this?", name)))
        texts.append(words.decode(wanted, skip_special_tokens=True))
        assert f"\nWhat is this?\n{texts[-1]}" in out.stdout
    assert texts[0] != texts[1], "a picture that changes nothing shows nothing"


@pytest.mark.nightly
def test_the_unswapped_model_sees_the_same(folder: Path) -> None:
    message = {"role": "user", "content": "What?", "images": [folder / "a.png", folder / "b.png"]}
    ids, more = pictures.encode(pictures.load_processor(folder), [message])
    inputs = asked(folder, ("user", "What?", "ab"))
    assert ids == inputs["input_ids"][0].tolist() and more["pixel_values"].equal(inputs["pixel_values"])
    found = measure_unswapped(folder, ids, 5, dtype="auto", device_map=None, more=more)
    plain = AutoModelForMultimodalLM.from_pretrained(folder)
    assert isinstance(found, Measurement) and found.tokens == written(plain, inputs)


def test_a_conversation(folder: Path, model: PreTrainedModel) -> None:
    words = AutoProcessor.from_pretrained(folder).tokenizer

    def chat() -> Conversation:
        return Conversation(model, words, longest=5, do_sample=False)

    def text(*messages: tuple[str, str, str]) -> str:
        return str(words.decode(written(model, asked(folder, *messages)), skip_special_tokens=True))

    def silent(piece: str) -> None:
        pass

    talk = chat()
    first = talk.ask("What?", silent, [str(folder / "a.png")])
    assert first.text == text(("user", "What?", "a"))
    turns = [("user", "What?", "a"), ("assistant", first.text, ""), ("user", "And?", "")]
    second = talk.ask("And?", silent)
    assert second.text == text(*turns) and second.read == second.prompt, "all of it is read again"
    talk.undo(), talk.undo()
    assert talk.ask("Hello", silent).text == chat().ask("Hello", silent).text, (
        "nothing of the picture is left"
    )
    with pytest.raises(PlanError, match="no such file"):
        talk.ask("What?", silent, [str(folder / "c.png")])
    assert talk.question == {"role": "user", "content": "Hello"}


def test_chat(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = [
        "/image", f"/image {folder / 'c.png'}", f"/image {folder / 'config.json'}", f"/image {folder / 'b.png'}",
        "What?", "/again", f"/save {saved}", "/clear", f"/load {saved}", "/again",
    ]  # fmt: skip
    arguments = ["chat", folder, "--image", folder / "a.png", "--max-new-tokens", 3, "--temperature", 0]
    done = prepared.run(COMMAND, *arguments, "--device", "cpu", input="\n".join(lines) + "\n", check=True)
    assert "/image: name a picture." in done.stderr and "c.png: there is no such file" in done.stderr
    assert "config.json: it cannot be read as a picture" in done.stderr
    question, answer = json.loads(saved.read_text())
    assert question["images"] == [str(folder / "a.png"), str(folder / "b.png")]
    assert done.stdout == f"{answer['content']}\n" * 3


def test_what_is_refused(
    ktinject, tiny_qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ktinject("run", tiny_qwen3_moe, "--image", "a.png", exit_code=2).stderr
    assert "Qwen3MoeForCausalLM reads text alone" in text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(package.CheckpointError, match="there is no processor of pictures"):
        pictures.load_processor(tiny_qwen3_moe)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "AriaProcessor"}')
    with pytest.raises(PlanError, match=r"without PIL and torchvision: pip install 'ktinject\[images\]'"):
        pictures.load_processor(tmp_path)
