"""What computes a request for a handler of transformers: tokens from `batches`, parts of the answer from `answers`."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from ktinject.hf import compat
from ktinject.serving.answers import Answer, Written
from ktinject.serving.metrics import Job, Metrics
from ktinject.serving.running import Complete

logger = logging.getLogger("ktinject")


class _Cancelled(Exception):
    """Nobody waits for the answer."""


class _Watch:
    """Takes the tokens of a request: counts them, makes the answer of them, and ends it when nobody waits any more."""

    def __init__(self, job: Job, answer: Answer, metrics: Metrics) -> None:
        self._job, self._answer, self._metrics = job, answer, metrics
        self.may_complete = answer.may_end
        self._is_prompt = True
        self.total_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        if self._job.cancelled.is_set():
            raise _Cancelled
        if self._is_prompt:
            self._is_prompt = False
            self._metrics.started(self._job)
            return
        self._job.count(value.numel())
        for token in value.tolist():
            self.total_tokens += 1
            if not self._answer.add(token):
                raise Complete

    def found(self, tokens: int) -> None:
        """So many of the prompt's were read before."""
        self._job.cached = tokens

    def end(self) -> None:
        self._answer.finish()

    def cancel(self) -> None:
        self._job.cancelled.set()


class Manager:
    """Computes one request for a handler of transformers, in the place of its `GenerateManager`."""

    def __init__(self, handler: Any) -> None:
        self._one, self._service = handler, handler.service

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> Any:
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def give(part: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, part)

        job, answer, watch = self._begun(inputs, gen_config, response_parser, give)

        def run() -> None:
            try:
                self._computed(inputs, gen_config, job, answer, watch)
            except _Cancelled:
                give(None)
            except Exception as error:
                logger.error("%s failed: %s: %s", self._one.path, type(error).__name__, error)
                self._one.failure = str(error)
                give(compat.StreamError(self._one.failure))
            else:
                give(None)

        self._service.waiting.submit(run)
        return queue, watch

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, Written]:
        parts: list[Any] = []
        parser = None
        if self._one.path != "/v1/completions":
            takes = inspect.signature(compat.build_response_parser).parameters
            more = {"tools": self._one.tools} if "tools" in takes else {}
            parser = compat.build_response_parser(processor, model, inputs["input_ids"], **more)
        job, answer, watch = self._begun(inputs, gen_config, parser, parts.append)
        work = asyncio.wrap_future(
            self._service.waiting.submit(self._computed, inputs, gen_config, job, answer, watch)
        )
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
        try:
            sequences = await asyncio.shield(work)
        except asyncio.CancelledError:
            job.cancelled.set()
            raise
        written = Written(sequences[0, job.prompt :], parts)
        return written.text, job.prompt, written

    def _begun(
        self, inputs: Any, config: GenerationConfig, parser: Any, give: Callable[[Any], None]
    ) -> tuple[Job, Answer, _Watch]:
        job = Job(inputs["input_ids"].shape[-1])
        config.max_new_tokens = min(config.max_new_tokens, self._service.metrics.context - job.prompt)
        ends = config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        answer = Answer(self._service.tokenizer, self._one.stops, ends, parser, give)
        return job, answer, _Watch(job, answer, self._service.metrics)

    def _computed(
        self, inputs: Any, config: GenerationConfig, job: Job, answer: Answer, watch: _Watch
    ) -> torch.Tensor:
        """The whole text, [1, n]."""
        try:
            found = self._service.batches.generate(
                inputs["input_ids"][0].tolist(), config, watch, self._one.seed
            )
        finally:
            self._service.metrics.ended(job)
        if answer.has_ended:
            config.max_new_tokens = (
                None  # by which handlers tell that it was not cut, in its last token either
            )
        return found
