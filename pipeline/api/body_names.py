"""The model and the session that a request's body names, for the log: also if the rest of the body is refused.

A value of another form than names have is left out: it may be a part of a prompt in the wrong field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_NAME = re.compile(r"[\w.:/@+-]{1,128}")


class BodyNames(NamedTuple):
    """ "": not named."""

    model: str = ""
    session_id: str = ""


def names_of(body: Mapping[str, Any]) -> BodyNames:
    """The names in a parsed body, which is not checked yet."""
    return BodyNames(_name(body.get("model")), _name(body.get("session_id")))


def _name(value: Any) -> str:
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""
