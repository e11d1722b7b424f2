"""POST /v1/session/close: `{"model"?, "session_id"}` deletes a session."""

from __future__ import annotations

from typing import Any

from pipeline.api.fields import FieldTable, text
from pipeline.protocol.messages import MAX_SESSION_ID

BODY = FieldTable({"model": text(256, empty=False), "session_id": text(MAX_SESSION_ID, empty=False)}, ("session_id",))


def read_close(body: dict[str, Any]) -> tuple[str, str]:
    """(model, session id). Raises `InvalidRequest`."""
    values = BODY.read(body)
    return values.get("model", ""), values["session_id"]
