"""ktinject.tools.evaluate against the definitions written out."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM

from ktinject.errors import OperatorError, PlanError
from ktinject.hf import compat
from ktinject.tools import evaluate


@pytest.fixture(scope="module")
def model(tiny_qwen3_moe):
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe).eval()


@pytest.fixture(scope="module")
def other(tiny_qwen3_moe):
    """The same model, slightly wrong."""
    changed = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return changed


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (101,), generator=torch.Generator().manual_seed(2))


def by_definition(model, ids, window):
    """Log-probabilities [predictions, V] and targets, window by window."""
    rows, targets = [], []
    for start in range(0, len(ids), window):
        piece = ids[start : start + window]
        with torch.no_grad():
            logits = model(piece[None]).logits[0].double()
        for position in range(len(piece) - 1):
            rows.append(logits[position] - logits[position].exp().sum().log())
            targets.append(int(piece[position + 1]))
    return torch.stack(rows), targets


# 50 leaves a last window of one token, 64 a shorter one, 512 more than the text.
@pytest.mark.parametrize("chunk_rows, window", [(7, 2), (7, 50), (7, 64), (7, 512), (1, 50), (1000, 64)])
def test_against_the_definition(model, other, ids, window, chunk_rows, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK_BYTES", chunk_rows * 257 * 8)
    p, targets = by_definition(model, ids, window)
    q, _ = by_definition(other, ids, window)
    kl = (p.exp() * (p - q)).sum(-1)
    count = len(targets)

    def exp_nll(rows):
        return math.exp(-sum(float(row[target]) for row, target in zip(rows, targets)) / count)

    found = evaluate.divergence(model, other, ids, window=window)
    assert found.tokens == count
    assert found.mean_nats == pytest.approx(float(kl.mean()), rel=1e-4)
    rank = max(1, math.ceil(0.99 * count))
    assert found.p99_nats == pytest.approx(sorted(kl.tolist())[rank - 1], rel=1e-4)
    assert found.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.perplexity_a == pytest.approx(exp_nll(p), rel=1e-5)
    assert found.perplexity_b == pytest.approx(exp_nll(q), rel=1e-5)
    assert evaluate.perplexity(other, ids, window=window) == pytest.approx(found.perplexity_b, rel=1e-12)
    worse = [float(a[target] - b[target]) for a, b, target in zip(p, q, targets)]
    error = found.perplexity_b / found.perplexity_a * statistics.pstdev(worse) / count**0.5
    assert found.change_error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(("window", "rows"), [(20, 16), (20, 2), (50, 1), (25, 16)])
def test_token_by_token_is_the_same(model, other, ids, window, rows, monkeypatch):
    """For models that do at decode what they do with a prompt; windows of 20 leave one of 1, which is left out, and
    windows of 25 a shorter one."""
    monkeypatch.setattr(evaluate, "ROWS", rows)
    ids = ids[:61]
    at_once = evaluate.divergence(model, other, ids, window=window)
    found = evaluate.divergence(model, other, ids, window=window, decode=True)
    assert found.tokens == at_once.tokens
    for name in ("mean_nats", "p99_nats", "top1", "perplexity_a", "perplexity_b", "change_error"):
        assert getattr(found, name) == pytest.approx(getattr(at_once, name), rel=1e-3), name
    alone = evaluate.perplexity(other, ids, window=window, decode=True)
    assert alone == pytest.approx(found.perplexity_b, rel=1e-9)


def test_token_by_token_through_the_cache(model, ids):
    """Every step but the first sees one token and what the cache holds."""
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, named: seen.append((named["input_ids"].shape, compat.cache_of(named) is None)),
        with_kwargs=True,
    )
    evaluate.perplexity(model, ids[:60], window=20, decode=True)
    hook.remove()
    assert seen == [((3, 1), True)] + 18 * [((3, 1), False)]


def test_a_model_does_not_diverge_from_itself(model, ids):
    found = evaluate.divergence(model, model, ids)
    assert (found.mean_nats, found.p99_nats, found.top1) == (0.0, 0.0, 1.0)
    assert found.perplexity_a == found.perplexity_b and found.change_error == 0.0


@pytest.mark.parametrize("prompt", [slice(0, 5), slice(40, 41)])
def test_greedy_is_the_argmax_chain(model, ids, prompt):
    sequence = ids[prompt]
    for _ in range(8):
        with torch.no_grad():
            token = model(sequence[None]).logits[0, -1].argmax()
        sequence = torch.cat([sequence, token[None]])
        if token == model.config.eos_token_id:
            break
    assert ids[prompt].tolist() + evaluate.greedy(model, ids[prompt], 8) == sequence.tolist()


def test_agreement():
    found = evaluate.greedy_agreement([[1, 2, 3], [4, 5], [6]], [[1, 2, 3], [4, 6], [6, 7]])
    assert found == evaluate.Agreement(prompts=3, identical=1, tokens=7, same=5)
    assert evaluate.greedy_agreement([], []) == evaluate.Agreement(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("text", "window", "says"),
    [
        (torch.zeros(1, 8, dtype=torch.long), 8, "shape (1, 8)"),
        (torch.zeros(1, dtype=torch.long), 8, "at least 2"),
        (torch.zeros(8, dtype=torch.long), 1, "2 to 512"),
        (torch.zeros(8, dtype=torch.long), 513, "2 to 512"),
        (torch.full((8,), 257), 8, "vocabulary of 257"),
        (torch.full((8,), -1), 8, "vocabulary of 257"),
    ],
)
def test_refused_text(model, text, window, says):
    for measure in (
        lambda: evaluate.perplexity(model, text, window=window),
        lambda: evaluate.divergence(model, model, text, window=window),
    ):
        with pytest.raises(PlanError) as caught:
            measure()
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (torch.zeros(0, dtype=torch.long), "at least 1"),
        (torch.zeros(511, dtype=torch.long), "at most 512"),
        (torch.tensor([3, 257]), "vocabulary of 257"),
    ],
)
def test_refused_prompt(model, prompt, says):
    with pytest.raises(PlanError, match=says):
        evaluate.greedy(model, prompt, 2)


def test_refused_vocabularies(model, tiny_qwen3_moe, ids):
    smaller = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe)
    smaller.resize_token_embeddings(256)
    with pytest.raises(PlanError, match="257 and 256"):
        evaluate.divergence(model, smaller, ids)


def test_refused_logits(tiny_qwen3_moe, ids):
    broken = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe)
    with torch.no_grad():
        broken.lm_head.weight[7, 0] = torch.nan
    with pytest.raises(OperatorError, match="not finite"):
        evaluate.perplexity(broken, ids)
