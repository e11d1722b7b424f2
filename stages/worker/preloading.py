"""What a process does that is forked as workers: it loads compiled kernels, and uses once what every worker uses.

Python makes what decodes a type of message at its first use, and rewrites the code of a function that has been called
a few times.  A fork that begins with that saves 15 ms of CPU, and shares the memory of it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.faults import points
from pipeline.models import store, versions, worker_groups
from pipeline.protocol.messages import FRAMES
from shm.checkpoint import VERSION, Checkpoint, load_index
from stages.worker import activations_arena as act
from stages.worker.checkpoint.usable import usable_version
from stages.worker.kernels import compiled, stored_code
from stages.worker.mapped_weights import SAMPLE_BYTES, are_in_memory
from stages.worker.model import Model
from stages.worker.rank_places import place_ranks

log = logging.getLogger("starling.worker")

UNUSABLE = "it is not read ahead"  # what the log says of one that is damaged
_has_read = False  # this process has read a model, or tried


def preload(config: Config) -> None:
    """Load kernels, if they are in the cache, and read the first model that is prepared. Starts no thread.

    It is called before each fork. A model is read once: a disk that hangs must not stop the groups of others.
    """
    global _has_read
    for kv_type in {model.kv_type for model in config.models}:
        if stored_code.is_compiled(kv_type):
            compiled.addresses(kv_type)
    if _has_read:
        return
    _has_read = True
    try:
        versions.read(config)
        points.DiskPoints("locks")
        msgspec.msgpack.Decoder(FRAMES["scheduler-worker"].to_connector)
        for model in config.models:
            cpus = worker_groups.cpus_of_groups(config, model, model.name)[0]
            place_ranks(cpus, model.ranks or len(cpus))
            index_path = store.find_index(model, paths.models_dir())
            if index_path is not None and usable_version(index_path, UNUSABLE) == VERSION:
                _read(index_path, model)
                return
    except Exception as error:  # whatever a file holds: the worker that needs it reports it, and others are forked
        log.debug("no model is read ahead", extra={"reason": str(error)})


def _read(index_path: Path, model: ModelConfig) -> None:
    hyper = load_index(index_path).hyper
    act.strides(hyper)
    if stored_code.is_compiled(model.kv_type, stored_code.extra_entries(hyper)):
        checkpoint = Checkpoint(index_path)
        Model(checkpoint).load_kernels(model.kv_type)
        are_in_memory(checkpoint.data[:SAMPLE_BYTES])
