"""The output tokens of one stream so far, as its engines have named them (pipeline/api/output_tokens.py).

With them another engine of the same version continues the stream instead of computing it again.
"""

from __future__ import annotations

from array import array

from pipeline.api.output_tokens import encode_output, read_comments

MAX_CHOICES = 1024
MAX_TOKENS = 1 << 20  # of all choices; of a longer answer another engine computes the rest again
UNREAD_BYTES = 4 << 10  # of comments that are read together: of a short answer, none are


class OutputRecord:
    """Of one request. It is kept with the request while its client may read it again."""

    def __init__(self) -> None:
        self.version = ""  # of the engines that have begun it
        self._n_tokens = 0
        self._choices: list[array[int]] = []
        self._cached: list[int] = []
        self._unread = bytearray()  # comments

    @property
    def n_tokens(self) -> int:
        """Tokens of all choices."""
        self._read()
        return self._n_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens, and of comments that are not read."""
        return 4 * self._n_tokens + len(self._unread)

    def counts(self) -> list[int]:
        """The tokens of each choice."""
        self._read()
        return [len(one) for one in self._choices]

    def add(self, block: bytes) -> None:
        """Add the tokens of a comment. What does not follow the known tokens is left out."""
        self._unread += block
        self._unread += b"\n\n"
        if len(self._unread) > UNREAD_BYTES:
            self._read()

    def _read(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, bytearray()
        for choice, first, cached, tokens in read_comments(bytes(unread)):
            if choice >= MAX_CHOICES:
                continue
            while len(self._choices) <= choice:
                self._choices.append(array("i"))
                self._cached.append(0)
            known = self._choices[choice]
            if not known:
                self._cached[choice] = cached
            fresh = tokens[len(known) - first :] if first <= len(known) else []
            if fresh and max(fresh) < 1 << 31 and self._n_tokens + len(fresh) <= MAX_TOKENS:
                known.extend(fresh)
                self._n_tokens += len(fresh)

    def encode(self) -> bytes:
        """What another engine of the version is sent after the body; b"" if there is nothing."""
        return encode_output(self.version, self._choices, self._cached) if self.version and self.n_tokens else b""
