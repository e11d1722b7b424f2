"""The command line: what it prints, how it ends, and that its errors are one message."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.errors import InternalError, ResourceError, StarlingError
from stages.worker.kernels.build import CompilerFailed
from starling.cli import COMMANDS, cli
from starling.cli.prepare import _compiler_failures
from starling.cli.progress import _Lines, shown

ROOT = Path(__file__).resolve().parents[2]


def starling(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "starling", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


# ------------------------------------------------------------------ what it prints


def test_every_command_has_help(home: Path) -> None:
    listing = CliRunner().invoke(cli, ["--help"])
    assert listing.exit_code == 0
    for name in COMMANDS:
        assert f"  {name} " in listing.output
        assert CliRunner().invoke(cli, [name, "--help"]).exit_code == 0


def test_config_prints_what_is_in_force(home: Path) -> None:
    result = CliRunner().invoke(cli, ["config"], env={"STARLING_SERVER__PORT": "9001"})
    assert yaml.safe_load(result.output)["server"]["port"] == 9001
    assert f"# run: {home / 'run'}" in result.output
    as_json = CliRunner().invoke(cli, ["config", "--json"], env={"STARLING_SERVER__PORT": "9001"})
    assert json.loads(as_json.output)["server"]["port"] == 9001


def test_a_file_given_to_the_command_is_read(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("[server]\nport = 9002\n")
    monkeypatch.setenv("STARLING_CONFIG", "elsewhere.yaml")  # restores the variable after the test
    result = CliRunner().invoke(cli, ["--config", "mine.toml", "config", "--json"])
    assert json.loads(result.output)["server"]["port"] == 9002
    # Stages that are started from here read the same file.
    assert os.environ["STARLING_CONFIG"] == str(tmp_path / "mine.toml")


def test_models_says_how_far_they_are(home: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "--json"])
    (row,) = json.loads(result.output)
    assert (row["name"], row["present"], row["ingested"]) == ("smollm2-135m-instruct", False, False)
    assert "to be fetched" in CliRunner().invoke(cli, ["models"]).output


def test_a_plan_of_what_is_not_prepared_names_the_command(home: Path) -> None:
    result = CliRunner().invoke(cli, ["models", "--plan"])
    assert (result.exit_code, result.output) == (
        0,
        "smollm2-135m-instruct  not prepared: run `starling prepare smollm2-135m-instruct` first\n",
    )


def test_status_of_a_server_that_is_down(home: Path) -> None:
    result = CliRunner().invoke(cli, ["status"], standalone_mode=False)
    assert (result.return_value, result.output) == (1, "no stage is running\n")


def test_progress_without_a_terminal_is_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("m") as progress:
        for done in (1, 2_000_000):
            progress("download", done, 2_000_000)
        progress("compile", 1, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "m: download ..."
    assert lines[1].startswith("m: download done (2 MB, ")
    assert [line.split(" (")[0] for line in lines[2:]] == ["m: compile ...", "m: compile done"]


def test_a_long_phase_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = _Lines("m", clock=lambda: now)
    for done in range(4):
        lines("compile", done, 4)
        now += 3.0
    lines.finish()
    assert capsys.readouterr().out == "m: compile ...\nm: compile 2/4\nm: compile done (12.0 s)\n"


# ------------------------------------------------------------------ how it ends


@pytest.mark.parametrize(
    ("args", "env", "code", "message"),
    [
        (["config"], {"STARLING_SERVER__PROT": "1"}, 78, "server.prot (STARLING_SERVER__PROT): no such key"),
        (["config"], {"STARLING_CONFIG": "/none.yaml"}, 78, "/none.yaml: cannot read the configuration"),
        (["fetch", "absent"], {}, 2, "no configured model and no file has this name"),
        (["stage", "nothing"], {}, 2, "'nothing' is not one of 'gateway', 'tokenizer'"),
        (["stage", "worker", "--model", "x"], {}, 78, "--model x: no such model is configured"),
        (["stage", "kv", "--model", "x"], {}, 2, "--model is only for worker"),
        (["nothing"], {}, 2, "No such command 'nothing'"),
        ([], {}, 2, "Usage: starling"),
    ],
)
def test_errors_are_one_message_and_a_code(
    home: Path, args: list[str], env: dict[str, str], code: int, message: str
) -> None:
    result = starling(*args, **env)
    assert result.returncode == code
    assert message in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error(home: Path) -> None:
    command = [sys.executable, "-m", "starling", "config"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as out:
        result = subprocess.run(command, env=env, stdout=out, stderr=subprocess.PIPE, timeout=240)
    assert result.stderr == b""


@pytest.mark.parametrize(("command", "unbuffered"), [("config", ""), ("models", ""), ("models", "1"), ("--help", "")])
def test_an_output_on_a_full_disk_is_one_message(home: Path, command: str, unbuffered: str) -> None:
    line = [sys.executable, "-m", "starling", *command.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False)
    assert done.stderr == "starling: standard output: No space left on device; the rest was not printed\n"
    assert done.returncode == 1


LATIN = {"PYTHONIOENCODING": "iso-8859-1", "STARLING_SERVER__RUN_DIR": "/tmp/\u00fc\u2019\U0001f600"}


def test_a_file_gets_characters_that_the_encoding_lacks_as_in_json(home: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **LATIN}
    for option in ([], ["--json"]):
        done = subprocess.run([sys.executable, "-m", "starling", "config", *option], env=env, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"/tmp/\xfc\\u2019\\ud83d\\ude00" in done.stdout
    assert json.loads(done.stdout.decode("iso-8859-1"))["server"]["run_dir"] == LATIN["STARLING_SERVER__RUN_DIR"]
    env["PYTHONIOENCODING"] = "iso-8859-1:ignore"  # what the user asks for
    done = subprocess.run([sys.executable, "-m", "starling", "config", "--json"], env=env, capture_output=True)
    assert b'"/tmp/\xfc"' in done.stdout


def test_a_terminal_shows_a_replacement_for_characters_that_it_lacks(home: Path) -> None:
    master, slave = os.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), **LATIN}
    command = [sys.executable, "-m", "starling", "config", "--json"]
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the program has ended
            while part := os.read(master, 65536):
                shown += part
    os.close(master)
    assert process.returncode == 0
    assert b'"/tmp/\xfc??"' in shown


@pytest.mark.parametrize("output", ["/dev/full", "a pipe without a reader"])
def test_what_a_stage_announces_may_find_no_reader(output: str) -> None:
    code = """if True:
        import sys
        from starling.cli import output
        output.install()
        output.announce("is ready")
        output.announce("is ready again")
        print("goes on", file=sys.stderr)
    """
    if output == "/dev/full":
        stdout = os.open(output, os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    try:
        line, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, env=env, stdout=stdout, stderr=subprocess.PIPE, timeout=240, check=False)
    finally:
        os.close(stdout)
    assert (done.returncode, done.stderr) == (0, b"goes on\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_messages_that_find_no_room_leave_the_exit_code(home: Path, unbuffered: str) -> None:
    line = [sys.executable, "-m", "starling", "show", "absent"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, env=env, stderr=full, timeout=240, check=False)
    assert done.returncode == 2


def test_messages_of_commands_have_one_form(home: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff")
    done = starling("kv", "warm", str(tmp_path / "prompts"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"starling: {tmp_path / 'prompts'} is not UTF-8: ")


@pytest.mark.parametrize("module", ["click", "pipeline.config.load"])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(home: Path, tmp_path: Path, module: str) -> None:
    """SIGINT arrives while `module` is being found: before the command runs, and while it is loaded."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the handler runs between two instructions
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests' parent ignores it
sys.meta_path.insert(0, Interrupt())
"""
    )
    command = [str(Path(sys.executable).with_name("starling")), "config"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stderr.strip() in ("", "starling: interrupted")


INTERRUPTED_TWICE = """
import os, signal, sys
from starling.cli import terminal
from starling.cli.run_command import run_program
signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests' parent ignores it
terminal.complain = lambda message: os.kill(os.getpid(), signal.SIGINT)
run_program(lambda: os.kill(os.getpid(), signal.SIGINT))
"""


def test_a_second_ctrl_c_ends_a_command_without_a_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_TWICE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# ------------------------------------------------------------------ hostile users


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "90000", "soon"])
@pytest.mark.parametrize(
    "command", ["drain", "reload m", "load m", "unload m", "restart kv", "restart all --drain-timeout 1", "down"]
)
def test_a_time_that_never_comes_is_refused(home: Path, command: str, seconds: str) -> None:
    done = CliRunner().invoke(cli, [*command.split(), "--timeout", seconds])
    assert done.exit_code == 2
    assert "--timeout" in done.output


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("m", 30.0), ("m:adapter", 600.0), ("m --timeout 30", 30.0), ("m:adapter --timeout 30", 30.0)],
)
def test_an_unload_of_an_adapter_has_the_time_of_a_load(
    home: Path, monkeypatch: pytest.MonkeyPatch, words: str, seconds: float
) -> None:
    given: list[float] = []
    monkeypatch.setattr("starling.cli.reload.run", lambda op, model, timeout, as_json: given.append(timeout) or 0)
    CliRunner().invoke(cli, ["unload", *words.split()], catch_exceptions=False)
    assert given == [seconds]


@pytest.mark.parametrize(
    "line",
    [
        *(f"{command} --temperature nan" for command in ("run m hi", "chat", "bench")),
        *(f"run m hi --{name} nan" for name in ("top-p", "repetition-penalty")),
        "bench --rate nan",
        "fleet drain a --timeout nan",
        "logs -n 99999999999999999999",
    ],
)
def test_a_number_in_no_range_is_refused_before_anything_starts(home: Path, line: str) -> None:
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 2, done.output
    assert "in the range" in done.output


@pytest.mark.parametrize("command", ["doctor", "prepare"])
def test_a_home_that_takes_no_kernels_is_one_message(home: Path, command: str) -> None:
    home.mkdir()
    (home / "cache").write_text("where the directory should be")
    done = starling(command)
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "compiled kernels are kept in" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("code", "last_line", "kind", "said"),
    [
        (1, "OSError: [Errno 28] No space left on device", ResourceError, "; free space for {home}/cache and run "),
        (1, "RuntimeError: LLVM", InternalError, "could not be compiled: RuntimeError: LLVM; run the command again; "),
        (-9, "", InternalError, "was ended by SIGKILL, as happens when memory is short; free memory and run "),
    ],
)
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_failed_compiler_is_named_with_the_remedy_and_its_output(
    home: Path, capsys: pytest.CaptureFixture[str], code: int, last_line: str, kind: type, said: str, is_kept: bool
) -> None:
    if not is_kept:
        home.mkdir()
        (home / "logs").write_text("where the directory should be")
    output = last_line and f"Traceback (most recent call last):\n  ...\n{last_line}"
    with pytest.raises(StarlingError) as refused, _compiler_failures():
        raise CompilerFailed("steps", code, output)
    assert type(refused.value) is kind
    message, log = refused.value.message, home / "logs" / "kernel-compiler.log"
    assert message.startswith("kernel 'steps' could not be compiled: ") and said.format(home=home) in message
    shown = capsys.readouterr().err
    if not output:
        assert message.endswith(" again") and not log.exists()
    elif is_kept:
        assert message.endswith(f"; the compiler's output is in {log}")
        assert (log.read_text(), shown) == (f"{output}\n", "")
    else:
        assert message.endswith("; the compiler's output is above")
        assert shown == f"{output}\n"


def test_a_compiler_that_cannot_be_started_is_one_message(home: Path) -> None:
    reason = f"the compiler cannot be started: {OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))}"
    with pytest.raises(InternalError) as refused, _compiler_failures():
        raise CompilerFailed("steps", None, reason)
    assert refused.value.message == (
        f"kernel 'steps' could not be compiled: {reason}; free memory, or end processes that are not needed, and run "
        f"the command again"
    )
    assert not (home / "logs").exists()


# Prepares no model, as there is none of that name, and meets a damaged index.
WARNED = """
import sys
from pathlib import Path
from pipeline.config.load import load
from pipeline.errors import ModelNotFound
from stages.worker.checkpoint.usable import usable_version
from starling.cli.prepare import prepare_all

try:
    prepare_all(load(), "absent")
except ModelNotFound:
    usable_version(Path(sys.argv[1]))
"""


def test_a_warning_is_printed_with_its_reason(home: Path, tmp_path: Path) -> None:
    """A command writes no log."""
    path = tmp_path / "damaged.idx"
    path.write_bytes(b"damaged")
    done = subprocess.run([sys.executable, "-c", WARNED, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"checkpoint cannot be used  effect=it is made again  reason={path}: not a checkpoint index" in line


@pytest.mark.parametrize("duration", ["0", "0.0s", "-5s", "1d", "nan", ""])
def test_a_duration_that_is_none_is_refused(home: Path, duration: str) -> None:
    done = CliRunner().invoke(cli, ["chaos", "--duration", duration])
    assert done.exit_code == 2
    assert "is not a duration" in done.output


@pytest.mark.parametrize("command", ["drain absent", "resume absent", "fetch absent", "prepare absent"])
def test_a_name_that_is_not_there_is_wrong_usage(home: Path, command: str) -> None:
    done = starling(*command.split())
    assert done.returncode == 2
    assert "'absent'" in done.stderr


@pytest.mark.parametrize("command", ["drain", "resume", "reload m", "load m", "unload m"])
def test_that_no_server_runs_is_said(home: Path, command: str) -> None:
    done = starling(*command.split())
    assert done.returncode == 1
    assert "`starling status` shows what runs here" in done.stderr


def as_anybody(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `starling` as a user whom file modes restrict."""
    libc = ctypes.CDLL(None)

    def drop() -> None:
        if os.getuid() == 0:
            for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP

    return subprocess.run(
        [sys.executable, "-m", "starling", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=drop,
    )


@pytest.mark.parametrize("closed", ["", "run"])
@pytest.mark.parametrize("command", ["status", "status --json", "down", "restart kv", "kv check"])
def test_a_server_of_another_user_is_not_none(home: Path, closed: str, command: str) -> None:
    """As seen by someone to whom its directory is closed."""
    (home / "run").mkdir(parents=True)
    (home / closed).chmod(0)
    try:
        done = as_anybody(*command.split())
    finally:
        (home / closed).chmod(0o700)
    assert done.returncode == 78, done.stderr
    assert "Permission denied" in done.stderr
    assert f"STARLING_HOME is {home}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["kv", "logs", "models", "prepare"])
def test_a_home_of_another_user_is_said(home: Path, command: str) -> None:
    (home / "logs").mkdir(parents=True)
    home.chmod(0)
    try:
        done = as_anybody(command)
    finally:
        home.chmod(0o700)
    assert done.returncode == 78, done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_crash_left_in_the_run_directory_is_no_server(home: Path) -> None:
    run = home / "run"
    run.mkdir(parents=True, mode=0o700)
    (run / "kv.status").write_text("{}")
    (run / "gateway.status").write_bytes(b"\xff")
    (run / "versions.json").write_text("[")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(run / "gateway.control.sock"))
    for command, code in (("status", 1), ("drain", 1), ("kv check", 0), ("down", 0), ("restart all", 1)):
        done = starling(*command.split())
        assert done.returncode == code, (command, done)
        assert "Traceback" not in done.stderr
