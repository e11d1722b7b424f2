"""The emulated machine with AMX (tests/amx_machine): its instructions, by hand-written code, and what it refuses."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipeline.native import object_code
from pipeline.native.object_code import ObjectCode
from stages.worker.kernels.build import COMPILER
from tests import amx_machine as emulation
from tests.amx_machine import Machine, layout
from tests.worker.matrices import awkward, multiply, random_matrix

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulation.is_possible(), reason="needs AVX-512 VNNI, and no AMX"),
]

Code = Callable[..., None]  # called with up to six addresses or numbers: rdi, rsi, rdx, rcx, r8, r9
ROWS, K, N = 5, 12, 28  # rows of the sums, values of a row of A, bytes of a row of the sums and of B


def run(machine: Machine, call: str, isa: str = "vnni") -> str:
    """What a function of this module returns in a process of the machine."""
    code = f"from tests.worker import test_amx_machine as t; print(t.{call})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = COMPILER | os.environ | machine.environment | {"STARLING_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------ in a process of the machine


def assembled(text: str) -> Code:
    """A function of instructions, by LLVM's assembler."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    lines = [".text", ".globl code", ".type code,@function", "code:", *text.split(";"), "ret"]
    module = llvm.parse_assembly("\n".join(f'module asm "{line.strip()}"' for line in lines))
    machine = llvm.Target.from_default_triple().create_target_machine(features="+amx-tile,+amx-int8", codemodel="large")
    loaded = ObjectCode(machine.emit_object(module))
    function = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 6)(loaded.address("code"))

    def call(*arguments: object) -> None:
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        function(*values, *(0,) * (6 - len(values)))  # type: ignore[arg-type]

    call.code = loaded  # type: ignore[attr-defined]
    return call


def permit() -> None:
    from stages.worker.kernels.features import permit_amx

    permit_amx()


def configuration(shapes: dict[int, tuple[int, int]], palette: int = 1) -> np.ndarray:
    """What `ldtilecfg` reads: rows and bytes of a row, by tile."""
    data = np.zeros(64, np.uint8)
    data[0] = palette
    for tile, (rows, row_bytes) in shapes.items():
        data[16 + 2 * tile : 18 + 2 * tile] = list(struct.pack("<H", row_bytes))
        data[48 + tile] = rows
    return data


# Tiles 7, 1 and 4 are the sums, A and B.
SHAPES = {7: (ROWS, N), 1: (ROWS, K), 4: (K // 4, N)}
PRODUCT = """ldtilecfg (%rdi); tileloadd (%rsi,%r8), %tmm1; tileloaddt1 (%rdx,%r8), %tmm4; tileloadd (%rcx,%r8), %tmm7;
    {} %tmm4, %tmm1, %tmm7; tilestored %tmm7, (%rcx,%r8); tilerelease"""


def products() -> str:
    """Each product adds to the sums what numpy computes, whatever the values; other bytes stay as they are."""
    permit()
    rng = np.random.default_rng(1)
    types = {"s": np.int8, "u": np.uint8}
    for name in ("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"):
        multiply = assembled(PRODUCT.format(name))
        for extreme in (False, True):
            a, b, c = (rng.integers(0, 256, (16, 64), np.uint8) for _ in range(3))
            if extreme:
                a[:], b[:] = (128 if name[4] == "s" else 255), (128 if name[5] == "s" else 255)
            expected = c.copy()
            values = a[:ROWS, :K].view(types[name[4]]).astype(np.int64)
            codes = b[: K // 4, :N].reshape(K // 4, N // 4, 4).transpose(0, 2, 1).reshape(K, N // 4)
            sums = values @ codes.view(types[name[5]]).astype(np.int64)
            total = expected[:ROWS, :N].copy().view(np.int32).astype(np.int64) + sums
            expected[:ROWS, :N] = total.astype(np.uint64).astype(np.uint32).view(np.uint8)
            multiply(configuration(SHAPES), a, b, c, 64)
            assert c.tobytes() == expected.tobytes(), (name, extreme)
    return "equal"


def addresses() -> str:
    """Every form of an address, negative strides, and whole tiles."""
    permit()
    rng = np.random.default_rng(2)
    shapes, lines = configuration({0: (16, 64)}), rng.integers(0, 256, (64, 64), np.uint8)
    begin = "ldtilecfg (%rdi); movq %rsi, %rax; movq %rsi, %r10; movq %rsi, %r13; movq %rsi, %rbp"
    for form, first, step in (
        ("(%rsi,%r8)", 0, 1),
        ("(%r10,%r8,2)", 0, 2),
        ("64(%r13,%r9)", 1, 2),
        ("640(%r10,%r8)", 10, 1),
        ("-128(%rax,%rcx,2)", 30, 1),
        ("(%rsi)", 0, 0),
        ("960(%rsi,%rdx)", 15, -1),
    ):
        saved = "pushq %rbp; pushq %r13;" + begin
        at = saved + f"; {'subq $-2048, %rax;' if '%rax' in form else ''}"
        load = assembled(
            f"{at} movq $32, %rcx; movq $-64, %rdx; tileloadd {form}, %tmm0; "
            "popq %r13; popq %rbp; leaq 4096(%rsi), %rax; movq $64, %rcx; tilestored %tmm0, (%rax,%rcx)"
        )
        memory = np.concatenate([lines, np.zeros((64, 64), np.uint8)])
        load(shapes, memory, 0, 0, 64, 128)
        expected = lines[[first + step * r for r in range(16)]]
        assert memory[64:80].tobytes() == expected.tobytes(), form
        assert not memory[80:].any()
    return "equal"


def stored_configurations() -> str:
    """`sttilecfg` after `ldtilecfg`, after a release, and after a configuration of palette 0; tiles begin as zero."""
    permit()
    given, out = configuration(SHAPES), np.full((4, 64), 0xA5, np.uint8)
    code = """sttilecfg (%rsi); ldtilecfg (%rdi); sttilecfg 64(%rsi); tilerelease; sttilecfg 128(%rsi);
        ldtilecfg (%rdi); ldtilecfg (%rdx); sttilecfg 192(%rsi)"""
    assembled(code)(given, out, configuration({0: (1, 4)}, 0))
    assert out[1].tobytes() == given.tobytes()
    assert not out[[0, 2, 3]].any()
    data = np.full((16, 64), 0x5A, np.uint8)
    code = """ldtilecfg (%rdi); tileloadd (%rsi,%r8), %tmm7; ldtilecfg (%rdi); tilestored %tmm7, (%rsi,%r8);
        tileloadd (%rdx,%r8), %tmm7; tilezero %tmm7; tilestored %tmm7, (%rdx,%r8); tilerelease"""
    other = data.copy()
    assembled(code)(given, data, other, 0, 64)
    for written in (data, other):
        assert not written[:ROWS, :N].any()
        written[:ROWS, :N] = 0x5A
        assert (written == 0x5A).all()
    return "equal"


def interrupted_moves() -> str:
    """A configuration whose `start_row` is 2, as that of an interrupted load or store: the other rows are done."""
    permit()
    data, out = np.arange(1024, dtype=np.uint32).view(np.uint8).reshape(-1, 64)[:16], np.zeros((16, 64), np.uint8)
    given = configuration({0: (4, 64)})
    given[1] = 2
    code = "ldtilecfg (%rdi); tileloadd (%rsi,%r8), %tmm0; tilestored %tmm0, (%rdx,%r8); sttilecfg (%rdi)"
    assembled(code)(given, data, out, 0, 64)
    assert given[1] == 0
    assert not out[:2].any() and not out[4:].any()
    assert out[2:4].tobytes() == data[2:4].tobytes()
    return "equal"


def ended(code: str, is_permitted: bool = True, shapes: np.ndarray | None = None, thread: bool = False) -> int:
    """The signal that ends a forked process, or thread of this process, which executes instructions; 0: none."""
    shapes = configuration(SHAPES) if shapes is None else shapes
    data = np.zeros((64, 64), np.uint8)
    function = assembled(code)
    if is_permitted:
        permit()
    if thread:
        function, of_thread = assembled("ldtilecfg (%rdi)"), function
    pid = os.fork()
    if not pid:
        function(shapes, data, data, data, 64)
        if thread:
            other = threading.Thread(target=of_thread, args=(shapes, data, data, data, 64))
            other.start()
            other.join()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def changed(**bytes_at: int) -> str:
    """An expression for the configuration of SHAPES with other bytes, by name `b16`."""
    return f"t.changed_configuration({ {int(name[1:]): value for name, value in bytes_at.items()} })"


def changed_configuration(values: dict[int, int]) -> np.ndarray:
    data = configuration(SHAPES)
    for place, value in values.items():
        data[place] = value
    return data


CONFIGURED = "ldtilecfg (%rdi); "


def recycled_number() -> str:
    """The first byte of the configuration of a thread, and of another one that Linux has given its number later."""
    import sitecustomize  # of the machine

    state, (configure, store) = sitecustomize._kept[-1], map(assembled, ("ldtilecfg (%rdi)", "sttilecfg (%rdi)"))
    shapes, first, second = configuration(SHAPES), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    numbers = []

    def configured() -> None:
        numbers.append(threading.get_native_id())
        configure(shapes)
        store(first)

    def later() -> None:
        for at in range(layout.THREADS_AT, layout.STATE_BYTES, layout.THREAD_BYTES):
            if struct.unpack_from("<q", state, at + layout.THREAD_ID)[0] == numbers[0]:
                struct.pack_into("<q", state, at + layout.THREAD_ID, threading.get_native_id())
        store(second)

    for body in (configured, later):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    return f"{first[0]} {second[0]}"


def products_beside_threads_and_signals() -> str:
    """Products of three threads at once, with tiles of their own, while Python handles a signal every millisecond."""
    rng, ticks = np.random.default_rng(6), []
    m = random_matrix("Q4_K", 64, 4, rng)
    x = awkward(40, m.columns, rng)
    expected = multiply(m, x, by_tiles=False).tobytes()
    signal.signal(signal.SIGALRM, lambda number, frame: ticks.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    begin = threading.Barrier(3)

    def products() -> set[bytes]:
        begin.wait()
        return {multiply(m, x).tobytes() for _ in range(8)}

    with ThreadPoolExecutor(3) as pool:
        assert [future.result() for future in [pool.submit(products) for _ in range(3)]] == [{expected}] * 3
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert ticks
    return "equal"


# ------------------------------------------------------------------ tests


def test_the_handler_calls_nothing_but_safe_functions_of_libc(amx_machine: Machine) -> None:
    """No symbol of Python: a trap may come in any thread, with or without the interpreter's lock."""
    directory, name, _ = amx_machine.environment["STARLING_AMX_MACHINE"].split(os.pathsep)
    code = ObjectCode((Path(directory) / f"{name}.o").read_bytes())
    undefined = {s.name for s in code._symbols if s.section == object_code._UNDEFINED and s.name}
    of_threads = {"pthread_getspecific", "pthread_setspecific"}  # of a key for which libc allocates nothing
    assert undefined == {"getpid", "gettid", "raise", "signal", "write", *of_threads}


@pytest.mark.parametrize("call", ["products", "addresses", "stored_configurations", "interrupted_moves"])
def test_an_instruction_does_what_it_should(amx_machine: Machine, call: str) -> None:
    assert run(amx_machine, f"{call}()") == "equal"


@pytest.mark.parametrize(
    ("code", "options", "reason"),
    [
        ("ud2", "", layout.UNKNOWN),
        (CONFIGURED + "tilezero %tmm7", "False", layout.NOT_PERMITTED),
        ("tilezero %tmm7", "", layout.NOT_CONFIGURED),
        (CONFIGURED + "tilerelease; tilezero %tmm7", "", layout.NOT_CONFIGURED),
        ("tilezero %tmm7", "thread=True", layout.NOT_CONFIGURED),
        (CONFIGURED + "tilezero %tmm0", "", layout.NO_TILE),
        (CONFIGURED + "tileloadd (%rsi,%r8), %tmm0", "", layout.NO_TILE),
        (CONFIGURED + "tdpbssd %tmm4, %tmm0, %tmm7", "", layout.NO_TILE),
        # Products whose sums are A, whose sums are B, and whose A is B: no assembler takes them.
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x5B, 0x5E, 0xC9", "", layout.ONE_TILE),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x5B, 0x5E, 0xE1", "", layout.ONE_TILE),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x5B, 0x5E, 0xFC", "", layout.ONE_TILE),
        (CONFIGURED + "tdpbssd %tmm1, %tmm4, %tmm7", "", layout.SHAPES),
        (CONFIGURED + "tdpbsud %tmm4, %tmm1, %tmm7", f"shapes={changed(b52=4)}", layout.SHAPES),
        (CONFIGURED + "tdpbsud %tmm4, %tmm1, %tmm7", f"shapes={changed(b55=6)}", layout.SHAPES),
        (CONFIGURED + "tdpbsud %tmm4, %tmm1, %tmm7", f"shapes={changed(b24=24)}", layout.SHAPES),
        (CONFIGURED + "tileloadd (%rsi,%r8), %tmm7", f"shapes={changed(b30=27)}", layout.ODD_ROW),
        (CONFIGURED + "tdpbsud %tmm4, %tmm1, %tmm7", f"shapes={changed(b18=11)}", layout.ODD_ROW),
        # tilezero with vvvv, with W, with L; ldtilecfg with F2; tileloadd without SIB; a product of tile 8
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x73, 0x49, 0xF8", "", layout.ENCODING),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0xFB, 0x49, 0xF8", "", layout.ENCODING),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x7F, 0x49, 0xF8", "", layout.ENCODING),
        (".byte 0xC4, 0xE2, 0x7B, 0x49, 0x07", "", layout.ENCODING),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x7B, 0x4B, 0x3E", "", layout.ENCODING),
        (CONFIGURED + ".byte 0xC4, 0xE2, 0x38, 0x5E, 0xF9", "", layout.ENCODING),
        (CONFIGURED, f"shapes={changed(b0=2)}", layout.PALETTE),
        (CONFIGURED, f"shapes={changed(b2=1)}", layout.RESERVED),
        (CONFIGURED, f"shapes={changed(b32=1)}", layout.RESERVED),
        (CONFIGURED, f"shapes={changed(b56=1)}", layout.RESERVED),
        (CONFIGURED, f"shapes={changed(b31=1)}", layout.LARGE),
        (CONFIGURED, f"shapes={changed(b55=17)}", layout.LARGE),
        (CONFIGURED, f"shapes={changed(b48=1)}", layout.HALF_TILE),
        (CONFIGURED, f"shapes={changed(b55=0)}", layout.HALF_TILE),
    ],
)
def test_what_the_cpu_refuses_ends_the_process(amx_machine: Machine, code: str, options: str, reason: int) -> None:
    amx_machine.clear()
    name, why = layout.REASONS[reason]
    assert run(amx_machine, f"ended({code!r}, {options})") == str(int(signal.Signals[name]))
    [thread] = [thread for thread in amx_machine.threads() if thread.reason]
    assert thread.reason == why
    assert thread.code[:2] == (b"\x0f\x0b" if reason == layout.UNKNOWN else b"\xc4" + thread.code[1:2])


def test_what_is_allowed_does_not_end_it(amx_machine: Machine) -> None:
    """The same code as above, without what is wrong: the test above sees the fault that it means."""
    amx_machine.clear()
    moves = "tileloadd (%rsi,%r8), %tmm1; tilezero %tmm7; tdpbsud %tmm4, %tmm1, %tmm7; tilestored %tmm7, (%rdx,%r8)"
    assert run(amx_machine, f"ended({CONFIGURED + moves!r})") == "0"
    counts = {"ldtilecfg": 1, "tileloadd": 1, "tilezero": 1, "tdpbsud": 1, "tilestored": 1}
    assert [thread.instructions for thread in amx_machine.threads()] == [counts]
    assert [thread.reason for thread in amx_machine.threads()] == [""]


def test_a_thread_with_the_number_of_an_ended_one_has_no_configuration(amx_machine: Machine) -> None:
    amx_machine.clear()
    assert run(amx_machine, "recycled_number()") == "1 0"
    counts = [{"ldtilecfg": 1, "sttilecfg": 1}, {"sttilecfg": 1}]
    assert [thread.instructions for thread in amx_machine.threads()] == counts


# Forbids filters of system calls to this process, by the error of the given number, and prints why there is no machine.
FORBIDDEN = """
import runpy, struct, sys
from tests import amx_machine

site = runpy.run_path(str(amx_machine.SITE / "sitecustomize.py"), run_name="site")
load, jump, leave, allow = site["_LOAD"], site["_JUMP_IF_EQUAL"], site["_RETURN"], site["_ALLOW"]
prctl, set_seccomp, error = 157, 22, 0x00050000 | int(sys.argv[1])
code = (load, 0, 0, 0), (jump, 0, 3, prctl), (load, 0, 0, 16), (jump, 0, 1, set_seccomp), (leave, 0, 0, error)
site["filter_calls"](b"".join(struct.pack("<HBBI", *one) for one in (*code, (leave, 0, 0, allow))))
print(amx_machine.refusal())
"""


def test_where_filters_are_forbidden_there_is_no_machine(amx_machine: Machine) -> None:
    """Its tests are skipped with this reason."""
    assert emulation.refusal() == ""
    done = install_where_forbidden(errno.EPERM)
    assert done.stdout.startswith("needs filters of system calls, and this system refuses them: PermissionError")
    assert "PR_SET_SECCOMP" in done.stdout


def test_a_fault_of_the_emulation_skips_no_test(amx_machine: Machine) -> None:
    """Linux refuses a filter that is wrong by EINVAL."""
    done = install_where_forbidden(errno.EINVAL)
    assert done.returncode == 1
    assert re.search(r"RuntimeError: .* ended with 1: .*OSError: \[Errno 22\]", done.stderr, re.DOTALL)
    assert not done.stdout


def install_where_forbidden(error: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FORBIDDEN, str(error)], capture_output=True, text=True)


def test_linux_is_asked_for_other_components_in_vain(amx_machine: Machine) -> None:
    assert json.loads(run(amx_machine, "components()")) == [-22, 0]


def components() -> str:
    """What arch_prctl returns for a request of XTILECFG, which needs none, and of XTILEDATA."""
    libc = ctypes.CDLL(None, use_errno=True)
    answers = []
    for number in (17, 18):
        answer = libc.syscall(158, 0x1023, number)
        answers.append(-ctypes.get_errno() if answer else 0)
    return json.dumps(answers)


def test_threads_and_signals_do_not_disturb_products(amx_machine: Machine) -> None:
    amx_machine.clear()
    assert run(amx_machine, "products_beside_threads_and_signals()", "amx") == "equal"
    threads = amx_machine.threads()
    assert len(threads) == 3
    assert [thread.reason for thread in threads] == [""] * 3
    # 8 products of 4 row groups x 32 blocks x 3 tiles of tokens, the last of which has 8.
    assert {thread.instructions["tdpbsud"] for thread in threads} == {8 * 4 * 32 * 3}
    assert {thread.instructions["ldtilecfg"] for thread in threads} == {8}
    assert {thread.instructions["tilerelease"] for thread in threads} == {8}
