"""A client's body is read here once, before the body is sent anywhere.

All fields are checked with the readers of the gateway: a bad body is refused, with the same error, before an agent is
chosen and a model loaded for it.  Routing gets the model, whether the answer is streamed, the session, and the
prompt's bytes; engines get the body as it was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pipeline.api.body_names import names_of
from pipeline.api.content_coding import decompress
from pipeline.api.json_body import count_separators, parse_object
from pipeline.api.requests.embeddings import EmbeddingRequest
from pipeline.api.requests.generation_request import GenerationRequest, TextOrIds
from pipeline.api.requests.messages import text_characters
from pipeline.api.requests.readers import READERS
from pipeline.api.requests.rerank import RerankRequest, ScoreRequest
from pipeline.api.requests.tokenize import DetokenizeRequest, TokenizeRequest
from pipeline.errors import InvalidRequest, StarlingError
from stages.orchestrator.prefixes import block_hashes, prompt_text

# The reader of each path's body.
TEXT_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    "/v1/generate": "generate",
}
OTHER_PATHS = {
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/tokenize": "tokenize",
    "/v1/detokenize": "detokenize",
    "/v1/session/close": "session_close",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
_READER_OF = {**TEXT_PATHS, **OTHER_PATHS}
# Bodies that are larger or have more values are read on a thread. Larger ones are hashed there, too: on a core without
# instructions for SHA-256 so many bytes take 0.2 ms, and the way to a thread 0.05 ms.
INLINE_BYTES = 64 << 10
INLINE_SEPARATORS = 2_000
CHARGED_BYTES = 4  # of text that the quota counts as a token: its tokens are not known here
T = TypeVar("T")


class ReadBody(NamedTuple):
    """What the orchestrator uses of a body."""

    model: str
    is_stream: bool
    session: str | None  # None: none; "": a new one
    blocks: tuple[int, ...]
    prompt_bytes: int
    begins_session: bool = False  # one with that id, if there is none
    generation: GenerationRequest | None = None  # of a request for /v1/responses, whose prompt is not complete here
    converted: int = 0  # tokens that the quota counts of a request that generates none
    n_choices: int = 1  # of all prompts


async def inline_or_not(body: bytes, headers: Mapping[str, str], read: Callable[[], T]) -> T:
    """Read a body, on a thread if that may take long."""
    is_small = len(body) <= INLINE_BYTES and count_separators(body) <= INLINE_SEPARATORS
    return read() if is_small and not headers.get("Content-Encoding") else await asyncio.to_thread(read)


async def digest_of(*parts: bytes) -> bytes:
    """SHA-256 of the parts, on a thread if that may take long."""
    if sum(map(len, parts)) <= INLINE_BYTES:
        return _sha256(parts)
    return await asyncio.to_thread(_sha256, parts)


def _sha256(parts: tuple[bytes, ...]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def read_fields(reader: str, body: bytes, content_type: str, coding: str, max_bytes: int) -> tuple[dict[str, Any], Any]:
    """The fields of a body, and what a reader makes of them. Raises `InvalidRequest`, `TooLarge`."""
    fields: dict[str, Any] = parse_object(decompress(body, coding, max_bytes), content_type)
    try:
        return fields, READERS[reader](fields)
    except StarlingError as error:
        error.names = names_of(fields)
        raise


def read_body(
    path: str, body: bytes, content_type: str, coding: str, max_bytes: int, tenant_salt: str = ""
) -> ReadBody:
    """Read the body of a request for `path`. Raises `InvalidRequest`, `TooLarge`."""
    reader = _READER_OF[path]
    fields, request = read_fields(reader, body, content_type, coding, max_bytes)
    is_stream, salt, session, begins, n_choices = False, "", None, False, 1
    if isinstance(request, GenerationRequest):
        is_stream, salt, session = request.stream, request.cache_salt, request.session_id
        begins, n_choices = request.creates_session, max(1, len(request.prompts)) * request.n
    if reader == "session_close":
        model, session = request
    else:
        model = request.model
    if not model:
        raise InvalidRequest("model is missing; it is required: GET /v1/models lists the models of the fleet", "model")
    if reader == "responses":
        return ReadBody(model, is_stream, None, (), 0, generation=request)
    prompt = prompt_text(fields)
    blocks = block_hashes(prompt, f"{model}\0{tenant_salt}\0{salt}")
    converted = _converted(request) if path in OTHER_PATHS else 0
    begins = begins and bool(session)
    return ReadBody(model, is_stream, session, blocks, len(prompt), begins, converted=converted, n_choices=n_choices)


def _converted(request: object) -> int:
    """Tokens that the quota counts of a body of `OTHER_PATHS`: as many as ids, and those of the texts' bytes."""
    texts: list[TextOrIds] = []
    match request:
        case GenerationRequest():
            return -(-text_characters(request) // CHARGED_BYTES)
        case DetokenizeRequest():
            return len(request.tokens)
        case TokenizeRequest():
            texts = [request.text]
        case EmbeddingRequest():
            texts = request.inputs
        case RerankRequest() | ScoreRequest():
            texts = [*request.texts]
    n_bytes = sum(len(one.encode()) for one in texts if isinstance(one, str))
    return sum(len(one) for one in texts if not isinstance(one, str)) + -(-n_bytes // CHARGED_BYTES)
