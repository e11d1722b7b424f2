"""What happens to a client's request before it is forwarded: keys, bounds, quotas, its id, and where it was before.

A *ticket* is a request that may be forwarded.  Its id binds it to its tenant (request_ids.py), so that any orchestrator
can tell whose it is.  Without sockets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipeline.api import response_context
from pipeline.api.body_names import names_of
from pipeline.api.forwarded import TrustedProxies
from pipeline.api.held_bytes import answer_shares, body_shares
from pipeline.api.idempotency_key import digest_head, read_key
from pipeline.api.keys import Caller, Keys
from pipeline.api.output_tokens import RELAY, relay_header
from pipeline.api.quotas import REQUESTS, TOKENS, Quotas
from pipeline.api.requests.conversations import NewConversation
from pipeline.config.schema import Config
from pipeline.errors import InvalidRequest, ModelUnavailable, NotFound, Overloaded, StarlingError
from pipeline.fleet import token as fleet_token
from pipeline.observe.metrics import Metrics
from stages.orchestrator.event_cutter import tokens_before
from stages.orchestrator.forward import Forward, Out
from stages.orchestrator.interfaces import RoutedRequest
from stages.orchestrator.known_sessions import KnownSessions, SessionReader, session_in
from stages.orchestrator.quotas.publisher import QuotaPublisher
from stages.orchestrator.read_body import (
    CHARGED_BYTES,
    TEXT_PATHS,
    ReadBody,
    digest_of,
    inline_or_not,
    read_body,
    read_fields,
)
from stages.orchestrator.relay import Relay
from stages.orchestrator.request_ids import RequestIds, request_of
from stages.orchestrator.responses.jobs import Job, queued_response
from stages.orchestrator.responses.keeping import Keep, KeepingOut, without_record
from stages.orchestrator.responses.service import PATH, Responses
from stages.orchestrator.responses.shared import SharedResponses
from stages.orchestrator.responses.turns import Turn
from stages.orchestrator.router import ScoreRouter
from stages.orchestrator.slots import Counted, RequestSlots, hold_body
from stages.orchestrator.traffic import Traffic

CLOSE_PATH = "/v1/session/close"


class Ticket(NamedTuple):
    """A request that may be forwarded."""

    forward: Forward
    tenant: str
    session: str | None = None
    key_id: str = ""  # of a key of the key file
    job: Job | None = None  # of a response in the background
    is_charged: bool = True  # its output counts
    continues: str = ""  # the conversation that gets its items; "": none
    turn: Turn = Turn()  # in that
    queued: bytes = b""  # JSON of the response of a new stream before it begins
    stored: bytes = b""  # the response, if the request was answered before: then nothing is forwarded


def _name(error: StarlingError, read: ReadBody) -> None:
    """Give an error the names in the body, for the log."""
    error.names = names_of({"model": read.model, "session_id": read.session})


class Front:
    """One per orchestrator. Clocks: `clock` monotonic, `wall` since 1970, both s."""

    def __init__(
        self,
        config: Config,
        secret: str,
        relay: Relay,
        router: ScoreRouter,
        metrics: Metrics,
        clock: Callable[[], float],
        wall: Callable[[], float],
        learn: Callable[[str], Awaitable[None]],
        keys: Keys,
        quotas: Quotas,
        publisher: QuotaPublisher,
        has_emptied: Callable[[str], bool] = lambda agent: False,
        shared: SharedResponses | None = None,
    ) -> None:
        """`learn(model)`: look whether an unknown model has been published. `has_emptied`: see registry.py.

        `shared`: the fleet's stored responses; None: it has no place for them.
        """
        self.config = config
        self._learn = learn
        self.keys = keys
        self.quotas = quotas
        self.proxies = TrustedProxies(config.server.trusted_proxies)
        self._publisher = publisher
        self.metrics = metrics
        self.traffic = Traffic(metrics)
        relay.first_event = self.traffic.first_event
        self.clock = clock
        self._ids = RequestIds(secret, wall)
        self._wall = wall
        self.responses = Responses(shared, self._ids)
        self._secret = secret
        self._relay = relay
        self._router = router
        self._locator = relay.locator
        self.sessions = KnownSessions(has_emptied)
        # (request, tenant, session, model, agent): the agent for a session's turn, which may move. Raises nothing.
        self.move_session: Callable[[str, str, str, str, str], Awaitable[str]] | None = None
        self._begun = clock()
        total = config.fleet.orchestrator.max_concurrent_requests
        share = total if len(config.tenants) == 1 else max(1, total - total // 4)

        def share_of(principal: str) -> int:
            return keys.share_of(principal, total, share)

        def is_alone() -> bool:
            return len(config.tenants) == 1 and not keys.has_file

        bodies, answers = body_shares(config.server, is_alone), answer_shares(config.server, is_alone)
        self._slots = RequestSlots(total, share, share_of, bodies, answers)
        self._cancellations = RequestSlots(total, share, share_of, state="cancelled at once")
        relay.routes.locate = self._locator.locate_other

    # ---------------------------------------------------------------- bounds and counts

    @property
    def uptime_s(self) -> float:
        """Since the start of this process."""
        return self.clock() - self._begun

    @property
    def in_flight(self) -> int:
        """Requests that are being answered, and stores of responses whose clients have left."""
        return self._slots.held

    def share_of(self, tenant: str, most: int) -> int:
        """How many of `most` may be of a tenant: all, if there is no other one."""
        if not self.keys:
            return most
        return self.keys.share_of(tenant, most, most if len(self.config.tenants) == 1 else most - most // 4)

    def counted(self, principal: str, *, is_cancellation: bool = False) -> Counted:
        """Count a request of a tenant or address; a cancellation apart from the others. Raises `Overloaded`."""
        return (self._cancellations if is_cancellation else self._slots).counted(principal)

    def prepare(self, tenant: str) -> None:
        """A request of the tenant was answered: do what its next one would wait for."""
        self._ids.prepare(tenant)

    async def needs_key(self) -> bool:
        """Whether requests need a key, as the key file says now."""
        await self.keys.follower.refresh()
        return bool(self.keys)

    def is_operator(self, authorization: str | None) -> bool:
        """Whether the header carries the fleet's token."""
        return fleet_token.is_carried(authorization, self._secret)

    def reads_metrics(self, authorization: str | None) -> bool:
        """Whether the header carries the fleet's token, or the one for its metrics."""
        return fleet_token.reads_metrics(authorization, self._secret)

    # ---------------------------------------------------------------- tickets

    async def _take_prompt(self, caller: Caller, tokens: int) -> None:
        """Charge a prompt to the quotas. Raises `RateLimited`."""
        if self.quotas.apply_to(caller.key_id):
            await self._publisher.publish_if_needed(self.quotas, TOKENS, caller.tenant, caller.key_id, tokens)
            self.quotas.take_prompt(caller.tenant, tokens, caller.key_id)

    async def take_request(self, caller: Caller) -> None:
        """Charge a request to the quotas. Raises `RateLimited`."""
        if self.quotas.apply_to(caller.key_id):
            await self._publisher.publish_if_needed(self.quotas, REQUESTS, caller.tenant, caller.key_id, 1)
            self.quotas.take_request(caller.tenant, caller.key_id)

    async def ticket(
        self, caller: Caller, path: str, body: bytes, headers: Mapping[str, str], key: str | None, last_id: str
    ) -> Ticket:
        """A request for text. End its turn after it. Raises `StarlingError`."""
        key = read_key(key)
        read = await self._read(caller, path, body, headers)
        turn = Turn()
        try:
            if last_id:
                request_id = self._ids.check(request_of(last_id), caller.tenant)
            else:
                request_id = self._ids.of_key(caller.tenant, key) if key else self._ids.new(caller.tenant)
            digest, stored, before = b"", None, None
            if key:
                digest = await digest_of(digest_head(TEXT_PATHS[path], headers.get("Content-Encoding", "")), body)
                self._relay.kept.check_key(request_id, key, digest)
            if read.generation is not None and (key or last_id):
                of = caller.tenant, request_id, key, digest
                stored = await self.responses.check_key(read.generation, *of)
                before = self.responses.before(read.generation, stored)
                is_answered = stored is not None and before is not None and bool(digest) and stored.digest == digest
                if stored is not None and is_answered and not (read.is_stream or last_id):
                    routed = RoutedRequest(request_id=request_id, model=read.model)
                    forward = Forward(routed=routed, path=path, body=b"", headers={})
                    return Ticket(forward, caller.tenant, key_id=caller.key_id, stored=stored.body)
            if read.generation is not None and not last_id and before is None:
                turn = await self.responses.take_turn(read.generation, caller.tenant, request_id, key, digest)
            of_body = read, caller, path, body, headers
            return await self._ticket(*of_body, key, last_id, request_id, digest, before, turn)
        except BaseException as error:
            await turn.end()
            if isinstance(error, StarlingError):
                _name(error, read)
            raise

    async def _ticket(
        self,
        read: ReadBody,
        caller: Caller,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        key: str,
        last_id: str,
        request_id: str,
        digest: bytes,
        before: list[dict[str, Any]] | None,
        turn: Turn,
    ) -> Ticket:
        context, joined, stored_digest = None, None, digest
        if read.generation is not None:
            if read.generation.is_in_background:  # it has one without a key, too
                stored_digest = await digest_of(body)
            of = caller.tenant, caller.salt, request_id
            joined = await self.responses.join(read.generation, *of, key, stored_digest, before)
            read = read._replace(blocks=joined.blocks, prompt_bytes=joined.prompt_bytes)
            context = joined.context
        await self._take_prompt(caller, -(-read.prompt_bytes // CHARGED_BYTES))
        is_bound = read.session is not None
        agent = self.sessions.agent_of(caller.tenant, read.session)
        if not agent and (last_id or (key and is_bound)):
            agent = await self._locate(request_id, read.model, caller, is_certain=is_bound)
        elif not agent and key and (known := self._relay.kept.find(request_id)) is not None:
            agent = known[1]  # else the agent is agreed on when it is chosen
        elif agent and read.session and not (last_id or key) and self.move_session is not None:
            agent = await self.move_session(request_id, caller.tenant, read.session, read.model, agent)
        name = self._ids.name(request_id, is_keyed=bool(key), salt=caller.salt)
        sent = {**headers, "X-Starling-Request": name, RELAY: relay_header(caller.tenant, caller.priority)}
        if context is not None:
            sent[response_context.HEADER] = str(len(context))
        if key:
            sent["Idempotency-Key"] = hashlib.sha256(f"{caller.tenant}\0{key}".encode()).hexdigest()
        fields = read.generation.response if read.generation is not None else None
        continues = fields.conversation_id if fields else ""
        routed = RoutedRequest(
            request_id=request_id,
            model=read.model,
            prompt_bytes=read.prompt_bytes,
            blocks=read.blocks,
            pinned=agent,
            is_held=bool(read.session) and not read.begins_session,
            begins=f"{caller.tenant}\0{read.session}" if read.begins_session else "",
            has_moved=read.session is not None and self.sessions.take_moved(caller.tenant, read.session),
            has_context=context is not None,
        )
        forward = Forward(
            routed=routed,
            path=path,
            body=body + (context or b""),
            headers=sent,
            is_stream=read.is_stream,
            n_choices=read.n_choices,
            is_bound=is_bound,
            last_id=last_id,
            is_only_continued=bool(last_id and continues and before is None),
            digest=digest,
        )
        kept = self._relay.kept.find(request_id) if forward.is_only_continued else None
        if kept is not None and kept[0].path == path:  # with the conversation as it was
            same = {"body": kept[0].body, "headers": {**kept[0].headers, RELAY: sent[RELAY]}}
            forward = msgspec.structs.replace(forward, is_only_continued=False, **same)
        if len(forward.body) > len(body):  # with its conversation
            hold_body(len(forward.body) - len(body))
        job, queued = None, b""
        if read.generation is not None and read.is_stream and not last_id:
            queued = queued_response(read.generation, sent)
        if joined is not None and read.generation is not None and read.generation.is_in_background and not last_id:
            with suppress(ModelUnavailable, Overloaded):  # it waits for an agent
                self._router.choose(routed)
            whose = caller.tenant, caller.key_id
            job = self.responses.job_of(forward, joined, read.generation, *whose, stored_digest, self._wall())
        return Ticket(
            forward, caller.tenant, read.session, caller.key_id, job, continues=continues, turn=turn, queued=queued
        )

    async def plain_ticket(self, caller: Caller, path: str, body: bytes, headers: Mapping[str, str]) -> Ticket:
        """A request that any engine of the model answers, or the one of its session. Raises `StarlingError`."""
        read = await self._read(caller, path, body, headers)
        if read.converted:
            try:
                await self._take_prompt(caller, read.converted)
            except StarlingError as error:
                _name(error, read)
                raise
        agent = self.sessions.agent_of(caller.tenant, read.session)
        routed = RoutedRequest(request_id="", model=read.model, pinned=agent, is_held=read.session is not None)
        sent = {**headers, RELAY: relay_header(caller.tenant, caller.priority)}
        forward = Forward(routed=routed, path=path, body=body, headers=sent, is_bound=read.session is not None)
        return Ticket(forward, caller.tenant, read.session, caller.key_id)

    async def ticket_of(self, caller: Caller, request_id: str, last_id: str, *, is_body_held: bool = False) -> Ticket:
        """A request of the tenant that was sent before. Raises `NotFound`, `InvalidRequest`, `Overloaded`.

        is_body_held: the caller's request has brought the body, which counts already.
        """
        self._ids.check(request_id, caller.tenant)
        if last_id and request_of(last_id) != request_id:
            raise InvalidRequest(f"Last-Event-ID is of request {request_of(last_id)}, not of this one", "Last-Event-ID")
        kept = self._relay.kept.find(request_id)
        if kept is not None:
            forward, agent = kept
            if not is_body_held:
                hold_body(len(forward.body))  # it may be kept here alone before the answer ends
            routed = msgspec.structs.replace(forward.routed, pinned=agent, is_held=not forward.can_replay)
            again = msgspec.structs.replace(forward, routed=routed, last_id=last_id, was_sent=True)
            return Ticket(again, caller.tenant, key_id=caller.key_id, is_charged=not forward.in_background)
        relay = relay_header(caller.tenant, caller.priority)
        found = await self._locator.find(request_id, relay)
        if found is not None:
            forward = Forward(
                routed=RoutedRequest(request_id=request_id, model=found.model_id, pinned=found.agent_id, is_held=True),
                path=f"/v1/requests/{request_id}",
                body=b"",
                headers={RELAY: relay},
                method="GET",
                is_stream="event-stream" in found.content_type,
                last_id=last_id,
            )
            is_charged = not await self.responses.is_in_background(caller.tenant, request_id)
            return Ticket(forward, caller.tenant, key_id=caller.key_id, is_charged=is_charged)
        raise NotFound(f"there is no request {request_id}; answers of ended requests are stored for a short time only")

    async def tenants_by_salt(self) -> dict[str, str]:
        """The names of tenants by what engines get of their salts (`RequestIds.tenants`)."""
        await self.keys.follower.refresh()
        return self._ids.tenants(self.keys.salts())

    async def read_conversation(self, reader: str, body: bytes, headers: Mapping[str, str]) -> NewConversation:
        """The body of a request about a conversation. Raises `InvalidRequest`, `TooLarge`."""
        kind, coding = headers.get("Content-Type", ""), headers.get("Content-Encoding", "")
        read = partial(read_fields, reader, body, kind, coding, self.config.server.max_body_mb << 20)
        new: NewConversation = (await inline_or_not(body, headers, read))[1]
        return new

    async def _read(self, caller: Caller, path: str, body: bytes, headers: Mapping[str, str]) -> ReadBody:
        arguments = (
            path,
            body,
            headers.get("Content-Type", ""),
            headers.get("Content-Encoding", ""),
            self.config.server.max_body_mb << 20,
            caller.salt,
        )
        read = await inline_or_not(body, headers, partial(read_body, *arguments))
        try:
            model = self._router.resolve(read.model)
            if not self._router.is_known(model):
                await self._learn(read.model)
                model = self._router.resolve(read.model)
            if model != read.model:
                read = read._replace(model=model)
        except StarlingError as error:
            _name(error, read)
            raise
        return read

    # ---------------------------------------------------------------- where a request was

    async def _locate(self, request_id: str, model: str, caller: Caller, *, is_certain: bool) -> str:
        """The agent that has the request; "" if none has. `is_certain`: also the only one is asked."""
        kept = self._relay.kept.find(request_id)
        if kept is not None:
            return kept[1]
        relay = relay_header(caller.tenant, caller.priority)
        return await self._locator.locate(request_id, model, relay, is_certain=is_certain)

    async def locate_job(self, job: Job) -> str:
        """The agent that has a request in the background, which another orchestrator has sent; "" if none has."""
        return await self._locate(job.request_id, job.model, Caller(job.tenant), is_certain=False)

    async def cancel(self, caller: Caller, request_id: str) -> None:
        """End a request of the tenant at every engine that has it, or its wait for a model here. Raises `NotFound`."""
        self._ids.check(request_id, caller.tenant)
        was_waiting = self._relay.routes.cancel(request_id)
        relay = relay_header(caller.tenant, caller.priority)
        if not (await self._locator.end(request_id, relay) or was_waiting):
            raise NotFound(f"there is no request {request_id} in flight")

    async def running_response(self, caller: Caller, name: str) -> bytes | None:
        """A response that an engine generates, as it is now; None: none does."""
        relay = relay_header(caller.tenant, caller.priority)
        return await self._locator.response(f"{PATH}/{name}", relay)

    # ---------------------------------------------------------------- forwarding

    async def stream(self, ticket: Ticket, out: Out) -> None:
        """Forward a streamed request. Raises `StarlingError`, `Refusal`, `Unreachable` before it has begun."""
        reader = SessionReader(out) if ticket.session is not None else None
        if ticket.forward.may_be_response:
            is_response = ticket.forward.path == PATH
            keep, ends = self._keep_of(ticket), ticket.turn.end
            keeping = KeepingOut(out, keep, is_response=is_response, before_end=ends, queued=ticket.queued)

            def charge(events: int) -> None:
                used = keeping.usage.get("output_tokens")
                self._charge(ticket, events if used is None else used, is_all=used is not None)

            await self._relay.stream(ticket.forward, keeping, charge)
        else:
            await self._relay.stream(ticket.forward, reader or out, partial(self._charge, ticket))
        if reader is not None:
            self._remember(ticket, reader.session)

    async def whole(self, ticket: Ticket) -> tuple[int, dict[str, str], bytes]:
        """Forward a request that is not streamed. Raises `StarlingError`, `Refusal`, `Unreachable`."""
        forward = ticket.forward
        is_charged = bool(forward.id and ticket.is_charged and forward.method == "POST")
        # It may be called a minute after the client has left, which must not keep the body for so long.
        bare = ticket._replace(forward=msgspec.structs.replace(forward, body=b"")) if is_charged else None
        charge = partial(self._charge, bare) if bare is not None else None
        status, headers, body = await self._relay.whole(forward, charge)
        body, kept = response_context.split_kept(body, headers.get(response_context.KEPT_HEADER))
        end = body if ticket.forward.path == PATH else body[-512:]
        if ticket.forward.id and (used := _COMPLETION_TOKENS.search(end)):
            self._charge(ticket, int(used[1]))  # before anything is waited for: the client may leave
        if kept is not None:
            await self._keep_of(ticket)(body, kept)
        elif ticket.continues:
            raise without_record()
        if ticket.session is not None and ticket.forward.path == CLOSE_PATH:
            self.sessions.forget(ticket.tenant, ticket.session)
        elif ticket.session is not None:
            self._remember(ticket, session_in(body))
        return status, headers, body

    def _charge(self, ticket: Ticket, tokens: int, *, is_all: bool = False) -> None:
        """Charge the output that a client has got, once. `is_all`: from the beginning of the answer on."""
        if ticket.is_charged:
            is_all = is_all or not ticket.forward.last_id
            had = 0 if is_all else tokens_before(ticket.forward.last_id)
            fresh = self._relay.kept.uncharged(ticket.forward, tokens, is_all=is_all, had=had)
            self.quotas.charge_output(ticket.tenant, fresh, ticket.key_id)
            is_first = not ticket.forward.last_id and fresh == tokens  # else the prompt was counted with another part
            prompt_bytes = ticket.forward.routed.prompt_bytes if is_first else 0
            self.traffic.text(ticket.tenant, ticket.forward.routed.model, prompt_bytes, fresh)

    def _keep_of(self, ticket: Ticket) -> Keep:
        forward = ticket.forward
        return partial(
            self.responses.keep,
            ticket.tenant,
            digest=forward.digest,
            is_again=forward.is_read_again,
            turn=ticket.turn,
        )

    async def left(self, ticket: Ticket) -> None:
        """The client of a request has left. One with a key goes on at its engine, if one has it."""
        forward = ticket.forward
        if ticket.job is None and forward.outlives_client and self._relay.kept.find(forward.id) is not None:
            await ticket.turn.leave()

    async def delete_response(self, caller: Caller, name: str) -> None:
        """Remove a stored response. Raises `NotFound`, `StorageUnavailable`."""
        self._relay.kept.forget(self.responses.request_of(caller.tenant, name))
        await self.responses.delete(caller.tenant, name)

    def _remember(self, ticket: Ticket, session: str) -> None:
        kept = self._relay.kept.find(ticket.forward.id)
        if session and kept is not None:
            self.sessions.bind(ticket.tenant, session, kept[1])


_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":([0-9]{1,9})')
