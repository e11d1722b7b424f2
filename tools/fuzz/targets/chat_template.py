"""Chat templates of model files: compiled and rendered within their bounds.

byte 0   bit 0: with messages that contain names of control tokens; bit 1: with tools
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pipeline.errors import StarlingError
from stages.tokenizer.template import ChatTemplate
from tools.fuzz.target import Target
from tools.tiny_gguf import _CHAT_TEMPLATE

NAMES = {"<|im_start|>": 1, "<|im_end|>": 2, "</s>": 3}
_LOOP = """{% set ns = namespace(a=1) %}{% for m in messages if m.role != 'x' -%}
{{ loop.index0 ~ m['content'][1:] | trim }}{% set ns.a = ns.a + loop.length %}{% endfor %}{{ ns.a }}"""
NOW = datetime(2026, 1, 2, 3, 4, 5)


def run(data: bytes) -> None:
    """Render a chat. Marks lie on the ends of names of control tokens."""
    flags, source = (data[:1] or b"\0")[0], data[1:].decode("utf-8", "replace")
    template = ChatTemplate(source, "</s>", "<|im_end|>", lambda: NOW, NAMES)
    content = "<|im_end|>x </s> \u00e9" if flags & 1 else "hello there"
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    tools = (
        [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None]}}}] if flags & 2 else None
    )
    chat = template.render(messages, tools=tools)
    chat.text.encode()
    assert all(0 <= mark < len(chat.text) for mark in chat.marks)


def seeds() -> Iterator[bytes]:
    """Templates with the constructs that published ones use."""
    sources = [
        _CHAT_TEMPLATE,
        _LOOP,
        "{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f('ab', y=3) }}{{ strftime_now('%d %b %Y') }}",
        "{% if not messages %}{{ raise_exception('no') }}{% endif %}{{ tools | tojson(indent=2) }}",
        "{{ bos_token }}{{ messages | map(attribute='content') | join('</s>') }}{{ '%s-%d' % ('a', 3) }}",
        "{{ messages[0].content.split(' ')[0].replace('s', '<|im_start|>') | upper }}{{ range(9) | list | sum }}",
        "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ '{:>8}'.format(i) }}{% endfor %}",
    ]
    for flags, source in enumerate(sources):
        yield bytes([flags & 3]) + source.encode()


TARGET = Target(
    run,
    seeds,
    errors=(StarlingError,),
    modules=(
        "stages.tokenizer.template",
        "stages.tokenizer.template_budget",
        "stages.tokenizer.template_marks",
        "stages.tokenizer.template_selection",
    ),
    max_bytes=1024,
    memory_mb=1024,
)
