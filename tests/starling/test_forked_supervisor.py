"""`starling up` forks supervisors from its process; other lines of a Procfile are started by a shell."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from starling.cli import forked_supervisor
from starling.cli.stage import STAGES

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0

# In a process of its own: that of the tests may have threads. Prints what is seen of the child that runs `line`.
RUN = """
import json, logging, os, sys
from starling.cli import forked_supervisor
logging.basicConfig()  # as honcho does
forked_supervisor.preload()
child = forked_supervisor.child_of(sys.argv[1], {**os.environ, "GREETING": "hello"}, sys.argv[2])
output = child.stdout.read().decode()
session = os.getsid(child.pid)
print(json.dumps([type(child).__name__, child.wait(), child.returncode, session == child.pid, output]))
"""


def run(line: str, directory: Path, program: str = RUN) -> list[object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, line, str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("prefix", ["", 'PATH="$PATH:$PWD/.venv/bin" '])
def test_a_supervisor_is_a_fork_with_its_own_session_output_and_exit_code(tmp_path: Path, prefix: str) -> None:
    kind, code, returncode, leads_session, output = run(f"{prefix}exec starling supervise nonsense", tmp_path)
    assert (kind, code, returncode, leads_session) == ("ForkedProgram", 2, 2, True)
    assert "'nonsense' is not one of" in str(output)


def test_the_stages_that_take_longest_start_first_once_all_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {f"{stage}.1": f"exec starling supervise {stage}" for stage in STAGES} | {"mine.1": "echo mine"}
    monkeypatch.delitem(sys.modules, "stages.kv.stage", raising=False)
    assert forked_supervisor.start_order(lines) == list(lines)
    for stage in STAGES:
        monkeypatch.setitem(sys.modules, f"stages.{stage}.stage", sys)
    order = ["worker.1", "tokenizer.1", "gateway.1", "scheduler.1", "kv.1", "mine.1"]
    assert forked_supervisor.start_order(lines) == order


def test_other_lines_are_started_by_a_shell(tmp_path: Path) -> None:
    kind, code, _, leads_session, output = run("echo $GREETING; pwd; exit 3", tmp_path)
    assert (kind, code, leads_session) == ("Popen", 3, True)
    assert output == f"hello\n{tmp_path}\n"


def test_they_run_where_this_process_did_before_it_kept_to_a_core(tmp_path: Path) -> None:
    kept = (
        "from pipeline.config import server_cores; server_cores.keep_to(server_cores.own()[:1]); logging.basicConfig()"
    )
    program = RUN.replace("logging.basicConfig()", kept)
    allowed = "grep Cpus_allowed_list /proc/self/status"
    here = subprocess.run(allowed.split(), capture_output=True, text=True, check=True).stdout
    assert run(allowed, tmp_path, program)[-1] == here


def test_a_supervisor_is_not_forked_if_the_import_of_its_stage_started_a_thread(tmp_path: Path) -> None:
    starts = "lambda stage: threading.Thread(target=threading.Event().wait, daemon=True).start()"
    program = RUN.replace(
        "logging.basicConfig()", f"import threading; forked_supervisor._import = {starts}; logging.basicConfig()"
    )
    assert program != RUN
    kind, code, *_ = run("exec starling supervise nonsense", tmp_path, program)
    assert (kind, code != 0) == ("Popen", True)


def test_a_fork_shows_its_own_command(tmp_path: Path) -> None:
    """`starling down` and `ps` find supervisors by it."""
    code = """
import os, sys
from pathlib import Path
from pipeline import procfs
from pipeline.runtime import process
process.set_command(["python", "-m", "starling", "supervise", "kv"])
print(procfs.command(os.getpid())[:5])
before = len(Path("/proc/self/cmdline").read_bytes())
process.set_command(["x" * 100_000])
assert len(Path("/proc/self/cmdline").read_bytes()) == before
assert os.environ["AFTER"] == "unharmed" and b"AFTER=unharmed" in Path("/proc/self/environ").read_bytes()
"""
    done = subprocess.run(
        [sys.executable, "-c", code + "#" + "a" * 200],
        env={**os.environ, "PYTHONPATH": str(ROOT), "AFTER": "unharmed"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "['python', '-m', 'starling', 'supervise', 'kv']\n"


# The child of a process that is killed before the child watches it.
ORPHAN = """
import os, signal, sys, time
from starling.cli import forked_supervisor
forked_supervisor.preload()
main, parent = forked_supervisor._main, os.getpid()

def late(*arguments):
    while os.getppid() == parent:
        time.sleep(0.01)
    main(*arguments)

forked_supervisor._main = late
print(forked_supervisor.child_of("exec starling supervise kv", os.environ, sys.argv[1]).pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_supervisor_ends_whose_parent_has_died_before_it_watches_it(tmp_path: Path) -> None:
    model = tmp_path / "none.gguf"
    (tmp_path / "starling.yaml").write_text(
        f"models: [{{name: m, path: {model}}}]\nserver: {{arena_dir: {tmp_path}/shm}}\n"
    )
    paths = {
        "STARLING_HOME": str(tmp_path),
        "STARLING_CONFIG": str(tmp_path / "starling.yaml"),
        "PYTHONPATH": str(ROOT),
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)],
        env={**os.environ, **paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    supervisor = os.pidfd_open(pid)
    try:
        parent.communicate("end\n")
        assert parent.returncode == -signal.SIGKILL
        assert select.select([supervisor], [], [], WAIT_S)[0]
        assert not list((tmp_path / "run").glob("*.sock"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(supervisor, signal.SIGKILL)
        os.close(supervisor)


IMPATIENT = """
import sys
from honcho import manager
from starling.cli import honcho_patch
manager.KILL_WAIT = 0.2
honcho_patch.main()
"""


def test_processes_that_do_not_end_are_killed_after_one_has_ended(tmp_path: Path) -> None:
    ready = [tmp_path / f"ready{i}" for i in range(2)]
    lines = [f"stuck{i}: trap '' TERM; touch {file}; while :; do sleep 1; done" for i, file in enumerate(ready)]
    lines.append(f"gone: until [ -e {ready[0]} ] && [ -e {ready[1]} ]; do sleep 0.02; done; exit 3")
    (tmp_path / "Procfile").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", IMPATIENT, "start", "-f", str(tmp_path / "Procfile")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 3, done.stderr
    for i in range(2):
        assert f"stuck{i}.1 stopped (rc=-9)" in done.stdout
        assert done.stdout.count(f"sending SIGKILL to stuck{i}.1") == 1


HELD = """
import signal, sys
from starling.cli import forked_supervisor, honcho_patch

class Holding:
    def find_spec(self, name, path, target=None):
        if name == "stages.kv.stage":
            print("held", flush=True)
            sys.stdin.readline()

sys.meta_path.insert(0, Holding())
# It has no handler of its own, however late the signal comes.
forked_supervisor._main = lambda stage, config: signal.pause()
honcho_patch.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_an_import_ends_all_processes_that_start(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "Procfile").write_text("kv: exec starling supervise kv\nlast: exec sleep 600\n")
    honcho = subprocess.Popen(
        [sys.executable, "-c", HELD, "start", "-f", str(tmp_path / "Procfile")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert honcho.stdout is not None
    assert honcho.stdout.readline() == "held\n"
    honcho.send_signal(number)
    output, _ = honcho.communicate("go on\n", timeout=240)
    assert honcho.returncode == code, output
    assert "kv.1 stopped (rc=-15)" in output
    assert "last.1 stopped (rc=-15)" in output


IMPORTED = """
import os, sys
from starling.cli import forked_supervisor
forked_supervisor.preload()
for stage in ("gateway", "kv"):
    child = forked_supervisor.child_of(f"exec starling supervise {stage}", {**os.environ, "STARLING_CONFIG": "/none"})
    child.stdout.read()
    print(stage, child.wait(), f"stages.{stage}.stage" in sys.modules)
"""


def test_stages_but_the_gateway_are_imported_before_their_supervisors_are_forked() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "gateway 78 False\nkv 78 True\n"


READ = """
import os, sys
from pathlib import Path
from starling.cli import forked_supervisor, stage

def port(name, model, config):
    print(config.server.port, os.environ["PORT"], flush=True)

def read(*arguments, **options):
    print("read", os.getpid() == parent, flush=True)
    return load(*arguments, **options)

parent, load = os.getpid(), forked_supervisor.load
forked_supervisor.preload()
forked_supervisor.load = stage.load = read
stage.supervise_stage = port
os.environ["PORT"] = "none"
OTHER = {"STARLING_SERVER__PORT": "9"}
for at, (name, settings) in enumerate([("kv", {}), ("scheduler", {}), ("kv", {}), ("tokenizer", OTHER)]):
    env = {**os.environ, "PORT": str(at), **settings}
    child = forked_supervisor.child_of(f"exec starling supervise {name}", env, sys.argv[1])
    print(child.stdout.read().decode(), child.wait(), flush=True)
    Path(sys.argv[1], "starling.yaml").write_text("server: {port: 8}")
"""


def test_supervisors_share_the_configuration_of_the_start_and_their_successors_have_it(tmp_path: Path) -> None:
    """Each has its own environment; one whose settings differ has a configuration of its own."""
    (tmp_path / "starling.yaml").write_text("server: {port: 7}")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "STARLING_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n") == [
        *("read True", "7 0", " 0", "7 1", " 0", "7 2", " 0"),
        *("read True", "9 3", " 0", ""),
    ]


def test_a_fork_may_get_the_environment_of_its_parent(tmp_path: Path) -> None:
    """The child empties its own before it takes over what it gets."""
    code = """
import os
from starling.cli.forked_program import ForkedProgram
child = ForkedProgram(["child"], lambda: print(os.environ["GREETING"], flush=True), os.environ, is_piped=True)
print(child.stdout.read().decode(), child.wait())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GREETING": "hello"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "hello\n 0\n"


def test_processes_get_the_settings_that_honcho_gives_them(tmp_path: Path) -> None:
    """A name and a port for each, and those of `.env` in the working directory that the environment lacks."""
    os.mkfifo(tmp_path / "gate")  # neither ends before the other has printed its line: honcho would end the other, too
    ends = {"one": ": > gate", "two": ": < gate"}
    lines = [f'{name}: echo "$HONCHO_PROCESS_NAME $PORT $STARLING_GREETING"; {end}' for name, end in ends.items()]
    (tmp_path / "Procfile").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "starling.cli.honcho_patch"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STARLING_GREETING": "of the caller", "PORT": "7000"}

    def start(*arguments: str, lacks: str = "") -> subprocess.CompletedProcess[str]:
        given = {name: value for name, value in env.items() if name not in lacks.split()}
        return subprocess.run([*command, *arguments], cwd=tmp_path, env=given, capture_output=True, text=True)

    done = start("start", "-f", "Procfile")
    assert done.returncode == 0, done.stderr
    assert "one.1 7000 of the caller" in done.stdout
    assert "two.1 7100 of the caller" in done.stdout
    (tmp_path / ".env").write_text("STARLING_GREETING=hello\nPORT=7200\n")
    assert "one.1 7000 of the caller" in start("start", "-f", "Procfile").stdout
    done = start("start", "-f", "Procfile", lacks="STARLING_GREETING PORT")
    assert "one.1 7200 hello" in done.stdout
    assert "two.1 7300 hello" in done.stdout
    assert "expected start -f PROCFILE" in start("run", "-f", "Procfile").stderr
    done = start("start", "-f", "none")
    assert (done.returncode, done.stderr) == (1, "none: cannot read the Procfile: No such file or directory\n")
    (tmp_path / ".env").write_text("PORT=http\n")
    done = start("start", "-f", "Procfile", lacks="PORT")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "PORT is 'http': expected a number" in done.stderr


@pytest.mark.parametrize(("value", "has_colour"), [("", True), ("1", False)])
def test_no_color_reaches_the_lines_of_the_stages(tmp_path: Path, value: str, has_colour: bool) -> None:
    (tmp_path / "Procfile").write_text("one: echo hello\n")
    command = [sys.executable, "-m", "starling.cli.honcho_patch", "start", "-f", "Procfile"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": value}
    own, terminal = os.openpty()
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the process has ended
            while data := os.read(own, 4096):
                shown += data
        assert process.wait() == 0
    os.close(own)
    assert b"hello" in shown
    assert (b"\x1b[" in shown) == has_colour
