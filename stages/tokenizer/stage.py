"""The tokenizer process: the I/O around `service.py`.

Long texts are encoded in one background thread (the library lets go of the interpreter lock), so that
the streams of others go on meanwhile; everything else is answered at once.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from pipeline import messages as m
from pipeline import paths, registry
from pipeline.config import Config
from pipeline.errors import ModelNotFound, ModelUnavailable
from pipeline.loop import StageLoop
from shm.checkpoint import load_index
from stages.tokenizer.service import TokenizerModel, TokenizerService
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

LONG_TEXT = 16_384  # characters: about 15 ms of encoding
MAX_LONG = 256  # long texts waiting for the thread; more get 429


@functools.cache
def open_model(name: str, index_path: Path) -> TokenizerModel:
    """Build vocabulary and template from a checkpoint's index. Raises `ModelUnavailable`.

    Cached: a checkpoint is immutable (its digest is its name), and `preload` leaves it to the stage.
    """
    index = load_index(index_path)
    t = index.tokenizer
    vocabulary = Vocabulary(
        TokenizerSpec(t.model, t.pre, t.tokens, t.types, t.merges, t.bos, t.eos, t.eot, t.add_bos)
    )
    template = None
    if t.chat_template:
        bos, eos = (vocabulary.token_bytes(i).decode("utf-8", "replace") for i in (t.bos, t.eos))
        template = ChatTemplate(t.chat_template, bos, eos)
    described = m.Described(
        "", name, index.digest, vocabulary.size, index.hyper.context_length, vocabulary.eos_ids,
        template is not None, index.architecture, index.parameters, int(index_path.stat().st_mtime),
    )  # fmt: skip
    return TokenizerModel(vocabulary, template, described)


class TokenizerStage:
    def __init__(self, config: Config) -> None:
        self.loop = StageLoop("tokenizer", config)
        self.config = config
        self.service = TokenizerService(self._open)
        self.hub = self.loop.bind("gateway-tokenizer", self._on_frame)
        self.hub.on_down = lambda peer, hello: self._gone.add(peer)
        self._gone: set[bytes] = set()
        self._long: queue.Queue[tuple[bytes, Any] | None] = queue.Queue(MAX_LONG)
        self._done: queue.SimpleQueue[tuple[bytes, m.Frame | None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop.add_fd(self._wake, self._on_done)
        self._thread = threading.Thread(target=self._encode_long, name="encode", daemon=True)
        self._spent = 0.0  # CPU time of the thread, s
        self.loop.on_tick.append(self._notice_work)

    def run(self) -> int:
        self._thread.start()
        try:
            return self.loop.run(self._work)
        finally:
            while not self._long.empty():
                self._long.get_nowait()
            self._long.put(None)
            self._thread.join()
            os.close(self._wake)

    # -------------------------------------------------------------- models

    def _open(self, name: str) -> TokenizerModel:
        model = self.config.model(name)
        if model is None:
            known = ", ".join(repr(other.name) for other in self.config.models)
            raise ModelNotFound(f"model {name!r} is not served here; served: {known}", param="model")
        index_path = registry.find_index(model, paths.models_dir())
        if index_path is None:
            raise ModelUnavailable(f"model {name!r} is not prepared yet", param="model", retry_after_s=5)
        return open_model(name, index_path)

    def _work(self) -> float | None:
        """Open what has become ready; until everything is, say what is missing."""
        if self.loop.ready:
            return None
        for model in self.config.models:
            try:
                self.service.model(model.name)
            except ModelUnavailable as error:
                self.loop.reason = error.message
                return 0.2
        self.loop.ready, self.loop.reason = True, ""
        return None

    # -------------------------------------------------------------- frames

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        if self._length(frame) > LONG_TEXT:
            try:
                self._long.put_nowait((peer, frame))
                self.loop.busy = True
            except queue.Full:
                message = f"{MAX_LONG} long prompts are waiting to be tokenized; try again later"
                self.hub.send(peer, m.TokenizerFailed(frame.id, "OVERLOADED", message))  # type: ignore[attr-defined]
            return
        self._send(peer, self.service.answer(frame))

    @staticmethod
    def _length(frame: m.Frame) -> int:
        if isinstance(frame, m.Encode):
            return len(frame.text)
        if isinstance(frame, m.Render):
            return sum(len(text) for message in frame.messages for text in message.values()
                       if isinstance(text, str))  # fmt: skip
        return 0

    def _send(self, peer: bytes, reply: m.Frame | None) -> None:
        # A gateway that is gone or full asks again: its record has everything.
        if reply is not None:
            self.hub.send(peer, reply)

    # -------------------------------------------------------------- the thread

    def _encode_long(self) -> None:
        while (job := self._long.get()) is not None:
            peer, frame = job
            reply = None if peer in self._gone else self.service.answer(frame)
            self._done.put((peer, reply))
            os.eventfd_write(self._wake, 1)

    def _notice_work(self) -> None:
        """A text that takes seconds is one call into the library: its CPU time is what shows progress."""
        if self.loop.busy and self._thread.ident is not None and self._thread.is_alive():
            spent = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            if spent > self._spent:
                self._spent = spent
                self.loop.progress += 1

    def _on_done(self) -> None:
        os.eventfd_read(self._wake)
        while not self._done.empty():
            self._send(*self._done.get())
            self.loop.progress += 1
        self.loop.busy = not self._long.empty()


def preload(config: Config) -> None:
    """Build vocabularies before the stage is forked: its restarts then cost no time."""
    for model in config.models:
        index_path = registry.find_index(model, paths.models_dir())
        if index_path is not None:
            open_model(model.name, index_path)


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete with the ranks
    return TokenizerStage(config).run()
