"""A model whose file is damaged or hostile fails its own requests; the tokenizer serves the other models."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.protocol import messages as m
from stages.tokenizer import opened_models
from stages.tokenizer.opened_models import MAX_TEMPLATES, ModelSource, build_model
from tests.tokenizer.process import TokenizerProcess, configure, write_model

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hello"}]
GOOD = "{% for message in messages %}{{ message.content }}{% endfor %}"

HOSTILE = {
    "nested-loops": "{% for a in range(9) %}" * 30 + "{{ a }}" + "{% endfor %}" * 30,
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "endless-loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "huge-output": "{{ 'x' * 1000000000 }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "words": "{{ ('ab ' * 20000000) | title | length }}",
    "search": "{{ ('a' * 20000000).rfind('a' * 1000000 ~ 'b' ~ 'a' * 1000000) }}",
    "deep-nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "not-a-template": "{% if %}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


def opened(home: Path) -> TokenizerProcess:
    tokenizer = TokenizerProcess(home)
    tokenizer.until(lambda: tokenizer.link.peer is not None)
    tokenizer.until(lambda: bool(beat := tokenizer.link.last_heartbeat) and beat.ready)
    return tokenizer


def test_a_damaged_index_fails_only_its_model(tmp_path: Path) -> None:
    damages = ("cut", "text", "noise", "tokens")
    configure(tmp_path, [*damages, "good"])
    for damage in damages:
        path = write_model(tmp_path, damage)
        raw = path.read_bytes()
        changed = {
            "cut": raw[: len(raw) // 2],
            "text": raw.replace(b"hell", b"he\xffl"),
            "noise": b"\xc1" * 64,
            "tokens": raw.replace(b"gpt2", b"gpt9"),
        }[damage]
        assert changed != raw
        path.write_bytes(changed)
    write_model(tmp_path, "good", GOOD)
    tokenizer = opened(tmp_path)
    try:
        for damage in damages:
            reply = tokenizer.request(m.Encode(damage, damage, "hello"))
            assert isinstance(reply, m.TokenizerFailed)
            assert reply.code == "MODEL_UNAVAILABLE", reply
        assert isinstance(tokenizer.request(m.Describe("describe", "good")), m.Described)
        assert isinstance(tokenizer.request(m.Render("render", "good", MESSAGES)), m.Encoded)
        assert tokenizer.process.poll() is None
        # A file that is written again is read again.
        write_model(tmp_path, "noise", GOOD)
        assert isinstance(tokenizer.request(m.Render("again", "noise", MESSAGES)), m.Encoded)
    finally:
        tokenizer.close()


def test_models_with_one_template_share_its_compiled_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model that is loaded again need not compile it; a bounded number is kept, and none that fails."""
    monkeypatch.setattr(opened_models, "_templates", {})
    names = ("a", "b", "bad", *(f"other{number}" for number in range(2 * MAX_TEMPLATES)))
    configure(tmp_path, names)
    sources = (
        dict.fromkeys(names, GOOD) | {name: GOOD + name for name in names[3:]} | {"bad": HOSTILE["not-a-template"]}
    )
    built = {name: build_model(ModelSource(write_model(tmp_path, name, text))) for name, text in sources.items()}
    assert built["a"].template is built["b"].template
    bad = built["bad"].template
    assert bad is not None
    assert bad.failure
    kept = list(opened_models._templates.values())
    assert kept == [built[name].template for name in names[-MAX_TEMPLATES:]]
    again = build_model(ModelSource(write_model(tmp_path, "a", GOOD)))
    assert again.template is not built["a"].template
    assert again.template is not None
    assert again.template.render(MESSAGES).text == "hello"


def test_a_hostile_template_fails_only_its_model(tmp_path: Path) -> None:
    configure(tmp_path, [*HOSTILE, "good"])
    for name, template in HOSTILE.items():
        write_model(tmp_path, name, template)
    write_model(tmp_path, "good", GOOD)
    tokenizer = opened(tmp_path)
    try:
        expected = tokenizer.request(m.Render("first", "good", MESSAGES))
        assert isinstance(expected, m.Encoded)
        before = tokenizer.peak_mb()
        for name in HOSTILE:
            assert tokenizer.link.send(m.Render(name, name, MESSAGES))
            assert tokenizer.link.send(m.Render(f"after-{name}", "good", MESSAGES))
        tokenizer.until(lambda: all(tokenizer.of(f"after-{name}") for name in HOSTILE))
        tokenizer.until(lambda: all(tokenizer.of(name) for name in HOSTILE))
        for name in HOSTILE:
            (reply,) = tokenizer.of(name)
            assert isinstance(reply, m.TokenizerFailed), name
            assert reply.code == "INVALID_REQUEST", reply
            (other,) = tokenizer.of(f"after-{name}")
            assert isinstance(other, m.Encoded)
            assert other.tokens == expected.tokens
        for name in HOSTILE:  # its vocabulary is sound
            assert isinstance(tokenizer.request(m.Encode(f"text-{name}", name, "hello")), m.Encoded)
        assert tokenizer.process.poll() is None
        assert tokenizer.peak_mb() - before < 512
    finally:
        tokenizer.close()
