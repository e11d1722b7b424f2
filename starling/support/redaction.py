"""Removes from a text what a stranger must not read: keys, credentials, tenants' names, this user and this host.

The same secret always becomes the same mark, so that lines about one tenant still belong together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

MASK = "[redacted]"
LEAST = (
    3  # characters of a literal secret; shorter ones occur in words, and are replaced only where a pattern finds them
)

_LITERAL = re.compile(r"-?[0-9.]+(?:[eE][+-]?[0-9]+)?|null|true|false")
_SEPARATOR = r"(?P<mark>\\*[\"'])?[ \t]*[=:][ \t]*+"  # of a name and its value, also in JSON within a JSON string
_KEY = r"(?:api|access|secret|private|account|engine|shared)[_-]?key"  # tls_key and others name files
# Values: a string to its quote or to the end of the line (\" closes only what \" has opened), a list, a word, words.
_QUOTED = r"(?P<quote>\\*[\"'])(?:''|(?!(?<!\\)(?P=quote)).)+"
_LIST = r"\[\s*(?=(?P<first>\\*[\"'])?)(?:\"(?:[^\"\\\r\n]|\\.)*\"|[^\]]){1,1024}\]?[^\s\"'\\,&}\]]*"
_CHARACTER = r"[^\s\"'\\&}]|\\(?![\"'nru])"
_WORD = rf"(?!\[)(?:{_CHARACTER}){{3,}}(?![,;])(?:{_CHARACTER})"
_WORDS = rf"(?!\[)(?:{_CHARACTER}|[ \t]){{3,}}"
_PHRASE = rf"(?(mark){_WORD}|{_WORDS})"  # after a name in quotes, which JSON has, other fields follow


def _value(match: re.Match[str]) -> str:
    """The mark for a value, in quotes if it or its name had some, so that JSON stays JSON."""
    if match["quote"]:
        return f"{match['name']}{match['quote']}{MASK}"  # its end stays
    if match["first"]:
        return f"{match['name']}[{match['first']}{MASK}{match['first']}]"
    quote = match["mark"] or ""
    return f"{match['name']}{quote}{MASK}{quote}"


# (pattern, replacement): secrets that have a form, wherever they come from.
_FORMS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{4,}"), rf"\1 {MASK}"),
    (
        re.compile(
            r"(?i)((?<![A-Za-z0-9])(?:authorization|cookie)(?:\\*[\"'])?[ \t]*[=:][ \t]*(?:\\*[\"'])?)"
            r"(?!\[)[^\r\n\"'\\]{4,}"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]*"), MASK),  # a JSON Web Token
    (
        re.compile(
            rf"(?i)(?P<name>(?<![\w-])[\w-]*(?:{_KEY}|secret|token|salt|signature){_SEPARATOR})"
            rf"(?:{_QUOTED}|{_LIST}|{_WORD})"
        ),
        _value,
    ),
    (
        re.compile(
            rf"(?i)(?P<name>(?<![\w-])[\w-]*(?:password|passwd|passphrase){_SEPARATOR})(?:{_QUOTED}|{_LIST}|{_PHRASE})"
        ),
        _value,
    ),
    (
        re.compile(r"(?i)((?<![\w-])--[\w-]*(?:key|password|secret|token)(?:[\s=]+|[\"'],\s*[\"']))[^\s\"',;]+"),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(?i)((?:[?&;]|%3F|%26|\\u0026|\\u003f)(?:[\w-]*signature|sig|key|[\w-]*credential)(?:=|%3D))[^&\s\"'\\]+"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"\b(?:sk|pk|hf|gh[opsur]|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{4,}"), MASK),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), MASK),
    (re.compile(r"(?i)(\bclient\"?\s*[=:]\s*\"?)[0-9a-f]*[.:][0-9a-f.:]*"), rf"\1{MASK}"),  # an address in a log line
    (re.compile(r"(?<=://)[^\s/@\"']+@"), f"{MASK}@"),
)


class Redaction:
    """Replaces literal secrets and everything that looks like one."""

    def __init__(self, secrets: Iterable[str] = (), names: Iterable[tuple[str, str]] = ()) -> None:
        """`secrets` become `MASK` wherever they stand; `names` are (name, mark), replaced as whole words."""
        secrets = {one for one in secrets if len(one) >= LEAST}
        self._secrets = _any_of({written for one in secrets for written in (one, json.dumps(one)[1:-1])}, "{}")
        self._marks: dict[str, str] = {}
        for name, mark in names:
            if name:
                for written in (name, json.dumps(name)[1:-1]):  # plain, and as a JSON string has it
                    self._marks.setdefault(written, mark)
        # A name that JSON may have as a value, such as 1 or null, is replaced as a string only.
        self._names = _any_of({name for name in self._marks if not _LITERAL.fullmatch(name)}, r"(?<!\w){}(?!\w)")
        self._literals = _any_of(
            {name for name in self._marks if _LITERAL.fullmatch(name)}, r"(?<=[\"']){}(?=\\*[\"'])"
        )

    def text(self, text: str) -> str:
        """The text without secrets. Names come last: a tenant's name may be that of a field, which tells a secret."""
        if self._secrets is not None:
            text = self._secrets.sub(MASK, text)
        for form, mark in _FORMS:
            text = form.sub(mark, text)
        for pattern in (self._names, self._literals):
            if pattern is not None:
                text = pattern.sub(lambda match: self._marks[match[0]], text)
        return text


def _any_of(texts: Iterable[str], form: str) -> re.Pattern[str] | None:
    """A pattern for one of these, the longest first; None without any. One group: a look-around for each is slow."""
    found = sorted(texts, key=lambda one: (-len(one), one))
    return re.compile(form.format(f"(?:{'|'.join(map(re.escape, found))})")) if found else None
