"""Train a small Mixture-of-Experts language model on Python's own standard library.

    python examples/train_tiny.py --arch deepseek_v3 --out examples/models/tiny-deepseek-v3
    python examples/train_tiny.py --arch qwen3_moe   --out examples/models/tiny-qwen3-moe
    python examples/train_tiny.py --heldout examples/models

The first two train a model each, both of transformers' own classes and just under 20 MB in bf16; the third
writes heldout.txt and prompts.jsonl. The text is what every CPython carries, minus a held-out tenth chosen by
a hash of each file's path, so the split is the same on every machine. A GPU takes minutes; a CPU works too,
for a small --tokens.

The model computes in bf16 and the optimiser keeps fp32 master weights, so what is saved is exactly what was
trained. The same seed gives the same initial weights and the same order of data; GPU kernels that add in
any order still make the last digits differ from run to run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from stdlib_text import VOCAB, encode, split, stdlib_files, train_tokenizer, write_heldout
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SAMPLE_PROMPT = "import unittest\n\n\nclass QueueTest(unittest.TestCase):\n    def setUp(self):\n"

# fmt: off
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 512,
    "num_hidden_layers": 11, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 1024,
    "initializer_range": 0.04, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1,
}
ARCHS = {
    "deepseek_v3": {
        "n_routed_experts": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_experts": 32, "router_aux_loss_coef": 0.003,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": True,
    },
}
# fmt: on


# --- model --------------------------------------------------------------------------------------------


def build(arch: str, device: torch.device) -> torch.nn.Module:
    """A fresh model: fp32 parameters and buffers."""
    # Under a name transformers knows no mask for, sdpa gets none and is causal by itself. Making the mask asks
    # the GPU whether windows are packed, which stalls every step and cannot be part of a CUDA graph.
    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    config = AutoConfig.for_model(arch, **COMMON, **ARCHS[arch])
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa_without_mask"
    )
    model.set_experts_implementation("grouped_mm")
    return model.to(device)


def watch_routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Have every router keep, after each forward, its `load` and its `balance_loss`.

    load          [e] share of the choices that went to each expert, times e: 1 is balanced
    balance_loss  scalar: the load-balancing loss of Switch Transformers (Fedus et al. 2021), of this layer alone
    """

    def keep(router: torch.nn.Module, _: tuple, output: tuple) -> None:
        logits, _, index = output  # [m, e], [m, t], [m, t]
        e = router.num_experts
        router.load = torch.histc(index.detach().float(), bins=e, min=0, max=e - 1) * (e / index.numel())
        router.balance_loss = (router.load * logits.float().softmax(-1).mean(0)).sum()

    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for router in routers:
        router.register_forward_hook(keep)
    return routers


def add_dropout(model: torch.nn.Module, p: float) -> None:
    """Dropout on what attention and MLP add to the residual stream, while training: the text is seen many times."""
    for layer in model.model.layers:
        for branch in (layer.self_attn.o_proj, layer.mlp):
            branch.register_forward_hook(lambda module, _, output: F.dropout(output, p, module.training))


@torch.no_grad()
def nudge_biases(routers: list[torch.nn.Module], rate: torch.Tensor) -> None:
    """Balancing without a loss (DeepSeek-V3, section 2.1.2): the bias goes down where the load is high, else up."""
    for router in routers:
        router.e_score_correction_bias.add_(rate * (1.0 - router.load).sign())


# --- training -----------------------------------------------------------------------------------------


def windows(ids: torch.Tensor, seq: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches [batch, seq + 1] of windows; each epoch has its own order and its own phase."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(seq + 1, device=ids.device)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < batch:
            phase = torch.randint(seq, (1,), generator=generator)
            starts = torch.arange(0, len(ids) - 2 * seq, seq) + phase
            left = torch.cat([left, starts[torch.randperm(len(starts), generator=generator)]])
        yield ids[left[:batch].to(ids.device)[:, None] + span]
        left = left[batch:]


def learning_rate(progress: float, peak: float, warmup: float = 0.03) -> float:
    """Linear warm-up, then a cosine down to nothing; `progress` runs from 0 to 1."""
    if progress < warmup:
        return peak * (progress + 1e-3) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def train(model: torch.nn.Module, ids: torch.Tensor, heldout: torch.Tensor, args: argparse.Namespace) -> dict:
    """Train in place, in bf16 with fp32 master weights. Returns what the model card reports.

    ids, heldout  [n] int64, on the device and on the CPU
    """
    model.train()
    masters = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.bfloat16()  # parameters only: rotary frequencies and routing biases stay fp32
    lr = torch.zeros((), device=ids.device)
    groups = [
        {"params": [m for m in masters if m.dim() > 1], "weight_decay": args.weight_decay, "lr": lr},
        {"params": [m for m in masters if m.dim() == 1], "weight_decay": 0.0, "lr": lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, capturable=ids.is_cuda)
    routers = watch_routers(model)
    add_dropout(model, args.dropout)
    if args.mode != "eager":
        for layer in model.model.layers:
            layer.compile()
    aux_coef = getattr(model.config, "router_aux_loss_coef", 0.0)
    balance_by_bias = model.config.model_type == "deepseek_v3"
    batches = windows(ids, args.seq, args.batch, args.seed)
    x = next(batches).clone()

    def update() -> torch.Tensor:
        """One optimiser step on `x` at `lr`; what outlives it keeps its address, so it can be a CUDA graph."""
        hidden = model.model(input_ids=x[:, :-1], use_cache=False).last_hidden_state
        loss = F.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), x[:, 1:].flatten())
        (loss + aux_coef * sum(r.balance_loss for r in routers)).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), masters)
        if balance_by_bias:
            nudge_biases(routers, 1e-3 * lr / args.lr)
        return loss.detach()

    if args.mode == "graph":
        update = record(update)
    steps = max(1, args.tokens // (args.batch * args.seq))
    losses: list[torch.Tensor] = []
    started, progress = time.perf_counter(), 0.0
    while progress < 1:
        lr.fill_(learning_rate(progress, args.lr))
        losses.append(update().clone())
        x.copy_(next(batches))
        step, seconds = len(losses), time.perf_counter() - started
        progress = max(step / steps, seconds / (60 * args.minutes))
        if step % max(1, steps // 100) == 0 or progress >= 1:
            loss = torch.stack(losses[-100:]).mean().item()
            speed = step * args.batch * args.seq / seconds
            print(
                f"step {step}/{steps}  loss {loss:.4f}  lr {lr.item():.1e}  {speed:,.0f} tokens/s", flush=True
            )
        if step % max(1, steps // 10) == 0 or progress >= 1:
            nats, _ = evaluate(model, heldout[: 8 * args.batch * args.seq + 1], args.seq, args.batch)
            load = torch.stack([r.load for r in routers])
            print(f"  held-out loss {nats:.4f}  expert load {load.min():.2f} to {load.max():.2f}", flush=True)
    return {
        "steps": len(losses),
        "tokens": len(losses) * args.batch * args.seq,
        "train_loss": loss,
        "seconds": time.perf_counter() - started,
    }


def record(update: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """`update` as one CUDA graph: its thousand launches cost more than the work. First runs are at a rate of zero."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = update()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


# --- evaluation ---------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model: torch.nn.Module, ids: torch.Tensor, seq: int, batch: int = 16) -> tuple[float, int]:
    """(mean loss in nats, tokens predicted): windows of `seq` tokens, every token but the first predicted once."""
    was_training = model.training
    model.eval()
    device, total = model.device, 0.0
    starts = list(range(0, len(ids) - 1, seq))
    full = [s for s in starts if s + seq < len(ids)]
    groups = [full[i : i + batch] for i in range(0, len(full), batch)] + [
        [s] for s in starts if s + seq >= len(ids)
    ]
    for group in groups:
        x = torch.stack([ids[s : s + seq + 1] for s in group]).to(device)
        logits = model(input_ids=x[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum").item()
    model.train(was_training)
    return total / (len(ids) - 1), len(ids) - 1


@torch.no_grad()
def expert_load(model: torch.nn.Module, ids: torch.Tensor, seq: int) -> tuple[float, float]:
    """(smallest, largest) load of an expert in any layer over up to 16 windows of `ids` [n]; 1 is balanced."""
    routers = watch_routers(model)
    x = ids[: 16 * seq]
    x = x[: len(x) // seq * seq].view(-1, seq) if len(x) >= seq else x[None]
    model(input_ids=x.to(model.device), use_cache=False)
    load = torch.stack([r.load for r in routers])
    return load.min().item(), load.max().item()


def finish(out: Path, tokenizer: PreTrainedTokenizerFast, heldout: torch.Tensor, facts: dict, args) -> None:
    """Reload the saved checkpoint in fp32, evaluate it on the held-out tokens [n] and write the model card."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, experts_implementation="eager").to(
        args.device
    )
    ids = heldout[: args.eval_tokens or None]
    nats, predicted = evaluate(model, ids, args.seq)
    text_bytes = len(tokenizer.decode(ids[1:]).encode())
    load_min, load_max = expert_load(model, ids, args.seq)
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt").to(args.device)
    sample = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=96, do_sample=False)[0], skip_special_tokens=True
    )
    config = model.config
    facts |= {
        "name": out.name,
        "arch": type(model).__name__,
        "layers": config.num_hidden_layers,
        "experts": config.num_local_experts,
        "top_k": config.num_experts_per_tok,
        "parameters": model.num_parameters(),
        "size_bytes": (out / "model.safetensors").stat().st_size,
        "epochs": facts["tokens"] / facts["train_tokens"],
        "nats": nats,
        "perplexity": math.exp(nats),
        "bits_per_byte": nats * predicted / text_bytes / math.log(2),
        "load_min": load_min,
        "load_max": load_max,
        "sample_tokens": 96,
        "sample": sample.rstrip(),
    }
    card = (Path(__file__).parent / "models" / "CARD.template.md").read_text(encoding="utf-8")
    (out / "README.md").write_text(card.format(**facts), encoding="utf-8")
    print(json.dumps({k: v for k, v in facts.items() if k != "sample"}, indent=1))
    print(sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", choices=sorted(ARCHS))
    parser.add_argument("--out", type=Path, help="folder for the model")
    parser.add_argument(
        "--heldout", type=Path, metavar="DIR", help="write heldout.txt and prompts.jsonl there, and end"
    )
    parser.add_argument("--stdlib", type=Path, help="standard library to read (default: this interpreter's)")
    parser.add_argument(
        "--stdlib-version", default=platform.python_version(), help="its version, for the model card"
    )
    parser.add_argument("--tokens", type=int, default=160_000_000, help="tokens to train on")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="finish the schedule within this time"
    )
    parser.add_argument("--batch", type=int, default=32, help="windows a step")
    parser.add_argument("--seq", type=int, default=1024, help="tokens a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument(
        "--mode", choices=["eager", "compile", "graph"], help="default: graph on a GPU, else eager"
    )
    parser.add_argument(
        "--eval-tokens", type=int, default=0, help="held-out tokens of the last evaluation (0: all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    args = parser.parse_args()
    if args.heldout:
        return write_heldout(args.heldout, args.stdlib)
    if not args.arch or not args.out:
        parser.error("--arch and --out are both needed")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.mode = args.mode or ("graph" if args.device.startswith("cuda") else "eager")
    torch.manual_seed(args.seed)

    training, heldout = split(stdlib_files(args.stdlib))
    tokenizer = train_tokenizer([text for _, text in training])
    ids = encode(tokenizer, [text for _, text in training], end=True)
    heldout_ids = encode(tokenizer, ["".join(text for _, text in heldout)], end=False)
    model = build(args.arch, torch.device(args.device))
    print(
        f"{model.num_parameters():,} parameters; {len(ids):,} training tokens, {len(heldout_ids):,} held out",
        flush=True,
    )

    facts = train(model, ids.to(args.device), heldout_ids, args)
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=1, do_sample=False
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    cuda = args.device.startswith("cuda")
    facts |= {
        "cpython": args.stdlib_version,
        "train_files": len(training),
        "train_bytes": sum(len(text.encode()) for _, text in training),
        "train_tokens": len(ids),
        "heldout_files": len(heldout),
        "heldout_bytes": sum(len(text.encode()) for _, text in heldout),
        "heldout_tokens": len(heldout_ids),
        "hardware": f"one {torch.cuda.get_device_name()}"
        if cuda
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": args.seed,
        "seq": args.seq,
        "command": f"python examples/train_tiny.py --arch {args.arch} --out {args.out.name}"
        f" --tokens {args.tokens} --seed {args.seed}",
    }
    finish(args.out, tokenizer, heldout_ids, facts, args)


if __name__ == "__main__":
    main()
