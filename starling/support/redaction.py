"""Removes from a text what a stranger must not read: keys, credentials, tenants' names, this user and this host.

The same secret always becomes the same mark, so that lines about one tenant still belong together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MASK = "[redacted]"
LEAST = (
    3  # characters of a literal secret; shorter ones occur in words, and are replaced only where a pattern finds them
)

# (pattern, replacement): secrets that have a form, wherever they come from.
_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{4,}"), rf"\1 {MASK}"),
    (re.compile(r"\b(?:sk|pk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{4,}"), MASK),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), MASK),
    (re.compile(r"(?i)(\bclient\"?\s*[=:]\s*\"?)[0-9a-f]*[.:][0-9a-f.:]*"), rf"\1{MASK}"),  # an address in a log line
    (re.compile(r"(?<=://)[^\s/@\"']+@"), f"{MASK}@"),
    (re.compile(r"(?i)([?&](?:[a-z-]*signature|sig|token|key|[a-z-]*credential)=)[^&\s\"']+"), rf"\1{MASK}"),
    (
        re.compile(
            r"(?i)(\"?\b(?:api[_-]?key|password|passwd|secret|authorization|token)\"?\s*[=:]\s*\"?)(?!\[)[^\s\",}]{4,}"
        ),
        rf"\1{MASK}",
    ),
)


class Redaction:
    """Replaces literal secrets and everything that looks like one."""

    def __init__(self, secrets: Iterable[str] = (), names: Iterable[tuple[str, str]] = ()) -> None:
        """`secrets` become `MASK` wherever they stand; `names` are (name, mark), replaced as whole words."""
        self._marks: dict[str, str] = {}
        patterns = []
        texts = [(secret, MASK, "{}") for secret in secrets if len(secret) >= LEAST]
        texts += [(name, mark, r"(?<!\w){}(?!\w)") for name, mark in names if name]
        for text, mark, form in sorted(texts, key=lambda one: len(one[0]), reverse=True):
            for written in {text, json.dumps(text)[1:-1]}:  # plain, and as a JSON string has it
                self._marks.setdefault(written, mark)
                patterns.append(form.format(re.escape(written)))
        self._literals = re.compile("|".join(patterns)) if patterns else None

    def text(self, text: str) -> str:
        """The text without secrets."""
        if self._literals is not None:
            text = self._literals.sub(lambda match: self._marks[match[0]], text)
        for pattern, mark in _FORMS:
            text = pattern.sub(mark, text)
        return text
