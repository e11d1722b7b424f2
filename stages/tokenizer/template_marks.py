"""Marks: which control tokens of a rendered chat the template wrote itself.

Messages are literal text: a name of a control token in them (`<|im_start|>`) must not become that token.  The marks
are in the template's own text and not in the messages.  A template tests, splits, trims and compares both without marks
(template_selection.py).

In each literal of the template, the first and the last character of a name are replaced by stand-ins: lone surrogates,
which valid Unicode text cannot contain.  After rendering, a name is a control token if and only if both of these
characters are stand-ins.

A template may also assemble a name: `'<|' + message.role + '|>'`.  Therefore the first character is marked too in a
literal that ends with the beginning of a name, and the last one in a literal that begins with the end of a name, from
two characters on.

Literals in expressions may be keys, names of roles or formats, so only names that begin and end with punctuation are
marked there.  Those that are compared are not marked at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

from pipeline.errors import ModelUnavailable
from stages.tokenizer.chunked_encode import SpecialTokenFinder

FIRST_STAND_IN, MAX_STAND_INS = 0xDC00, 0x400
_MAX_ASSEMBLED = 64  # characters of a name that a template may assemble


class TemplateMarks:
    """Marks names of control tokens. Raises `ModelUnavailable` if the names have too many different ends."""

    def __init__(self, control_names: Mapping[str, int]) -> None:
        ends = sorted({end for name in control_names for end in (name[0], name[-1])})
        if len(ends) > MAX_STAND_INS:
            raise ModelUnavailable(f"its control tokens begin and end with more than {MAX_STAND_INS} characters")
        self._stand_in = {character: chr(FIRST_STAND_IN + i) for i, character in enumerate(ends)}
        self._original = {stand_in: character for character, stand_in in self._stand_in.items()}
        bracketed = {name: i for name, i in control_names.items() if _is_bracketed(name)}
        self._all, self._bracketed = SpecialTokenFinder(control_names), SpecialTokenFinder(bracketed)
        short = [name for name in bracketed if len(name) <= _MAX_ASSEMBLED]
        self._beginnings = {name[:n] for name in short for n in range(2, len(name))}
        self._endings = {name[-n:] for name in short for n in range(2, len(name))}

    @property
    def n_ends(self) -> int:
        """Number of characters that have a stand-in."""
        return len(self._original)

    def are_in(self, text: str) -> bool:
        """Whether a text has marks."""
        return any(stand_in in text for stand_in in self._original)

    def plain(self, text: str) -> str:
        """Return a text without its marks, of the same length."""
        for stand_in, character in self._original.items():
            text = str.replace(text, stand_in, character)  # not that of `Markup`, which escapes
        return text

    def mark(self, literal: str, in_expression: bool = False) -> str:
        """Return a literal of the template with marks."""
        finder = self._bracketed if in_expression else self._all
        characters = list(literal)
        at, first, marked = 0, len(literal), []
        while (found := finder.find(literal, at, len(literal))) is not None:
            begin, at, _ = found
            first = min(first, begin)
            marked += [begin, at - 1]
        for begin in range(max(at, len(literal) - _MAX_ASSEMBLED), len(literal) - 1):
            if literal[begin:] in self._beginnings:
                marked.append(begin)
                break
        for end in range(min(first, _MAX_ASSEMBLED), 1, -1):
            if literal[:end] in self._endings:
                marked.append(end - 1)
                break
        for position in marked:
            characters[position] = self._stand_in[literal[position]]
        return "".join(characters)

    def remove(self, pieces: Iterable[str]) -> tuple[str, frozenset[int]]:
        """Return the rendered pieces as a text without marks, and the positions of the characters that were marked.

        Piece by piece: a text of ASCII characters with marks takes twice the memory of one without.
        """
        plain: list[str] = []
        positions: set[int] = set()
        begin = 0
        for piece in pieces:
            if not piece.isascii():
                for stand_in, character in self._original.items():
                    at = piece.find(stand_in)
                    if at < 0:
                        continue
                    while at >= 0:
                        positions.add(begin + at)
                        at = piece.find(stand_in, at + 1)
                    piece = piece.replace(stand_in, character)
            plain.append(piece)
            begin += len(piece)
        return "".join(plain), frozenset(positions)


def _is_bracketed(name: str) -> bool:
    return len(name) > 2 and not any(end.isalnum() or end.isspace() for end in (name[0], name[-1]))


class Marking(NodeTransformer):
    """Marks the literals of a syntax tree for the `MarkedEnvironment` that parsed it."""

    def __init__(self, marks: TemplateMarks, environment: Environment) -> None:
        self._marks, self._environment = marks, environment

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        """Mark text outside of expressions."""
        node.data = self._marks.mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        """Mark a string in an expression."""
        if isinstance(node.value, str):
            node.value = self._marks.mark(node.value, in_expression=True)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Compare texts without marks."""
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        is_search = [operand.op.endswith("in") for operand in node.ops]  # with or without "not"
        if len(operands) == 2 and any(isinstance(operand, nodes.Const) for operand in operands):
            # The other operand is compared with a text, a number or `none`, which no list or mapping is equal to.
            node.expr = self._plain(node.expr, "compared_text")
            node.ops[0].expr = self._plain(operands[1], "compared_members" if is_search[0] else "compared_text")
        elif len(operands) == 2 and not is_search[0]:
            given = [nodes.Const(node.ops[0].op, lineno=node.lineno), self.visit(operands[1])]
            return self._filter(self.visit(node.expr), "compared_values", given)
        else:
            node.expr = self._plain(node.expr, "compared_plain")
            for operand, searches in zip(node.ops, is_search):
                operand.expr = self._plain(operand.expr, "compared_members" if searches else "compared_plain")
        return node

    def _plain(self, operand: nodes.Expr, name: str) -> nodes.Expr:
        return operand if isinstance(operand, nodes.Const) else self._filter(self.visit(operand), name, [])

    def _filter(self, value: nodes.Expr, name: str, given: list[nodes.Expr]) -> nodes.Filter:
        made = nodes.Filter(value, name, given, [], None, None, lineno=value.lineno)
        made.set_environment(self._environment)
        return made
