"""The decode loop: a token a step, with nothing between two steps that the device would have to wait for.

    step ──► logits ──► Sampler.choose ──► tokens stay on the device ──► step …
                              └──► a copy to the host, read while the next step runs

So the loop sees the end of a text one step late and throws that step away. It does not know whether a step is a forward
pass or the replay of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ktinject.hf import compat


class Step(Protocol):
    """Makes the next token of each row, given those that it made before, and leaves it in `result`."""

    result: Tensor  # [2 or more, b] int64, see Sampler

    def __call__(self) -> None: ...

    def end_row(self, row: int) -> None: ...

    def check(
        self, result: Tensor
    ) -> None: ...  # raises what went wrong in steps whose results are on the host


class Mailbox:
    """Results on their way to the host: written behind the step that made them, read without stopping the device."""

    def __init__(self, result: Tensor) -> None:
        self._result = result
        on_gpu = result.is_cuda
        # On the CPU a result is there once it is sent.
        self._slots = [
            torch.empty_like(result, device="cpu", pin_memory=True) if on_gpu else result for _ in range(2)
        ]
        # A thread that spins here would take a core from the workers that compute the experts.
        self._written = [torch.cuda.Event(blocking=True) for _ in range(2)] if on_gpu else []
        self._sent = 0

    def send(self) -> int:
        """Have the result of the step just queued copied; at most two are on their way. Returns what `read` takes."""
        slot = self._sent % 2
        self._sent += 1
        if self._written:
            self._slots[slot].copy_(self._result, non_blocking=True)
            self._written[slot].record()
        else:
            self._slots[slot] = self._result.clone()
        return slot

    def read(self, slot: int) -> Tensor:
        """Wait for a result: [2, b], the caller's own. To be read once."""
        if not self._written:
            return self._slots[slot]
        self._written[slot].synchronize()
        return self._slots[slot].clone()


def run(
    prompt: Tensor,
    step: Step,
    first: Callable[[], None],
    *,
    new_tokens: int,
    pad: int | None,
    stop: Callable[[Tensor], Tensor] | None,
    streamer: Any,
    queue_ahead: bool,
    generator: torch.Generator | None,
) -> Tensor:
    """Generate until every row has ended or has `new_tokens`.

    prompt     [b, n] int64
    first      chooses the first tokens, from the logits of the prompt
    pad        what a finished row goes on with; None: what it produces
    stop       rows, [b, n] int64 on the host → which of them end in a stop string, [b] bool
    streamer   gets [b] int64 on the host for each step, or is None
    queue_ahead  queue the next step before the end of this one is known
    generator  whose random numbers a thrown-away step must not use up; None if it uses none
    Returns    [b, n + new] int64 on the prompt's device
    """
    mailbox = Mailbox(step.result)
    stopped = torch.zeros(len(prompt), dtype=torch.bool, device="cpu")
    rows = prompt.cpu() if stop is not None else None
    produced: list[Tensor] = []
    first()
    waiting = mailbox.send()
    while True:
        is_last = len(produced) + 1 == new_tokens
        ahead, drawn = None, 0
        if queue_ahead and not is_last:
            drawn = generator.get_offset() if generator is not None else 0
            step()
            ahead = mailbox.send()
        found = mailbox.read(waiting)
        tokens, alive, *_ = found.unbind()
        step.check(found)
        if pad is not None and stop is not None:
            tokens = tokens.masked_fill_(stopped, pad)  # a row stopped by a string was one step ahead
        produced.append(tokens)
        if streamer is not None:
            streamer.put(tokens)
        if stop is not None:
            assert rows is not None
            rows = torch.cat([rows, tokens[:, None]], dim=1)
            found = stop(rows) & ~stopped
            stopped |= found
            for row in found.nonzero().flatten().tolist():
                step.end_row(row)
        ended = not any((alive if stop is None else alive * ~stopped).tolist())
        if is_last or ended:
            if ahead is not None and generator is not None:
                generator.set_offset(drawn)
            break
        if ahead is None:
            step()
            ahead = mailbox.send()
        waiting = ahead
    if streamer is not None:
        streamer.end()
    return torch.cat([prompt, torch.stack(produced, dim=1).to(prompt.device)], dim=1)


def logits_of(model: Callable[..., Any], ids: Tensor, mask: Any, positions: Tensor, cache: Any) -> Tensor:
    """A step of a model as transformers calls it: ids and positions [b, n], mask as `Masks.of` makes it → [b, n, v]."""
    outputs = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        return_dict=True,
        **{compat.CACHE: cache},
    )
    logits: Tensor = outputs.logits
    return logits
