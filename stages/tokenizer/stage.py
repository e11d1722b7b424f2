"""The tokenizer process: sockets, threads and models around `service.py`.

One background thread encodes long texts (`encode_queue.py`); the library releases the interpreter lock meanwhile.  The
main thread replies to everything else at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from pipeline.config import paths
from pipeline.config.schema import Config
from pipeline.errors import ModelNotFound, ModelUnavailable, StarlingError
from pipeline.ipc.poll_loop import PollLoop
from pipeline.models import versions
from pipeline.protocol import messages as m
from pipeline.runtime.malloc_trim import MallocTrimmer
from stages.tokenizer import opened_models
from stages.tokenizer.encode_queue import EncodeQueue
from stages.tokenizer.opened_models import ModelSource
from stages.tokenizer.service import TextRequest, TokenizerModel, TokenizerService

log = logging.getLogger("starling.tokenizer")

# Characters encoded or tokens decoded by the main thread in one iteration of its loop: about 15 ms.  Requests beyond
# that go to the background thread.
MAX_LENGTH_PER_ITERATION = 16_384
OFFSETS_LENGTH = 2  # a character counts so often if its token's offsets are wanted, too
MESSAGE_LENGTH = 64  # added per chat message, for the template's work


class TokenizerStage:
    """The main loop of the tokenizer process."""

    def __init__(self, config: Config) -> None:
        self.loop = PollLoop("tokenizer", config)
        self.config = config
        self.service = TokenizerService(self._open)
        self.hub = self.loop.bind("gateway-tokenizer", self._on_frame)
        self.encode_queue: EncodeQueue[m.Frame] = EncodeQueue(lambda: os.eventfd_write(self._wake, 1))
        self.hub.on_down = lambda peer, hello: self._drop_client(peer)
        self._length_left = MAX_LENGTH_PER_ITERATION
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.loop.add_fd(self._wake, self._on_done)
        self._thread = threading.Thread(target=self._run_queue, name="encode", daemon=True)
        self._spent = 0.0  # CPU time of the background thread, s
        self.loop.on_tick += [self._count_progress, MallocTrimmer(self.loop.clock).tick]
        self.follower = versions.VersionFollower(config)
        # Versions that are being loaded.  Only the main thread changes `_opening`: a vocabulary whose thread ends while
        # a request is handled counts as being built until `_take_built`, which answers that request.
        self._opening: dict[ModelSource, threading.Thread] = {}
        self._built: SimpleQueue[tuple[ModelSource, StarlingError | None]] = SimpleQueue()  # by their threads
        self._failed: dict[ModelSource, StarlingError] = {}  # of the builds that `_take_built` ends
        self._waiting: dict[tuple[bytes, str], m.Describe] = {}  # by peer and version, which is being opened

    def run(self) -> int:
        """Serve until told to stop; return the exit code."""
        self._thread.start()
        try:
            return self.loop.run(self._work)
        finally:
            self.encode_queue.stop()
            self._thread.join()
            # `_wake` stays open until the process ends: a thread that opens a model may still write to it.

    # -------------------------------------------------------------- models

    def _open(self, name: str) -> TokenizerModel:
        """Open a version of a model by its id. Raises `StarlingError`."""
        version = self.follower.table.find(name)
        if version is None and self.follower.poll():  # the version may be newer than the table read last
            self._unload_removed()
            version = self.follower.table.find(name)
        if version is None:
            known = ", ".join(repr(other.id) for other in self.follower.table.versions)
            raise ModelNotFound(f"model {name!r} is not served here; served: {known}", param="model")
        index_path = versions.find_index(version, paths.models_dir())
        is_loading = version.state == "loading"
        if index_path is None or (is_loading and not version.digest):
            raise ModelUnavailable(f"model {name!r} is not prepared yet", param="model", retry_after_s=5)
        source = ModelSource.of(index_path, version.settings)
        if is_loading and not opened_models.is_open(source):
            self._open_in_background(source, name)
        opened = opened_models.open_model(source)
        return opened._replace(described=msgspec.structs.replace(opened.described, model=name))

    def _open_in_background(self, source: ModelSource, name: str) -> None:
        """Build a vocabulary on a separate thread while the stage serves. Raises until it is built."""
        if source in self._failed:
            raise self._failed[source]
        if source not in self._opening:
            thread = threading.Thread(target=self._build, args=(source,), name="open", daemon=True)
            self._opening[source] = thread
            thread.start()
        raise ModelUnavailable(f"the vocabulary of model {name!r} is being loaded", param="model", retry_after_s=1)

    def _build(self, source: ModelSource) -> None:
        failure: StarlingError | None = None
        try:
            opened_models.open_model(source)
        except StarlingError as error:
            failure = error
        finally:
            self._built.put((source, failure))
            os.eventfd_write(self._wake, 1)

    def _take_built(self) -> None:
        """End the builds whose threads are done, and answer those that have waited for them."""
        while not self._built.empty():
            source, failure = self._built.get()
            del self._opening[source]
            if failure is not None:
                self._failed[source] = failure
        for (peer, name), frame in list(self._waiting.items()):
            if not self._is_opening(name):
                del self._waiting[peer, name]
                self._send(peer, self.service.reply(frame))
        self._failed.clear()  # a later request builds it again

    def _unload_removed(self) -> None:
        """Unload the versions that are no longer in the version table."""
        self.loop.mark_active()
        loaded = self.follower.table.versions
        self.service.keep_models({one.id for one in loaded})
        digests = {one.digest for one in loaded}
        if "" not in digests:
            opened_models.close_except(digests)

    def _work(self) -> float | None:
        """Open all serving versions; until that is done, report the reason for not being ready."""
        self._length_left = MAX_LENGTH_PER_ITERATION
        if self.loop.stopping:
            self.loop.busy = self.encode_queue.is_busy or self.loop.serves_stopping_clients(self.hub)
        if self.follower.poll():
            self._unload_removed()
            self.loop.ready = False
        if self.loop.ready:
            return None
        reason = ""
        for version in self.follower.table.versions:
            if version.state != "serving":
                continue
            try:
                self.service.model(version.id)
            except opened_models.UnusableModel:
                continue  # requests to it fail; the other models are served
            except StarlingError as error:
                reason = reason or error.message
        self.loop.ready, self.loop.reason = not reason, reason
        return 0.2 if reason else None

    # -------------------------------------------------------------- frames

    def _on_frame(self, peer: bytes, frame: m.Frame) -> None:
        self.loop.progress += 1
        if isinstance(frame, m.CancelText):
            self.encode_queue.drop(peer, frame.id)
            self.loop.busy = self.encode_queue.is_busy
            return
        if self.service.is_text_request(frame):
            length = self._length(frame)
            cost = length * OFFSETS_LENGTH if isinstance(frame, m.Encode) and frame.offsets else length
            if cost > self._length_left:
                self._enqueue(peer, frame, length)
                return
            self._length_left -= cost
        reply = self.service.reply(frame)
        if isinstance(frame, m.Describe) and isinstance(reply, m.TokenizerFailed) and self._is_opening(frame.model):
            self._waiting[peer, frame.model] = frame
            return
        self._send(peer, reply)

    def _is_opening(self, name: str) -> bool:
        """Whether a thread builds the vocabulary of a version, so that its end is a better answer than an error."""
        version = self.follower.table.find(name)
        index_path = versions.find_index(version, paths.models_dir()) if version is not None else None
        return (
            version is not None
            and index_path is not None
            and ModelSource.of(index_path, version.settings) in self._opening
        )

    def _drop_client(self, peer: bytes) -> None:
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]
        self.encode_queue.drop_client(peer)
        self.loop.busy = self.encode_queue.is_busy

    def _enqueue(self, peer: bytes, frame: TextRequest, length: int) -> None:
        if self.encode_queue.submit(peer, length, self.service.reply_steps(frame), frame.tenant, frame.id):
            self.loop.busy = True
        else:
            message = "the tokenizer's queue of long texts, or one tenant's part of it, is full; try again later"
            self._send(peer, m.TokenizerFailed(frame.id, "OVERLOADED", message))

    @staticmethod
    def _length(frame: TextRequest) -> int:
        if isinstance(frame, m.Encode):
            return len(frame.text) + len(frame.suffix)
        if isinstance(frame, m.Detokenize):
            return len(frame.tokens)
        values = [frame.tools or "", frame.documents or "", frame.template_vars or ""]
        values += [value for message in frame.messages for value in message.values()]
        return MESSAGE_LENGTH * len(frame.messages) + sum(
            len(value) if isinstance(value, str) else len(msgspec.msgpack.encode(value)) for value in values
        )

    def _send(self, peer: bytes, reply: m.Frame | None) -> None:
        # A send may fail: a gateway that reconnects sends its open requests again.
        if reply is not None:
            self.hub.send(peer, reply)

    # -------------------------------------------------------------- the thread

    def _run_queue(self) -> None:
        try:
            self.encode_queue.run()
        except BaseException:
            log.exception("the encoding thread failed; the stage exits")
            self.loop.quit()
            self.loop.wake()

    def _count_progress(self) -> None:
        """Update metrics and progress. One library call may take long, so the thread's CPU time counts as progress."""
        self.loop.is_steady = not (self.loop.busy or self._opening or self._waiting)
        for direction, tokens in (("encoded", self.service.tokens_encoded), ("decoded", self.service.tokens_decoded)):
            self.loop.metrics.set("starling_tokenizer_tokens_total", tokens, direction)
        if self.loop.busy and self._thread.ident is not None and self._thread.is_alive():
            spent = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            if spent > self._spent:
                self._spent = spent
                self.loop.progress += 1

    def _on_done(self) -> None:
        os.eventfd_read(self._wake)
        self._take_built()
        for peer, reply in self.encode_queue.take_results():
            self._send(peer, reply)
            self.loop.progress += 1
        self.loop.busy = self.encode_queue.is_busy


def preload(config: Config) -> None:
    """Build vocabularies before the stage is forked, so that its restarts need no time for them."""
    for version in versions.read(config).versions:
        index_path = versions.find_index(version, paths.models_dir())
        if index_path is not None:
            with suppress(ModelUnavailable):  # the stage reports it
                opened_models.open_model(ModelSource.of(index_path, version.settings))


def main(config: Config) -> int:
    """Run until told to stop; returns the exit code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would compete with the ranks
    return TokenizerStage(config).run()
