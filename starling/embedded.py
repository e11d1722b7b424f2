"""The engine inside one Python process: no sockets, no other processes, no HTTP.

    from starling import Embedded

    with Embedded.load("model.gguf", kv_cache_mb=256) as engine:
        first = engine.submit("Once upon a time", max_tokens=64, temperature=0.8, seed=7)
        second = engine.submit([1, 2, 3], max_tokens=16, on_token=print, timeout_s=30)
        while engine.step():                  # or engine.run()
            print(engine.poll(first).text)
        print(engine.poll(second).tokens, engine.stats().tokens_generated)

`step` is the server's step, in one thread: the scheduler (`stages.scheduler`) composes it, the KV manager
(`stages.kv`) grants its pages, the ranks of a worker group (`stages.worker`) compute it, the gateway's decoder turns
tokens into text.  A request therefore gets the bytes that `POST /v1/generate` gives to the same fields.

Any thread may call any method.  `_lock` guards all but the computation of a step and the calls of `on_token`: those
belong to one thread at a time (`step_owner.py`), and the other threads submit, poll and cancel meanwhile.  A result is
kept until `release`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InternalError, InvalidRequest, NotFound, ResourceError, StarlingError
from pipeline.models.store import Progress, no_progress
from pipeline.observe.log_names import log_names
from pipeline.protocol.messages import Cancel, Denied, Granted
from shm.arena import ArenaError
from shm.checkpoint import CheckpointError
from stages.tokenizer.opened_models import ModelSource, open_model
from stages.worker.checkpoint.attention_factor import LoadedError, apply_factor
from stages.worker.checkpoint.prepare import open_verified, prepare
from stages.worker.model import Model
from starling import loaded_revisions
from starling.assembly import Parts, assemble, choose_model
from starling.directory_conversion import conversion_of
from starling.engine_stats import EngineStats, RequestStats
from starling.generation import Delta, Generation, LocalRequest
from starling.local_submission import make_frame, read_request
from starling.step_owner import StepOwner

log = logging.getLogger("starling.embedded")

GATEWAY = b"embedded"  # in place of the gateway's address
MAX_REQUESTS = 100_000  # running and finished ones that have not been released
MAX_IDLE_STEPS = 100  # calls of `step` in a row that change nothing, before it is an error


class Embedded:
    """An engine for one model in this process. Use `load` to make one; a context manager."""

    def __init__(self, config: Config, model: ModelConfig, index_path: Path) -> None:
        """`index_path`: the model's prepared checkpoint; its kernels must be compiled."""
        self.config, self.model = config, model
        self._tokenizer = open_model(ModelSource.of(index_path, model))
        self._requests: dict[str, LocalRequest] = {}  # by request id
        weights = Model(open_verified(index_path, use_mmap=config.performance.use_mmap))
        try:
            self._parts: Parts | None = assemble(config, model, weights)
        except ArenaError as error:
            raise ResourceError(str(error)) from None
        self._stack = self._parts.stack
        self._idle_steps = 0
        self._clock = time.monotonic
        self._ended = RequestStats()
        self._owner = StepOwner(self._fail_callback)
        self._lock = self._owner.lock

    @classmethod
    def load(
        cls,
        model: str | Path = "",
        *,
        config: Config | str | Path | None = None,
        progress: Progress = no_progress,
        **settings: Any,
    ) -> Self:
        """Load a model, and fetch, convert and compile first whatever is missing.

        model: path of a GGUF file (a `Path`, or a string that ends in ".gguf" or is a URL), or the name of a model
            of the configuration; "" is its first one, which without a configuration file is the demo model.
        config: a configuration, or the path of its file; default: the one that the server would use.
        progress: called with (phase, done, total) while the model is prepared.
        settings: keys of `models` that replace the configuration's: `kv_cache_mb`, `max_batch_size`, `ranks`,
            `kv_type`, `page_tokens`, `max_sequence_length`, `speculate`, `sha256`, `name`.

        Raises `ModelNotFound`, `ConfigError` (a setting or the file is wrong) or `ResourceError` (it does not fit).
        """
        resolved, chosen = choose_model(model, config, settings)
        folder = paths.models_dir()
        conversion = conversion_of(folder, chosen.pretokenizer)
        index_path = prepare(chosen, folder, progress, allowed=resolved.registry.sources, conversion=conversion)
        _apply_factor(resolved, chosen, index_path, progress)
        return cls(resolved, chosen, index_path)

    # -------------------------------------------------------------- requests

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        on_token: Callable[[Delta], object] | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> str:
        """Queue a request and return its id. Nothing is computed before `step` or `run`.

        prompt: a text, which gets the model's BOS token if it asks for one, or token ids, which are taken as they are.
        on_token: called with a `Delta` after each step that has made output for the request, and when it ends. Calls
            are in order, and never two at a time in one engine. The thread that computes makes them, or the one that
            cancels. It may call `submit`, `poll`, `cancel` and `release`. An exception that it raises ends this
            request with an error, and no other.
        timeout_s: from now on; the first step after it ends the request with the error TIMEOUT. None: no limit.
        fields: those of `POST /v1/generate` with the same defaults: `max_tokens`, `temperature`, `top_k`, `top_p`,
            `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `order`, `seed`, `min_tokens`,
            `min_p`, `typical_p`, `top_n_sigma`, those of DRY and XTC, `ignore_eos`, `stop`, `stop_token_ids`,
            `logprobs`, `skip_special_tokens`, `cache_salt`, `speculate`, `priority`.

        Raises `InvalidRequest` for a field that is wrong, and `StarlingError` with the code OVERLOADED when
        `scheduler.max_queue_depth` requests wait already.
        """
        return self._submit(prompt, on_token, timeout_s, fields).id

    def _submit(
        self,
        prompt: str | Sequence[int],
        on_token: Callable[[Delta], object] | None,
        timeout_s: float | None,
        fields: Mapping[str, Any],
    ) -> LocalRequest:
        bounds = self._open_parts().bounds
        if on_token is not None and not callable(on_token):
            raise InvalidRequest(f"on_token is {on_token!r}: expected a function of one argument", "on_token")
        parsed = read_request(prompt, fields)
        frame = make_frame(parsed, self._tokenizer.vocabulary, self.model, bounds, timeout_s)
        with self._lock:
            parts = self._open_parts()
            if len(self._requests) >= MAX_REQUESTS:
                raise StarlingError(
                    "OVERLOADED", f"{MAX_REQUESTS} requests are kept, the most there may be; release finished ones"
                )
            now = self._clock()
            request = LocalRequest(frame, parsed, self._tokenizer, now, on_token)
            self._requests[request.id] = request
            parts.scheduler.submissions.submit(GATEWAY, frame, now)
            request.scheduled = parts.scheduler.table.live.get(request.sequence)
            self._deliver(parts)
            if request.error is not None:
                del self._requests[request.id]
                request.deltas.clear()  # the caller gets the exception
                raise request.error
        self._owner.call_due()
        return request

    def poll(self, request_id: str) -> Generation:
        """What the request has produced so far. Raises `NotFound` for an unknown or released id."""
        with self._lock:
            return self._request(request_id).snapshot()

    def cancel(self, request_id: str) -> None:
        """End a request; its result so far stays. No effect on a finished one. Raises `NotFound`."""
        with self._lock:
            self._cancel(self._request(request_id))
        self._owner.call_due()

    def release(self, request_id: str) -> Generation:
        """Forget a request, which is cancelled if it still runs; returns its result. Raises `NotFound`."""
        with self._lock:
            request = self._request(request_id)
            self._cancel(request)
            result = self._requests.pop(request_id).snapshot()
        self._owner.call_due()
        return result

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        on_token: Callable[[Delta], object] | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generation:
        """Submit a request, compute until it has ended, and release it. Other requests advance with it.

        Raises as `submit` does, and the request's error if it ends with one. Whatever interrupts it, such as Ctrl-C,
        ends the request.
        """
        self._owner.refuse_in_callback("generate")
        request = self._submit(prompt, on_token, timeout_s, fields)
        try:
            while not request.is_over:
                self._step("generate")
        except BaseException:
            with suppress(StarlingError):  # it may be released
                self.release(request.id)
            self._requests.pop(request.id, None)
            raise
        with self._lock:
            self._requests.pop(request.id, None)
            result = request.snapshot()
        if result.error is not None:
            raise result.error
        return result

    def _request(self, request_id: str) -> LocalRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise NotFound(f"no request {request_id!r} is kept here; it was never submitted or has been released")
        return request

    def _cancel(self, request: LocalRequest) -> None:
        """End a request if it runs. The caller has the lock."""
        if not request.finish_reason:
            self._end_sequence(self._open_parts(), request)

    def _end_sequence(self, parts: Parts, request: LocalRequest) -> None:
        """Compute no more of a request, and take its pages back. The caller has the lock."""
        parts.scheduler.submissions.cancel(Cancel(request.sequence))
        self._exchange_pages(parts)
        self._deliver(parts)

    # -------------------------------------------------------------- computing

    def step(self) -> bool:
        """Compute one step of the model: prompts and next tokens of the requests that fit into a batch.

        If another thread computes a step, wait until that one has ended instead. Returns whether requests are left to
        compute; False also when another thread has closed the engine meanwhile.

        An exception of the computation ends all running requests with an error; Ctrl-C does not.
        """
        self._open_parts()
        return self._step("step")

    def run(self) -> None:
        """Compute until every request has ended, or another thread closes the engine."""
        self._open_parts()
        while self._step("run"):
            pass

    def _step(self, method: str) -> bool:
        self._owner.refuse_in_callback(method)
        self._owner.own(self._compute, wait=True)
        with self._lock:
            return self._parts is not None and self._parts.scheduler.is_busy

    def _compute(self) -> None:
        """Compute a step. If that fails, end all requests: threads that wait for one do not get the exception."""
        try:
            self._compute_step()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # kept errors must not keep the arenas mapped after `close`
            with self._lock:
                failed = self._fail_running(partial(_internal_error, "computing has raised", error))
                self._idle_steps = 0
                if self._parts is not None:
                    for request in failed:
                        self._end_sequence(self._parts, request)
            raise

    def _compute_step(self) -> None:
        """Compute a step unless the engine is closed. This thread is the owner."""
        with self._lock:
            if (parts := self._parts) is None:
                return
            scheduler, now = parts.scheduler, self._clock()
            scheduler.tick(now)
            scheduler.pages.kv_state(parts.kv.state(self.model.name))  # pages may be free: repeat denied requests
            scheduler.steps.run_round(now)
            self._exchange_pages(parts)
            if not scheduler.steps.unacknowledged:
                # A sequence that has just been granted its first pages can begin now.
                scheduler.steps.run_round(now)
                self._exchange_pages(parts)
            has_computed = bool(scheduler.steps.unacknowledged)
            published = range(parts.ring.done + 1, parts.ring.head + 1)
        for step in published:
            parts.group.compute(step)
        with self._lock:
            scheduler.steps.complete(self._clock())
            has_ended = self._deliver(parts)
            self._exchange_pages(parts)
            self._idle_steps = 0 if has_computed or has_ended or not scheduler.is_busy else self._idle_steps + 1
            if self._idle_steps > MAX_IDLE_STEPS:
                raise InternalError(f"{MAX_IDLE_STEPS} steps in a row computed nothing although requests are left")

    @staticmethod
    def _exchange_pages(parts: Parts) -> None:
        """Let the KV manager answer what the scheduler has asked for. The caller has the lock."""
        scheduler = parts.scheduler
        while scheduler.leases.frames:
            frames, scheduler.leases.frames = scheduler.leases.frames, []
            for frame in frames:
                answer = parts.kv.answer(frame)
                if isinstance(answer, Granted):
                    scheduler.pages.granted(answer)
                elif isinstance(answer, Denied):
                    scheduler.pages.denied(answer)

    def _deliver(self, parts: Parts) -> bool:
        """Pass what the scheduler has produced to the requests. The caller has the lock. Returns whether one ended."""
        outbox, now = parts.scheduler.outbox, self._clock()
        outbox.events.clear()  # this engine keeps no timelines
        has_ended = False
        while outbox.tokens or outbox.rejected:
            moved = [new for sequences in outbox.tokens.values() for new in sequences]
            rejected = [frame for _, frame in outbox.rejected]
            outbox.tokens.clear()
            outbox.started.clear()
            outbox.rejected.clear()
            for new in moved:
                has_ended = has_ended or bool(new.finish)
                if (request := self._running(new.sequence)) is not None:
                    if request.take(new, now):
                        parts.scheduler.submissions.cancel(Cancel(new.sequence, at=request.used))
                    self._delivered(request, now)
            for frame in rejected:
                has_ended = True
                if (request := self._running(frame.sequence)) is not None:
                    request.fail(
                        StarlingError(frame.code, frame.message, frame.param, retry_after_s=frame.retry_after_s)
                    )
                    self._delivered(request, now)
        return has_ended

    def _running(self, sequence: str) -> LocalRequest | None:
        request = self._requests.get(sequence.rpartition("/")[0])
        return request if request is not None and not request.finish_reason else None

    def _delivered(self, request: LocalRequest, now: float) -> None:
        if request.deltas:
            self._owner.add_due(request)
        if request.finish_reason:
            self._ended.record_end(request, now)
            request.scheduled = None  # it has the tokens once more

    def _fail_callback(self, request: LocalRequest, error: Exception) -> None:
        """End a request whose callback has raised `error`, and call it no more."""
        names = log_names(request.id, self.model.name, "", "")
        log.error("on_token has raised an exception, ending its request", extra=names, exc_info=error)
        with self._lock:
            request.on_token = None
            was_running = not request.finish_reason
            request.fail(_internal_error("on_token raised", error))
            if was_running:
                self._delivered(request, self._clock())
                if self._parts is not None:
                    self._end_sequence(self._parts, request)

    def _fail_running(self, make_error: Callable[[], StarlingError]) -> list[LocalRequest]:
        """End all running requests with an error of their own each; returns them. The caller has the lock."""
        now = self._clock()
        running = [request for request in self._requests.values() if not request.finish_reason]
        for request in running:
            request.fail(make_error())
            self._delivered(request, now)
        return running

    # -------------------------------------------------------------- text, figures, end

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        """Token ids of a text. `parse_special`: names of special tokens in the text become their ids."""
        return self._tokenizer.vocabulary.encode(text, parse_special, add_bos)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.vocabulary.decode(tokens, skip_special)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The prompt for chat messages, `{"role": ..., "content": ...}` each, by the model's chat template.

        chat_template_kwargs: further variables of the template.
        continue_final_message: the prompt ends where the last message does, without a generation prompt.

        Raises `InvalidRequest` when the model has no template or the template refuses the messages.
        """
        if self._tokenizer.template is None:
            raise InvalidRequest(f"model {self.model.name!r} has no chat template; submit a text", "messages")
        chat = self._tokenizer.template.render(
            messages,
            not continue_final_message if add_generation_prompt is None else add_generation_prompt,
            tools,
            chat_template_kwargs,
            documents=documents,
            continue_final_message=continue_final_message,
        )
        return self._tokenizer.vocabulary.encode(chat.text, True, add_bos=True, marks=chat.marks)

    def stats(self) -> EngineStats:
        """Counters, sizes and latencies as they are now."""
        with self._lock:
            parts = self._open_parts()
            stats, pool, seconds = parts.scheduler.stats, parts.kv.pool, parts.scheduler.stats.worker_s
            return EngineStats(
                steps=stats.steps,
                step_seconds=seconds,
                tokens_generated=stats.generated,
                tokens_per_second=stats.generated / seconds if seconds else 0.0,
                prompt_tokens_cached=stats.prompt_cached,
                preemptions=stats.preemptions,
                requests_waiting=parts.scheduler.queues.depth,
                requests_running=len(parts.scheduler.table.scheduled),
                requests_kept=len(self._requests),
                requests_finished=self._ended.finished,
                requests_failed=self._ended.failed,
                kv_pages=pool.total,
                kv_pages_free=pool.free,
                kv_pages_cached=pool.cached,
                kv_pages_leased=pool.leased,
                **self._ended.latencies(),
            )

    def _open_parts(self) -> Parts:
        parts = self._parts
        if parts is None:
            raise RuntimeError("the engine is closed")
        return parts

    def close(self) -> None:
        """End the worker's threads and unmap everything, after the step that another thread computes.

        Running requests end with the error DRAINING, and have had their last calls of `on_token` when it returns.
        Results stay readable with `poll` and `release`. Idempotent; after Ctrl-C, another call completes it.
        """
        self._owner.refuse_in_callback("close")
        with self._lock:
            self._parts = None  # so that a thread in `run` leaves the ownership
            message = "the engine was closed before the request had ended"
            self._fail_running(partial(StarlingError, "DRAINING", message))
        while not self._owner.own(self._stack.close, wait=True):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _internal_error(what: str, cause: Exception) -> InternalError:
    error = InternalError(f"{what} {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _apply_factor(config: Config, model: ModelConfig, index_path: Path, progress: Progress) -> None:
    """Prepare an older checkpoint again if that is possible. If it is not, it is used as it is, as by a worker."""
    try:
        apply_factor(model, index_path, lambda: loaded_revisions.read(config), progress)
    except LoadedError:  # this engine computes what the server does, which has the index as it is
        pass
    except (StarlingError, OSError, CheckpointError) as error:  # such as a disk without room for a second copy
        log.warning(
            "an older release ignored the attention factor of a model, using its checkpoint as it is",
            extra={"model": model.name, "path": str(index_path), "reason": str(error)},
        )
