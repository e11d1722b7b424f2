"""POST /v1/rerank and /v1/score: two sets of texts to compare.

    {"model"?, "query", "documents": [texts], "top_n"?, "return_documents": false}
        -> {"object": "list", "model", "results": [{"index", "relevance_score", "document"?}, ...], "usage"}
    {"model"?, "text_1", "text_2"} -> {"object": "list", "model", "data": [{"index", "object", "score"}, ...], "usage"}

Results are ordered by score, the highest first, equal ones by index.  `text_1` and `text_2` are a text or a list; one
text is compared with each of a list, and two lists of one length pair by pair.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.api.fields import FieldTable, Reader, flag, integer, invalid_value, object_schema, read_fields, text
from pipeline.api.generation_fields import MAX_MODEL_CHARACTERS, read_keep_alive
from pipeline.api.json_schema import any_of, array_of, described, schema_of
from pipeline.api.requests.embeddings import MAX_INPUTS, MAX_TEXT_CHARACTERS
from pipeline.errors import InvalidRequest


class RerankRequest(msgspec.Struct, frozen=True):
    """A valid body of /v1/rerank."""

    model: str  # "": the first model
    query: str
    documents: list[str]
    top_n: int | None
    returns_documents: bool
    keep_alive: float | None = None  # how long the model stays loaded, s; negative: for good

    @property
    def texts(self) -> list[str]:
        """All texts to embed, the query first."""
        return [self.query, *self.documents]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Indices in `texts` of the query and each document."""
        return [(0, 1 + index) for index in range(len(self.documents))]

    @property
    def names(self) -> list[str]:
        """The names of the texts, for error messages."""
        return ["query", *(f"documents[{index}]" for index in range(len(self.documents)))]


class ScoreRequest(msgspec.Struct, frozen=True):
    """A valid body of /v1/score. The lists have one length, or one of them has one text."""

    model: str
    first: list[str]
    second: list[str]
    keep_alive: float | None = None  # as above

    @property
    def texts(self) -> list[str]:
        """All texts to embed."""
        return [*self.first, *self.second]

    @property
    def names(self) -> list[str]:
        """The names of the texts, for error messages."""
        return [
            f"{field}[{index}]"
            for field, texts in (("text_1", self.first), ("text_2", self.second))
            for index in range(len(texts))
        ]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Indices in `texts` of the two texts of each score."""
        n = max(len(self.first), len(self.second))
        return [
            (i if len(self.first) > 1 else 0, len(self.first) + (i if len(self.second) > 1 else 0)) for i in range(n)
        ]


_read_text = text(MAX_TEXT_CHARACTERS, empty=False)
_DOCUMENT: dict[str, Reader] = {"text": _read_text}
_DOCUMENTS = array_of(
    any_of(schema_of(_read_text), object_schema(_DOCUMENT, required=("text",))), least=1, most=MAX_INPUTS - 1
)


def _read_document(value: Any, name: str) -> str:
    """Read a text, or an object with one."""
    if isinstance(value, dict):
        value = read_fields(value, _DOCUMENT, required=("text",), within=name)["text"]
    if not isinstance(value, str):
        raise invalid_value(name, value, "a string, or an object with a string as its text")
    found: str = _read_text(value, name)
    return found


@described(_DOCUMENTS)
def _read_documents(value: Any, name: str) -> list[str]:
    if not isinstance(value, list):
        raise invalid_value(name, value, "an array of texts")
    if not 1 <= len(value) < MAX_INPUTS:
        raise InvalidRequest(
            f"{name} has {len(value)} texts; it must have 1 to {MAX_INPUTS - 1}: send several requests", name
        )
    return [_read_document(item, f"{name}[{index}]") for index, item in enumerate(value)]


@described(any_of(schema_of(_read_text), _DOCUMENTS))
def _read_texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, str | list):
        raise invalid_value(name, value, "a string or an array of strings")
    return [_read_text(value, name)] if isinstance(value, str) else _read_documents(value, name)


_MODEL: dict[str, Reader] = {
    "model": text(MAX_MODEL_CHARACTERS, empty=False),
    "keep_alive": read_keep_alive,
    "user": text(512),
}
RERANK_BODY = FieldTable(
    {
        **_MODEL,
        "query": _read_text,
        "documents": _read_documents,
        "top_n": integer(1, MAX_INPUTS),
        "return_documents": flag,
    },
    ("query", "documents"),
)
SCORE_BODY = FieldTable({**_MODEL, "text_1": _read_texts, "text_2": _read_texts}, ("text_1", "text_2"))


def read_rerank(body: dict[str, Any]) -> RerankRequest:
    """Read the body of /v1/rerank. Raises `InvalidRequest`."""
    values = RERANK_BODY.read(body)
    return RerankRequest(
        values.get("model", ""),
        values["query"],
        values["documents"],
        values.get("top_n"),
        values.get("return_documents", False),
        values.get("keep_alive"),
    )


def read_score(body: dict[str, Any]) -> ScoreRequest:
    """Read the body of /v1/score. Raises `InvalidRequest`."""
    values = SCORE_BODY.read(body)
    first, second = values["text_1"], values["text_2"]
    if len(first) != len(second) and 1 not in (len(first), len(second)):
        raise InvalidRequest(
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; they must have the same number, or one of "
            f"them a single text",
            "text_2",
        )
    if len(first) + len(second) > MAX_INPUTS:
        raise InvalidRequest(
            f"text_1 and text_2 have {len(first) + len(second)} texts; at most {MAX_INPUTS} are allowed: send several "
            f"requests",
            "text_2",
        )
    return ScoreRequest(values.get("model", ""), first, second, values.get("keep_alive"))
