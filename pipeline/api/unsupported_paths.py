"""Paths of OpenAI's and Anthropic's APIs that this server does not have, and what to use instead."""

from __future__ import annotations

from pipeline.errors import StarlingError

_TRAINING = "it does not train models: fine-tune one elsewhere, and load its GGUF file (models[].path)"
_FILES = "it keeps no files: send the text in the request"
_BATCHES = "it has no batches: send the requests at once, they share steps"
_THREADS = "it has no assistants: use /v1/responses and /v1/conversations"
_OWN = "its operator has the command `starling` and /v1/admin"

# By the part of the path after /v1/.
UNSUPPORTED_PATHS = {
    "fine_tuning": _TRAINING,
    "fine-tuning": _TRAINING,
    "fine-tunes": _TRAINING,
    "images": "it makes and reads no images: it generates text",
    "videos": "it makes no videos: it generates text",
    "audio": "it has no speech, neither in nor out: it generates text",
    "realtime": "it has no speech and no sessions over WebSockets: stream /v1/chat/completions",
    "files": _FILES,
    "uploads": _FILES,
    "vector_stores": "it keeps no vectors: compute them with /v1/embeddings, and rank texts with /v1/rerank",
    "containers": "it runs no code: offer tools, and run their calls yourself",
    "batches": _BATCHES,
    "messages/batches": _BATCHES,
    "assistants": _THREADS,
    "threads": _THREADS,
    "chatkit": _THREADS,
    "moderations": "it has no moderation model: a plugin can refuse requests and answers",
    "evals": "it evaluates no models",
    "graders": "it evaluates no models",
    "skills": "it runs no code: offer tools, and run their calls yourself",
    "organization": _OWN,
    "organizations": _OWN,
    "projects": _OWN,
    "edits": "the edits API has ended: use /v1/chat/completions",
}


def unsupported_path(path: str) -> StarlingError | None:
    """Return the error for a path of an API that the server does not have; None: the path is of no such API."""
    parts = path.removeprefix("/v1/").split("/") if path.startswith("/v1/") else []
    for length in (2, 1):
        name = "/".join(parts[:length])
        if reason := UNSUPPORTED_PATHS.get(name):
            return StarlingError("NOT_IMPLEMENTED", f"this server does not support /v1/{name}: {reason}")
    return None
