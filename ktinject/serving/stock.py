"""The application of `transformers serve`, around a model that is loaded already.

    gate.py ──► transformers' app: routes, templates, tools, streams ──► the manager here ──► batches.py

It is built as transformers builds it. What is put in: the model, checks of a request, and a manager that measures, ends
work for which nobody waits, and keeps a request within the context. A thread waits for each request.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ktinject.errors import PlanError
from ktinject.hf import compat
from ktinject.serving import requests
from ktinject.serving.batches import Batches
from ktinject.serving.metrics import Job, Metrics

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
_MOST_THREADS = 4096  # more than a queue is long
_DEFAULT_TOKENS = 1024  # of an answer whose request names no number; as transformers has it

_seed: contextvars.ContextVar[int | None] = contextvars.ContextVar("seed", default=None)


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
    _keep_prompts_out(tokenizer, model)
    serve = _stock()
    manager = serve._model_manager
    manager.loaded_models[name] = compat.TimedModel(model, timeout_seconds=-1, processor=tokenizer)
    manager.force_model = name
    manager.process_model_name = lambda model_id: model_id
    listed = [{"id": name, "object": "model", "created": int(time.time()), "owned_by": "ktinject"}]
    manager.list_models = manager.get_gen_models = lambda: listed  # before transformers 5.24 the latter
    ours = _manager(metrics, batches)
    serve._generation_state.get_manager = lambda model_id, use_cb=False: ours
    for path, handler in (
        ("/v1/chat/completions", serve._chat_handler),
        ("/v1/completions", serve._completion_handler),
        ("/v1/responses", serve._response_handler),
    ):
        handler._validate_request = _checked(path, handler._validate_request, bool(tokenizer.chat_template))
        handler._build_generation_config = _bounded(handler._build_generation_config, most)
    return serve.server.config.app


def _keep_prompts_out(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Give a tokenizer a template of answers where transformers has one of the model's type that does not fit.

    It is found by the type of the model, and made for the chat template that such models come with. It takes what
    stands behind a mark as the beginning of the answer. With another chat template there is no such mark, and answers
    would begin with the whole prompt.
    """
    found = compat.get_response_template(tokenizer, model)
    if not tokenizer.chat_template or found is None or "start_anchor" not in found:
        return
    marks = found["start_anchor"]
    probe = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    if not any(mark in probe for mark in ([marks] if isinstance(marks, str) else marks)):
        ends = model.generation_config.eos_token_id
        ids = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
        tokenizer.response_template = {
            "defaults": {"role": "assistant"},
            "start_anchor_pattern": r"\Z",  # where the prompt ends
            "fields": {"content": {"close": tokenizer.convert_ids_to_tokens(ids), "content": "text"}},
        }


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


def _refused(status: int, message: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(status_code=status, detail=message)


def _checked(
    path: str, own: Callable[[dict[str, Any]], None], has_template: bool
) -> Callable[[dict[str, Any]], None]:
    def validate(body: dict[str, Any]) -> None:
        try:
            requests.check(path, body)
        except requests.BadRequest as error:
            raise _refused(400, str(error)) from None
        if not has_template and path != "/v1/completions":
            raise _refused(
                400, "this model has no chat template: it goes on with texts. Use /v1/completions."
            )
        body.setdefault("stream", False)  # one of transformers' handlers streams unless it is told not to
        own(body)

    return validate


def _bounded(own: Callable[..., GenerationConfig], most: int) -> Callable[..., GenerationConfig]:
    def build(
        body: Mapping[str, Any], model_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        # The seed is set where the request computes: others may be in between.
        _seed.set(body.get("seed"))
        found = own(
            {name: value for name, value in body.items() if name != "seed"}, model_config, use_cb=use_cb
        )
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        asked = next((int(body[name]) for name in names if body.get(name) is not None), None)
        if asked is not None and asked > most:
            raise _refused(400, f"{asked} tokens are asked for, and this server writes at most {most}.")
        found.max_new_tokens = min(_DEFAULT_TOKENS, most) if asked is None else asked
        found.max_length = None
        # A temperature means nothing to a model whose config says that it does not sample.
        if body.get("temperature") or (body.get("temperature") is None and body.get("top_p") is not None):
            found.do_sample = True
        return found

    return build


class _Cancelled(Exception):
    """Nobody waits for the answer."""


class _Watch:
    """A streamer that counts, and ends a request for which nobody waits.

    streamer  transformers' own, which takes the tokens; None if nobody looks before the end
    """

    def __init__(self, job: Job, streamer: Any, metrics: Metrics) -> None:
        self._job, self._streamer, self._is_prompt = job, streamer, True
        self._metrics = metrics

    def put(self, value: torch.Tensor) -> None:
        if self._job.cancelled.is_set():
            raise _Cancelled
        if self._is_prompt:
            self._metrics.started(self._job)
        else:
            self._job.count(value.numel())
        self._is_prompt = False
        if self._streamer is not None:
            self._streamer.put(value)

    def found(self, tokens: int) -> None:
        """So many of the prompt's were read before."""
        self._job.cached = tokens

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class _Generator:
    """Stands for the model where transformers' manager calls `generate`."""

    def __init__(self, model: PreTrainedModel, job: Job, metrics: Metrics, batches: Batches) -> None:
        self._model, self._job, self._metrics, self._batches = model, job, metrics, batches
        self._seed = _seed.get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        streamer: Any = None,
        tokenizer: Any = None,
        attention_mask: Any = None,  # all ones, of one text
        **arguments: Any,
    ) -> torch.Tensor:
        sink = _Watch(self._job, streamer, self._metrics)
        try:
            return self._batches.generate(
                input_ids[0].tolist(), generation_config, sink, self._seed, **arguments
            )
        finally:
            self._metrics.ended(self._job)


def _manager(metrics: Metrics, batches: Batches) -> Any:
    class Manager(compat.GenerateManager):
        """A thread waits for each request; those that compute are of `batches`."""

        def __init__(self) -> None:
            self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="ktinject request")

        def submit(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            return self._threads.submit(function, *args, **kwargs)

        def generate_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            job = _job(inputs, gen_config, metrics)
            generator = _Generator(model, job, metrics, batches)
            return super().generate_streaming(generator, processor, inputs, gen_config, *args, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
        ) -> tuple[str, int, torch.Tensor]:
            job = _job(inputs, gen_config, metrics)
            generator = _Generator(model, job, metrics, batches)
            work = asyncio.wrap_future(
                self.submit(generator.generate, **inputs, generation_config=gen_config)
            )
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
            try:
                sequences = await asyncio.shield(work)
            except asyncio.CancelledError:
                job.cancelled.set()
                raise
            written = sequences[0, job.prompt :]
            return processor.decode(written, skip_special_tokens=True), job.prompt, written

    return Manager()


def _job(inputs: Mapping[str, Any], config: GenerationConfig, metrics: Metrics) -> Job:
    """A request that fits: its answer ends where the context does. Refuses with 400 where there is no room."""
    prompt = inputs["input_ids"].shape[-1]
    room = metrics.context - prompt
    if prompt < 1 or room < 1:
        raise _refused(
            400, f"the prompt has {prompt} tokens; there is room for {metrics.context}, the answer included."
        )
    config.max_new_tokens = min(config.max_new_tokens, room)
    return Job(prompt)
