"""`starling up --standby`: a server that has imported what its stages need, and waits until it gets its home.

An agent keeps such processes, so that the first request for a model does not wait for imports
(stages/agent/engines/standby.py).  On stdin comes one line, JSON of `pipeline.fleet.standby.Home`; the end of stdin
ends the process.  It opens no file and holds nothing that belongs to a server until then.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from pipeline.config.load import resolve
from pipeline.fleet.standby import WAITING, Home
from pipeline.models.versions import VersionTable
from pipeline.protocol.messages import FRAMES
from shm.checkpoint import Index
from starling.cli.forked_supervisor import preload
from starling.cli.stage import STAGES, import_stage

OOM_SCORE = Path("/proc/self/oom_score_adj")


def wait_for_home() -> bool:
    """Import, print `WAITING`, and wait; False at the end of stdin. Afterwards the home is that of this process."""
    _import_all()
    score = _set_oom_score("1000")  # when memory is short the kernel ends it before anything else
    print(WAITING, flush=True)
    line = sys.stdin.buffer.readline()
    if not line:
        return False
    _set_oom_score(score)
    given = msgspec.json.decode(line, type=Home)
    with open(os.devnull, "rb") as nothing:  # what is started later gets no pipe of the agent
        os.dup2(nothing.fileno(), 0)
    os.environ["STARLING_HOME"] = given.home
    os.environ["STARLING_CONFIG"] = given.config
    os.chdir(given.home)
    return True


def _set_oom_score(score: str) -> str:
    """The value before; "" changes nothing. Where it cannot be changed, the kernel chooses as it would."""
    try:
        before = OOM_SCORE.read_text()
        if score:
            OOM_SCORE.write_text(score)
        return before
    except OSError:
        return ""


def _import_all() -> None:
    """Modules of all stages, and compiled kernels: forks share them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as in a supervisor: a process with threads cannot be forked
    import multiprocessing.queues  # honcho makes one
    import multiprocessing.synchronize  # noqa: F401

    import numpy.ma  # noqa: F401  # at the first use of some functions of NumPy

    from stages.tokenizer.kernels import compiled
    from stages.tokenizer.template import ChatTemplate
    from stages.worker.checkpoint import prepare  # noqa: F401
    from starling import directory_conversion  # noqa: F401
    from starling.cli import honcho_patch  # noqa: F401

    for name in STAGES:
        module = import_stage(name)
        if name == "worker":
            module.preload(resolve({}, {}))  # of the default type of KV cache; a supervisor loads others
    _build_decoders()
    compiled.is_stored()  # hashes the sources, once in a process
    ChatTemplate("{% for one in messages %}{{ one['content'] | trim }}{% endfor %}", "", "")  # Jinja's first one
    preload()


def _build_decoders() -> None:
    """What msgspec derives from the annotations of structs is kept with them."""
    for frames in FRAMES.values():
        for union in (frames.to_binder, frames.to_connector):
            msgspec.msgpack.Decoder(union)
    msgspec.json.Decoder(VersionTable)
    msgspec.msgpack.Decoder(Index)
    with_all_keys = msgspec.to_builtins(resolve({"models": [{"name": "any", "path": "/any"}]}, {}))
    resolve(with_all_keys, {})
