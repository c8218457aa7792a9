"""Answers of SGLang with experts on the CPU, beside those of SGLang alone and those of fp32.

For bench_sglang_engine.py, whose docstring says what is compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_engine import AT_ONCE, MOST_GROWTH, Engine, environ_of, grown, options_of

REPOSITORY = Path(__file__).resolve().parents[1]
TRAINED = REPOSITORY / "examples" / "models" / "tiny-qwen3-moe"
EXPERTS, WIDE = 32, 128  # SGLang's kernels on CUDA want heads of 64 or more
TIE = 0.35  # in bf16, SGLang alone takes tokens that are as far behind fp32's best
APART = ", apart"
FAR = 0.7  # ahead of the second by twice as much, fp32's best is that of bf16, too


def widened(folder: Path) -> Path:
    """The trained model with heads of 128, whose further values are zero, and a head of its own: the same logits.

    The root mean square of a head is half over four times as many values, so the weights before it are twice as large.
    The scale of the scores is half, too, for which the queries' norm makes up. Position i of a head turns as position
    4 i of a wide one.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((TRAINED / "config.json").read_text())
    head = config["head_dim"]
    if head * 4 != WIDE:
        raise SystemExit(f"{TRAINED}: heads of {head}; expected {WIDE // 4}")
    half = torch.arange(head // 2)
    place = torch.cat([4 * half, 4 * half + WIDE // 2])
    made = {}
    for name, value in load_file(TRAINED / "model.safetensors").items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = value.view(-1, head, value.shape[1])
            wide = torch.zeros(len(heads), WIDE, value.shape[1], dtype=value.dtype)
            wide[:, place] = heads * (1 if kind == "v_proj" else 2)
            value = wide.view(-1, value.shape[1])
        elif kind == "o_proj":
            heads = value.view(len(value), -1, head)
            wide = torch.zeros(len(value), heads.shape[1], WIDE, dtype=value.dtype)
            wide[:, :, place] = heads
            value = wide.view(len(value), -1)
        elif kind in ("q_norm", "k_norm"):
            wide = torch.zeros(WIDE, dtype=value.dtype)
            wide[place] = value * (1 if kind == "q_norm" else 0.5)
            value = wide
        made[name] = value
    made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": WIDE, "tie_word_embeddings": False}))
    return folder


def prompts(count: int) -> list[list[int]]:
    """Python, which the model was trained to write: pieces of this repository."""
    from tokenizers import Tokenizer

    known, found = Tokenizer.from_file(str(TRAINED / "tokenizer.json")), []
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        ids = known.encode(path.read_text()).ids
        if len(ids) > 400 and len(found) < count:
            found.append(ids[120 : 125 + 13 * len(found) % 150])
    return found


def job(
    given: argparse.Namespace,
    model: Path,
    asked: list[list[int]],
    own: int | None,
    graphs: bool,
    *rounds: str,
    apart: bool = False,
) -> dict[str, Any]:
    """For `engine` and `run`. own: experts that are SGLang's; None: all. apart: see `environ_of`."""
    limits = {"max_total_tokens": 16384, "chunked_prefill_size": 64, "mem_fraction_static": 0.3}
    options = options_of(given.device, graphs, given.tp) | limits
    if own is not None:
        options |= {"kt_weight_path": str(model), "kt_method": "BF16", "kt_num_gpu_experts": own}
    return {
        "model": str(model),
        "options": options,
        "prompts": asked,
        "new": given.new,
        "at_once": AT_ONCE,
        "requests": given.requests,
        "margins": False,
        "apart": apart,
        "rounds": rounds,
    }


def same(given: argparse.Namespace) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    model, asked = widened(folder / "model"), prompts(given.prompts)
    with_graphs = (False,) if given.device == "cpu" else (True, False) if given.eager else (True,)
    jobs = {
        named(own, graphs, apart): job(given, model, asked, own, graphs, "together", "alone", apart=apart)
        for graphs in with_graphs
        for own in (None, *given.own)
        for apart in ((False, True) if given.tp > 1 and own is not None else (False,))
    }
    ended = run(jobs, folder, given)
    print(f"# {given.prompts} prompts, {given.new} tokens each; logs: {folder}")
    judge, stock = Judge(model, asked), texts(ended[0].found().get("alone"))
    fine, worst = len(ended) == len(jobs), TIE
    for one in ended:
        is_stock, found, said = one.name.startswith("all"), one.found(), []
        for way in ("alone", "together"):
            if stock and (answers := texts(found.get(way))):
                told, missed, behind = judge.say(answers, stock)
                said.append(f"{way}: {told}")
                worst = max(worst, min(behind, 1.0)) if is_stock else worst
                fine &= missed == 0 and behind <= worst
            else:
                said.append(f"{way}: no answer: {one.why()}")
                fine = False
        if (having := one.having()) != (0 if is_stock else 1) or given.tp > 1:
            said.append(f"{having} of {given.tp} processes had experts on the CPU")
        # Without a word from us, SGLang may bind its processes to NUMA nodes, so that each has a part.
        wanted = {0} if is_stock else {given.tp} if one.name.endswith(APART) else {1, given.tp}
        fine &= having in wanted
        print(f"{one.name:30} " + "; ".join(said), flush=True)
    return fine


def named(own: int | None, graphs: bool, apart: bool) -> str:
    told = f"{'all' if own is None else own} of {EXPERTS} SGLang's, {'graphs' if graphs else 'eager'}"
    return told + APART if apart else told


def soaked(given: argparse.Namespace) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    model, asked = widened(folder / "model"), prompts(given.prompts)
    how = given, model, asked, given.own[0], given.device != "cpu"
    first = run({"the first": job(*how, "together", "soak", "after", "killed")}, folder, given)[0]
    found, judge, fine = first.found(), Judge(model, asked), first.having() > 0
    print(f"# {given.own[0]} of {EXPERTS} experts SGLang's, {given.requests} requests; logs: {folder}")
    if "soak" in found:
        fine &= found["soak"]["ended"]["failed"] == 0 and found["soak"]["ended"]["cancelled"] > 0
        fine &= grown(found["soak"]["held"]) < MOST_GROWTH and not any(found["soak"]["left"])
        fine &= "killed" not in found  # it was, before that round's end
        print(leavings(found["soak"]), flush=True)
    before = texts(found.get("together"))

    def said(name: str, one: Engine, answers: list[list[int]]) -> bool:
        if not answers:
            print(f"{name:14} no answer: {one.why()}", flush=True)
            return False
        told, missed, behind = judge.say(answers, before)
        print(f"{name:14} {told}", flush=True)
        return missed == 0 and behind <= 1.0

    fine &= said("before", first, before)
    fine &= said("after", first, texts(found.get("after")))
    again = run({"started again": job(*how, "together")}, folder, given)[0]
    return said("started again", again, texts(again.found().get("together"))) and again.having() > 0 and fine


def leavings(soak: dict[str, Any]) -> str:
    """What `sglang_engine.soak` found, in lines: how requests ended, then each process after the first part and after
    the last."""
    first, last = soak["held"][0], soak["held"][-1]
    lines = [
        f"{soak['ended']}; requests that are left after each part: {soak['left']}; MiB of the GPU: {soak['gpu']}"
    ]
    for process in first.keys() | last.keys():
        one, other = first.get(process), last.get(process)
        name = (one or other)["name"]
        if one and other:
            each = (
                f"{what} {one[what]:.0f} to {other[what]:.0f}" for what in ("own", "rss", "threads", "files")
            )
            lines.append(f"{name:24} {', '.join(each)}")
        else:
            lines.append(f"{name:24} {'ended' if one else 'began'} between the first part and the last")
    same = [line for line in lines[1:] if lines.count(line) > 1]
    told = [*dict.fromkeys(sorted(lines[1:]))]
    told = [f"{line} ({same.count(line)} of them)" if line in same else line for line in told]
    return "\n".join(
        [lines[0], *told, f"{grown(soak['held']):.0f} MiB more of its own in the process that grew most"]
    )


def texts(answers: list[dict[str, Any]] | None) -> list[list[int]]:
    """Their ids; none where there was no answer."""
    return [answer["ids"] for answer in answers or () if "ids" in answer]


def run(jobs: dict[str, dict[str, Any]], folder: Path, given: argparse.Namespace) -> list[Engine]:
    """All engines, some at once, and each within its time; in the order of the jobs."""
    waiting, running, ended = list(enumerate(jobs.items())), list[Engine](), list[Engine]()
    try:
        while waiting or running:
            for one in list(running):
                one.tell()
                if one.running.poll() is not None or time.monotonic() - one.began > given.seconds:
                    one.stop()
                    running.remove(one)
                    ended.append(one)
            while waiting and len(running) < given.at_once:
                number, (name, given_job) = waiting.pop(0)
                given_job["options"] |= {"nccl_port": 29500 + number}
                running.append(Engine(name, folder, given_job, environ=environ_of(given_job["apart"])))
            time.sleep(0.1)
    finally:
        for one in running:
            one.stop()
    return sorted(ended, key=lambda one: [*jobs].index(one.name))


class Judge:
    """What fp32 says of tokens, given all before them."""

    def __init__(self, model: Path, asked: list[list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model, self.asked = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), asked

    def of(self, answers: list[list[int]]) -> tuple[float, float, int, int]:
        """The share of tokens that fp32 has as the best, and how far its logit of another is behind at most.

        Then of how many tokens fp32's best is far ahead of the second, and how many of these are others.
        """
        import torch

        behind, ahead = [], []
        for prompt, answer in zip(self.asked, answers):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            first, second = logits.topk(2).values.T
            ahead.append(first - second)
            behind.append(first - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0])
        every, clear = torch.cat(behind), torch.cat(ahead) >= FAR
        missed = int((clear & (every > 0)).sum())
        return (every == 0).float().mean().item(), every.max().item(), int(clear.sum()), missed

    def say(self, answers: list[list[int]], others: list[list[int]]) -> tuple[str, int, float]:
        """In words, beside other answers to the same prompts; then how many clear tokens are missed, and how far one
        is behind at most."""
        best, behind, clear, missed = self.of(answers)
        equal = sum(ours == theirs for ours, theirs in zip(answers, others))
        told = f"{equal} texts equal, {best:.1%} fp32's, behind by {behind:.2f} at most"
        return f"{told}, {missed} of {clear} clear ones missed", missed, behind
