"""`ktinject serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import dataclasses
import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ktinject.errors import PlanError
from ktinject.generation import batching
from ktinject.planning.plan import Plan
from ktinject.serving import bounds, origins, page, picture, stock
from ktinject.serving.activity import Activity
from ktinject.serving.batches import PAGE, Batches
from ktinject.serving.gate import Gate, Limits
from ktinject.serving.metrics import Metrics
from ktinject.serving.prefixes import Prefixes
from ktinject.support import Support
from ktinject.tools import evaluate

logger = logging.getLogger("ktinject")

_USUAL_TOKENS = (
    4096  # of a request, prompt and answer, for which the paged cache is made; others may have more
)
_LEAST = 16  # tokens without which a server is of no use


@dataclass
class Settings:
    """How a server is reached and what it takes.

    host, port   where it listens; port 0: any that is free
    context      tokens of a request, prompt and answer; None: what the model was made for, or what memory holds
    most         tokens of an answer; None: of the context
    grace        seconds that running requests get when the server ends
    batch        requests that are computed at once; 1: no continuous batching
    prefixes     bytes of RAM for what was read of earlier texts; 0: nothing is kept
    """

    host: str = "127.0.0.1"
    port: int = 8000
    context: int | None = None
    most: int | None = None
    grace: int = 30
    batch: int = 16
    prefixes: int = 2 << 30
    limits: Limits = field(default_factory=Limits)


def context_of(plan: Plan, model: PreTrainedModel, asked: int | None) -> tuple[int, list[str]]:
    """Tokens that a request may have, and remarks on that.

    asked    None: as many as the model was made for, or as memory holds
    Raises   PlanError if so many do not fit
    """
    made_for = evaluate.longest_text(model.config)
    room = {
        device: found.longest_request
        for device, found in plan.runtime_memory.items()
        if found.longest_request is not None
    }
    device, fits = min(room.items(), key=lambda item: item[1], default=("", sys.maxsize))
    if asked is not None and asked > made_for:
        raise PlanError(f"a context of {asked} tokens: the model was made for {made_for}. Ask for fewer.")
    wanted = made_for if asked is None else asked
    if wanted > fits and asked is not None:
        raise PlanError(
            f"a context of {asked} tokens: beside the weights, {device} has room for {fits}. Ask for fewer, or give "
            "it smaller weights or a larger budget."
        )
    if fits < _LEAST:
        raise PlanError(
            f"beside the weights, {device} has room for {fits} tokens of a request. Give it smaller weights, or a "
            "larger budget."
        )
    if wanted <= fits:
        return wanted, []
    return fits, [
        f"requests may have {fits} tokens, not the {made_for} that the model was made for: {device} has room for no "
        "more beside the weights"
    ]


def batches_of(model: PreTrainedModel, context: int, settings: Settings) -> tuple[Batches, list[str]]:
    """What computes requests of up to `context` tokens, several at once if the model can; and remarks on that."""
    room = [found.longest_request for found in model.ktinject.runtime_memory.values()]
    left = min((fits for fits in room if fits is not None), default=sys.maxsize) - context
    most, tokens, notes = settings.batch, 0, []
    if most > 1:
        # Room for a text of the whole context, or for shorter ones of all.
        tokens = min(left, max(context, most * min(context, _USUAL_TOKENS))) // PAGE * PAGE
        found = batching.support(model)
        if found and tokens < 2 * PAGE:
            found = Support.no(
                f"beside a request of {context} tokens there is no room for a batch (--context)"
            )
        if not found:
            most, tokens = 1, 0
            notes.append(f"requests are computed one after the other, not in batches: {found.reason}")
    here, ram = max(0, min(left - tokens, context)), settings.prefixes
    if model.device.type == "cpu":
        each = max((found.kv_bytes_per_token for found in model.ktinject.runtime_memory.values()), default=0)
        here, ram = 0, min(ram, max(0, left - tokens) * each) if each else ram
    prefixes = Prefixes(model, here if ram else 0, ram)
    return Batches(model, most, tokens, prefixes), notes


class Server:
    """A server that is ready to run.

    notes   what somebody who starts it should know
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, settings: Settings
    ) -> None:
        stock.require_packages()
        from ktinject.serving import connections

        if not tokenizer.is_fast:
            raise PlanError(
                f"the tokenizer is a {type(tokenizer).__name__}, and the server decodes with fast ones alone. Put a "
                "tokenizer.json into the folder."
            )
        context, self.notes = context_of(model.ktinject, model, settings.context)
        metrics = Metrics(context)
        most = min(settings.most or context, context)
        self._batches, notes = batches_of(model, context, settings)
        self.notes += notes
        reader = bounds.bounded(tokenizer, context)
        app = stock.application(model, reader, name, metrics, most, self._batches)
        hosts = origins.own_names(settings.host)
        limits = dataclasses.replace(settings.limits, hosts=hosts, running=self._batches.most)
        if hosts is None and limits.key is None:
            self.notes.append(
                "whoever reaches this machine can use the model: there is no key (--api-key-file)"
            )
        state = {"model": name, "context": context}
        self.activity = Activity(model, metrics.now)
        metrics.experts = self.activity.cache
        about = {**state, "chat": bool(tokenizer.chat_template), "most": most}

        async def plan() -> dict[str, Any]:
            return picture.of_model(model, about)

        views = {"/plan": plan, "/activity": self.activity.answer}
        gate = Gate(app, metrics, limits, state, lambda: self._server.should_exit, views, page.files())
        self._server = connections.Listener(
            gate, settings.host, settings.port, settings.grace, limits.queue + limits.running
        )

    @property
    def address(self) -> str | None:
        """Where it listens; None before it does."""
        for server in getattr(self._server, "servers", ()):
            host, port, *_ = server.sockets[0].getsockname()
            return f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return None

    def run(self, ready: Any = None) -> None:
        """Serve until SIGINT or SIGTERM; requests that run then may end within the grace time.

        ready   called with the address, once it listens
        Raises  PlanError if it cannot listen there.
        """
        own = self._server.startup

        async def startup(sockets: Any = None) -> None:
            await own(sockets)
            if ready is not None and self.address is not None:
                ready(self.address)

        self._server.startup = startup  # type: ignore[method-assign]
        try:
            self._server.run()
        finally:
            self._batches.close()
            self.activity.end()

    def stop(self) -> None:
        """Let `run` return; safe from another thread."""
        self._server.should_exit = True
