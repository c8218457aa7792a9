"""The choice of a next token by a kernel of native/cuda, and what follows from it in the request's state."""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import address, stream_of


class Chooser:
    """Chooses the next token of each row and updates the state of the request, in one kernel.

    ids     [b, 1] int64, receives the tokens
    result  [2, b] int64: receives the tokens; then, read and written, 1 while a row goes on and 0 once it has ended
    length  [1] int64, grows by one
    seen    [b, v + 1] bool, where the chosen tokens are marked; or [b, 0] if nobody needs it
    ends    [v] bool: True for tokens that end a row
    pad     the token that an ended row gets; None: the token that is chosen as for other rows
    """

    def __init__(
        self, ids: Tensor, result: Tensor, length: Tensor, seen: Tensor, ends: Tensor, pad: int | None
    ) -> None:
        self._ids, self._result, self._length, self._seen, self._ends = ids, result, length, seen, ends
        self._pad = -1 if pad is None else pad
        rows, device, int64 = len(ids), ids.device, torch.int64
        if seen.numel() and seen.shape != (rows, len(ends) + 1):
            raise ValueError(
                f"seen: found {list(seen.shape)}; expected {[rows, len(ends) + 1]}, or no columns"
            )
        self._addresses = {
            "ends": address("ends", ends, device, torch.bool, (len(ends),)),
            "ids": address("ids", ids, device, int64, (rows, 1)),
            "result": address("result", result, device, int64, (2, rows)),
            "seen": address("seen", seen if seen.numel() else None, device, torch.bool),
            "length": address("length", length, device, int64, (1,)),
        }
        # Scratch by which the kernel's thread blocks find the best token together; zero between calls.
        self._best = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        self._block_counts = torch.zeros(1, dtype=torch.int32, device=ids.device)

    def __call__(self, scores: Tensor, noise: Tensor | None) -> None:
        """Choose the token with the greatest score; of equal scores, the first. With noise, draw a sample.

        scores  [b, v] float32
        noise   [b, v] float32 from the exponential distribution. The greatest of softmax(scores) / noise is a sample
                of the softmax
        """
        scores = scores.contiguous()
        shape, device = (len(self._ids), len(self._ends)), self._ids.device
        _native.choose_on_gpu(
            scores=address("scores", scores, device, torch.float32, shape),
            noise=address("noise", noise, device, torch.float32, shape),
            **self._addresses,
            best=address("best", self._best, device, torch.int64),
            block_counts=address("block counts", self._block_counts, device, torch.int32),
            pad=self._pad,
            rows=scores.shape[0],
            vocab=scores.shape[1],
            stream=stream_of(scores.device),
        )
