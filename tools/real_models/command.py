"""`make real-models`: each real model is served, answers chats, and is compared with llama.cpp on the same file.

Per model: the mean KL divergence of both engines from exact weights (f32 activations) over one text, and greedy answers
of up to 64 tokens to five questions, over `/v1/chat/completions`, against llama.cpp's.  Answers may part at a near tie:
where the margin between the two tokens, with exact weights, is not larger than what roundings do to margins.  Exits
with 1 when our divergence is more than 1.3 times llama.cpp's, or when texts part elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from pipeline.config import paths
from pipeline.config.schema import ModelConfig
from stages.tokenizer.opened_models import ModelSource, open_model
from stages.tokenizer.service import TokenizerModel
from stages.worker.checkpoint.prepare import prepare_checkpoint
from tools.bench.http.server_under_test import ServerUnderTest
from tools.real_models import served
from tools.real_models.distance import distances
from tools.real_models.files import MODELS, fetch
from tools.real_models.nearness import first_parting, margin
from tools.reference.float_forward import FloatModel
from tools.reference.lines import make_lines
from tools.reference.peer_model import PeerModel
from tools.reference.peer_vocabulary import PeerVocabulary, is_installed

MAX_RATIO = 1.3
NEAR = 4.0  # standard deviations of what roundings do to a margin
N_TOKENS = 64
N_LINES = 2000
CONTEXT = 1024
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "What is 17 + 25? Show each step.",
    "Name three European capitals and one sight of each.",
    "Write a Python function that reverses a list.",
)
TEXT = """The ferry left the harbour shortly after six, when the fog over the estuary had begun to lift. On deck stood
eleven passengers, two bicycles and a crate of oranges that no one had come to collect. The captain, who had sailed
this route since 1978, knew every buoy by its number: 4, 7, 12 and 31. "If the wind turns," she said, "we shall be late
by twenty minutes, and not by a minute more." The engineer did not believe her; he wrote 6:20 into the log and added a
question mark. In the kitchen the cook peeled potatoes and listened to the radio, which reported snow in the mountains
and an election in a country far away. Then the engine stopped. For a moment nothing could be heard but water.

def average(values):
    total = sum(values)
    return total / len(values) if values else 0.0
"""


class Answer(NamedTuple):
    """How one answer compares with llama.cpp's."""

    question: str
    n_tokens: int
    place: int  # where the two part, -1: nowhere
    margin: float  # nats, with exact weights, between the two tokens there


class Result(NamedTuple):
    """One model's row."""

    name: str
    bytes: int
    positions: int
    ours: float  # mean KL, nats
    theirs: float
    bound: float  # largest margin of a near tie, nats
    answers: list[Answer]

    @property
    def ratio(self) -> float:
        """Our divergence by llama.cpp's."""
        return self.ours / self.theirs

    @property
    def failures(self) -> list[str]:
        """What does not hold; empty if all does."""
        found = []
        if self.ratio > MAX_RATIO:
            found.append(f"{self.name}: mean KL is {self.ratio:.2f} times llama.cpp's, expected at most {MAX_RATIO}")
        return found + [
            f"{self.name}: the answer to {one.question!r} parts at token {one.place} with a margin of "
            f"{one.margin:.3f} nats, expected at most {self.bound:.3f}"
            for one in self.answers
            if one.margin > self.bound
        ]


def compare(name: str, gguf: Path) -> Result:
    """Serve a model and compare it. Raises `RuntimeError` when the server or llama.cpp refuses the file."""
    config = ModelConfig(name=name, path=str(gguf))
    index_path = prepare_checkpoint(config, paths.models_dir())
    opened = open_model(ModelSource.of(index_path, config))
    check_ids(gguf, opened)
    cores = sorted(os.sched_getaffinity(0))
    model = {"name": name, "path": str(gguf), "max_sequence_length": CONTEXT, "kv_cache_mb": 256}
    with ServerUnderTest(model, cores, {}, {}) as server:
        chats = [served.chat(server, opened, question, N_TOKENS) for question in QUESTIONS]
        click.echo(f"{name}: {len(chats)} answers", err=True)
    exact = FloatModel(gguf)
    tokens = opened.vocabulary.encode(TEXT, False, add_bos=True)
    with PeerModel(gguf, CONTEXT, threads=1) as peer:
        found = distances(index_path, tokens, exact, peer)
        click.echo(f"{name}: mean KL {found.ours:.5f}, llama.cpp's {found.theirs:.5f}", err=True)
        answers = [
            answer(question, chat, exact, peer, opened.vocabulary.eos_ids)
            for question, chat in zip(QUESTIONS, chats, strict=True)
        ]
    return Result(name, gguf.stat().st_size, found.positions, found.ours, found.theirs, NEAR * found.noise, answers)


def check_ids(gguf: Path, opened: TokenizerModel) -> None:
    """Raise `RuntimeError` unless llama.cpp gives the texts, and `N_LINES` lines of all kinds, the same ids."""
    peer = PeerVocabulary(gguf)
    try:
        for text in (TEXT, *QUESTIONS, *make_lines(N_LINES)):
            for parse_special in (False, True):
                ours, theirs = (one.encode(text, parse_special) for one in (opened.vocabulary, peer))
                if ours != theirs:
                    raise RuntimeError(f"llama.cpp gives {text[:60]!r} the token ids {theirs[:20]}, not {ours[:20]}")
    finally:
        peer.close()


def answer(question: str, chat: served.Chat, exact: FloatModel, peer: PeerModel, ends: tuple[int, ...]) -> Answer:
    """Compare one answer."""
    theirs = peer.greedy(chat.prompt, N_TOKENS, ends)
    parting = first_parting(chat.tokens, theirs)
    if parting is None:
        return Answer(question, len(chat.tokens), -1, 0.0)
    before = [*chat.prompt, *chat.tokens[: parting.place]]
    return Answer(question, len(chat.tokens), parting.place, margin(parting, last_logits(exact, before), ends))


def last_logits(exact: FloatModel, tokens: list[int]) -> np.ndarray:
    """Logits behind the last token, (vocab,) f32, without those of the others."""
    h, y = exact.source.hyper, exact.hidden(tokens)[-1]
    logits = exact.source.values(exact.source.head_name) @ y * h.logit_scale
    return h.logit_cap * np.tanh(logits / h.logit_cap) if h.logit_cap else logits


def lines(results: list[Result]) -> list[str]:
    """The table, as in docs/models.md, and the margins."""
    rows = [
        "| model | file, MB | mean KL | llama.cpp's | ratio | equal answers of 5 | margins of the others, nats |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        parted = [a for a in one.answers if a.place >= 0]
        margins = ", ".join(f"{a.margin:.3f} (token {a.place})" for a in parted)
        rows.append(
            f"| {one.name} | {one.bytes / 1e6:,.0f} | {one.ours:.5f} | {one.theirs:.5f} | {one.ratio:.2f} | "
            f"{len(one.answers) - len(parted)} | {margins} (near: up to {one.bound:.3f}) |"
        )
    return rows


def as_json(results: list[Result]) -> str:
    """All figures in one line."""
    plain: list[dict[str, Any]] = [
        {**one._asdict(), "ratio": one.ratio, "answers": [a._asdict() for a in one.answers]} for one in results
    ]
    return json.dumps({"real_models": plain})


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(MODELS)))
@click.option(
    "--gguf", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Another file."
)
def main(names: tuple[str, ...], files: tuple[Path, ...]) -> None:
    """Compare the real models NAMES (default: all), or model files of this machine, with llama.cpp."""
    if not is_installed():
        raise click.ClickException("llama.cpp is not installed; `make peers` does that")
    folder = paths.cache_dir() / "real-models"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: MODELS[name] for name in names or (() if files else MODELS)}
    found = {name: fetch(model, folder) for name, model in chosen.items()} | {file.stem: file for file in files}
    results = []
    for name, path in found.items():
        click.echo(f"{name} ...", err=True)
        results.append(compare(name, path))
        click.echo("\n".join(lines(results[-1:])[2:]), err=True)
    click.echo("\n".join(lines(results)))
    click.echo(as_json(results))
    failures = [failure for one in results for failure in one.failures]
    click.echo("\n".join(failures), err=True)
    sys.exit(bool(failures))
