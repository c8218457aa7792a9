"""Train an MTP head for one of the small models: one more layer that predicts the token after the next one.

    python examples/train_mtp.py --model examples/models/tiny-deepseek-v3 --minutes 8
    python examples/train_mtp.py --model examples/models/tiny-qwen3-moe --minutes 8

The head is transformers' own MtpModel: a decoder layer of the model's class behind a projection of two things, what the
model made of a token and the embedding of the next one. Embedding, output layer and the model itself stay as they are.
So a CPU takes minutes. It is written to mtp/model.safetensors in the model's folder, in bf16, where ktinject finds it
for `generate(..., use_mtp=True)`. The text is that of train_tiny.py.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel


def new_head(model: Any) -> MtpModel:
    """A head for a model of transformers; of its dtype, and on its device."""
    text = model.config.get_text_config()
    before = getattr(text, "num_mtp_layers", None)
    text.num_mtp_layers = 1  # Qwen3-MoE has no such value, and heads read it of the model
    try:
        head = MtpModel(model, 1)
    finally:
        if before is not None:
            text.num_mtp_layers = before
        else:
            del text.num_mtp_layers
    head.layers.to(dtype=model.dtype, device=model.device)
    head.eval()
    head.tie_with_main_model(model)
    return head


def losses(model: Any, head: MtpModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids [b, n] → mean loss of the token after the next one; how often the head's is the model's own choice."""
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        own = model.lm_head(hidden[:, 1:-1]).argmax(-1)
    positions = torch.arange(1, ids.shape[1] - 1, device=ids.device)[None]
    embedded = head.embed_tokens(ids[:, 1:-1]).float()
    made = head.layers[0](
        embedded,
        hidden[:, :-2].float(),
        position_embeddings=head.rotary_emb(embedded, position_ids=positions),
        position_ids=positions,
        past_key_values=None,
        **head.create_masks_for_mtp_layer(0, embedded, None, positions),
    )
    logits = F.linear(made, head.shared_head.weight.float())
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
    return loss, (logits.argmax(-1) == own).float().mean()


@torch.no_grad()
def begin(model: Any, head: MtpModel) -> None:
    """Let a head compute what the model's last layer computes of what the model made, without the next token."""
    layer, size = head.layers[0], model.config.hidden_size
    layer.mtp_block.load_state_dict(model.model.layers[-1].state_dict())
    layer.eh_proj.weight[:, :size] = 0  # the embedding comes first
    layer.eh_proj.weight[:, size:] = torch.eye(size, device=model.device)
    for norm in (layer.enorm, layer.hnorm, layer.post_norm):
        norm.weight.fill_(1.0)


def train(model: Any, ids: Tensor, heldout: Tensor, args: argparse.Namespace) -> MtpModel:
    """ids, heldout  [n] int64"""
    head = new_head(model).train()
    head.layers.float()
    head.set_experts_implementation("eager")  # in fp32
    begin(model, head)
    weights = list(head.layers.parameters())
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    span, started, step = torch.arange(args.seq), time.perf_counter(), 0
    shown = started
    while (progress := (time.perf_counter() - started) / (60 * args.minutes)) < 1:
        starts = torch.randint(len(ids) - args.seq, (args.batch, 1), generator=generator)
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / 50) * (1 - progress)
        loss, right = losses(model, head, ids[starts + span].to(model.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if time.perf_counter() - shown > 20:
            shown = time.perf_counter()
            print(f"step {step}  loss {loss.item():.3f}  as the model {right.item():.3f}", flush=True)
    head.eval()
    with torch.no_grad():
        found = [
            losses(model, head, window[None].to(model.device))
            for window in heldout[: 32 * args.seq].split(args.seq)[:-1]
        ]
    loss, right = (torch.stack(each).mean().item() for each in zip(*found))
    print(f"{step * args.batch * args.seq:,} tokens; held out: loss {loss:.3f}, as the model {right:.3f}")
    return head


def main() -> None:
    from stdlib_text import encode, split, stdlib_files

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="default: mtp/model.safetensors in the model's folder")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--seq", type=int, default=256, help="tokens a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    training, heldout = split(stdlib_files())
    ids = encode(tokenizer, [text for _, text in training], end=True)
    heldout_ids = encode(tokenizer, ["".join(text for _, text in heldout)], end=False)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, experts_implementation="grouped_mm")
    model = model.to(args.device).eval()
    torch.set_float32_matmul_precision("high")
    head = train(model, ids, heldout_ids, args)
    kept = {
        name: p.to("cpu", torch.bfloat16)
        for name, p in head.state_dict().items()
        if name.startswith("layers.")
    }
    out = args.out or args.model / "mtp" / "model.safetensors"
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(kept, out)


if __name__ == "__main__":
    main()
