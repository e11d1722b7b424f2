"""What every test may ask for: the demo model, its vocabulary, and a clean end."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.config.schema import DEMO_MODEL, ModelConfig
from pipeline.models import store
from tests import properties
from tests.collection import is_needed

properties.configure()

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which `-m` selects no test, unless the command names them."""
    if is_needed(collection_path, config.option.markexpr):
        return None
    named = {config.invocation_params.dir / argument.partition("::")[0] for argument in config.args}
    return None if collection_path in named else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the modules and the tests, which stay: it would read them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file, fetched at its first use (STARLING_HOME as outside of tests)."""
    return store.fetch(ModelConfig(name=DEMO_MODEL), paths.models_dir(os.environ)).path


@pytest.fixture(scope="session")
def demo_vocabulary(demo_gguf: Path):  # type: ignore[no-untyped-def]
    from gguf import GGUFReader

    from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

    fields = GGUFReader(demo_gguf).fields

    def get(key: str):  # type: ignore[no-untyped-def]
        return fields[f"tokenizer.ggml.{key}"].contents()

    return Vocabulary(
        TokenizerSpec(
            get("model"),
            get("pre"),
            get("tokens"),
            get("token_type"),
            get("merges"),
            get("bos_token_id"),
            get("eos_token_id"),
        )
    )
