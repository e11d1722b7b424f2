"""Compiled code is loaded without a compiler, and an object that is damaged or needs more is refused."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from pipeline.native import object_file
from pipeline.native.object_code import ObjectCode, ObjectCodeError
from stages.worker.kernels import compiled, features, stored_code

# A constant table, a zeroed variable and its counter, a call of a function of the same object, and one of libc.
SOURCE = """
target triple = "x86_64-unknown-linux-gnu"
@table = private constant [4 x i64] [i64 10, i64 20, i64 30, i64 40]
@counter = common global i64 0
declare i64 @syscall(i64, ...)
declare void @missing()
define i64 @lookup(i64 %i) {
  %at = getelementptr [4 x i64], [4 x i64]* @table, i64 0, i64 %i
  %value = load volatile i64, i64* %at
  ret i64 %value
}
define i64 @count(i64 %i) noinline {
  %old = load i64, i64* @counter
  %new = add i64 %old, 1
  store i64 %new, i64* @counter
  %value = call i64 @lookup(i64 %i)
  %sum = add i64 %value, %new
  ret i64 %sum
}
define i64 @pid() {
  %pid = call i64 (i64, ...) @syscall(i64 39)
  ret i64 %pid
}
"""
CALLER = "define void @caller() {\n  call void @missing()\n  ret void\n}\n"


def emit(source: str, model: str = "jitdefault") -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel=model, jit=True)
    return bytes(machine.emit_object(llvm.parse_assembly(source)))


@pytest.fixture(scope="module")
def raw() -> bytes:
    return emit(SOURCE)


def function(code: ObjectCode, name: str, *kinds: type) -> ctypes._CFunctionType:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(code.address(name))


def test_functions_use_constants_variables_each_other_and_libc(raw: bytes) -> None:
    code, other = ObjectCode(raw), ObjectCode(raw)
    count = function(code, "count", ctypes.c_int64)
    assert [count(i) for i in range(4)] == [11, 22, 33, 44]
    assert function(other, "count", ctypes.c_int64)(0) == 11  # each load has variables of its own
    assert function(code, "pid")() == os.getpid()


def test_children_of_a_fork_use_it(raw: bytes) -> None:
    code = ObjectCode(raw)
    count = function(code, "count", ctypes.c_int64)
    child = os.fork()
    if child == 0:
        os._exit(count(1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 21


def test_code_is_not_writable(raw: bytes) -> None:
    code = ObjectCode(raw)
    at = code.address("count")
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end, permissions = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
        if int(begin, 16) <= at < int(end, 16):
            assert permissions == "r-xp"
            return
    raise AssertionError("not mapped")


def test_symbols_that_nothing_defines_are_refused() -> None:
    with pytest.raises(ObjectCodeError, match="symbol 'missing' is not defined"):
        ObjectCode(emit(SOURCE + CALLER))


def test_a_function_that_is_not_there_is_refused(raw: bytes) -> None:
    with pytest.raises(ObjectCodeError, match="no function 'missing'"):
        ObjectCode(raw).address("missing")


def test_other_code_models_are_refused() -> None:
    with pytest.raises(ObjectCodeError, match=r"relocation type \d+ is not supported, only 1"):
        ObjectCode(emit(SOURCE, "small"))


def test_damaged_objects_are_refused(raw: bytes) -> None:
    for damaged in (b"", b"\x7fELF", b"MZ" + raw[2:], raw[:18] + b"\x3f" + raw[19:]):
        with pytest.raises(ObjectCodeError):
            ObjectCode(damaged)
    for size in range(0, len(raw) - 1, 7):
        with pytest.raises(ObjectCodeError):
            ObjectCode(raw[:size])


def test_kernels_that_were_built_again_with_other_bytes_have_another_name(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "cache_dir", lambda: tmp_path)

    def name_in_a_new_process(kv_type: str) -> str:
        monkeypatch.setattr(compiled, "_load", functools.cache(load))
        return compiled.identity(kv_type)

    load = compiled._load.__wrapped__
    for entry in stored_code.ENTRIES:
        stored_code.store(entry, "f16", raw, "lookup")
    stored_code.store("attend", "int8", raw, "lookup")
    before = name_in_a_new_process("f16")
    assert name_in_a_new_process("f16") == before
    stored_code.store("attend", "int8", raw + b"\0", "lookup")
    assert name_in_a_new_process("f16") == before
    assert name_in_a_new_process("int8") != before
    stored_code.store("head", "f16", raw + b"\0", "lookup")
    assert compiled.identity("f16") == before, "this process has loaded the other one"
    assert name_in_a_new_process("f16") != before


def test_a_damaged_entry_is_removed_from_the_cache(raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "cache_dir", lambda: tmp_path)
    stored_code.store("head", "f16", raw, "lookup")
    code, address = stored_code.load("head", "int8")  # it does not depend on the type of cache
    assert address == code.address("lookup")
    path = tmp_path / "head-any.o"
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ObjectCodeError, match="kernel 'head-any' in .* its bytes are not those that were stored"):
        stored_code.load("head", "f16")
    assert not stored_code.symbol_path("head", "f16").exists()
    assert not stored_code.is_compiled("f16")
    with pytest.raises(ObjectCodeError, match="kernel 'head-any'"):
        stored_code.load("head", "f16")


def test_an_entry_that_is_stored_again_while_it_is_read_is_loaded(
    raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that has compiled it as well, to other bytes."""
    stored_bytes = iter([raw + b"\0"])
    read_bytes = Path.read_bytes

    def read_late(path: Path) -> bytes:
        for again in stored_bytes:
            object_file.store(tmp_path, "head", again, "lookup")
        return read_bytes(path)

    object_file.store(tmp_path, "head", raw, "lookup")
    monkeypatch.setattr(Path, "read_bytes", read_late)
    code, address = object_file.load(tmp_path, "head")
    assert address == code.address("lookup")
    assert code.digest == hashlib.sha256(raw + b"\0").hexdigest()


def test_only_one_process_stores_entries_at_a_time(raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object of one must not get the description of another."""
    placed: list[str] = []
    replace = Path.replace

    def replace_locked(path: Path, target: Path) -> Path:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        placed.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_locked)
    object_file.store(tmp_path, "head", raw, "lookup")
    assert placed == ["head.o", "head.symbol"]
