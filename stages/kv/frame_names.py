"""What log lines about a frame of the scheduler name: its sequence, and whose request that is of."""

from __future__ import annotations

from pipeline.observe.log_names import log_names
from pipeline.protocol import messages as m
from pipeline.protocol.messages import request_of


def frame_names(frame: m.Frame) -> dict[str, str | None]:
    """Fields of a log line. Only `Acquire` says whose request it is; the others have its id."""
    model, sequence = getattr(frame, "model", ""), getattr(frame, "sequence", "")
    return sequence_names(sequence, model, getattr(frame, "tenant", ""), getattr(frame, "session", ""))


def sequence_names(sequence: str, model: str, tenant: str, session: str) -> dict[str, str | None]:
    """Fields of a log line about a sequence; "": about none."""
    request = "" if sequence.startswith("/") else request_of(sequence)  # a draft sequence is of no request alone
    names = log_names(request, model, tenant, session)
    return {**names, "sequence": sequence} if sequence else names
