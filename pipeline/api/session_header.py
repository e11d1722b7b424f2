"""`X-Starling-Session: existing`: the turn is of a session that the server has, and begins none.

An orchestrator that does not know where a session is asks one server after the other before it lets one of them begin
the session (`create_session`): a server that does not have it answers 404, as for a turn without `create_session`.
"""

from __future__ import annotations

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.errors import InvalidRequest

HEADER = "X-Starling-Session"
EXISTING = "existing"


def narrowed(generation: GenerationRequest, given: str | None) -> GenerationRequest:
    """The request as the header, if any, narrows it. Raises `InvalidRequest`."""
    if given is None:
        return generation
    if given != EXISTING or not generation.session_id:
        raise InvalidRequest(f"{HEADER} is {given[:40]!r}; send {EXISTING}, with a session_id, or leave it out", HEADER)
    return msgspec.structs.replace(generation, creates_session=False, session_ttl_s=None)
