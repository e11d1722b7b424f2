"""`starling pull` of a hub's repositories of safetensors: what is fetched, converted, named, continued and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import paths
from pipeline.models.model_directory import QUANTS
from shm.checkpoint import load_index
from stages.worker.checkpoint.requantized import QUANTS as MIXES
from stages.worker.kernels.formats import FORMATS
from tests.starling.hub_server import COMMIT, Hub
from tests.starling.pull_command import environment, left, pull, pulled, sha256
from tools.tiny_gguf import SHAPES, write_model
from tools.tiny_hf import write_directory

pytestmark = pytest.mark.slow

MODULES = json.dumps(
    [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")])
    ]
).encode()
CACHE = paths.cache_dir(dict(os.environ))  # of compiled kernels, which `prepare` would compile for minutes


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory, by the names that a repository has for them."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return write_directory(write_model(folder / "tiny.gguf", SHAPES["small"], "F16"), folder / "Tiny-HF")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    source = write_model(folder / "tiny.gguf", SHAPES["small"], "F16", seed=3)
    return write_directory(source, folder / "Sharded", shards=3)


@pytest.fixture
def hub(directory: Path, sharded: Path) -> Iterator[Hub]:
    files = contents(directory)
    others = {
        "README.md": b"tiny",
        "pytorch_model.bin": b"\x80\x04",
        "onnx/model.safetensors": b"other",
        ".gitattributes": b"",
    }
    gguf = {"tiny-f16.gguf": (directory.parent / "tiny.gguf").read_bytes()}
    repositories = {
        "org/Tiny-HF": {**files, **others},
        "org/Sharded": {**contents(sharded), "consolidated.safetensors": b"the same weights again"},
        "org/both": {**files, **gguf},
        "org/adapter": {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"},
        "org/no-words": {name: files[name] for name in ("config.json", "model.safetensors")},
        "org/no-index": {name: data for name, data in contents(sharded).items() if not name.endswith("index.json")},
        "org/unknown": {**files, "config.json": b'{"architectures": ["MambaForCausalLM"]}'},
        "org/dense": {**files, "modules.json": MODULES},
        "org/pickled": {"pytorch_model.bin": b"\x80\x04", "config.json": b"{}"},
    }
    with Hub(repositories) as hub:
        yield hub


def ingested(home: Path, directory: Path, quant: str) -> str:
    """The digest of the checkpoint that `starling ingest` makes of a directory, in a home of its own."""
    command = [sys.executable, "-m", "starling", "ingest", str(directory), "--quant", quant, "--json"]
    done = subprocess.run(command, env=environment(home / "ingest"), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["digest"])


def fetched(hub: Hub) -> list[str]:
    """The names of the files whose bytes were requested, each once."""
    return sorted(
        {
            path.split("/resolve/")[1].split("/", 1)[1]
            for kind, path in hub.requests
            if kind == "GET" and "/resolve/" in path
        }
    )


def test_the_types_are_those_of_the_worker() -> None:
    """With the bytes of a value, by which the space on the disk is estimated."""
    sizes = {quant: FORMATS[mix.matrices].source_bytes / FORMATS[mix.matrices].unit for quant, mix in MIXES.items()}
    assert sizes == QUANTS


@pytest.mark.parametrize("quant", ["", "q8_0"])
def test_a_repository_becomes_what_ingest_makes_of_it(home: Path, hub: Hub, directory: Path, quant: str) -> None:
    settings = {"HF_ENDPOINT": hub.url}
    done = pull(home, "hf:org/Tiny-HF", *(["--quant", quant] if quant else []), **settings)
    assert f"org/Tiny-HF has safetensors and no GGUF file: converting them to {quant or 'q4_k_m'}" in done.stderr
    assert ("the default; --quant takes q4_0, q4_1, q4_k_m, q8_0, f16" in done.stderr) == (not quant)
    name, digest = f"Tiny-HF-{quant or 'q4_k_m'}", ingested(home, directory, quant or "q4_k_m")
    assert digest in done.stdout and f"`starling run {name} PROMPT` answers with it" in done.stderr
    # Nothing is fetched that the conversion does not read, and nothing of what was is left.
    assert fetched(hub) == sorted(contents(directory))
    assert left(home) == sorted([".fetch", f"{digest}.idx", f"{digest}.bin", "digests.json", "names"])
    assert list((home / "models" / ".fetch").iterdir()) == []
    for suffix in (".idx", ".bin"):
        made = (home / "models" / f"{digest}{suffix}").read_bytes()
        assert made == (home / "ingest" / "models" / f"{digest}{suffix}").read_bytes()
    record = pulled(home, "hf:org/Tiny-HF", "--quant", (quant or "q4_k_m").upper(), "--name", "again", **settings)
    assert (record["digest"], record["revision"], record["is_checkpoint"]) == (digest, COMMIT, True)
    assert record["path"].endswith(f"{digest}.idx") and fetched(hub) == sorted(contents(directory))
    hub.requests.clear()
    assert pulled(home, "hf:org/Tiny-HF", "--quant", quant or "q4_k_m", "--sha256", digest, **settings)["name"] == name
    assert fetched(hub) == []


def test_a_commit_that_changes_no_file_of_the_model_fetches_nothing(home: Path, hub: Hub) -> None:
    first = pulled(home, "hf:org/Tiny-HF", HF_ENDPOINT=hub.url)
    hub.requests.clear()
    hub.repositories["org/Tiny-HF"]["README.md"] = b"new"
    assert pulled(home, "hf:org/Tiny-HF", HF_ENDPOINT=hub.url)["digest"] == first["digest"]
    assert fetched(hub) == []
    hub.repositories["org/Tiny-HF"]["generation_config.json"] = b'{"temperature": 0.5}'
    assert pulled(home, "hf:org/Tiny-HF", HF_ENDPOINT=hub.url)["digest"] != first["digest"]


def test_several_files_of_weights(home: Path, hub: Hub, sharded: Path) -> None:
    record = pulled(home, "org/Sharded", "--quant", "q4_0", HF_ENDPOINT=hub.url)
    assert record["digest"] == ingested(home, sharded, "q4_0")
    assert fetched(hub) == sorted(contents(sharded))
    assert len([name for name in fetched(hub) if name.endswith(".safetensors")]) == 3


def test_a_gguf_file_comes_first(home: Path, hub: Hub) -> None:
    record = pulled(home, "hf:org/both", HF_ENDPOINT=hub.url)
    assert (record["name"], record["is_checkpoint"]) == ("tiny-f16", False)
    assert fetched(hub) == ["tiny-f16.gguf"]


@pytest.mark.parametrize("form", ["toml", "yaml"])
def test_a_configured_repository(home: Path, hub: Hub, directory: Path, form: str) -> None:
    """By the keys of other servers, and prepared twice: the second time needs no hub."""
    home.mkdir()
    CACHE.mkdir(parents=True, exist_ok=True)
    (home / "cache").symlink_to(CACHE)
    path = home.parent / f"starling.{form}"
    path.write_text(
        {"toml": '[model]\nmodel_path = "org/Tiny-HF"\n', "yaml": "models:\n  - {name: tiny, path: org/Tiny-HF}\n"}[
            form
        ]
    )
    settings = environment(home, HF_ENDPOINT=hub.url, STARLING_CONFIG=str(path))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "starling", *args]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    assert "converting them to q4_k_m" in run("prepare").stderr
    digest = ingested(home, directory, "q4_k_m")
    index = load_index(home / "models" / f"{digest}.idx")
    assert (index.name, index.digest) == ("Tiny-HF", digest)
    (row,) = json.loads(run("models", "--json").stdout)
    assert (row["state"], row["digest"], row["configured"]) == ("ready", digest, True)
    hub.requests.clear()
    run("prepare")
    run("gc")
    assert json.loads(run("pull", "--json").stdout)[0]["digest"] == digest
    assert hub.requests == []
    # A checkpoint that is gone, or of an older release, is made again.
    (home / "models" / f"{digest}.bin").unlink()
    assert json.loads(run("pull", "--json").stdout)[0]["digest"] == digest
    (home / "models" / f"{digest}.idx").write_bytes(b"\x91\x00")
    run("prepare")
    assert load_index(home / "models" / f"{digest}.idx").digest == digest


def test_a_damaged_shard_is_named_with_both_digests_and_fetched_again(home: Path, hub: Hub, sharded: Path) -> None:
    name = "model-00002-of-00003.safetensors"
    good = contents(sharded)[name]
    hub.substituted = {name: good[:-1] + bytes([good[-1] ^ 1])}
    done = pull(home, "hf:org/Sharded", "--quant", "q8_0", code=1, HF_ENDPOINT=hub.url)
    assert f"{name} has SHA-256 {sha256(hub.substituted[name])}, the hub announces {sha256(good)}" in done.stderr
    assert [path for path in left(home) if path.endswith((".idx", ".bin"))] == []
    hub.substituted = {}
    hub.requests.clear()
    record = pulled(home, "hf:org/Sharded", "--quant", "q8_0", HF_ENDPOINT=hub.url)
    assert record["digest"] == ingested(home, sharded, "q8_0")
    assert fetched(hub) == [name, "model-00003-of-00003.safetensors"]


def test_connections_that_are_cut(home: Path, hub: Hub, directory: Path) -> None:
    hub.cuts = 2
    assert pulled(home, "hf:org/Tiny-HF", HF_ENDPOINT=hub.url)["digest"] == ingested(home, directory, "q4_k_m")
    assert hub.cuts == 0


def test_a_killed_pull_goes_on_with_the_files_that_it_lacks(home: Path, hub: Hub, sharded: Path) -> None:
    """The hub holds the second shard back until the process has been killed."""
    reached, killed = threading.Event(), threading.Event()

    def before(name: str) -> None:
        if name == "model-00002-of-00003.safetensors" and not killed.is_set():
            reached.set()
            killed.wait(240)

    hub.before = before
    command = [sys.executable, "-m", "starling", "pull", "hf:org/Sharded", "--json"]
    process = subprocess.Popen(command, env=environment(home, HF_ENDPOINT=hub.url), stdout=subprocess.DEVNULL)
    assert reached.wait(240)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed.set()
    hub.requests.clear()
    # `starling gc` leaves a download alone that runs, and removes one that does not: this one goes on first.
    assert pulled(home, "hf:org/Sharded", HF_ENDPOINT=hub.url)["digest"] == ingested(home, sharded, "q4_k_m")
    assert fetched(hub) == ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


def test_two_processes_convert_a_repository_once(home: Path, hub: Hub) -> None:
    """By the same source, or by two that name the same files."""
    sources = ["hf:org/Tiny-HF", "hf:org/Tiny-HF", f"hf:org/Tiny-HF@{COMMIT}"]
    env = environment(home, HF_ENDPOINT=hub.url)
    command = [sys.executable, "-m", "starling", "pull", "--json"]
    all_three = [subprocess.Popen([*command, one], env=env, stdout=subprocess.PIPE, text=True) for one in sources]
    digests = {json.loads(one.communicate(timeout=240)[0])[0]["digest"] for one in all_three}
    assert len(digests) == 1
    weights = [path for kind, path in hub.requests if kind == "GET" and path.endswith("/model.safetensors")]
    assert len(weights) == 2  # the first byte, by which the length is known, and all of them


@pytest.mark.parametrize(
    ("source", "args", "code", "message"),
    [
        ("hf:org/pickled", (), 2, "has only pickled weights (pytorch_model.bin)"),
        ("hf:org/Tiny-HF", ("--quant", "q5_1"), 2, "--quant q5_1 is none of the types"),
        (
            "hf:org/Tiny-HF/model.safetensors",
            (),
            2,
            "`starling pull hf:org/Tiny-HF` fetches and converts the repository",
        ),
        ("hf:org/adapter", (), 2, "no config.json: it cannot be converted; an adapter is named in models[].adapters"),
        ("hf:org/no-words", (), 2, "no tokenizer.json or tokenizer.model"),
        ("hf:org/no-index", (), 78, "it has 3 files of safetensors and no model.safetensors.index.json"),
        ("hf:org/unknown", (), 78, "architectures is \"['MambaForCausalLM']\", expected one of"),
        ("hf:org/dense", (), 78, "[2].type is 'sentence_transformers.models.Dense', expected Transformer"),
        ("hf:org/Tiny-HF", ("--sha256", "1" * 64), 1, f"expected {'1' * 64}"),
    ],
)
def test_what_is_refused(home: Path, hub: Hub, source: str, args: tuple[str, ...], code: int, message: str) -> None:
    assert message in pull(home, source, *args, code=code, HF_ENDPOINT=hub.url).stderr
    if "--sha256" not in args:  # before the weights arrive
        assert not [name for name in fetched(hub) if name.endswith((".safetensors", ".bin"))]
        assert not list((home / "models").glob(".fetch/hf-*"))
    assert not list((home / "models").glob("*.idx"))


def test_an_index_that_lists_a_file_that_is_not_there(home: Path, hub: Hub) -> None:
    del hub.repositories["org/Sharded"]["model-00003-of-00003.safetensors"]
    done = pull(home, "hf:org/Sharded", code=78, HF_ENDPOINT=hub.url)
    assert "lists 'model-00003-of-00003.safetensors', which the repository has not" in done.stderr
    index = {"weight_map": {"x": "../../x.safetensors"}}
    hub.repositories["org/Sharded"]["model.safetensors.index.json"] = json.dumps(index).encode()
    done = pull(home, "hf:org/Sharded", code=78, HF_ENDPOINT=hub.url)
    assert "lists '../../x.safetensors', expected .safetensors files of the same folder" in done.stderr


def test_a_disk_that_is_too_small_is_noticed_before_the_weights_arrive(home: Path, hub: Hub) -> None:
    small = (
        "import shutil, runpy, collections\n"
        "shutil.disk_usage = lambda path: collections.namedtuple('U', 'total used free')(0, 0, 100_000)\n"
        "runpy.run_module('starling', run_name='__main__')"
    )
    command = [sys.executable, "-c", small, "pull", "hf:org/Tiny-HF"]
    done = subprocess.run(command, env=environment(home, HF_ENDPOINT=hub.url), capture_output=True, text=True)
    assert done.returncode == 78
    assert "bytes more and the model that is converted from them about" in done.stderr, done.stderr
    assert "which has 100,000 free" in done.stderr
    assert not [name for name in fetched(hub) if name.endswith(".safetensors")]
