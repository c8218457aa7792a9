"""Who computes a request of the server: `generate` while it is alone, continuous batching while there are several.

    request ─► queue ─► alone?  generate, in its captured or native steps ─┐ another comes: it goes on in the batch,
                   └──► several: one batch of transformers' ◄──────────────┘ from what it has written

One request alone is fastest in `generate`; several are in a batch, whose steps read an expert once for all of them. A
request that goes over to the batch has its text read again there, which costs what a prompt costs, and its tokens go
on. What a batch cannot do for a request alone, such as a seed of its own or a repetition penalty, `generate` does: it
waits until the batch is empty, and those behind it wait for it. So all requests are begun in the order in which they
came.

Whatever goes wrong ends the request that it belongs to, and no other. A batch that dies fails its requests, and the
next one gets a new batch.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteriaList

from ktinject.errors import KTInjectError, OperatorError
from ktinject.generation import next_turns
from ktinject.hf import compat
from ktinject.serving.prefixes import Prefixes
from ktinject.serving.running import Completed, Moved, Relay, Request, Unavailable

logger = logging.getLogger("ktinject")

PAGE = 256  # tokens of a block of the paged cache, as transformers has it
_PATIENCE = 60  # seconds until the memory of a batch that has died is taken for gone
_CHUNK = 2048  # tokens of prompts in a step at most, so that others do not wait long for their next token


class Batches:
    """Runs the requests of a server.

    most      requests at once; 1: always `generate`
    tokens    that the paged cache holds
    prefixes  what was read of earlier texts, for requests that run alone
    """

    def __init__(self, model: Any, most: int, tokens: int, prefixes: Prefixes) -> None:
        self._model = model
        self.most, self._tokens, self._prefixes = most, tokens, prefixes
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._batch: dict[str, Request] = {}
        self._alone: Request | None = None
        self._manager: Any = None
        self._number, self._closed = 0, False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ktinject requests", daemon=True)
        self._thread.start()

    def generate(
        self, ids: list[int], config: GenerationConfig, sink: Any, seed: int | None, **arguments: Any
    ) -> Tensor:
        """What `model.generate` gives for one text, [1, n]; returns when it is written.

        config     without stop strings, which are the sink's business
        arguments  others of `generate`
        Raises     what went wrong, or what `sink` raised
        """
        config = copy.deepcopy(config)
        choice = None
        if self.most > 1 and seed is None and len(ids) + config.max_new_tokens < self._tokens:
            from ktinject.generation.batching_sampling import Choice

            choice = Choice.of(self._model, config)
        request = Request(ids, config, sink, arguments, choice, seed)
        with self._changed:
            if self._broken is not None:
                raise _broken(self._broken)
            if self._closed:
                raise Unavailable("the server is about to end.")
            self._waiting.append(request)
            if self._alone is not None and choice is not None and self._alone.choice is not None:
                self._alone.moves = True
            self._changed.notify_all()
        request.done.wait()
        if request.error is not None:
            raise request.error
        return torch.cat(
            [request.prompt, torch.tensor([request.written], dtype=torch.int64, device="cpu")], dim=1
        )

    def close(self) -> None:
        """End what runs."""
        with self._changed:
            self._closed = True
            for request in (*self._waiting, *self._batch.values()):
                request.end(Unavailable("the server has ended."))
            self._waiting.clear()
            self._batch.clear()
            self._changed.notify_all()
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=10, hard_stop=True)

    # The thread.

    def _run(self) -> None:
        try:
            while (request := self._next()) is not None:
                try:
                    if request is self._alone:
                        self._run_alone(request)
                    else:
                        self._add(request)
                except Exception as error:  # of whatever is called there: it is this request's
                    logger.exception("a request failed")
                    self._drop(request, error)
        except BaseException as error:
            # Of what is above: nothing is computed any more, so nobody must wait for it.
            if not isinstance(error, SystemExit):  # by which threads are ended with the process
                logger.exception("the server computes no more requests")
            with self._changed:
                self._broken = error
                for each in (*self._waiting, *self._batch.values(), self._alone):
                    if each is not None:
                        each.end(_broken(error))

    def _next(self) -> Request | None:
        """The one to begin, `self._alone` if it runs alone; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_begin())
            if self._closed:
                return None
            request = self._waiting.popleft()
            if not self._batch and (request.choice is None or not self._has_company()):
                self._alone = request
                request.moves = False
            return request

    def _drop(self, request: Request, error: Exception) -> None:
        with self._changed:
            if self._alone is request:
                self._alone = None
            self._batch = {name: each for name, each in self._batch.items() if each is not request}
            if request in self._waiting:
                self._waiting.remove(request)
        request.end(error)

    def _may_begin(self) -> bool:
        if not self._waiting or len(self._batch) >= self.most:
            return False
        return not self._batch or self._waiting[0].choice is not None

    def _has_company(self) -> bool:
        return bool(self._waiting) and self._waiting[0].choice is not None

    def _run_alone(self, request: Request) -> None:
        error: BaseException | None = None
        kept: list[int] = []
        try:
            if request.begin():
                kept = self._generate(request)
        except Moved:
            if request.error is None:  # else its sink has ended it
                with self._changed:
                    self._alone = None
                    self._waiting.appendleft(request)
                return
        except Exception as found:
            error = found
        with self._changed:
            self._alone = None
        request.end(error)
        while kept and not self._waiting and next_turns.between_requests(self._model, kept):
            pass

    def _generate(self, request: Request) -> list[int]:
        """Returns the tokens of the text whose cache is kept."""
        written = torch.tensor([request.written], dtype=torch.int64, device="cpu")
        ids = torch.cat([request.prompt, written], dim=1).to(self._model.device)
        config = copy.deepcopy(request.config)
        config.max_new_tokens -= len(request.written)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        text = request.ids + request.written
        cache, count = self._prefixes.take(text)
        request.sink.found(count)
        kept = text[:count]
        try:
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                streamer=Relay(request),
                stopping_criteria=StoppingCriteriaList(
                    [Completed(request)] if request.sink.may_complete else []
                ),
                **{compat.CACHE: cache},
                **request.arguments,
            )
            if cache is not None:
                kept = text + found[0, len(text) : cache.get_seq_length()].tolist()
        finally:  # whatever is raised leaves the cache as it was
            self._prefixes.keep(kept, cache)
        return kept

    def _add(self, request: Request) -> None:
        assert request.choice is not None
        try:
            manager = self._manager or self._made()
        except (KTInjectError, RuntimeError, ValueError, MemoryError) as error:
            # From now on one after the other.
            logger.warning("requests are not batched: %s", error)
            self.most = 1
            with self._changed:
                for each in (request, *self._waiting):
                    each.choice = None
                self._waiting.appendleft(request)
            return
        if not request.begin():
            request.end()
            return
        ends = request.config.eos_token_id
        with self._changed:  # what it writes at once waits until it is known
            self._number += 1
            name = f"request {self._number}"
            request.seen = 0
            accepted = manager.add_request(
                request.ids + request.written,
                request_id=name,
                max_new_tokens=request.config.max_new_tokens - len(request.written),
                streaming=True,
                eos_token_id=-1 if ends is None else ends,
                **request.choice.arguments(self._model.config.get_text_config().vocab_size),
            )
            if accepted is not None:
                request.manager, self._batch[name] = manager, request
                return
            # It has failed since, or is about to end; a next one takes the request.
            self._waiting.appendleft(request)
            self._manager = None
        manager._generation_thread.join(_PATIENCE)  # it holds the memory that the next one needs

    def _made(self) -> Any:
        """A manager that runs."""
        from ktinject.generation import batching_sampling  # with it comes all of continuous batching

        model = self._model
        config = GenerationConfig(do_sample=False, eos_token_id=-1)
        manager = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=-(-self._tokens // PAGE),
                max_batch_tokens=_CHUNK,
                max_requests_per_batch=self.most,
                use_cuda_graph=model.device.type == "cuda",
            ),
        )
        batching_sampling.install(manager, model.config.get_text_config().vocab_size)
        manager.output_router = _router(functools.partial(self._take, manager))
        manager.batch_processor = manager._create_batch_processor()  # raises what the thread could not
        _tell_of_prefixes(manager.batch_processor.cache, self._found)
        manager.background_thread_status.clear()
        # As `start` does it, but the thread does not keep the process from ending.
        # Inference mode is a thread's own; since transformers 5.24 the loop is told the caller's.
        takes = inspect.signature(manager._run_generation_loop).parameters
        told = {"use_inference_mode": torch.is_inference_mode_enabled()} if takes else {}

        def run() -> None:
            try:
                manager._run_generation_loop(**told)
            finally:
                self._ended(manager)

        manager._generation_thread = threading.Thread(target=run, name="ktinject batch", daemon=True)
        manager._generation_thread.start()
        self._manager = manager
        return manager

    # The thread of the batch.

    def _found(self, name: str, tokens: int) -> None:
        """So many tokens of a request are in the paged cache."""
        with self._changed:
            request = self._batch.get(name)
        if request is not None and not request.written:
            request.sink.found(min(tokens, len(request.ids) - 1))

    def _take(self, manager: Any, output: Any) -> None:
        """Hand on what the batch has written of a request."""
        name = output.request_id
        with self._changed:
            request = self._batch.get(name)
        if request is None:
            return
        has_ended = bool(output.is_finished())
        error: Exception | None = None
        try:
            new = output.generated_tokens[request.seen :]
            request.seen += len(new)
            goes_on = request.write([*itertools.takewhile(lambda token: token >= 0, new)])
            if goes_on and any(token < 0 for token in new):
                error = OperatorError(
                    "the model's scores are not finite numbers, so no token can be chosen. Load the model in bfloat16 "
                    "or float32 if its values are beyond float16, and check its weights."
                )
            elif output.error is not None:
                error = OperatorError(f"the batch failed: {output.error}")
        except Exception as found:  # in the thread of the batch it would end all requests
            logger.exception("a request failed")
            goes_on, error = False, found
        if goes_on and error is None and not has_ended:
            return
        if not has_ended:
            manager.cancel_request(name)
        with self._changed:
            self._batch.pop(name, None)
            self._changed.notify_all()
        request.end(error)

    def _ended(self, manager: Any) -> None:
        """The thread of a batch has ended: what came too late for it to fail does not wait for ever."""
        with self._changed:
            if self._manager is manager:
                self._manager = None
            left = {name: each for name, each in self._batch.items() if each.manager is manager}
            for name in left:
                del self._batch[name]
            self._changed.notify_all()
        for request in left.values():
            request.end(OperatorError("the batch ended. Ask again."))


def _broken(error: BaseException) -> Unavailable:
    return Unavailable(f"the server is broken: {type(error).__name__}: {error}. Start it anew.")


def _tell_of_prefixes(cache: Any, found: Callable[[str, int], None]) -> None:
    """Have what a paged cache finds of a request's beginning told to `found` (request, tokens)."""
    own = cache.search_prefix_match

    def search(request_id: str, prompt_ids: list[int]) -> int:
        tokens: int = own(request_id, prompt_ids)
        found(request_id, tokens)
        return tokens

    cache.search_prefix_match = search


def _router(take: Callable[[Any], None]) -> Any:
    class Router(compat.OutputRouter):
        """Hands what requests have written to `take`, in the thread of the batch."""

        def deliver(self, output: Any) -> None:
            take(output)

        def deliver_batch(self, outputs: list[Any]) -> None:
            for output in outputs:
                take(output)

    return Router()
