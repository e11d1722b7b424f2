"""What the helper processes keep of versions that are unloaded: nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.protocol.messages import Constraint
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar, helper_main
from stages.scheduler.constraints.mask_writer import read_vocabulary

from . import vocabularies
from .constraint_helpers import Site, mappings, vetted
from .masks import PLAIN, TEXT, Masks

SHORT = Constraint("regex", "[ab]{3}", "regex")


class Tokenizer:
    """Something that ends when no reference is left."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.slow
def test_unloaded_versions_leave_no_arena_mapped_in_the_mask_process(site: Site) -> None:
    """tmpfs keeps the memory of removed files that are mapped. The process goes on with the version that stays."""
    stays = site.load("stays")
    site.ask(stays, "a", SHORT)
    site.until(lambda: site.has_mask(stays, "a"))
    pid = site.mask_pid
    for number in range(3):
        name = f"m@{number}"
        version = site.load(name)
        site.ask(version, "b", SHORT)
        site.until(lambda version=version: site.has_mask(version, "b"))  # type: ignore[misc]
        site.unload(name)
    site.ask(stays, "c", SHORT)
    site.until(lambda: site.has_mask(stays, "c"))  # what was sent before has been handled
    assert site.mask_pid == pid
    assert set(mappings(pid, site.home)) == {str(stays.path)}


def test_a_mask_writer_forgets_all_of_an_unloaded_version_and_nothing_of_others() -> None:
    masks = Masks(PLAIN)
    writer = masks.writer
    writer.set_vocabulary("other", vocabularies.vocabulary())
    writer.set_rows("other", masks.steps)
    writer.handle(f.Open("1", "other", "tenant", PLAIN))
    masks.steps.tokens[1, : len(TEXT)] = TEXT
    assert masks.at(0, 0) is not None
    expected = masks.at(1, 4)
    writer.handle(f.Forget("m"))
    assert set(writer._versions) == {"other"}
    assert set(writer._sequences) == {"1"}
    assert [key[:3] for key in writer._grammars] == [("other", PLAIN.kind, PLAIN.text)]
    assert masks.at(1, 4) == expected
    writer.handle(f.Close("0"))  # on its way meanwhile
    writer.handle(f.Forget("m"))
    assert not writer.answers


def test_the_trial_process_forgets_an_unloaded_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vocabulary.msgpack"
    path.write_bytes(msgspec.msgpack.encode(vocabularies.vocabulary()))
    tokenizers: list[weakref.ref[Tokenizer]] = []
    alive: list[int] = []  # tokenizers at each vocabulary that is read

    def make(file: f.VocabularyFile) -> Tokenizer:
        one = Tokenizer()
        tokenizers.append(weakref.ref(one))
        return one

    def read(path: str) -> f.VocabularyFile:
        alive.append(sum(one() is not None for one in tokenizers))
        return read_vocabulary(path)

    monkeypatch.setattr(grammar, "make_tokenizer", make)
    monkeypatch.setattr(helper_main, "read_vocabulary", read)
    monkeypatch.setattr(helper_main, "vet", lambda tokenizer, frame: f.Vetted(frame.id, ""))
    sent: list[f.ToHelper] = [f.Vocabulary("m", str(path)), f.Vet(1, "m", SHORT), f.Forget("m"), f.Vet(2, "m", SHORT)]
    sent += [f.Vocabulary("m", str(path)), f.Vet(3, "m", SHORT)]
    errors = [frame.error for frame in vetted(sent) if isinstance(frame, f.Vetted)]
    assert errors == ["", "the model has been unloaded", ""]
    assert (alive, len(tokenizers)) == ([0, 0], 2)
