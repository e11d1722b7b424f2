"""What differs between the other engines: how each is started, its metrics, and its names for our parameters.

All of them answer `GET /health`, `GET /metrics`, and OpenAI's `POST /v1/completions` and `/v1/chat/completions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import EngineConfig
from stages.agent.engines.interface import Queue


class ChatTemplate(NamedTuple):
    """What the chat template of a model has a place for. What it has none for, the engine leaves out of the prompt."""

    tools: bool
    calls: bool  # in the assistant's messages


class Dialect(ABC):
    """One kind of engine."""

    name: str  # as in the configuration
    honoured: frozenset[str]  # of the parameters in `OPTIONAL` (door/request_body.py)
    separates_tenants: bool  # its cache of prompts takes a salt
    counts_choices: bool  # an event of no choice counts the tokens of the choice before; else those of all
    template_path = ""  # of what it says of the chat template; "": it says nothing

    @abstractmethod
    def command(self, engine: EngineConfig, port: int) -> list[str]:
        """Program and arguments of an engine that listens on 127.0.0.1:`port`."""

    @abstractmethod
    def environment(self, key: str) -> dict[str, str]:
        """Variables that it gets; `key`: that it must require. Arguments are visible to all users of the host."""

    @abstractmethod
    def queue(self, metrics: Mapping[str, float]) -> Queue:
        """What its metrics say."""

    @abstractmethod
    def parameters(self, request: GenerationRequest, seed: int, *, salt: str, may_reuse: bool) -> dict[str, Any]:
        """The fields of its body besides prompt and `max_tokens`: all that it would else have its own defaults for.

        salt: prompts of other salts must not share cached pages.  may_reuse: its cache has prompts of this salt alone.
        """

    def template(self, said: Mapping[str, Any]) -> ChatTemplate:
        """What it says of the chat template."""
        return ChatTemplate(tools=True, calls=True)

    def unfit_field(self, request: GenerationRequest) -> str:
        """A field that the engine would not honour in this request, although it does in others; "": there is none."""
        return ""

    def logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        """The fields of its body that ask for log probabilities."""
        if request.messages is None:
            return {"logprobs": request.top_logprobs}
        return {"logprobs": True, "top_logprobs": request.top_logprobs}

    @abstractmethod
    def tokens(self, event: Mapping[str, Any]) -> int | None:
        """The output tokens up to an event of its stream; None: the event does not say."""
