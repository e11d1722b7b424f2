"""The parameters of URLs: a name that is not read is refused, as in bodies, but for hints. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pipeline.errors import InvalidRequest

# OpenAI's client for Azure adds it to all URLs, also to those whose parameters are not read.
_HINTS = ("api-version",)
_NUMBER = re.compile("-1|[0-9]{1,12}")  # a sequence number; -1: before the first


def check_names(query: Mapping[str, str], names: Collection[str]) -> None:
    """Raise `InvalidRequest` for a parameter that is not among `names` and no hint, or is given twice."""
    given = set[str]()
    for name, _ in query.items():  # of a `MultiDict` also those that are repeated, unlike the keys
        if name in _HINTS:
            continue
        if name not in names:
            raise InvalidRequest(
                f"{name[:80]!r} is no parameter of this URL, which has {', '.join(names)}; leave it out", name[:80]
            )
        if name in given:
            raise InvalidRequest(f"{name} is given twice; send it once", name)
        given.add(name)


def read_streaming(query: Mapping[str, str]) -> int | None:
    """Read those of GET /v1/responses/ID: the sequence number after which events are streamed, or None: no stream.

    Raises `InvalidRequest`.
    """
    check_names(query, ("stream", "starting_after", "include_obfuscation"))
    stream = query.get("stream", "false")
    if stream not in ("true", "false"):
        raise InvalidRequest(f"stream is {stream[:40]!r}; it must be true or false", "stream")
    padding = query.get("include_obfuscation", "false")
    if padding != "false":
        raise InvalidRequest(
            f"include_obfuscation is {padding[:40]!r}; events are not padded: leave it out", "include_obfuscation"
        )
    if stream == "false":
        if "starting_after" in query:
            raise InvalidRequest("starting_after is given without stream=true; leave it out", "starting_after")
        return None
    after = query.get("starting_after", "-1")
    if not _NUMBER.fullmatch(after):
        raise InvalidRequest(
            f"starting_after is {after[:40]!r}; it must be the sequence_number of an event", "starting_after"
        )
    return int(after)
