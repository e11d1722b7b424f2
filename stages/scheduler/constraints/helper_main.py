"""The program of the helper processes: `vet` compiles constraints on trial, `mask` writes masks, `slow` slow ones.

    python -m stages.scheduler.constraints.helper_main PARENT_PID FD ROLE MEMORY_MB MAX_CACHED MAX_CACHED_PER_TENANT

Packets go through FD, one for each read and write.  The process ends with the scheduler.  A constraint that needs more
than MEMORY_MB, or makes the library crash, costs only this process; the scheduler starts another one.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline import procfs
from pipeline.protocol.messages import Frame
from pipeline.runtime import process
from pipeline.runtime.malloc_trim import trim
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import grammar
from stages.scheduler.constraints.mask_writer import MaskWriter, Memory, read_vocabulary

RECEIVE_BYTES = 1 << 20  # more than a packet has
NICENESS = 10  # of the trial process and of the one for slow masks: the cores are for others first
MAX_THREADS = 4  # that compute masks
SLOW_COMPILE_S = 0.1  # CPU time from which the process for slow masks compiles a constraint, too
# Shares of the memory limit.  Beyond it the process ends: masks take at most the first share in all, at most the
# second of one request; compilation takes the rest.
MASKS_SHARE, REQUEST_SHARE = 0.75, 0.125


def vet(tokenizer: Any, frame: f.Vet) -> f.Vetted:
    """Compile the constraint and compute its first mask."""
    begun = time.process_time()
    try:
        matcher = grammar.new_matcher(tokenizer, frame.constraint)
        mask = matcher.compute_bitmask()
        grammar.check(matcher)
        if not any(mask):
            raise grammar.GrammarError("no token of the vocabulary begins it")
    except grammar.GrammarError as error:
        return f.Vetted(frame.id, str(error))
    return f.Vetted(frame.id, "", time.process_time() - begun > SLOW_COMPILE_S)


def serve_vet(fd: int) -> None:
    """Answer `Vet` frames, one after the other."""
    vocabularies: dict[str, f.VocabularyFile] = {}
    tokenizers: dict[str, Any] = {}
    while packet := os.read(fd, RECEIVE_BYTES):
        for frame in f.decode_frames(packet):
            if isinstance(frame, f.Vocabulary):
                vocabularies[frame.version] = read_vocabulary(frame.path)
                tokenizers.pop(frame.version, None)
            elif isinstance(frame, f.Vet):
                if frame.version not in tokenizers:
                    tokenizers[frame.version] = grammar.make_tokenizer(vocabularies[frame.version])
                _send(fd, [f.Begun(frame.id)])
                _send(fd, [vet(tokenizers[frame.version], frame)])


def serve_masks(fd: int, megabytes: int, max_grammars: int, max_tenant_grammars: int, is_slow: bool) -> None:
    """Write masks; grammars are compiled on a thread, and masks of others are written meanwhile."""
    if not is_slow:
        process.use_short_time_slice()
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    pool = ThreadPoolExecutor(1)

    def compile_later(function: Callable[[], Any]) -> Future[Any]:
        future = pool.submit(function)
        future.add_done_callback(lambda _: os.eventfd_write(wake, 1))
        return future

    threads = 1 if is_slow else min(MAX_THREADS, len(os.sched_getaffinity(0)))
    limit = megabytes << 20
    memory = (
        Memory(procfs.anonymous_bytes, int(MASKS_SHARE * limit), int(REQUEST_SHARE * limit), trim) if limit else None
    )
    writer = MaskWriter(compile_later, max_grammars, max_tenant_grammars, threads, is_slow, memory)
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
        writer.write()
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
    if role != "mask":
        os.nice(NICENESS)
    limit_memory(megabytes)
    if role == "vet":
        serve_vet(fd)
    else:
        serve_masks(fd, megabytes, max_grammars, max_tenant_grammars, role == "slow")


if __name__ == "__main__":
    main()
