"""How a request of `generate` would run, for `Decoding.explain`."""

from __future__ import annotations

from torch import Tensor

from ktinject.generation import speculation
from ktinject.generation.candidates import Request
from ktinject.generation.decoding import Decoding, Explanation
from ktinject.generation.eligibility import PlainRequest
from ktinject.generation.graph_runner import size_of
from ktinject.support import Support


def kind_of(decoding: Decoding, recorded: Support) -> str:
    """How the name of a request in transformers' loop begins."""
    if not recorded:
        return ""
    return "native, " if decoding.native is not None else "graph, "


def of_candidates(decoding: Decoding, recorded: Support, request: Request) -> Explanation:
    """How a request for candidates would run."""
    if not recorded:
        return Explanation(f"stock loop: {request.name}", recorded.reason)
    recorded = speculation.foreseen(decoding)
    return Explanation(speculation.how(decoding, request), recorded.reason)


def of_request(
    decoding: Decoding, recorded: Support, plain: PlainRequest | Support, input_ids: Tensor
) -> Explanation:
    """How a request would run; the arguments are those of the loops."""
    is_native = decoding.native is not None
    kind = kind_of(decoding, recorded)
    is_decoded = not isinstance(plain, PlainRequest) or plain.max_length - input_ids.shape[1] > 1
    if recorded and is_decoded and not is_native:
        known = decoding.runners.get(size_of(len(input_ids), input_ids.device))
        recorded = known.graphs if known is not None else recorded
    if not isinstance(plain, PlainRequest):
        return Explanation(f"{kind}stock loop: {plain.reason}", recorded.reason)
    if not recorded or not is_decoded:
        return Explanation("eager loop", recorded.reason)
    return Explanation("native loop" if is_native else "graph loop", "")
