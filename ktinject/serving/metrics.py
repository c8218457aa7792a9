"""What a server has done, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_RATES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Histogram:
    """How often a value was at most each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        total, found = 0, []
        for bound, count in zip((*self.bounds, "+Inf"), self.counts):
            total += count
            found.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*found, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


@dataclass(eq=False)
class Job:
    """One request to the model.

    prompt, written    tokens
    cached             of the prompt's, those that were read before
    asked, first, last   when it came, and when its first and its last token did
    cancelled          nobody waits for it any more
    """

    prompt: int = 0
    written: int = 0
    cached: int = 0
    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def count(self, tokens: int) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.written += tokens


class Metrics:
    """Counters of a server. Safe from several threads.

    context   tokens that a request may have, prompt and answer
    inflight  requests that were let in and are not answered: some of them run, the others wait
    experts   what the experts on GPUs were good for; None where they stay where they are
    """

    def __init__(self, context: int) -> None:
        self.context, self.inflight = context, 0
        self.experts: Callable[[], Mapping[str, int] | None] = lambda: None
        self._lock = threading.Lock()
        self._running: set[Job] = set()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._decode_seconds = 0.0
        self._first, self._rate = Histogram(_SECONDS), Histogram(_RATES)

    def answered(self, path: str, status: int) -> None:
        with self._lock:
            self._requests[path, status] += 1

    def started(self, job: Job) -> None:
        with self._lock:
            self._running.add(job)

    def ended(self, job: Job) -> None:
        with self._lock:
            self._running.discard(job)
            self._tokens["prompt"] += job.prompt
            self._tokens["generated"] += job.written
            self._tokens["cached"] += job.cached
            if job.first is None:
                return
            self._first.add(job.first - job.asked)
            self._decode_seconds += job.last - job.first
            if job.written > 1 and job.last > job.first:
                self._rate.add((job.written - 1) / (job.last - job.first))

    def now(self) -> dict[str, float]:
        """Seconds of a clock, tokens that were generated so far, and requests that run and that wait."""
        with self._lock:
            running = len(self._running)
            return {
                "clock": time.perf_counter(),
                "generated": self._tokens["generated"] + sum(job.written for job in self._running),
                "running": running,
                "waiting": max(0, self.inflight - running),
                "held": sum(job.prompt + job.written for job in self._running),
            }

    def text(self) -> str:
        """The answer to GET /metrics."""
        with self._lock:
            held = sum(job.prompt + job.written for job in self._running)
            running = len(self._running)
            found = [
                *_titled("requests_total", "counter", "Requests that were answered, by path and status."),
                *(
                    f'ktinject_requests_total{{path="{path}",status="{status}"}} {count}'
                    for (path, status), count in sorted(self._requests.items())
                ),
                *_titled(
                    "tokens_total", "counter", "Tokens of prompts, of them those read before, and generated."
                ),
                *(
                    f'ktinject_tokens_total{{kind="{kind}"}} {self._tokens[kind]}'
                    for kind in ("prompt", "cached", "generated")
                ),
                *_titled("decode_seconds_total", "counter", "Seconds from first to last tokens."),
                f"ktinject_decode_seconds_total {self._decode_seconds:.6f}",
                *_titled("time_to_first_token_seconds", "histogram", "From the request, its wait included."),
                *self._first.lines("ktinject_time_to_first_token_seconds"),
                *_titled("tokens_per_second", "histogram", "Of a request, behind its first token."),
                *self._rate.lines("ktinject_tokens_per_second"),
                *_titled("requests_running", "gauge", "Requests that the model computes: the batch."),
                f"ktinject_requests_running {running}",
                *_titled("requests_waiting", "gauge", "Requests in the queue."),
                f"ktinject_requests_waiting {max(0, self.inflight - running)}",
                *_titled("cache_tokens", "gauge", "Tokens of the requests that run."),
                f"ktinject_cache_tokens {held}",
                *_titled("cache_tokens_limit", "gauge", "Tokens that a request may have."),
                f"ktinject_cache_tokens_limit {self.context}",
            ]
        return "\n".join([*found, *_of_experts(self.experts())]) + "\n"


def _of_experts(counts: Mapping[str, int] | None) -> Iterator[str]:
    if counts is None:
        return
    yield from _titled(
        "expert_uses_total", "counter", "Uses of experts in decode steps, by where the expert was."
    )
    yield f'ktinject_expert_uses_total{{where="gpu"}} {counts["hits"]}'
    yield f'ktinject_expert_uses_total{{where="cpu"}} {counts["uses"] - counts["hits"]}'
    yield from _titled("expert_fetches_total", "counter", "Experts that were copied to GPUs to stay there.")
    yield f"ktinject_expert_fetches_total {counts['fetches']}"
    yield from _titled("expert_fetched_bytes_total", "counter", "Bytes of these experts.")
    yield f"ktinject_expert_fetched_bytes_total {counts['bytes']}"


def _titled(name: str, kind: str, what: str) -> tuple[str, str]:
    return f"# HELP ktinject_{name} {what}", f"# TYPE ktinject_{name} {kind}"
