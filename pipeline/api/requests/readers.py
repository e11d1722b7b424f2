"""One reader for each kind of body that gateway and orchestrator accept.

A reader's result is bounded: whatever a body holds, what remains are a few thousand objects, texts, and token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.api.requests import chat, completions, conversations, embeddings, generate, messages, rerank, responses
from pipeline.api.requests.session_close import read_close
from pipeline.api.requests.tokenize import read_detokenize, read_tokenize

BodyReader = Callable[[dict[str, Any]], Any]  # raises `InvalidRequest`

READERS: Mapping[str, BodyReader] = {
    "generate": generate.read,
    "chat": chat.read,
    "completions": completions.read,
    "messages": messages.read,
    "responses": responses.read,
    "conversation": conversations.read_create,
    "conversation_update": conversations.read_update,
    "conversation_items": conversations.read_items,
    "count_tokens": messages.read_count,
    "embeddings": embeddings.read,
    "rerank": rerank.read_rerank,
    "score": rerank.read_score,
    "session_close": read_close,
    "tokenize": read_tokenize,
    "detokenize": read_detokenize,
}
