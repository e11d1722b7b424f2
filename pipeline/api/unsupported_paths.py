"""Paths of other APIs that a server, or an orchestrator, does not have, and what to use instead."""

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

_ADAPTERS = (
    "its agents load no files of requests: publish the adapter (`starling publish FILE --name MODEL:ADAPTER`), and ask "
    "for MODEL:ADAPTER"
)
_FLEET_OWN = "its operator has the command `starling fleet` and /v1/fleet"

# What an orchestrator does not have, besides and instead of those.
FLEET_UNSUPPORTED_PATHS = {
    "moderations": "it has no moderation model",
    "admin": "its operator has `starling fleet`; for one engine, call /load_model and /unload_model of its agent",
    "load_lora_adapter": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "organization": _FLEET_OWN,
    "organizations": _FLEET_OWN,
    "projects": _FLEET_OWN,
}


def unsupported_path(path: str, *, of_fleet: bool = False) -> StarlingError | None:
    """Return the error for a path of an API that the server does not have; None: the path is of no such API.

    of_fleet: the server is an orchestrator.
    """
    known = {**UNSUPPORTED_PATHS, **FLEET_UNSUPPORTED_PATHS} if of_fleet else UNSUPPORTED_PATHS
    what = "an orchestrator" if of_fleet else "this server"
    if of_fleet and path == "/lora-adapters":
        return StarlingError("NOT_IMPLEMENTED", f"{what} does not support {path}: {_ADAPTERS}")
    parts = path.removeprefix("/v1/").split("/") if path.startswith("/v1/") else []
    for length in (2, 1):
        name = "/".join(parts[:length])
        if reason := known.get(name):
            return StarlingError("NOT_IMPLEMENTED", f"{what} does not support /v1/{name}: {reason}")
    return None
