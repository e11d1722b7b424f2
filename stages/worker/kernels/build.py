"""The list of entries (entries.py), and their compilation in parallel processes.

    build("f16")        compile what the kernel cache lacks for this type of KV cache

On a CPU with AMX for which there is no verdict yet, the process that has compiled the products runs the probe
(amx_probe.py), while the others compile, and answers with what it has found, which it may be unable to store.  Nothing
depends on its success.

The processes run compile_entries.py; this module imports no compiler, so that its caller need not hold one.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

from stages.worker.kernels import amx_verdict, stored_code
from stages.worker.kernels.stored_code import ENTRIES

Progress = Callable[[str, int, int], None]  # entry, done, of

PRODUCTS, PROBE = "matmul", "amx probe"  # the entry that the probe multiplies with, and the job of running it

# Kernels write out vectors and unrolled loops: LLVM's further passes take a tenth of the time and gain nothing.
COMPILER = {"NUMBA_OPT": "2", "NUMBA_LOOP_VECTORIZE": "0"}

MAX_OUTPUT = 1 << 16  # characters of a failed compiler's stderr: many times a traceback


class CompilerFailed(RuntimeError):
    """A compiler process has ended before its entry was stored, or could not be started.

    entry: what it compiled.  code: its exit code, or -signal; None: it was not started.  output: the end of what it has
    printed on stderr, or why it was not started.
    """

    def __init__(self, entry: str, code: int | None, output: str) -> None:
        how = "" if code is None else f" ({code})"
        super().__init__(f"compiling kernel {entry!r} failed{how}: {output[-2000:]}")
        self.entry, self.code, self.output = entry, code, output[-MAX_OUTPUT:]


class _Compiler:
    """A process that compiles one entry after the other: shared callees are typed once."""

    def __init__(self, kv_type: str) -> None:
        """Raises `OSError` if the process cannot be started."""
        with contextlib.ExitStack() as stack:
            self._words = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                # -P: the modules of this installation, also in a folder that has others of their names, like a checkout
                [sys.executable, "-P", "-m", "stages.worker.kernels.compile_entries", kv_type, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                env=COMPILER | os.environ,
            )
            stack.pop_all()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self.answers = self._process.stdin, self._process.stdout
        self.entry = ""

    def begin(self, entry: str) -> None:
        self.entry = entry
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `finish` says why
            self._stdin.write(entry + "\n")
            self._stdin.flush()

    def finish(self) -> str:
        """Read the answer to `begin`: what follows the entry. Raises `CompilerFailed` if the process has ended."""
        entry, _, found = self.answers.readline().strip().partition("\t")
        if entry != self.entry:
            code = self._process.wait()
            self._words.seek(0)
            words = self._words.read().decode(errors="replace").strip()
            raise CompilerFailed(self.entry, code, words)
        return found

    def close(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # of an entry that it has not read
            self._stdin.close()
        self.answers.close()
        self._words.close()


def with_probe(waiting: Sequence[str]) -> list[str]:
    """The entries in the order in which they are begun where a probe is needed, which follows the products.

    These come first: with tiles they take longest.
    """
    return [PRODUCTS if PRODUCTS in waiting else PROBE, *(name for name in waiting if name != PRODUCTS)]


def build(
    kv_type: str,
    jobs: int = 0,
    progress: Progress = lambda name, done, of: None,
    cancel_fd: int = -1,
    extra: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    probe: bool = False,
) -> None:
    """Compile the entries that the cache lacks in `jobs` processes (0: one a CPU). Ends when `cancel_fd` is readable.

    `extra`: entries of `EXTRA_ENTRIES` that are needed as well.  `only`: these and no others.
    `probe`: run the probe, if one is needed, also if the products have been compiled before.

    Raises `CompilerFailed`.
    """
    needed = only or (*ENTRIES, *extra)
    waiting = [name for name in needed if not stored_code.symbol_path(name, kv_type).exists()]
    done = len(needed) - len(waiting)
    if is_probed := (probe or PRODUCTS in waiting) and not only and amx_verdict.needs_probe():
        needed, waiting = (*needed, PROBE), with_probe(waiting)
        progress("", done, len(needed))
    found: amx_verdict.Found | None = None
    jobs = min(len(waiting), jobs or len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as busy:

        def start_compiler() -> None:
            try:
                compiler = _Compiler(kv_type)
            except OSError as error:  # memory or processes are short
                raise CompilerFailed(waiting[0], None, f"the compiler cannot be started: {error}") from None
            stack.callback(compiler.close)
            compiler.begin(waiting.pop(0))
            busy.register(compiler.answers, selectors.EVENT_READ, compiler)

        for _ in range(jobs):
            start_compiler()
        if cancel_fd >= 0:
            busy.register(cancel_fd, selectors.EVENT_READ)
        while done < len(needed):
            for key, _ in busy.select():
                compiler = key.data
                if compiler is None:
                    return
                has_ended = False
                try:
                    answer = compiler.finish()
                    if compiler.entry == PROBE:
                        found = amx_verdict.Found.decode(answer)
                except (CompilerFailed, ValueError):  # it has ended, or has printed something else
                    if compiler.entry != PROBE:
                        raise
                    has_ended = True  # without a verdict, of which `pass_on` says so
                done += 1
                progress(compiler.entry, done, len(needed))
                if compiler.entry == PRODUCTS and is_probed:
                    compiler.begin(PROBE)
                elif waiting and not has_ended:
                    compiler.begin(waiting.pop(0))
                else:
                    busy.unregister(compiler.answers)
                    if waiting:
                        start_compiler()
    if is_probed:
        amx_verdict.pass_on(found)
