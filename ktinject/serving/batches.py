"""Who computes a request of the server: `generate` while it is alone, continuous batching while there are several.

    request ─► queue ─► alone?  generate, in its captured or native steps ─┐ another comes: it goes on in the batch,
                   └──► several: one batch of transformers' ◄──────────────┘ from what it has written

One request alone is fastest in `generate`; several are in a batch, whose steps read an expert once for all of them. A
request that goes over to the batch has its text read again there, which costs what a prompt costs, and its tokens go
on. What a batch cannot do for a request alone, such as a seed of its own or a repetition penalty, `generate` does: it
waits until the batch is empty, and those behind it wait for it. So all requests are begun in the order in which they
came.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, StopStringCriteria

from ktinject.errors import KTInjectError, OperatorError
from ktinject.generation import next_turns
from ktinject.hf import compat
from ktinject.serving.prefixes import Prefixes

if TYPE_CHECKING:
    from ktinject.generation.batching_sampling import Choice

logger = logging.getLogger("ktinject")

PAGE = 256  # tokens of a block of the paged cache, as transformers has it
_CHUNK = 2048  # tokens of prompts in a step at most, so that others do not wait long for their next token


@dataclass(eq=False)
class Request:
    """A request of one text.

    ids      of the prompt
    sink     a streamer: `put` gets the prompt and each token, and may raise to end the request; `end`; `found` is
             told how many tokens of the prompt need not be read
    choice   how a batch chooses its tokens; None: a batch cannot
    stopped  whether the text so far ends it
    """

    ids: list[int]
    config: GenerationConfig
    sink: Any
    arguments: dict[str, Any]
    choice: Choice | None
    seed: int | None = None
    stopped: Callable[[list[int]], bool] = lambda written: False
    written: list[int] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    moves: bool = False
    seen: int = 0  # of the tokens that the batch has written, those that were taken

    @functools.cached_property
    def prompt(self) -> Tensor:
        """[1, n]; made once, for of a long list that takes milliseconds."""
        return torch.tensor([self.ids], dtype=torch.int64, device="cpu")

    def begin(self) -> bool:
        """Give the sink the prompt; False if nobody waits any more."""
        if not self.has_begun:
            self.has_begun = True
            return self.put(self.prompt)
        return True

    def put(self, value: Tensor) -> bool:
        try:
            self.sink.put(value)
        except BaseException as error:  # whatever a streamer raises to end its request
            self.error = error
            return False
        return True

    def end(self, error: BaseException | None = None) -> None:
        self.error = self.error or error
        if self.error is None:
            try:
                self.sink.end()
            except Exception as found:  # of a client that is gone
                self.error = found
        self.done.set()


class _Moved(Exception):
    """The request goes on in the batch."""


class _Relay:
    """The streamer of `generate` for a request that may move."""

    def __init__(self, request: Request) -> None:
        self._request, self._is_prompt = request, True

    def put(self, value: Tensor) -> None:
        request = self._request
        if self._is_prompt:
            self._is_prompt = False
            return
        request.written.extend(value.tolist())
        if not request.put(value):
            raise _Moved
        if request.moves:
            raise _Moved

    def end(self) -> None:
        pass


class Batches:
    """Runs the requests of a server.

    most      requests at once; 1: always `generate`
    tokens    that the paged cache holds
    prefixes  what was read of earlier texts, for requests that run alone
    """

    def __init__(self, model: Any, tokenizer: Any, most: int, tokens: int, prefixes: Prefixes) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.most, self._tokens, self._prefixes = most, tokens, prefixes
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._batch: dict[str, Request] = {}
        self._alone: Request | None = None
        self._manager: Any = None
        self._number, self._closed = 0, False
        self._thread = threading.Thread(target=self._run, name="ktinject requests", daemon=True)
        self._thread.start()

    def generate(
        self, ids: list[int], config: GenerationConfig, sink: Any, seed: int | None, **arguments: Any
    ) -> Tensor:
        """What `model.generate` gives for one text, [1, n]; returns when it is written.

        arguments  others of `generate`
        Raises     what went wrong, or what `sink` raised
        """
        config = copy.deepcopy(config)
        choice = None
        if self.most > 1 and seed is None and len(ids) + config.max_new_tokens < self._tokens:
            from ktinject.generation.batching_sampling import Choice

            choice = Choice.of(self._model, config)
        stop = config.stop_strings
        request = Request(ids, config, sink, arguments, choice, seed)
        if stop and choice is not None:
            criterion = StopStringCriteria(self._tokenizer, [stop] if isinstance(stop, str) else stop)
            request.stopped = lambda written: bool(
                criterion(torch.tensor([ids + written], dtype=torch.int64, device="cpu"), None)[0]
            )
        with self._changed:
            if self._closed:
                raise RuntimeError("the server is about to end")
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
                request.end(RuntimeError("the server has ended"))
            self._waiting.clear()
            self._batch.clear()
            self._changed.notify_all()
            manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=10, hard_stop=True)

    # The thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_begin())
                if self._closed:
                    return
                request = self._waiting.popleft()
                is_alone = not self._batch and (request.choice is None or not self._has_company())
                if is_alone:
                    self._alone = request
                    request.moves = False
            if is_alone:
                self._run_alone(request)
            else:
                self._add(request)

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
        except _Moved:
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
                streamer=_Relay(request),
                tokenizer=self._tokenizer,
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
        with self._changed:
            self._number += 1
            name = f"request {self._number}"
            request.seen = 0
            self._batch[name] = request
        ends = request.config.eos_token_id
        accepted = manager.add_request(
            request.ids + request.written,
            request_id=name,
            max_new_tokens=request.config.max_new_tokens - len(request.written),
            streaming=True,
            eos_token_id=-1 if ends is None else ends,
            **request.choice.arguments(self._model.config.get_text_config().vocab_size),
        )
        if accepted is None:  # it has failed since; the next one takes the request
            with self._changed:
                if self._batch.pop(name, None) is not None:
                    self._waiting.appendleft(request)
                self._manager = None

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
        manager.output_router = _router(self._take)
        manager.batch_processor = manager._create_batch_processor()  # raises what the thread could not
        _tell_of_prefixes(manager.batch_processor.cache, self._found)
        manager.background_thread_status.clear()
        # As `start` does it, but the thread does not keep the process from ending.
        # Inference mode is a thread's own; since transformers 5.24 the loop is told the caller's.
        takes = inspect.signature(manager._run_generation_loop).parameters
        told = {"use_inference_mode": torch.is_inference_mode_enabled()} if takes else {}
        manager._generation_thread = threading.Thread(
            target=manager._run_generation_loop, kwargs=told, daemon=True
        )
        manager._generation_thread.start()
        self._manager = manager
        return manager

    # The thread of the batch.

    def _found(self, name: str, tokens: int) -> None:
        """So many tokens of a request are in the paged cache."""
        request = self._batch.get(name)
        if request is not None and not request.written:
            request.sink.found(min(tokens, len(request.ids) - 1))

    def _take(self, output: Any) -> None:
        """Hand on what the batch has written of a request."""
        request = self._batch.get(output.request_id)
        if request is None:
            return
        new = output.generated_tokens[request.seen :]
        request.seen += len(new)
        is_done = bool(output.is_finished())
        for token in new:
            request.written.append(token)
            if not request.put(torch.tensor([token], dtype=torch.int64, device="cpu")) or request.stopped(
                request.written
            ):
                if not is_done:
                    self._manager.cancel_request(output.request_id)
                is_done = True
                break
        error = OperatorError(f"the batch failed: {output.error}") if output.error is not None else None
        if not is_done and error is None:
            return
        with self._changed:
            self._batch.pop(output.request_id, None)
            if error is not None and self._manager.background_thread_status.fatal_error is not None:
                self._manager = None  # the next batch gets a new one
            self._changed.notify_all()
        request.end(error)


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
