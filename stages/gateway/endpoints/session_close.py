"""POST /v1/session/close: `{"model"?, "session_id"}` deletes a session."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import Reader, read_fields, text
from pipeline.protocol.messages import MAX_SESSION_ID

_FIELDS: dict[str, Reader] = {"model": text(256, empty=False), "session_id": text(MAX_SESSION_ID, empty=False)}


def read_close(body: dict[str, Any]) -> tuple[str, str]:
    """(model, session id). Raises `InvalidRequest`."""
    values = read_fields(body, _FIELDS, required=("session_id",))
    return values.get("model", ""), values["session_id"]
