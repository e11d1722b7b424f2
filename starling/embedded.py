"""The engine inside one Python process: no sockets, no other processes, no HTTP.

    from starling import Embedded

    with Embedded.load("model.gguf", kv_cache_mb=256) as engine:
        first = engine.submit("Once upon a time", max_tokens=64, temperature=0.8, seed=7)
        second = engine.submit([1, 2, 3], max_tokens=16)
        while engine.step():                  # or engine.run()
            print(engine.poll(first).text)
        print(engine.poll(second).tokens, engine.stats().tokens_generated)

`step` is the server's step, in one thread: the scheduler (`stages.scheduler`) composes it, the KV manager
(`stages.kv`) grants its pages, the ranks of a worker group (`stages.worker`) compute it, the gateway's decoder turns
tokens into text.  A request therefore gets the bytes that `POST /v1/generate` gives to the same fields.

One thread at a time may use an engine.  A request's result is kept until `release`.
"""

from __future__ import annotations

import logging
import operator
import secrets
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from pipeline.api.generation_fields import check_configured_order
from pipeline.api.requests import generate
from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import InternalError, InvalidRequest, NotFound, ResourceError, StarlingError
from pipeline.models.store import Progress, no_progress
from pipeline.protocol.messages import Cancel, Denied, Granted, Sampling, Submit
from shm.arena import ArenaError
from shm.checkpoint import CheckpointError
from stages.gateway.admission.lengths import Bounds, output_budget
from stages.gateway.admission.prompts import check_ids
from stages.gateway.requests.sequence_breakers import breakers_of
from stages.tokenizer.opened_models import ModelSource, open_model
from stages.worker.checkpoint.attention_factor import LoadedError, apply_factor
from stages.worker.checkpoint.prepare import open_verified, prepare
from stages.worker.model import Model
from starling import loaded_revisions
from starling.assembly import Parts, assemble, choose_model
from starling.directory_conversion import conversion_of
from starling.generation import Generation, LocalRequest

log = logging.getLogger("starling.embedded")

OWNER = b"embedded"  # in place of the gateway's address
MAX_REQUESTS = 100_000  # running and finished ones that have not been released
MAX_IDLE_STEPS = 100  # calls of `step` in a row that change nothing, before it is an error
SERVER_FIELDS = ("model", "stream", "session_id", "create_session", "session_ttl_s", "keep_alive", "prompt_logprobs")


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine was loaded, and how many requests and KV pages are in each state."""

    steps: int
    step_seconds: float  # time that the ranks spent in steps
    tokens_generated: int
    prompt_tokens_cached: int
    preemptions: int  # sequences that gave their pages back and were computed again
    requests_waiting: int
    requests_running: int
    requests_kept: int  # running and finished ones that have not been released
    kv_pages: int
    kv_pages_free: int
    kv_pages_cached: int
    kv_pages_leased: int


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
        self._idle_steps = 0
        self._clock = time.monotonic

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

    def submit(self, prompt: str | Sequence[int], **fields: Any) -> str:
        """Queue a request and return its id. Nothing is computed before `step` or `run`.

        prompt: a text, which gets the model's BOS token if it asks for one, or token ids, which are taken as they are.
        fields: those of `POST /v1/generate` with the same defaults: `max_tokens`, `temperature`, `top_k`, `top_p`,
            `repetition_penalty`, `frequency_penalty`, `presence_penalty`, `logit_bias`, `order`, `seed`, `min_tokens`,
            `min_p`, `typical_p`, `top_n_sigma`, those of DRY and XTC, `ignore_eos`, `stop`, `stop_token_ids`,
            `logprobs`, `skip_special_tokens`, `cache_salt`, `speculate`, `priority`.

        Raises `InvalidRequest` for a field that is wrong, and `StarlingError` with the code OVERLOADED when
        `scheduler.max_queue_depth` requests wait already.
        """
        parts = self._open_parts()
        if len(self._requests) >= MAX_REQUESTS:
            raise StarlingError(
                "OVERLOADED", f"{MAX_REQUESTS} requests are kept, the most there may be; release finished ones"
            )
        for name in SERVER_FIELDS:
            if name in fields:
                raise InvalidRequest(f"{name} is a field of the HTTP server; leave it out of submit", name)
        given = prompt if isinstance(prompt, str) else _token_ids(prompt)
        parsed = generate.read({"prompt": given, **fields})
        if (n := len(parsed.prompts)) != 1:
            raise InvalidRequest(f"prompt has {n} prompts; one submit makes one text: submit {n} times", "prompt")
        if parsed.n != 1:
            raise InvalidRequest(f"n is {parsed.n}; one submit makes one text: submit {parsed.n} times", "n")
        if parsed.constraint:  # it needs processes of its own
            name = parsed.constraint.field
            raise InvalidRequest(f"{name} constrains the output, which only a server does; leave it out", name)
        request, frame = self._new_request(parsed, parts.bounds)
        parts.scheduler.submissions.submit(OWNER, frame, self._clock())
        self._requests[request.id] = request
        self._deliver(parts)
        if request.error is not None:
            del self._requests[request.id]
            raise request.error
        return request.id

    def _new_request(self, parsed: GenerationRequest, bounds: Bounds) -> tuple[LocalRequest, Submit]:
        """As the gateway admits one."""
        vocabulary = self._tokenizer.vocabulary
        [given] = parsed.prompts
        tokens = vocabulary.encode(given, parse_special=False, add_bos=True) if isinstance(given, str) else given
        check_ids(parsed, [tuple(tokens)], vocabulary.size)
        budget = output_budget(len(tokens), parsed.max_tokens, bounds, "prompt", "max_tokens")
        seed = secrets.randbits(53) if parsed.seed is None else parsed.seed
        if not (order := parsed.sampling.order):
            order = self.model.sampler_order
            check_configured_order(parsed.sampling, order)
        sampling: Sampling = msgspec.structs.replace(parsed.sampling, seed=seed, order=order)
        breakers = b""
        if sampling.dry_multiplier:
            pieces = [vocabulary.token_bytes(token) for token in range(vocabulary.size)]
            breakers = breakers_of(pieces, sampling.dry_sequence_breakers).checked(sampling.dry_sequence_breakers).mask
        eos_ids = () if sampling.ignore_eos else vocabulary.eos_ids
        request_id = f"req-{secrets.token_hex(12)}"
        frame = Submit(
            sequence=f"{request_id}/0",
            request=request_id,
            model=self.model.name,
            tenant="",
            prompt=array("i", tokens).tobytes(),
            max_tokens=budget,
            sampling=sampling,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *parsed.stop_token_ids))),
            priority=-(parsed.priority or 0),
            cache_salt=parsed.cache_salt,
            speculate=parsed.speculate,
            breakers=breakers,
        )
        return LocalRequest(frame, parsed, self._tokenizer), frame

    def poll(self, request_id: str) -> Generation:
        """What the request has produced so far. Raises `NotFound` for an unknown or released id."""
        return self._request(request_id).snapshot()

    def cancel(self, request_id: str) -> None:
        """End a request; its result so far stays. No effect on a finished one. Raises `NotFound`."""
        parts, request = self._open_parts(), self._request(request_id)
        if not request.finish_reason:
            parts.scheduler.submissions.cancel(Cancel(request.sequence))
            self._deliver(parts)

    def release(self, request_id: str) -> Generation:
        """Forget a request, which is cancelled if it still runs; returns its result. Raises `NotFound`."""
        self.cancel(request_id)
        return self._requests.pop(request_id).snapshot()

    def generate(self, prompt: str | Sequence[int], **fields: Any) -> Generation:
        """Submit a request, compute until it has ended, and release it. Other requests advance with it.

        Raises as `submit` does, and the request's error if it ends with one. Whatever interrupts it, such as Ctrl-C,
        ends the request.
        """
        request_id = self.submit(prompt, **fields)
        try:
            while not self._requests[request_id].finish_reason:
                self.step()
        except BaseException:
            with suppress(StarlingError):  # the engine may be closed
                self.release(request_id)
            self._requests.pop(request_id, None)
            raise
        result = self.release(request_id)
        if result.error is not None:
            raise result.error
        return result

    def _request(self, request_id: str) -> LocalRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise NotFound(f"no request {request_id!r} is kept here; it was never submitted or has been released")
        return request

    # -------------------------------------------------------------- computing

    def step(self) -> bool:
        """Compute one step of the model: prompts and next tokens of the requests that fit into a batch.

        Returns whether requests are left to compute.
        """
        parts = self._open_parts()
        scheduler, now = parts.scheduler, self._clock()
        scheduler.tick(now)
        scheduler.pages.kv_state(parts.kv.state(self.model.name))  # pages may be free: repeat denied requests
        scheduler.steps.run_round(now)
        self._exchange_pages(parts)
        if not scheduler.steps.unacknowledged:  # a sequence that has just been granted its first pages can begin now
            scheduler.steps.run_round(now)
            self._exchange_pages(parts)
        has_computed = bool(scheduler.steps.unacknowledged)
        for step in range(parts.ring.done + 1, parts.ring.head + 1):
            parts.group.compute(step)
        scheduler.steps.complete(self._clock())
        has_ended = self._deliver(parts)
        self._exchange_pages(parts)
        self._idle_steps = 0 if has_computed or has_ended or not scheduler.is_busy else self._idle_steps + 1
        if self._idle_steps > MAX_IDLE_STEPS:
            raise InternalError(f"{MAX_IDLE_STEPS} steps in a row computed nothing although requests are left")
        return scheduler.is_busy

    def run(self) -> None:
        """Compute until every request has ended."""
        while self.step():
            pass

    @staticmethod
    def _exchange_pages(parts: Parts) -> None:
        """Let the KV manager answer what the scheduler has asked for."""
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
        """Pass what the scheduler has produced to the requests. Returns whether one has ended."""
        outbox = parts.scheduler.outbox
        outbox.events.clear()  # this engine keeps no timelines
        has_ended = False
        while outbox.tokens or outbox.rejected:
            moved = [new for sequences in outbox.tokens.values() for new in sequences]
            rejected = [frame for _, frame in outbox.rejected]
            outbox.tokens.clear()
            outbox.started.clear()
            outbox.rejected.clear()
            for new in moved:
                request = self._requests.get(new.sequence.rpartition("/")[0])
                if request is not None and request.take(new):
                    parts.scheduler.submissions.cancel(Cancel(new.sequence, at=request.used))
                has_ended = has_ended or bool(new.finish)
            for frame in rejected:
                request = self._requests.get(frame.sequence.rpartition("/")[0])
                if request is not None:
                    request.fail(
                        StarlingError(frame.code, frame.message, frame.param, retry_after_s=frame.retry_after_s)
                    )
                has_ended = True
        return has_ended

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
        """Counters and sizes as they are now."""
        parts = self._open_parts()
        stats, pool = parts.scheduler.stats, parts.kv.pool
        return EngineStats(
            steps=stats.steps,
            step_seconds=stats.worker_s,
            tokens_generated=stats.generated,
            prompt_tokens_cached=stats.prompt_cached,
            preemptions=stats.preemptions,
            requests_waiting=parts.scheduler.queues.depth,
            requests_running=len(parts.scheduler.table.scheduled),
            requests_kept=len(self._requests),
            kv_pages=pool.total,
            kv_pages_free=pool.free,
            kv_pages_cached=pool.cached,
            kv_pages_leased=pool.leased,
        )

    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("the engine is closed")
        return self._parts

    def close(self) -> None:
        """End the worker's threads and unmap everything. Results stay readable with `poll`. Idempotent."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.scheduler.worker.ring = None  # its views keep the arena mapped
            parts.stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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


def _token_ids(prompt: object) -> list[object]:
    """A prompt that is no text. Raises `InvalidRequest` for one that has numbers and is no sequence of token ids."""
    is_bytes = isinstance(prompt, bytes | bytearray) or (isinstance(prompt, memoryview) and prompt.itemsize == 1)
    if is_bytes or isinstance(prompt, Mapping | Set) or not isinstance(prompt, Iterable):
        remedy = "; decode it" if is_bytes else ""
        raise InvalidRequest(
            f"prompt is of type {type(prompt).__name__}: expected a text or a sequence of token ids{remedy}", "prompt"
        )
    return [_plain(token) for token in prompt]


def _plain(token: object) -> object:
    """A whole number of any library as Python's; what else a prompt holds is refused like any wrong value."""
    if isinstance(token, bool):
        return token
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        return token
