"""SGLang with experts on the CPU beside SGLang alone: the same answers, and how fast. In an environment with both.

    python benchmarks/bench_sglang_engine.py same [--device cpu] [--own 8 0 31] [--at-once 1]
    python benchmarks/bench_sglang_engine.py soak [--device cpu] [--own 8] [--requests 1000]
    python benchmarks/bench_sglang_engine.py speed [--layers 48] [--clients 1 32]

`same` asks the trained Qwen3-MoE of this repository, one prompt at a time and 32 at once, with some of the experts
SGLang's own, with graphs and without. Of two texts, either may be right: a token counts as fp32's where fp32, given all
before it, has it as the best one. Others should be as rare as with SGLang alone, and no further behind. Several engines
may run at once, which says nothing about speed. Where fp32's best is far ahead of its second, all must write it.

`soak` asks one engine of these for its answers before and after requests of which some are cancelled, kills it at work,
and asks another one that is started then.

`speed` has the shape of Qwen3-30B-A3B with random weights, int4 experts on the CPU and none on the GPU. Tokens are
drawn at random, so that clients do not ask for the same experts. It ends with a prompt of 2048 tokens, and with where
the GPU is in a decode step of one client: in kernels that wait for the CPU, in others, in none. bench_generate.py has
plain `generate` of that shape: hosts differ, so run it right before, on the same one.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
TRAINED = REPOSITORY / "examples" / "models" / "tiny-qwen3-moe"
EXPERTS, WIDE = 32, 128  # SGLang's kernels on CUDA want heads of 64 or more
AT_ONCE = 32
TIE = 0.35  # in bf16, SGLang alone takes tokens that are as far behind fp32's best
PROMPT = 2048
MOST_GROWTH = 64.0  # MiB of a process, after the first quarter of a soak
FAR = 0.7  # ahead of the second by twice as much, fp32's best is that of bf16, too
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
# Takes the place of a checkpoint's weights, in each of SGLang's processes.
FILLED = """
def drawn(model, *_, **__):
    for name, value in model.state_dict().items():
        if value.dim() > 1:
            value.normal_(std=1.0 if "embed_tokens" in name else 0.02)
        elif value.is_floating_point():
            value.fill_(0.0 if name.endswith("bias") else 1.0)


def register():
    import sys

    from ktinject.hf.on_import import when_imported
    from ktinject.sglang import wrapper

    # Else all layers would have the same router, and norms whose weights are about zero.
    loader = "sglang.srt.model_loader.loader"
    when_imported(loader, lambda: setattr(sys.modules[loader], "initialize_dummy_weights", drawn))

    def load_weights(self, physical_to_logical_map=None):
        import torch
        from ktinject.operators.cpu_experts import CpuExperts
        from ktinject.sglang.weights import on_cpu, plain_config, spec_of

        layer, given = self._layer, self.arguments
        hidden, inner = given.hidden_size, given.intermediate_size
        with on_cpu():
            torch.manual_seed(given.layer_idx)
            experts = CpuExperts(spec_of(given), plain_config(given, 0))
            experts.allocate()
            for half in range(2):
                experts.load("gate_up_proj", (torch.randn(inner, hidden) * 0.02).bfloat16(), 0, half)
            experts.load("down_proj", (torch.randn(hidden, inner) * 0.02).bfloat16(), 0, None)
            experts.repeat(0)  # all alike, each with memory of its own
            layer._take(experts)

    wrapper.KTMoEWrapper.load_weights = load_weights
"""


def options_of(device: str, graphs: bool, **others: Any) -> dict[str, Any]:
    """Arguments of sglang.Engine."""
    common = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "info",
        **others,
    }
    if device == "cpu":
        return common | {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.2,
        }
    common |= {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "moe_runner_backend": "triton",
        "grammar_backend": "none",
    }
    return common | ({"cuda_graph_max_bs_decode": AT_ONCE} if graphs else {"disable_cuda_graph": True})


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


# --- one engine, in a process of its own ---


def engine(given: dict[str, Any], out: Path) -> None:
    """Ask, and put what is known into the file after each round, since time may be over before the next.

    model, options  of sglang.Engine
    prompts         lists of ids
    new             tokens of each answer
    at_once         prompts are asked together by so many, or all of them
    requests        of a soak
    margins         also say how much likelier each token was than the next best one
    rounds          their names: "alone" asks one prompt at a time, "soak" and "killed" are what `soak` does, and any
                    other asks all prompts together
    """
    import sglang  # type: ignore[import-not-found]

    begun = time.monotonic()
    made = sglang.Engine(model_path=given["model"], **given["options"])
    found: dict[str, Any] = {"start_s": time.monotonic() - begun}
    every = given["prompts"]
    together = (every * given["at_once"])[: max(given["at_once"], len(every))]
    for name in given["rounds"]:
        if name == "alone":
            found[name] = [answer for prompt in every for answer in ask(made, [prompt], given)]
        elif name in ("soak", "killed"):
            kill_after = given["requests"] // 10 if name == "killed" else None
            found[name] = made.loop.run_until_complete(soak(made, given, kill_after))
        else:
            found[name] = ask(made, together, given)[: len(every)]
        out.with_suffix(".part").write_text(json.dumps(found))
        out.with_suffix(".part").rename(out)


def ask(made: Any, prompts: list[list[int]], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each answer's `ids`, and its `margins` if these are wanted; or, of all together, one `error`."""
    sampling = {"temperature": 0, "max_new_tokens": given["new"], "ignore_eos": True}
    more = {"return_logprob": True, "top_logprobs_num": 2} if given["margins"] else {}
    try:
        said = made.generate(input_ids=prompts, sampling_params=sampling, **more)
    except Exception as error:  # fastapi's, that a client gets
        return [{"error": f"{type(error).__name__}: {error}"}]
    answers = []
    for answer in said:
        tops = answer["meta_info"].get("output_top_logprobs") or []
        answers.append({"ids": answer["output_ids"], "margins": [abs(top[0][0] - top[1][0]) for top in tops]})
    return answers


async def soak(made: Any, given: dict[str, Any], kill_after: int | None) -> dict[str, Any]:
    """Requests of random lengths, of which some are cancelled: how they ended, and the MiB of SGLang's processes.

    kill_after  so many, end all processes at once
    """
    numbers, ended, held = random.Random(0), {"stop": 0, "cancelled": 0, "failed": 0}, []
    count, patience = given["requests"], 0.3 if given["options"].get("device") == "cpu" else 0.1
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            ids = [numbers.randrange(2, 2000) for _ in range(numbers.randrange(1, 60))]
            new = numbers.randrange(1, given["new"] + 1)
            sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
            name = f"soak{number}"
            asked = asyncio.create_task(
                made.async_generate(input_ids=ids, sampling_params=sampling, rid=name)
            )
            if numbers.random() < 0.4:
                await asyncio.sleep(numbers.random() * patience)
                made.tokenizer_manager.abort_request(rid=name)
            try:
                answer = await asked
                is_cut = answer["meta_info"]["finish_reason"]["type"] == "abort"
                is_short = len(answer["output_ids"]) != new
                ended["cancelled" if is_cut else "failed" if is_short else "stop"] += 1
            except ValueError as error:
                ended["cancelled" if "bort" in str(error) else "failed"] += 1
            done = sum(ended.values())
            if done % max(1, count // 4) == 0:
                held.append(mebibytes())
            if kill_after is not None and done >= kill_after:
                os.killpg(os.getpgid(0), signal.SIGKILL)

    await asyncio.gather(*(client() for _ in range(16)))
    return {"ended": ended, "held": held}


def grown(held: list[dict[str, float]]) -> float:
    """MiB by which the process that grew most has grown after the first quarter of a soak. Keys are process ids."""
    return max(held[-1][process] - held[0][process] for process in held[0].keys() & held[-1].keys())


def mebibytes() -> dict[int, float]:
    """Of each of SGLang's processes, what is its own: torch's compiler starts others at times."""
    import psutil

    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = child.memory_full_info().uss / 2**20
        except psutil.Error:  # it has ended
            pass
    return found


class Engine:
    """Such a process, and what it found.

    given   see `engine`
    python  of the environment with SGLang
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        given: dict[str, Any],
        python: str = sys.executable,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.name, self.began = name, time.monotonic()
        file = name.replace(" ", "-").replace(",", "").replace("'", "")
        self.out, self.log = folder / f"{file}.json", folder / f"{file}.log"
        with self.log.open("w") as log:
            self.running = subprocess.Popen(
                [python, __file__, "engine", json.dumps(given), str(self.out)],
                env=environ,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Also its own processes, whether it has ended or not."""
        try:
            os.killpg(self.running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.running.wait()

    def found(self) -> dict[str, Any]:
        return json.loads(self.out.read_text()) if self.out.exists() else {}

    def is_hybrid(self) -> bool:
        """Whether experts were on the CPU."""
        return "experts as bf16" in self.log.read_text(errors="replace")

    def why(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return " | ".join((errors or lines)[-3:])[-500:]


# --- the same answers ---


def job(
    given: argparse.Namespace,
    model: Path,
    asked: list[list[int]],
    own: int | None,
    graphs: bool,
    *rounds: str,
) -> dict[str, Any]:
    """For `engine`. own: experts that are SGLang's; None: all."""
    limits = {"max_total_tokens": 16384, "chunked_prefill_size": 64, "mem_fraction_static": 0.3}
    options = options_of(given.device, graphs) | limits
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
        "rounds": rounds,
    }


def same(given: argparse.Namespace) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    model, asked = widened(folder / "model"), prompts(given.prompts)
    jobs = {
        f"{'all' if own is None else own} of {EXPERTS} SGLang's, {'graphs' if graphs else 'eager'}": job(
            given, model, asked, own, graphs, "together", "alone"
        )
        for graphs in ((True, False) if given.device != "cpu" else (False,))
        for own in (None, *given.own)
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
        if one.is_hybrid() == is_stock:
            said.append("experts were on the CPU" if is_stock else "no experts were on the CPU")
            fine = False
        print(f"{one.name:30} " + "; ".join(said), flush=True)
    return fine


def soaked(given: argparse.Namespace) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    model, asked = widened(folder / "model"), prompts(given.prompts)
    how = given, model, asked, given.own[0], given.device != "cpu"
    first = run({"the first": job(*how, "together", "soak", "after", "killed")}, folder, given)[0]
    again = run({"started again": job(*how, "together")}, folder, given)[0]
    found, judge, fine = first.found(), Judge(model, asked), first.is_hybrid() and again.is_hybrid()
    print(f"# {given.own[0]} of {EXPERTS} experts SGLang's, {given.requests} requests; logs: {folder}")
    if "soak" in found:
        ended, more = found["soak"]["ended"], grown(found["soak"]["held"])
        print(f"{ended}; a process grew by {more:.0f} MiB at most after the first quarter", flush=True)
        fine &= ended["failed"] == 0 and ended["cancelled"] > 0 and more < MOST_GROWTH
        fine &= "killed" not in found  # it was, before that round's end
    before = texts(found.get("together"))
    for name, one, round in (
        ("before", first, "together"),
        ("after", first, "after"),
        ("started again", again, "together"),
    ):
        if answers := texts(one.found().get(round)):
            told, missed, behind = judge.say(answers, before)
            fine &= missed == 0 and behind <= 1.0
        else:
            told, fine = f"no answer: {one.why()}", False
        print(f"{name:14} {told}", flush=True)
    return fine


def texts(answers: list[dict[str, Any]] | None) -> list[list[int]]:
    """Their ids; none where there was no answer."""
    return [answer["ids"] for answer in answers or () if "ids" in answer]


def run(jobs: dict[str, dict[str, Any]], folder: Path, given: argparse.Namespace) -> list[Engine]:
    """All engines, some at once, and each within its time; in the order of the jobs."""
    waiting, running, ended = list(enumerate(jobs.items())), list[Engine](), list[Engine]()
    try:
        while waiting or running:
            for one in list(running):
                if one.running.poll() is not None or time.monotonic() - one.began > given.seconds:
                    one.stop()
                    running.remove(one)
                    ended.append(one)
            while waiting and len(running) < given.at_once:
                number, (name, given_job) = waiting.pop(0)
                given_job["options"] |= {"nccl_port": 29500 + number}
                running.append(Engine(name, folder, given_job))
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


# --- how fast ---


def speed(given: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="sglang-"))
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": given.layers}))
    (folder / "filled.py").write_text(FILLED)
    made = folder / "filled-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: filled\nVersion: 0\n")
    (made / "entry_points.txt").write_text("[sglang.srt.plugins]\nfilled = filled:register\n")
    sys.path.append(str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)]).strip(
        os.pathsep
    )
    import sglang

    begun = time.monotonic()
    running = sglang.Engine(
        model_path=str(folder),
        **options_of(
            given.device,
            True,
            load_format="dummy",
            max_total_tokens=32768,
            max_running_requests=max(given.clients),
            chunked_prefill_size=PROMPT,
            disable_prefill_cuda_graph=True,  # to capture them takes longer than all that is measured
            kt_weight_path=str(folder),
            kt_method="AMXINT4",
            kt_num_gpu_experts=0,
        ),
    )
    print(f"# {given.layers} layers, started in {time.monotonic() - begun:.0f} s", flush=True)
    numbers = random.Random(0)

    def took(count: int, new: int, tokens: int = 32) -> float:
        asked = [[numbers.randrange(3, 150_000) for _ in range(tokens)] for _ in range(count)]
        sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
        before = time.monotonic()
        running.generate(input_ids=asked, sampling_params=sampling)
        return time.monotonic() - before

    for count in sorted(given.clients):
        took(count, 8)
        rates = [
            count * given.new / (took(count, given.new + 2) - took(count, 2)) for _ in range(given.turns)
        ]
        span = f"({min(rates):.1f} to {max(rates):.1f})"
        print(f"{count:3} clients: {statistics.median(rates):7.1f} tokens/s {span}", flush=True)
    if given.device != "cpu":
        took(1, 1, PROMPT)
        rates = [PROMPT / took(1, 1, PROMPT) for _ in range(given.turns)]
        print(f"a prompt of {PROMPT}: {statistics.median(rates):.0f} tokens/s", flush=True)
        running.start_profile(output_dir=str(folder), num_steps=24, activities=["GPU"], with_stack=False)
        took(1, 40)
        print(parts(trace_in(folder), given.layers), flush=True)
    running.shutdown()


def trace_in(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that SGLang has written, or is writing."""
    for _ in range(300):
        for path in folder.glob("*.trace.json.gz"):
            try:
                return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
            except (EOFError, ValueError):  # not whole yet
                pass
        time.sleep(0.1)
    raise SystemExit(f"no trace in {folder}")


def parts(events: list[dict[str, Any]], layers: int) -> str:
    """µs of a decode step. A step goes from the end of one last layer's experts to that of the next."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], "wait_kernel" in event["name"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    ends = [end for _, end, waits in spans if waits]
    # The prompt's pass, and a step that may be cut off, are left out.
    steps = len(ends) // layers - 2
    if steps < 1:
        return f"too few steps in the trace: {len(ends)} kernels that wait for the CPU"
    first, last = ends[-1 - layers * steps], ends[-1]
    within = [span for span in spans if span[0] >= first and span[1] <= last]
    other = _covered([span for span in within if not span[2]])
    waiting = _covered(within) - other  # alone: what the next layer will ask for is guessed beside the wait
    step, *each = [value / steps for value in (last - first, waiting, other, last - first - waiting - other)]
    said = "{:.0f} waiting for the CPU, {:.0f} in other kernels, {:.0f} in none".format(*each)
    return f"a step of one client: {step:.0f} µs; {said}"


def _covered(spans: list[tuple[float, float, bool]]) -> float:
    """How long any of these runs, given in the order of their beginnings; kernels may run beside each other."""
    total, end = 0.0, -math.inf
    for start, stop, _ in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def main() -> None:
    if sys.argv[1:2] == ["engine"]:
        try:
            engine(json.loads(sys.argv[2]), Path(sys.argv[3]))
        except BaseException as error:
            print(f"Error: {type(error).__name__}: {error}", flush=True)
        os.killpg(os.getpgid(0), signal.SIGKILL)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["same", "soak", "speed"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--new", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--own", type=int, nargs="+", default=[8, 0, EXPERTS - 1], help="experts of SGLang")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--requests", type=int, default=1000, help="of a soak")
    parser.add_argument("--at-once", type=int, default=1, help="engines")
    parser.add_argument("--seconds", type=float, default=600, help="for each engine")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    if given.what == "speed":
        speed(given)
    elif not (same if given.what == "same" else soaked)(given):
        raise SystemExit("not as it should be, see above")


if __name__ == "__main__":
    main()
