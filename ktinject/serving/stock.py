"""The application of `transformers serve`, around a model that is loaded already.

    gate.py ──► transformers' app: routes, tools, streams ──► manager.py ──► batches.py
                   └──► requests.py, prompts.py                  └──► answers.py

It is built as transformers builds it. What is put in: the model, checks of a request, templates within limits, and a
manager that measures, ends work for which nobody waits, and keeps a request within the context. A request is read in a
thread of its own, since a long prompt takes seconds, and another thread waits for its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ktinject.errors import KTInjectError, PlanError
from ktinject.hf import compat, templates
from ktinject.serving import prompts, requests
from ktinject.serving.batches import Batches
from ktinject.serving.gate import GENERATING, LOAD
from ktinject.serving.manager import Manager
from ktinject.serving.metrics import Metrics
from ktinject.serving.prompts import refused
from ktinject.serving.refusal import error_of
from ktinject.serving.running import Unavailable

logger = logging.getLogger("ktinject")

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
_MOST_THREADS = 4096  # more than a queue is long
_READERS = 4  # threads that read requests; templates and tokenizers are quick, and others compute
_DEFAULT_TOKENS = 1024  # of an answer whose request names no number; as transformers has it
# Fields of a request that are not transformers' handlers' to look at, and those that say how long an answer may be.
_NAMED = ("top_k", "min_p", "repetition_penalty")
_OURS = ("seed", "stop", "logit_bias", "generation_config", "do_sample", *_NAMED)
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def require_packages() -> None:
    """Raises PlanError for packages that a server needs and that are not installed, or another transformers."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PlanError(
            f"ktinject serve needs {', '.join(missing)}. Install what a server needs: pip install 'ktinject[serve]'"
        )
    compat.require("serving")


def application(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    metrics: Metrics,
    most: int,
    batches: Batches,
) -> Any:
    """An ASGI application that serves a model.

    name     of the model, in requests and answers
    metrics  also says how many tokens a request may have
    most     tokens that an answer may have at most
    batches  compute the requests
    """
    require_packages()
    served = prompts.served(tokenizer, metrics.context)
    variables: frozenset[str] = frozenset()
    if tokenizer.chat_template:
        prompts.keep_prompts_out(served, model)
        variables = templates.variables(tokenizer) - prompts.RESERVED
    service = _Service(model, served, metrics, batches, most, variables)
    serve = _stock()
    manager = serve._model_manager
    manager.loaded_models[name] = compat.TimedModel(model, timeout_seconds=-1, processor=served)
    manager.force_model = name
    manager.process_model_name = lambda model_id: model_id
    listed = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "ktinject"}]
    manager.list_models = manager.get_gen_models = lambda: listed  # before transformers 5.24 the latter
    handlers = (serve._chat_handler, serve._completion_handler, serve._response_handler)
    for path, handler in zip(GENERATING, handlers):
        handler.__class__ = _handler_class(type(handler))
        handler.service, handler.path = service, path
    app = serve.server.config.app
    _load_model(app, name)
    return app


def _stock() -> Any:
    class Stock(compat.Serve):
        """transformers' server, which is built whole and not started."""

        def start_server(self) -> None:
            pass

    return Stock(
        force_model=None,
        continuous_batching=False,
        attn_implementation=None,
        compile=False,
        quantization=None,
        device="cpu",  # of models that it would load
        dtype="auto",
        trust_remote_code=False,
        model_timeout=-1,
        log_level="error",
        default_seed=None,
        non_blocking=True,
        **_unset(),
    )


def _unset() -> dict[str, Any]:
    """Arguments whose defaults are typer's, which means nothing outside of its command line."""
    return {
        "reasoning": "auto",
        "chat_template_kwargs": None,
        "host": "localhost",
        "port": 0,
        "enable_cors": False,
    }


@dataclass
class _Service:
    """What all requests share.

    tokenizer  as `prompts.served` makes it
    most       tokens that an answer may have at most
    variables  of the chat template, which a request may set
    readers    threads that read requests: check them, render their templates, find their tokens
    waiting    threads that wait for answers
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metrics: Metrics
    batches: Batches
    most: int
    variables: frozenset[str]
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_READERS, thread_name_prefix="ktinject reads")
    )
    waiting: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ktinject request")
    )


@cast(Any, functools.cache)
def _handler_class(stock: Any) -> Any:
    class Handler(stock):
        """transformers' handler of a path. Each request has a copy of it, with what is of that request alone."""

        service: _Service
        path: str
        seed: int | None = None
        stops: Sequence[str] = ()
        has_usage = False
        tools: Any = None
        failure: str | None = None  # of a stream

        async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
            one = copy.copy(self)
            one.generation_state = copy.copy(self.generation_state)
            one.generation_state.get_manager = lambda *_, **__: Manager(one)
            service, loop = self.service, asyncio.get_running_loop()
            try:
                begin = await loop.run_in_executor(
                    service.readers, lambda: _driven(stock.handle_request(one, body, request_id))
                )
                found = begin()
                found = await found if inspect.isawaitable(found) else found
            except templates.TemplateError as error:
                raise refused(400, f"the model's chat template {error.said}") from error
            except Unavailable as error:
                raise refused(503, str(error)) from error
            except KTInjectError as error:
                logger.error("%s failed: %s", self.path, error)
                raise refused(500, str(error)) from error
            if hasattr(found, "body_iterator"):
                found.body_iterator = one._said(found.body_iterator)
            return found

        # In a thread: what comes before the answer.

        def _validate_request(self, body: dict[str, Any]) -> None:
            try:
                requests.check(self.path, body, self.service.variables)
            except requests.BadRequest as error:
                raise refused(400, str(error)) from None
            if not self.service.tokenizer.chat_template and self.path != "/v1/completions":
                raise refused(
                    400, "this model has no chat template: it goes on with texts. Use /v1/completions."
                )
            body.setdefault("stream", False)  # one of transformers' handlers streams unless it is told not to
            stock._validate_request(self, body)
            self.has_usage = bool((body.get("stream_options") or {}).get("include_usage"))

        def _build_generation_config(
            self, body: Mapping[str, Any], model_config: GenerationConfig, use_cb: bool = False
        ) -> GenerationConfig:
            self.seed = body.get("seed")  # set where the request computes: others may be in between
            asked = requests.generation(body)
            known = {**asked, **{name: value for name, value in body.items() if value is not None}}
            own = {name: value for name, value in known.items() if name not in _OURS}
            found: GenerationConfig = stock._build_generation_config(self, own, model_config, use_cb=use_cb)
            for name in _NAMED:
                if name in asked:
                    setattr(found, name, asked[name])
            _choose(found, known)
            found.sequence_bias = _bias(known.get("logit_bias"), self.service.model) or found.sequence_bias
            stop = known.get("stop") or found.stop_strings or ()
            self.stops, found.stop_strings = ([stop] if isinstance(stop, str) else stop), None
            most = self.service.most
            wanted = next((int(known[name]) for name in _MOST if name in known), None)
            if wanted is not None and wanted > most:
                raise refused(400, f"{wanted} tokens are asked for, and this server writes at most {most}.")
            found.max_new_tokens = min(_DEFAULT_TOKENS, most) if wanted is None else wanted
            found.max_length = None
            return found

        def _streaming(self, *args: Any, **kwargs: Any) -> Any:
            return functools.partial(stock._streaming, self, *args, **kwargs)

        async def _non_streaming(self, *args: Any, **kwargs: Any) -> Any:
            self.tools = kwargs.get("tools")
            return functools.partial(stock._non_streaming, self, *args, **kwargs)

        # The stream.

        def _build_chunk_sse(self, *args: Any, usage: Any = None, **kwargs: Any) -> str:
            """Usage is a last chunk of its own without choices, for those that ask for it."""
            chunk: str = stock._build_chunk_sse(self, *args, **kwargs)
            if not self.has_usage:
                return chunk
            made = {**json.loads(chunk.removeprefix("data: ")), "usage": None}
            chunks = [made]
            if usage is not None:
                chunks.append({**made, "choices": [], "usage": usage.model_dump(exclude_none=True)})
            return "".join(self.chunk_to_sse(json.dumps(one)) for one in chunks)

        async def _said(self, chunks: Any) -> AsyncIterator[str]:
            """A stream's chunks, errors in the form that clients read."""
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if self.failure is not None:
                        stocks = f'data: {{"error": "{self.failure}"}}\n\n'
                        chunk = chunk.replace(stocks, self.chunk_to_sse(json.dumps(error_of(self.failure))))
                    yield chunk

    Handler.__name__, Handler.__qualname__ = stock.__name__, stock.__qualname__
    return Handler


def _driven(request: Coroutine[Any, Any, Any]) -> Any:
    """What a handler returns that waits for nothing, computed in this thread."""
    try:
        request.send(None)
    except StopIteration as end:
        return end.value
    request.close()
    raise RuntimeError("transformers' handler waits for something before the answer begins")


def _choose(config: GenerationConfig, asked: Mapping[str, Any]) -> None:
    """Say whether an answer is drawn. A temperature means nothing to a model whose config says that it is not."""
    temperature = asked.get("temperature")
    if temperature is not None and temperature < requests.LEAST_TEMPERATURE:
        config.temperature, config.do_sample = 1.0, False
    elif "do_sample" in asked:
        config.do_sample = asked["do_sample"]
    elif temperature is not None or asked.get("top_p") is not None:
        config.do_sample = True


def _bias(asked: Mapping[str, Any] | None, model: Any) -> dict[tuple[int, ...], float] | None:
    """A request's logit_bias as transformers has it. Refuses tokens that the model does not have."""
    count = model.config.get_text_config().vocab_size
    found: dict[tuple[int, ...], float] = {
        (int(token),): float(bias) for token, bias in (asked or {}).items()
    }
    if unknown := [token for (token, *_) in found if token >= count]:
        raise refused(400, f"logit_bias: token {unknown[0]}; the model's tokens are 0 to {count - 1}.")
    return found or None


def _load_model(app: Any, name: str) -> None:
    """Answer what clients of `transformers serve` ask before they begin: the model is loaded, as it always is."""
    from fastapi.responses import StreamingResponse

    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") != LOAD]

    @app.post(LOAD)
    async def load_model(body: dict[str, Any]) -> Any:
        asked = body.get("model")
        if asked != name:
            raise refused(400, f"model: found {requests.short(asked)}; this server has {name!r} alone.")
        said = json.dumps({"status": "ready", "model": name, "cached": True})
        return StreamingResponse(iter([f"data: {said}\n\n"]), media_type="text/event-stream")
