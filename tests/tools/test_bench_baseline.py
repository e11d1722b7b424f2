"""llama-server as the benchmark's baseline: which build is used, its arguments, and the message without one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.models.store import LocalModel
from tools import tile_instructions
from tools.bench.http import baseline
from tools.bench.http.baseline import BaselineMissing, BaselineServer
from tools.bench.http.command import Bench, about_line
from tools.bench.offline import peers
from tools.bench.offline.baseline import Baseline, EngineRefusesError
from tools.bench.offline.ik_baseline import IkBaseline
from tools.bench.offline.openvino_baseline import OpenVinoBaseline

ROOT = Path(__file__).resolve().parents[2]

# A server that is healthy at the second request of /health, and stores its arguments in a file.
SERVER = """#!{python}
import http.server, json, os, sys
if "--version" in sys.argv:
    print("version: 7 (abc)\\nbuilt with GNU 12.2.0", file=sys.stderr)
    sys.exit()
told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if told["--model"] == os.devnull:
    print("I system_info: n_threads = 1 | CPU : AVX512_VNNI = 1 | OPENMP = 1 | ", file=sys.stderr, flush=True)
    sys.exit(1)
json.dump([told, sorted(os.sched_getaffinity(0))], open({told!r}, "w"))
responses = [503, 200]
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(responses.pop(0) if len(responses) > 1 else responses[0])
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((told["--host"], int(told["--port"])), Health).serve_forever()
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_a_compiled_server_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_attention: str) -> None:
    told = tmp_path / "told"
    program(tmp_path / "llama-server", SERVER.format(python=sys.executable, told=str(told)))
    monkeypatch.setattr(baseline.sys, "executable", str(tmp_path / "python"))
    core = max(os.sched_getaffinity(0))
    with BaselineServer(Path("some/model.gguf"), [core], 16, 1024, flash_attention) as server:
        pid = server.pids[0]
        assert "cpu CPU : AVX512_VNNI = 1 | OPENMP = 1" in about_line(server.name, server.about)
        assert server.about.pop("load_ms") > 0
        assert server.about == {
            "version": "version: 7 (abc); built with GNU 12.2.0",
            "build": "compiled for this CPU",
            "cpu": "CPU : AVX512_VNNI = 1 | OPENMP = 1",
            "slots": 16,
            "flash_attention": flash_attention,
        }
        arguments, cores = json.loads(told.read_text())
    assert cores == [core]
    assert arguments["--model"] == "some/model.gguf"
    assert arguments["--flash-attn"] == flash_attention
    assert (arguments["--threads"], arguments["--threads-batch"]) == ("1", "1")
    assert (arguments["--parallel"], arguments["--ctx-size"]) == ("16", str(16 * 1024))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_runs_with_and_without_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "llama-server", SERVER.format(python=sys.executable, told=str(tmp_path / "told")))
    monkeypatch.setattr(baseline.sys, "executable", str(tmp_path / "python"))
    with ExitStack() as stack:
        bench = Bench.__new__(Bench)  # no model is prepared
        bench.stack, bench.cores = stack, [max(os.sched_getaffinity(0))]
        bench.source = LocalModel("m", tmp_path / "m.gguf", "", 0)
        servers = bench._baselines(4)
        assert [(server.name, server.about["flash_attention"]) for server in servers] == [
            ("llama-server", "on"),
            ("llama-server -fa off", "off"),
        ]


def test_a_server_that_ends_is_missing_with_its_last_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "llama-server", "#!/bin/sh\necho no such model >&2\nexit 3\n")
    monkeypatch.setattr(baseline.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BaselineMissing, match="llama-server ended with code 3:\nno such model"):
        BaselineServer(Path("model.gguf"), sorted(os.sched_getaffinity(0)), 1, 64)


def test_without_a_server_the_error_names_the_ways_to_install_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BaselineMissing, match="make peers-native .* make peers "):
        BaselineServer(Path("model.gguf"), [0], 1, 64)


def build(tmp_path: Path, python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script that compiles llama.cpp, with the shell script `python` as its interpreter."""
    interpreter = program(tmp_path / "python", f"#!/bin/bash\n{python}\n")
    return subprocess.run(
        [
            ROOT / "tools" / "build_llama_cpp.sh",
            interpreter,
            "locks/requirements-peers-native.lock",
            tmp_path / "out",
        ],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_compiler_the_error_names_a_way_to_install_one(tmp_path: Path) -> None:
    result = build(tmp_path, "exit 0", CXX="no-such-compiler")
    assert result.returncode != 0
    assert "no-such-compiler is needed to compile llama.cpp" in result.stderr
    assert "apt install cmake g++" in result.stderr


def test_only_the_locked_source_is_fetched(tmp_path: Path) -> None:
    tool = program(tmp_path / "cmake", "#!/bin/sh\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    asked = 'for a; do [ -f "$a" ] && cat "$a"; done; echo "$@"; echo not to be had; exit 1'
    result = build(tmp_path, asked, CXX=str(tool), PATH=path)
    assert result.returncode != 0
    assert result.stderr.startswith("llama-cpp-python==")
    assert result.stderr.count("==") == 1 and "--hash=sha256:" in result.stderr
    assert "--require-hashes" in result.stderr and "--no-binary :all:" in result.stderr
    assert "not to be had" in result.stderr
    assert "PIP_INDEX_URL names an index" in result.stderr
    assert not (tmp_path / "out").exists()


GCC_12 = "#!/bin/sh\n[ $1 = -dumpversion ] && echo 12 || echo 'c++ (Debian) 12.2.0 Free Software Foundation'\n"
GCC_14 = GCC_12.replace("12", "14")
CLANG = "#!/bin/sh\necho 'Debian clang version 16.0.6'\n"


# What tools/peer_clang.sh asks of g++, and of Python; the latter appends what pip is asked for to the file `asked`.
GXX_12 = """#!/bin/sh
case $1 in
    -E) printf '#include <...> search starts here:\\n /opt/c++/12\\n /usr/include\\nEnd of search list.\\n' >&2 ;;
    -print-file-name=*) echo "/opt/lib/${1#*=}" ;;
    *) exec c++ "$@" ;;
esac
"""
PYTHON = """#!/bin/sh
case "$*" in
    *metadata*) echo 0.0.1 ;;
    *install*) echo "$@" >>"$(dirname "$0")/asked" ;;
    *) dirname "$0" | sed s,$,/zig, ;;
esac
"""
ZIG = '#!/bin/sh\ncase "$*" in *--version*) echo clang version 22.1.8 ;; *) echo "$@" ;; esac\n'


def choose(tmp_path: Path, programs: dict[str, str], features: str, **environment: str) -> tuple[list[str], str]:
    """CC, CXX, CFLAGS and CXXFLAGS where only these programs are installed, and what is said."""
    for name, text in programs.items():
        program(tmp_path / name, text)
    for name in ("bash", "sh", "grep", "cut", "env", "dirname", "sed", "mkdir", "cat", "chmod"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : fpu {features} sse\n")
    script = 'assignments=$("$@") || exit; eval "$assignments"; printf "%s\\n" "$CC" "$CXX" "$CFLAGS" "$CXXFLAGS"'
    tool = ROOT / "tools" / "peer_compiler.sh"
    done = subprocess.run(
        [tmp_path / "bash", "-c", script, "-", tool, tmp_path / "python", tmp_path / "venv"],
        env={"PATH": str(tmp_path), "CPUINFO": str(cpuinfo), **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:4], done.stderr


@pytest.mark.parametrize(
    ("compilers", "features", "chosen", "flags"),
    [
        ({"c++": GCC_12}, "avx512f", ("cc", "c++"), ""),
        ({"c++": GCC_12, "clang++": CLANG}, "avx512f", ("cc", "c++"), ""),
        ({"c++": GCC_14}, "amx_int8", ("cc", "c++"), ""),
        ({"c++": GCC_12, "g++-14": GCC_14, "clang++": CLANG}, "amx_int8", ("gcc-14", "g++-14"), ""),
        ({"c++": GCC_12, "clang++-16": CLANG}, "amx_int8", ("clang-16", "clang++-16"), "-D__AMX_INT8__"),
    ],
)
def test_the_peer_is_compiled_with_amx_whatever_the_default_compiler(
    tmp_path: Path, compilers: dict[str, str], features: str, chosen: tuple[str, str], flags: str
) -> None:
    (cc, cxx, *found_flags), said = choose(tmp_path, compilers, features)
    assert (cc, cxx) == chosen
    assert found_flags[0] == found_flags[1]
    assert (flags in found_flags[0]) if flags else found_flags[0] == ""
    assert said == ""


def test_where_no_compiler_has_amx_the_locked_clang_is_fetched(tmp_path: Path) -> None:
    programs = {"c++": GCC_12, "g++": GXX_12, "python": PYTHON, "zig": ZIG}
    (cc, cxx, flags, _), said = choose(tmp_path, programs, "amx_int8")
    assert (cc, cxx) == (f"{tmp_path}/venv/bin/peer-clang", f"{tmp_path}/venv/bin/peer-clang++")
    assert "-D__AMX_INT8__" in flags
    assert "Fetching clang" in said and "without AMX" not in said
    asked = (tmp_path / "asked").read_text()
    assert "--require-hashes --only-binary :all:" in asked
    assert asked.strip().endswith("locks/requirements-peers-compiler.lock")
    compiled, linked = (
        subprocess.run([cxx, *arguments], capture_output=True, text=True, check=True, timeout=30).stdout.split()
        for arguments in (["-c", "a b.cpp"], ["a.o"])
    )
    assert compiled == ["c++", "-nostdinc++", "-nostdlib++", "-c", "a", "b.cpp", "-I/opt/c++/12"]
    assert linked[3:] == ["a.o", "-I/opt/c++/12", "/opt/lib/libstdc++.so", "/opt/lib/libgcc_s.so.1"]


@pytest.mark.parametrize(
    ("programs", "environment", "reason"),
    [
        ({"g++-13": GCC_12}, {}, "g++ is needed .*clang could not be fetched.* apt install clang"),
        ({"g++": GXX_12, "python": "#!/bin/sh\nexit 1\n"}, {}, "clang could not be fetched.* apt install clang"),
        ({"g++-12": GCC_12, "clang++": CLANG}, {"CXX": "g++-12"}, "g++-12 is older than GCC 13; .*CXX names"),
    ],
)
def test_a_peer_without_amx_is_said_to_be_one(
    tmp_path: Path, programs: dict[str, str], environment: dict[str, str], reason: str
) -> None:
    (_, cxx, *flags), said = choose(tmp_path, {"c++": GCC_12, **programs}, "amx_int8", **environment)
    assert cxx == environment.get("CXX", "c++")
    assert flags == ["-U__AMX_INT8__"] * 2
    assert "compiled without AMX" in said
    assert re.search(reason.replace("++", r"\+\+"), said, re.DOTALL)


TILES = """
#include <immintrin.h>
void product(const void *configuration) {
    _tile_loadconfig(configuration);
#ifdef __AMX_INT8__
    _tile_dpbusd(0, 1, 2);
#endif
    _tile_release();
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "code"), [("-mamx-int8", 0), ("-U__AMX_INT8__", 1)])
def test_compiled_tile_instructions_are_found(tmp_path: Path, flags: str, code: int) -> None:
    """g++ of any version compiles these few as they stand."""
    source = tmp_path / "tiles.cpp"
    source.write_text(TILES)
    command = ["g++", "-O2", "-mamx-tile", flags, "-c", str(source), "-o", str(tmp_path / "tiles.o")]
    subprocess.run(command, check=True, timeout=60)
    assert tile_instructions.main(str(tmp_path / "tiles.o")) == code


@pytest.mark.slow
@pytest.mark.skipif("importlib.util.find_spec('ziglang') is None", reason="locks/requirements-peers-compiler.lock")
def test_the_fetched_clang_compiles_for_amx_and_links_with_the_library_of_gxx(tmp_path: Path) -> None:
    compiler = subprocess.run(
        [ROOT / "tools" / "peer_clang.sh", sys.executable, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "cache")}

    def compile_file(name: str, text: str, *arguments: object) -> Path:
        (tmp_path / f"{name}.cpp").write_text(text)
        command = [compiler, "-O2", tmp_path / f"{name}.cpp", *arguments, "-o", tmp_path / name]
        subprocess.run(list(map(str, command)), env=environment, check=True, timeout=300)
        return tmp_path / name

    tiles = compile_file("tiles", TILES, "-march=sapphirerapids", "-D__AMX_INT8__", "-c")
    assert tile_instructions.count(tiles) == (1, 1)
    # What one library throws another one catches.
    throws = '#include <stdexcept>\nvoid fail() { throw std::runtime_error("thrown"); }\n'
    library = compile_file("libfail.so", throws, "-fPIC", "-shared")
    catches = """#include <cstdio>
        #include <exception>
        void fail();
        int main() { try { fail(); } catch (const std::exception &error) { puts(error.what()); } }
        """
    caught = compile_file("catch", catches, library)
    assert subprocess.run([caught], capture_output=True, text=True, check=True, timeout=60).stdout == "thrown\n"


def test_the_features_that_the_compiled_peer_reports_are_printed(tmp_path: Path) -> None:
    """By the package with copies of the compiled libraries, which replace those of a wheel."""
    reported = "CPU : AVX512_VNNI = 1 | AMX_INT8 = 1 | OPENMP = 1 | "
    package, libraries = tmp_path / "site" / "llama_cpp", tmp_path / "venv" / "lib" / "llama.cpp"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libwheel.so").touch()
    libraries.mkdir(parents=True)
    (libraries / "features").write_text(reported)
    (package / "__init__.py").write_text(
        "import pathlib\n"
        "def llama_print_system_info():\n"
        "    return pathlib.Path(__file__).with_name('lib').joinpath('features').read_bytes()\n"
    )
    interpreter = program(
        tmp_path / "python",
        f"""#!/bin/sh
        case "$*" in
            *"-m pip"*) echo "$@" >{tmp_path}/asked ;;
            *platlib*) echo {tmp_path}/site ;;
            *) PYTHONPATH={tmp_path}/site exec {sys.executable} "$@" ;;
        esac
        """,
    )
    lock = "locks/requirements-peers-native.lock"
    command = [str(ROOT / "tools" / "use_llama_cpp.sh"), str(interpreter), lock, str(tmp_path / "venv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"llama.cpp uses {reported}\n"
    assert [path.name for path in (package / "lib").iterdir()] == ["features"]
    assert f"--require-hashes --no-binary llama-cpp-python -r {lock}" in (tmp_path / "asked").read_text()


def test_another_compiler_compiles_the_peer_again(tmp_path: Path) -> None:
    """As after `apt install clang`, which the message about AMX names."""
    venv, compiler = tmp_path / "venv", tmp_path / "c++"
    venv.mkdir()
    (venv / ".locked-dev").touch()
    stamp = venv / ".peer-compiler"

    def contents(text: str, *more: str) -> str:
        program(compiler, text)
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX", "MAKEFLAGS")}
        command = ["make", f"VENV={venv}", *more, stamp]
        subprocess.run(command, cwd=ROOT, env=environment | {"PATH": path}, check=True, timeout=60)
        return stamp.read_text()

    first = contents(GCC_12)
    assert "12.2.0" in first
    os.utime(stamp, (1, 1))
    assert contents(GCC_12) == first
    assert stamp.stat().st_mtime == 1, "what depends on it is not made again"
    assert "14.2.0" in contents(GCC_14)
    assert stamp.stat().st_mtime > 1
    assert "-DGGML_BLAS=ON" in contents(GCC_14, "CMAKE_ARGS=-DGGML_BLAS=ON")


def test_a_peer_that_cannot_run_is_left_out_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real child process, in an environment that lacks the library."""
    assert peers.installed(tmp_path / "bin" / "python") == []
    cores = sorted(os.sched_getaffinity(0))[:1]
    with pytest.raises(EngineRefusesError, match="^ik_llama.cpp: .*ik_llama_cpp"):
        Baseline(tmp_path / "m.gguf", cores, 1, 64, IkBaseline.NAME)
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
        case "$1" in
            -c) echo openvino_genai ;;
            *) exec {sys.executable} "$@" ;;
        esac
        """)
    python.chmod(0o755)
    assert peers.installed(python) == [OpenVinoBaseline.NAME]
    with ExitStack() as stack:
        assert peers.start(stack, tmp_path / "m.gguf", cores, [(1, 64)], python) == {}
    assert capsys.readouterr().out.startswith("left out: OpenVINO GenAI: ")
