"""The program of both helper processes: `vet` compiles constraints on trial, `mask` writes masks.

    python -m stages.scheduler.constraints.helper_main PARENT_PID FD ROLE MEMORY_MB MAX_CACHED MAX_CACHED_PER_TENANT

Packets go through FD, one for each read and write.  The process ends with the scheduler.  A constraint that needs more
than MEMORY_MB, or makes the library crash, costs only this process; the scheduler starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.protocol.messages import Frame
from pipeline.runtime import process
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar
from stages.scheduler.constraints.mask_writer import MaskWriter, read_vocabulary

RECEIVE_BYTES = 1 << 20  # more than a packet has
NICENESS = 10  # of the trial process: what it does is not urgent


def vet(tokenizer: Any, frame: f.Vet) -> f.Vetted:
    """Compile the constraint and compute its first mask."""
    try:
        matcher = grammar.new_matcher(tokenizer, frame.constraint)
        mask = matcher.compute_bitmask()
        grammar.check(matcher)
        if not any(mask):
            raise grammar.GrammarError("no token of the vocabulary begins it")
    except grammar.GrammarError as error:
        return f.Vetted(frame.id, str(error))
    return f.Vetted(frame.id, "")


def serve_vet(fd: int) -> None:
    """Answer `Vet` frames, one after the other."""
    vocabularies: dict[str, f.VocabularyFile] = {}
    tokenizers: dict[str, Any] = {}
    while packet := os.read(fd, RECEIVE_BYTES):
        for frame in f.decode_frames(packet):
            if isinstance(frame, f.Vocabulary):
                with contextlib.suppress(FileNotFoundError):  # the version has been unloaded meanwhile
                    vocabularies[frame.version] = read_vocabulary(frame.path)
                tokenizers.pop(frame.version, None)
            elif isinstance(frame, f.Forget):
                vocabularies.pop(frame.version, None)
                tokenizers.pop(frame.version, None)
            elif isinstance(frame, f.Vet):
                known = vocabularies.get(frame.version)
                if known is None:
                    _send(fd, [f.Begun(frame.id), f.Vetted(frame.id, "the model has been unloaded")])
                    continue
                if frame.version not in tokenizers:
                    try:
                        tokenizers[frame.version] = grammar.make_tokenizer(known)
                    except grammar.GrammarError as error:  # no constraint works with this model
                        _send(fd, [f.Begun(frame.id), f.Vetted(frame.id, str(error))])
                        continue
                _send(fd, [f.Begun(frame.id)])
                _send(fd, [vet(tokenizers[frame.version], frame)])


def serve_masks(fd: int, megabytes: int, max_grammars: int, max_tenant_grammars: int) -> None:
    """Write masks; grammars are compiled on a thread, one at a time, and masks of others are written meanwhile."""
    process.use_short_time_slice()
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    pool = ThreadPoolExecutor(1)

    ids = itertools.count(1)

    def compile_later(sequence: str, function: Callable[[], Any]) -> Future[Any]:
        number = next(ids)

        def on_done(_: Future[Any]) -> None:  # on the thread: the main one may be in a long mask
            with contextlib.suppress(BrokenPipeError):  # the scheduler has ended
                _send(fd, [f.Compiled(number)])
            os.eventfd_write(wake, 1)

        _send(fd, [f.Compiling(number, sequence)])  # before: a crash is attributed to it
        future = pool.submit(function)
        future.add_done_callback(on_done)
        return future

    writer = MaskWriter(compile_later, max_grammars, max_tenant_grammars, (megabytes << 20) // 2)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == wake:
                os.eventfd_read(wake)
                writer.compiled()
                continue
            packet = os.read(fd, RECEIVE_BYTES)
            if not packet:
                os._exit(0)  # the thread may be in a long compilation
            for frame in f.decode_frames(packet):
                writer.handle(frame)
        writer.limit_memory()
        if writer.answers:
            _send(fd, writer.answers)
            writer.answers.clear()


def _send(fd: int, answers: list[Frame]) -> None:
    for packet in f.packets(answers):
        os.write(fd, packet)


def limit_memory(megabytes: int) -> None:
    """Allow so many more than the process has mapped now; 0: no limit."""
    if megabytes:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        bound = mapped + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def main() -> None:
    """See the module's docstring."""
    parent, fd = map(int, sys.argv[1:3])
    role = sys.argv[3]
    megabytes, max_grammars, max_tenant_grammars = map(int, sys.argv[4:])
    process.die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the scheduler drains first, and closes the socket
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if role == "mask":
        limit_memory(megabytes)
        serve_masks(fd, megabytes, max_grammars, max_tenant_grammars)
    else:
        os.nice(NICENESS)
        limit_memory(megabytes)
        serve_vet(fd)


if __name__ == "__main__":
    main()
