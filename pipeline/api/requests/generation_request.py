"""`GenerationRequest`: a valid request for text, the same for all generation endpoints.

The readers of this package fill it in from a body; admission turns it into sequences.  It does not
depend on a model: what does is checked at admission.  The journal stores it by field name: a field may be added with
a default, but never renamed or removed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.constraint_fields import constraint_of
from pipeline.api.generation_fields import MAX_SEQUENCES, sampling_of
from pipeline.api.requests.reasoning_fields import Reasoning, Thinking
from pipeline.api.requests.tool_fields import ToolUse
from pipeline.api.requests.tool_formats import MARKERS
from pipeline.errors import InvalidRequest
from pipeline.protocol.messages import Constraint, Sampling

TextOrIds = str | tuple[int, ...]
_NONE: frozenset[bytes] = frozenset()


class SessionTurn(msgspec.Struct, array_like=True, frozen=True):
    """A turn of a session that the KV manager has begun."""

    session: str
    number: int  # 0: it has been committed and must not be committed again
    base: int  # tokens that the session held before


class TemplateArguments(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the chat template gets besides the messages."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}  # `chat_template_kwargs`
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ResponseFields(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What is kept of a request for /v1/responses."""

    previous: str = ""  # id of the response that the conversation continues
    is_stored: bool = True  # the conversation can be continued, and the response read later
    in_background: bool = False  # no client waits for it
    conversation: list[dict[str, Any]] = []  # messages without instructions; since admission also those of `previous`
    n_instructions: int = 0  # messages before the conversation
    repeated: bytes = b"{}"  # JSON, fields of the request that the answer repeats
    effort: str = ""  # of reasoning; "": the request has none
    inputs: bytes = b"[]"  # JSON, the items of the input
    conversation_id: str = ""  # to which input and answer are added; "": none
    # By an orchestrator, which keeps the conversation, the answer, and what runs in the background.
    is_kept_elsewhere: bool = False


class AdapterUse(msgspec.Struct, array_like=True, frozen=True):
    """The LoRA adapter that computes a request."""

    name: str
    digest: str  # hex


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A valid request for text."""

    endpoint: str  # as in metrics and logs
    model: str  # "": the first model
    prompts: list[TextOrIds] = []
    messages: list[dict[str, Any]] | None = None  # of a chat, instead of prompts
    n: int = 1
    max_tokens: int | None = None  # None: as many as the context leaves
    max_tokens_field: str = "max_tokens"  # for error messages
    seed: int | None = None  # None: drawn at random
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special: bool = True
    cache_salt: str = ""  # prompts share cached pages only with others of the same salt
    speculate: int = 0  # most draft tokens in a step; 0: as the model is configured, -1: none
    session_id: str | None = None  # "": a new session
    creates_session: bool = False  # if no session has this id
    session_ttl_s: int | None = None  # of a new session; 0: it never expires; None: as configured
    turn: SessionTurn | None = None  # set at admission
    # Of a chat: what the template's `strftime_now` shows, ISO 8601; set at admission if the client gave none. UNSET is
    # not encoded, so that an older gateway finds the journal as it knows it.
    template_date: str | msgspec.UnsetType = msgspec.UNSET
    constraint: Constraint | msgspec.UnsetType = msgspec.UNSET  # what the output must match; UNSET: anything
    template: TemplateArguments | msgspec.UnsetType = msgspec.UNSET  # of a chat, until its prompt is rendered
    response: ResponseFields | msgspec.UnsetType = msgspec.UNSET  # of a request for /v1/responses
    n_returned: int | msgspec.UnsetType = msgspec.UNSET  # of each prompt, the most likely ones of `n`; UNSET: all
    tools: ToolUse | msgspec.UnsetType = msgspec.UNSET  # that an answer may call; UNSET: no call is looked for
    # Of each token of the prompts, its log probability and the n highest ones; UNSET: none.
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    suffix: str | msgspec.UnsetType = msgspec.UNSET  # what follows the text, until the prompt is tokenized
    adapter: AdapterUse | msgspec.UnsetType = msgspec.UNSET  # set at admission; UNSET: none
    shows_prompt_logprobs: bool | msgspec.UnsetType = msgspec.UNSET  # in a field of their own; UNSET: no
    thinking: Thinking | msgspec.UnsetType = msgspec.UNSET  # of a chat, until it is rendered; UNSET: no demands
    priority: int | msgspec.UnsetType = msgspec.UNSET  # the lower the earlier; UNSET: that of the key
    reasoning: Reasoning | msgspec.UnsetType = msgspec.UNSET  # set at admission; UNSET: the text is not divided
    # How long the model stays loaded after the request, s; negative: for good; UNSET: as configured.
    keep_alive: float | msgspec.UnsetType = msgspec.UNSET
    # What the answer may be; "" once it is tokenized (`RequestSpec.prediction`). UNSET: nothing is predicted.
    prediction: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def kept_control(self) -> frozenset[bytes]:
        """Control tokens that are text, although others are left out: they show where a call or reasoning is."""
        kept = MARKERS if self.tools else _NONE
        return kept.union(self.reasoning.marks) if self.reasoning else kept

    @property
    def is_anthropic(self) -> bool:
        """Whether the client uses Anthropic's API."""
        return self.endpoint in ("messages", "count_tokens")

    @property
    def is_in_background(self) -> bool:
        """Whether no client waits for the answer."""
        fields = self.response
        return fields.in_background and not fields.is_kept_elsewhere if fields else False

    @property
    def kept_alive_s(self) -> float | None:
        """`keep_alive`; None: as configured."""
        return None if self.keep_alive is msgspec.UNSET else self.keep_alive

    @property
    def prompt_field(self) -> str:
        """The name of the field that has the prompt, for error messages."""
        if self.response:
            return "input"
        return "prompt" if self.messages is None else "messages"


def common_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `GenerationRequest` from values that were read with `COMMON_FIELDS`."""
    return {
        "model": values.get("model", ""),
        "n": values.get("n", 1),
        "seed": values.get("seed"),
        "sampling": sampling_of(values),
        "stop": values.get("stop", ()),
        "stop_token_ids": values.get("stop_token_ids", ()),
        "stream": values.get("stream", False),
        "skip_special": values.get("skip_special_tokens", True),
        "cache_salt": values.get("cache_salt", ""),
        "speculate": values["speculate"] or -1 if "speculate" in values else 0,
        "constraint": constraint_of(values) or msgspec.UNSET,
        "priority": values.get("priority", msgspec.UNSET),
        "keep_alive": values.get("keep_alive", msgspec.UNSET),
    }


def with_logprobs(sampling: Sampling, top: int) -> Sampling:
    """Return `sampling` with the logprobs of the sampled token and of the `top` most likely ones."""
    return msgspec.structs.replace(sampling, logprobs=top)


def check_combination(request: GenerationRequest) -> GenerationRequest:
    """Return `request` after the checks that concern several fields. Raises `InvalidRequest`."""
    if request.max_tokens is not None and request.sampling.min_tokens > request.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.sampling.min_tokens} and {request.max_tokens_field} is {request.max_tokens}; "
            f"min_tokens must not be the larger one",
            "min_tokens",
        )
    what = request.constraint.field if request.constraint else ""
    if request.tools and (request.tools.forced or request.tools.strict):
        what = "tool_choice" if request.tools.forced else request.tools.strict_field
    if what and request.sampling.ignore_eos:
        raise InvalidRequest(
            f"ignore_eos is true and {what} says where the output ends; leave ignore_eos out",
            "ignore_eos",
        )
    if request.tools and request.constraint and request.constraint.kind != "json_schema":
        raise InvalidRequest(
            f"{request.constraint.field} constrains the whole answer, which then has no tool calls; leave it out, "
            f"or send tool_choice none",
            request.constraint.field,
        )
    total = max(1, len(request.prompts)) * request.n
    if total > MAX_SEQUENCES:
        field = "best_of" if request.n_returned else "n"
        raise InvalidRequest(
            f"{len(request.prompts)} prompts with {field} = {request.n} are {total} texts; at most {MAX_SEQUENCES} are "
            f"allowed per request: send several requests",
            field,
        )
    return request
