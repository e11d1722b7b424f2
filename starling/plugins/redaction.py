"""A plugin that replaces e-mail addresses and card numbers, in requests and in answers. See docs/plugins.md.

    plugins:
      - name: redaction
        options: {kinds: [email, card], email: "[EMAIL]", card: "[CARD]"}

While an answer is streamed, text that may become an address or a number is held back: at most `MAX_CHARACTERS`.
"""

from __future__ import annotations

import re
from typing import Any

from starling.plugins import InferenceRequest, InferenceResponse, Plugin, Refused

KINDS = {
    "email": r"(?P<email>[A-Za-z0-9][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,3}[A-Za-z]{2,24})",
    "card": r"(?P<card>(?<![0-9])[0-9](?:[ -]?[0-9]){12,18}(?![0-9]))",
}
# What stands at the end of a text and may become a match.
TAILS = {"email": r"[A-Za-z0-9._%+@-]+\Z", "card": r"[0-9](?:[ -]?[0-9]){0,18}[ -]?\Z"}
MAX_CHARACTERS = 64 + 1 + 3 * 64 + 24  # of a match
MAX_TEXTS = 1024  # whose beginnings are remembered
_NOT_REPLACED = ("role", "tool_call_id", "id", "type", "name")  # keys of messages


class Redactor:
    """Replaces matches in texts."""

    def __init__(self, kinds: list[str], replacements: dict[str, str]) -> None:
        self._pattern = re.compile("|".join(KINDS[kind] for kind in kinds))
        self._tails = [re.compile(TAILS[kind]) for kind in kinds]
        self._replacements = replacements

    def replaced(self, text: str, begin: int = 0, end: int | None = None) -> str:
        """Return the text from `begin` to `end` (None: its end) with replacements; no match spans the two."""
        end = len(text) if end is None else end
        parts: list[str] = []
        for match in self._pattern.finditer(text, begin):  # what follows `end` counts for what is before
            if match.start() >= end:
                break
            parts += text[begin : match.start()], self._replacement(match)
            begin = match.end()
        return "".join([*parts, text[begin:end]])

    def certain(self, text: str, begin: int = 0) -> int:
        """Return the length of the part whose replacements no later text can change."""
        while True:
            lowest = max(begin, len(text) - MAX_CHARACTERS)
            found = [match.start() for tail in self._tails if (match := tail.search(text, lowest))]
            end = min(found, default=len(text))
            match = self._pattern.search(text, begin, min(len(text), end + MAX_CHARACTERS))
            if match is None or match.start() >= end:
                return end
            begin = match.end()

    def _replacement(self, match: re.Match[str]) -> str:
        kind = str(match.lastgroup)
        found = match.group()
        return found if kind == "card" and not is_card(found) else self._replacements[kind]


def is_card(text: str) -> bool:
    """Whether the digits of a text have the check digit of a card number (Luhn)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


class Redaction(Plugin):
    """The plugin. Options: `kinds`, and a replacement for each kind."""

    version = "1"

    def initialize(self, options: dict[str, Any]) -> None:
        """Read the options. Raises `ValueError` for unknown ones."""
        given = dict(options)
        kinds = given.pop("kinds", list(KINDS))
        replacements = {kind: given.pop(kind, f"[{kind.upper()}]") for kind in KINDS}
        if given or not kinds or not set(kinds) <= set(KINDS) or not all(map(str.isprintable, replacements.values())):
            raise ValueError(f"options are kinds, a list of {', '.join(KINDS)}, and a replacement for each kind")
        self._redactor = Redactor(kinds, replacements)
        # Of texts that go on: how much was certain, and what became of it. A shorter way to the same result.
        self._begun: dict[tuple[str, int], tuple[str, str]] = {}

    def pre_inference(self, request: InferenceRequest) -> None:
        """Replace in messages, prompts and documents."""
        if any(not isinstance(prompt, str) for prompt in request.prompts):
            raise Refused("the prompt is given as token ids, which are not checked: send text", "prompt")
        request.messages = self._everywhere(request.messages)
        request.prompts = self._everywhere(request.prompts)
        request.documents = self._everywhere(request.documents)
        request.suffix = self._everywhere(request.suffix)

    def _everywhere(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redactor.replaced(value)
        if isinstance(value, list):
            return [self._everywhere(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key in _NOT_REPLACED else self._everywhere(item) for key, item in value.items()}
        return value

    def post_inference(self, response: InferenceResponse) -> None:
        """Replace in the answer, and hold back what may become a match."""
        key, text = (response.request_id, response.choice), response.text
        before, output = self._begun.pop(key, ("", ""))
        if not text.startswith(before):
            before = output = ""
        begin = len(before)
        if response.is_final:
            response.text = output + self._redactor.replaced(text, begin)
            return
        end = self._redactor.certain(text, begin)
        output += self._redactor.replaced(text, begin, end)
        response.text = output
        self._begun[key] = (text[:end], output)
        while len(self._begun) > MAX_TEXTS:
            del self._begun[next(iter(self._begun))]
