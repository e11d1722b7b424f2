"""The version that an agent reports: another one exactly for models that older releases answered differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.api.output_tokens import version_name
from pipeline.config.load import resolve
from pipeline.config.schema import ModelConfig
from shm.checkpoint import STRIPPING_REVISION, VOCABULARY_REVISION, Index, load_index, write_index
from shm.pages import NUMERICS
from stages.agent.engines import starling_engine
from stages.agent.engines.interface import Capabilities
from stages.agent.engines.starling_engine import StarlingEngine
from stages.orchestrator.score import version_of
from stages.tokenizer.opened_models import ModelSource, build_model
from stages.worker.checkpoint.gguf import GgufFile
from stages.worker.checkpoint.hyperparameters import HyperReader
from stages.worker.checkpoint.vocabulary import read_vocabulary
from tests.fleet.checkpoints import TOKENIZER, write_checkpoint
from tests.orchestrator.agents import engine
from tools.tiny_gguf import SHAPES, write_model

SCALING = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
# Shape, what is changed in its file, and the end of the KV type in the version; "": older releases answer the same.
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("small", {}, ""),
    ("small", SCALING, ""),
    ("small", SCALING | {"llama.rope.scaling.attn_factor": 1.5}, "-kv1"),
    ("small", {"general.name": "Phi-3 Mini"}, f"-vocabulary{STRIPPING_REVISION}"),
    (
        "small",
        {"general.name": "Phi-3 Mini", "llama.rope.scaling.attn_factor": 1.5},
        f"-kv1-vocabulary{STRIPPING_REVISION}",
    ),
    ("gemma3", {"gemma3.attention.sliding_window": 300, "gemma3.context_length": 2048}, ""),
    ("gemma3", {"gemma3.attention.sliding_window": 300, "gemma3.context_length": 300}, "-kv1"),
    ("phi3", {"general.name": "another"}, ""),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path, _ = write_checkpoint(tmp_path / "models", 4096)
    return path.parent


def write(folder: Path, **fields: Any) -> Index:
    """Change the index in the folder."""
    (path,) = folder.glob("*.idx")
    index = msgspec.structs.replace(load_index(path), **fields)
    write_index(path, index)
    return index


async def promised(folder: Path, kv_type: Any = "f16") -> Capabilities:
    """What an engine of the checkpoint in the folder promises when it has been started."""
    (path,) = folder.glob("*.idx")
    none: Any = None
    env = {"STARLING_HOME": str(folder.parent), "PATH": ""}
    made = StarlingEngine(
        resolve({}, {}),
        ModelConfig(name="m", kv_type=kv_type),
        path.stem,
        folder.parent / "engine-1",
        folder,
        none,
        lambda: 1,
        env,
    )
    assert made.capabilities == Capabilities()
    try:
        await made.start()
        return made.capabilities
    finally:
        await made.stop(at_once=True)


@pytest.fixture(autouse=True)
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starling_engine, "COMMAND", ("/bin/true",))


@pytest.mark.parametrize(("shape", "changes", "end"), CASES)
async def test_only_models_that_answer_differently_have_another_version(
    folder: Path, tmp_path: Path, shape: str, changes: dict[str, Any], end: str
) -> None:
    file = GgufFile(write_model(tmp_path / "m.gguf", SHAPES[shape], "Q4_0"))
    file.metadata |= changes
    raw = msgspec.Raw(read_vocabulary(file).packed())
    name = str(file.metadata.get("general.name", ""))
    index = write(folder, name=name, hyper=HyperReader(file).hyper(), tokenizer_raw=raw)
    assert index.revision == end
    (path,) = folder.glob("*.idx")
    described = build_model(ModelSource(path)).described
    assert described.revision == end  # which the engine compares
    assert bool(described.kv_revision) == ("-kv" in end)  # which the journal compares: it has prompts as token ids
    promises = await promised(folder)
    assert promises.can_continue and promises.numerics == NUMERICS
    now = version_of(engine(digest=index.digest, kv_type=promises.kv_type, numerics=promises.numerics))
    # As older releases report it, and as their orchestrators compare it.
    assert (now == version_name(index.digest, "f16", NUMERICS)) == (not end)
    assert now == version_name(index.digest, f"f16{end}", NUMERICS)


async def test_indexes_of_older_releases_have_their_version(folder: Path) -> None:
    """They are computed as before, whatever release does it."""
    for revision in (0, VOCABULARY_REVISION):
        tokenizer = msgspec.structs.replace(TOKENIZER, revision=revision)
        write(folder, name="Phi-3 Mini", tokenizer_raw=msgspec.Raw(tokenizer.packed()))
        assert (await promised(folder, "int8")).kv_type == "int8"


async def test_an_index_that_cannot_be_read_promises_nothing(folder: Path) -> None:
    (path,) = folder.glob("*.idx")
    path.unlink()
    path.write_bytes(b"damaged")
    promises = await promised(folder)
    assert (promises.kv_type, promises.numerics, promises.can_continue) == ("", 0, False)
