"""The tokenizer process: the I/O around `service.py`.

Long texts are encoded on one background thread, where they take turns (the library lets go of the interpreter
lock), so that short questions are answered meanwhile; everything else is answered at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from pipeline.config import paths
from pipeline.config.load import Config
from pipeline.errors import InternalError, ModelNotFound, ModelUnavailable, StarlingError
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions
from pipeline.protocol import messages as m
from pipeline.runtime.malloc_trim import MallocTrimmer
from shm.checkpoint import CheckpointError, load_index
from stages.tokenizer.encode_queue import Turns
from stages.tokenizer.service import TokenizerModel, TokenizerService, Work
from stages.tokenizer.template import ChatTemplate
from stages.tokenizer.vocabulary import TokenizerSpec, Vocabulary

log = logging.getLogger("starling.tokenizer")

# Characters that are encoded, or tokens decoded, between two looks at the clock, about 15 ms' worth; what is more is
# for the thread.
AT_ONCE = 16_384
MESSAGE = 64  # characters that a chat's message counts beside its content, for the template's work


_opened: dict[Path, TokenizerModel] = {}  # a checkpoint is immutable: its digest is its name


def open_model(index_path: Path) -> TokenizerModel:
    """Build vocabulary and template from a checkpoint's index. Raises `StarlingError`.

    Kept: versions of a model that have one checkpoint share them, and `preload` leaves them to the stage.
    """
    if index_path in _opened:
        return _opened[index_path]
    try:
        index = load_index(index_path)
    except (CheckpointError, OSError) as error:
        raise ModelUnavailable(str(error), param="model") from None
    t = index.tokenizer
    vocabulary = Vocabulary(TokenizerSpec(t.model, t.pre, t.tokens, t.types, t.merges, t.bos, t.eos, t.eot, t.add_bos))
    template = None
    if t.chat_template:
        bos, eos = (vocabulary.token_bytes(i).decode("utf-8", "replace") for i in (t.bos, t.eos))
        template = ChatTemplate(t.chat_template, bos, eos)
    described = m.Described(
        "",
        "",
        index.digest,
        vocabulary.size,
        index.hyper.context_length,
        vocabulary.eos_ids,
        template is not None,
        index.architecture,
        index.parameters,
        int(index_path.stat().st_mtime),
        index.tokenizer_digest,
    )
    model = _opened[index_path] = TokenizerModel(vocabulary, template, described)
    return model


class TokenizerStage:
    def __init__(self, config: Config) -> None:
        self.loop = PollLoop("tokenizer", config)
        self.config = config
        self.service = TokenizerService(self._open)
        self.hub = self.loop.bind("gateway-tokenizer", self._on_frame)
        self.turns: Turns[m.Frame] = Turns(lambda: os.eventfd_write(self._wake, 1))
        self.hub.on_down = lambda peer, hello: self._drop(peer)
        self._left = AT_ONCE
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop.add_fd(self._wake, self._on_done)
        self._thread = threading.Thread(target=self._encode_long, name="encode", daemon=True)
        self._spent = 0.0  # CPU time of the thread, s
        self.loop.on_tick += [self._notice_work, MallocTrimmer(self.loop.clock).tick]
        self.follower = versions.VersionFollower(config)
        self._opening: dict[Path, threading.Thread] = {}  # checkpoints of versions that are being loaded
        self._refused: dict[Path, StarlingError] = {}

    def run(self) -> int:
        self._thread.start()
        try:
            return self.loop.run(self._work)
        finally:
            self.turns.stop()
            self._thread.join()
            os.close(self._wake)

    # -------------------------------------------------------------- models

    def _open(self, name: str) -> TokenizerModel:
        """A version of a model, by its own name."""
        instance = self.follower.table.find(name)
        if instance is None and self.follower.poll():  # newer than our last look at the record
            self._follow()
            instance = self.follower.table.find(name)
        if instance is None:
            known = ", ".join(repr(other.id) for other in self.follower.table.versions)
            raise ModelNotFound(f"model {name!r} is not served here; served: {known}", param="model")
        index_path = versions.find_index(instance, paths.models_dir())
        is_loading = instance.state == "loading"
        if index_path is None or (is_loading and not instance.digest):
            raise ModelUnavailable(f"model {name!r} is not prepared yet", param="model", retry_after_s=5)
        if is_loading and index_path not in _opened:
            self._open_aside(index_path, name)
        opened = open_model(index_path)
        return opened._replace(described=msgspec.structs.replace(opened.described, model=name))

    def _open_aside(self, index_path: Path, name: str) -> None:
        """On a thread of its own, so that the questions of others are answered. Raises until it is there."""
        if index_path in self._refused:
            raise self._refused.pop(index_path)
        if index_path not in self._opening:
            thread = threading.Thread(target=self._build, args=(index_path,), name="open", daemon=True)
            self._opening[index_path] = thread
            thread.start()
        raise ModelUnavailable(f"the vocabulary of model {name!r} is being read", param="model", retry_after_s=1)

    def _build(self, index_path: Path) -> None:
        try:
            open_model(index_path)
        except StarlingError as error:
            self._refused[index_path] = error
        except Exception as error:  # whatever a vocabulary can hold that nobody has foreseen
            self._refused[index_path] = InternalError(f"its vocabulary cannot be used: {error}")
        finally:
            self._opening.pop(index_path, None)

    def _follow(self) -> None:
        """Forget the versions that the record does not name any more."""
        self.loop.mark_active()
        instances = self.follower.table.versions
        self.service.keep_models({one.id for one in instances})
        digests = {one.digest for one in instances}
        if "" not in digests:
            for path in [path for path in _opened if path.stem not in digests]:
                _opened.pop(path, None)

    def _work(self) -> float | None:
        """Open what has become ready; until everything that serves is, say what is missing."""
        self._left = AT_ONCE
        if self.loop.stopping:
            self.loop.busy = self.turns.is_busy or self.loop.serves_stopping_clients(self.hub)
        if self.follower.poll():
            self._follow()
            self.loop.ready = False
        if self.loop.ready:
            return None
        for instance in self.follower.table.versions:
            if instance.state != "serving":
                continue
            try:
                self.service.model(instance.id)
            except ModelUnavailable as error:
                self.loop.reason = error.message
                return 0.2
        self.loop.ready, self.loop.reason = True, ""
        return None

    # -------------------------------------------------------------- frames

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        if self.service.can_wait(frame):
            length = self._length(frame)
            if length > self._left:
                self._put_off(peer, frame, length)
                return
            self._left -= length
        self._send(peer, self.service.answer(frame))

    def _drop(self, peer: bytes) -> None:
        self.turns.drop(peer)
        self.loop.busy = self.turns.is_busy

    def _put_off(self, peer: bytes, frame: Work, length: int) -> None:
        if self.turns.put(peer, length, self.service.work(frame)):
            self.loop.busy = True
        else:
            message = "too many long texts are waiting for the tokenizer; try again later"
            self._send(peer, m.TokenizerFailed(frame.id, "OVERLOADED", message))

    @staticmethod
    def _length(frame: Work) -> int:
        if isinstance(frame, m.Encode):
            return len(frame.text)
        if isinstance(frame, m.Detokenize):
            return len(frame.tokens)
        return sum(
            MESSAGE + sum(len(text) for text in message.values() if isinstance(text, str)) for message in frame.messages
        )

    def _send(self, peer: bytes, reply: m.Frame | None) -> None:
        # A gateway that is gone or full asks again: its record has everything.
        if reply is not None:
            self.hub.send(peer, reply)

    # -------------------------------------------------------------- the thread

    def _encode_long(self) -> None:
        try:
            self.turns.run()
        except BaseException:
            log.exception("the thread that tokenizes long texts has failed, the stage ends")
            self.loop.quit()
            self.loop.wake()

    def _notice_work(self) -> None:
        """A run of one class of characters is one call into the library: its CPU time is what shows progress."""
        for direction, tokens in (("encoded", self.service.tokens_encoded), ("decoded", self.service.tokens_decoded)):
            self.loop.metrics.set("starling_tokenizer_tokens_total", tokens, direction)
        if self.loop.busy and self._thread.ident is not None and self._thread.is_alive():
            spent = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            if spent > self._spent:
                self._spent = spent
                self.loop.progress += 1

    def _on_done(self) -> None:
        os.eventfd_read(self._wake)
        for peer, reply in self.turns.take():
            self._send(peer, reply)
            self.loop.progress += 1
        self.loop.busy = self.turns.is_busy


def preload(config: Config) -> None:
    """Build vocabularies before the stage is forked: its restarts then cost no time."""
    for instance in versions.read(config).versions:
        index_path = versions.find_index(instance, paths.models_dir())
        if index_path is not None:
            open_model(index_path)


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete with the ranks
    return TokenizerStage(config).run()
