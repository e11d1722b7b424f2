"""Forwards requests to engines, and moves them to another engine when one dies.

A request is sent with everything that its answer depends on (request_ids.py), so that each engine of the same version
gives the same answer.  Until an answer is complete:

    the engine or agent dies     the request goes to another agent, or to the restarted engine
    a stream has begun           the successor goes on from the output tokens (output_record.py), or computes them
                                 again, and what was delivered is dropped (event_cutter.py); an engine that has the
                                 request still continues after the last event
    no agent has the model       it is loaded, once for all who wait; streams get comments meanwhile. For a stream that
                                 has begun, only after its agent had the time to say that its engine starts again
    no agent can serve it        the request waits for one, up to the bound, and then gets the error
    its session has moved        the engine names the agent that has it

Without sockets: clients, clocks and the response are injected.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from pipeline.api import sse
from pipeline.api.output_text import REPLAYED, TEXT
from pipeline.api.output_tokens import OUTPUT
from pipeline.api.page_names import HEADER as PAGES
from pipeline.api.session_header import EXISTING
from pipeline.api.session_header import HEADER as SESSION
from pipeline.api.weights_header import HEADER as WEIGHTS
from pipeline.errors import ModelUnavailable, NotFound, StarlingError
from stages.orchestrator.cold_loads import ColdLoads
from stages.orchestrator.event_cutter import EventCutter, EventTooLargeError
from stages.orchestrator.forward import (
    MOVABLE_IN_STREAM,
    Bounds,
    Forward,
    NotRepeated,
    Out,
    Refusal,
    Tries,
    read_error,
)
from stages.orchestrator.handover import BringPages, Handovers
from stages.orchestrator.kept_requests import KeptRequests
from stages.orchestrator.key_claims import KeyClaims
from stages.orchestrator.opening import Abortable, E, Opening, Registered
from stages.orchestrator.passing import Passing, pass_events
from stages.orchestrator.registry import Registry
from stages.orchestrator.releases import Releases
from stages.orchestrator.request_locator import RequestLocator
from stages.orchestrator.route_finder import NextChange, RouteFinder, comment
from stages.orchestrator.router import Route, ScoreRouter
from stages.orchestrator.score import text_kind_of, version_of
from stages.orchestrator.slots import hold_answer
from stages.orchestrator.text_stream import TextStream, next_bytes
from stages.orchestrator.unread_answers import Charge, UnreadAnswers
from stages.orchestrator.upstream import Answer, Begins, Client, Unreachable, read_whole

log = logging.getLogger("starling.orchestrator")

NOT_TAKEN = (400, 403, 413)  # answers to output tokens that an engine does not continue from
MAX_LOST = 8  # engines in a row that may die under a request: one that kills engines must not kill them all


class Relay:
    """One per orchestrator. `clock`: monotonic, s."""

    def __init__(
        self,
        client: Client,
        router: ScoreRouter,
        registry: Registry,
        cold: ColdLoads,
        bounds: Bounds,
        clock: Callable[[], float],
        next_change: NextChange,
        progress_of: Callable[[str], str] = lambda model: "",
        *,
        replays_text: bool = True,
        bring_pages: BringPages | None = None,
        claims: KeyClaims | None = None,
    ) -> None:
        """`replays_text`: streams of other engines go on from their text; else they end with an error.

        `claims`: of requests with keys; None: there is no other orchestrator.
        """
        self.kept = KeptRequests(clock)
        self.locator = RequestLocator(router, client, bounds.silent_s)
        self.moves: Counter[str] = Counter()  # by cause
        self.replayed_texts = 0  # streams that another engine went on with from their text
        self.continued_tokens = 0  # output tokens from which another engine went on
        self.first_event: Callable[[str, float], object] = lambda model, seconds: None  # of a stream that has ended
        self._client = client
        self._router = router
        self._registry = registry
        self._clock = clock
        self._replays_text = replays_text
        self._answers: dict[str, dict[Abortable, Forward]] = {}  # by agent
        self._streams: dict[Abortable, tuple[EventCutter, Tries]] = {}  # those that have begun, by answer
        self._fixed: set[Abortable] = set()  # streams of text that have begun: they stay where they are
        self._releases = Releases(client)
        self._unread = UnreadAnswers(client)
        self._claims = claims or KeyClaims(None, lambda: False, clock)
        self.routes = RouteFinder(router, registry, cold, bounds, clock, next_change, progress_of, self._claims)
        self._handovers = Handovers(router, self._send_copy, self._releases.begin, clock, bring_pages)

    # ---------------------------------------------------------------- streams

    async def stream(self, forward: Forward, out: Out, charge: Callable[[int], object] = lambda events: None) -> int:
        """Forward a streamed request; the number of events. Raises `StarlingError` or `Refusal` before it has begun.

        `charge` is called with the number of events however it ends, also when its client leaves.
        """
        cutter = EventCutter(forward.last_id.encode(), self.kept.record(forward))
        tries = Tries(self._clock)
        tries.version = cutter.output.version
        try:
            while True:
                route = await self.routes.find(forward, tries, out)
                try:
                    if kind := text_kind_of(route.engine) if route.engine is not None else "":
                        return await self._text_from(route, forward, kind, tries, out)
                    await self._stream_from(route, forward, cutter, tries, out)
                    return cutter.n_events
                except (Unreachable, EventTooLargeError) as lost:
                    self._lost(route, forward, tries, str(lost))
                except Refusal as refusal:
                    self._refused(route, forward, tries, refusal)
        except (StarlingError, Refusal) as error:
            if not out.is_begun:
                raise
            shown = error if isinstance(error, StarlingError) else error.to_error()
            log.warning("a stream ends with an error", extra={"request_id": forward.id, "reason": shown.message})
            await out.fail(shown, cutter.open_choices(forward.n_choices))
            return tries.begun_text.tokens if tries.begun_text is not None else cutter.n_events
        finally:
            self.routes.left(tries)
            self.kept.left(forward, cutter.output)
            if tries.first_event_s and not (forward.last_id or forward.was_sent):
                self.first_event(forward.routed.model, tries.first_event_s)
            charge(tries.begun_text.tokens if tries.begun_text is not None else cutter.n_events)

    async def _stream_from(self, route: Route, forward: Forward, cutter: EventCutter, tries: Tries, out: Out) -> None:
        """Forward the events of one engine, up to the last one. Raises `Unreachable`, `Refusal`."""
        assert route.engine is not None
        begun, is_first = self._clock(), tries.count == 1 and not cutter.last_id

        def note(headers: Mapping[str, str]) -> None:
            if is_first:
                self._router.first_token(route, forward.routed, self._clock() - begun)
            self._router.name_pages(forward.routed, headers.get(PAGES, ""))

        accept = partial(self._accepted, route, forward, tries)
        holder = route.agent_id if forward.is_bound else ""
        passing = Passing(cutter, tries, out, version_of(route.engine), holder, accept, note)
        self._router.begin(route, forward.routed)
        try:
            answer = await self._open(route, forward, cutter, tries, passing)
            with self._registered(route, forward, answer, self._end):
                if not passing.is_accepted:
                    await self._check_status(answer)
                    passing.begin(answer)
                self._streams[answer] = cutter, tries
                while await pass_events(answer, passing, cutter):
                    await passing.deliver()
                    if cutter.error:
                        await self._on_error_event(cutter.error, out, cutter.error_code, cutter.before_error)
                        return
                if not cutter.is_over:
                    raise Unreachable("the stream ended before its last event")
        finally:
            self._router.end(route, forward.routed)

    async def _text_from(self, route: Route, forward: Forward, kind: str, tries: Tries, out: Out) -> int:
        """Forward the text of an engine that promises no equal bytes; the output tokens. Raises as `_stream_from`."""
        text = tries.text = tries.text or TextStream()
        begun, is_first = self._clock(), tries.count == 1
        self._router.begin(route, forward.routed)
        try:
            rest = text.restart()
            # Its door refuses a request to go on after an event, with the name of the header.
            extra = {"Last-Event-ID": forward.last_id} if forward.last_id else {}
            answer = await self._send(route, forward, extra, output=rest, header=TEXT)
            with self._registered(route, forward, answer, self._end):
                await self._accept(route, forward, answer, tries)
                if text.accepted(answer.headers):
                    self.replayed_texts += 1
                    await comment(out, f"{REPLAYED} {text.n_replays}: another engine goes on from the text so far")
                elif not out.is_begun:
                    out.begin(200, answer.headers)
                while data := await next_bytes(answer, text):
                    if is_first:
                        is_first = False
                        self._router.first_token(route, forward.routed, self._clock() - begun)
                    if events := text.feed(data):
                        tries.advanced()
                        tries.version = kind
                        self._fixed.add(answer)
                        await out.write(events)
                    if text.problem:
                        raise Unreachable(text.problem)
                    if text.error:
                        await self._on_error_event(text.error, out)
                        return text.tokens
                if not text.is_over:
                    raise Unreachable("the stream ended before its last event")
                return text.tokens
        finally:
            self._router.end(route, forward.routed)

    async def _open(
        self, route: Route, forward: Forward, cutter: EventCutter, tries: Tries, passing: Passing
    ) -> Answer:
        """Send the request, or continue it where the engine may have it already."""
        may_know = route.agent_id in tries.visited or tries.count == 1
        if cutter.last_id and may_know:
            answer = await self._send(route, forward, {"Last-Event-ID": cutter.last_id.decode("latin-1")})
            if answer.status != 404:
                cutter.restart(is_replay=False)
                return answer
            await self._read_refusal(route, forward, answer)
        if cutter.has_begun and forward.is_only_continued:
            raise NotFound(
                f"no engine has the request {forward.id} any longer, and its conversation may have changed, so that "
                "no other one can continue the stream; read the response, or send the request again"
            )
        if cutter.has_begun and not forward.can_replay:
            raise Unreachable("the engine does not have the request any longer, and no other one can repeat it")
        cutter.restart(is_replay=True)
        output = cutter.output.encode() if route.engine is not None and route.engine.can_continue else b""
        # What begins at once is counted at once: the tokens of `output` are counted first.
        answer = await self._send(route, forward, {}, output=output, begins=None if output else passing.begin)
        if output and answer.status == 200:
            self.continued_tokens += cutter.output.n_tokens
        elif output and answer.status in NOT_TAKEN:
            await self._read_refusal(route, forward, answer)
            answer = await self._send(route, forward, {})
        if answer.status == 409 and (forward.was_sent or route.agent_id in tries.visited):
            # The engine has it from an earlier attempt, of which nothing was delivered.
            await self._check_same(route, forward, answer)
            return await self._send(route, forward, {}, method="GET", path=f"/v1/requests/{forward.id}")
        return answer

    async def _on_error_event(self, event: bytes, out: Out, named: str = "", opening: bytes = b"") -> None:
        """Raises `Unreachable` if another engine may go on. `named`: the error's code, where the event has another one.

        `opening`: events before it.
        """
        data = event[event.find(b"data: ") + 6 :].strip()
        code, message = read_error(data)
        code = named or code
        if code in MOVABLE_IN_STREAM:
            raise Unreachable(message or code)
        end = sse.DONE if data.startswith(b'{"error":') else b""  # the engine's does not follow its error here
        await out.write(opening + event + end)

    # ---------------------------------------------------------------- whole answers

    async def whole(self, forward: Forward, charge: Charge | None = None) -> tuple[int, dict[str, str], bytes]:
        """Forward a request that is not streamed; status, headers and body. Raises `StarlingError`, `Refusal`.

        `charge` is called with the number of tokens if its client leaves, when it is known.
        """
        tries = Tries(self._clock)
        try:
            while True:
                route = await self.routes.find(forward, tries, None)
                try:
                    return await self._whole_from(route, forward, tries, charge)
                except Unreachable as lost:
                    self._lost(route, forward, tries, str(lost))
                except Refusal as refusal:
                    self._refused(route, forward, tries, refusal)
        finally:
            self.routes.left(tries)
            self.kept.left(forward)

    async def _whole_from(
        self, route: Route, forward: Forward, tries: Tries, charge: Charge | None
    ) -> tuple[int, dict[str, str], bytes]:
        on_unread = partial(self._unread.begin, forward=forward, charge=charge) if charge is not None else None
        self._router.begin(route, forward.routed)
        try:
            answer = await self._send(route, forward, {}, on_unread=on_unread)
            if answer.status == 409 and (forward.was_sent or route.agent_id in tries.visited):
                await self._check_same(route, forward, answer)
                path = f"/v1/requests/{forward.id}"
                answer = await self._send(route, forward, {}, method="GET", path=path, on_unread=on_unread)
            with self._registered(route, forward, answer, self._end, on_unread):
                await self._accept(route, forward, answer, tries)
                body = await read_whole(answer, hold_answer)
                return answer.status, dict(answer.headers), body
        finally:
            self._router.end(route, forward.routed)

    # ---------------------------------------------------------------- agents

    def _lost(self, route: Route, forward: Forward, tries: Tries, reason: str) -> None:
        """An engine or its agent has died, or sent something that is no answer; or the request is moved."""
        if tries.is_moving:
            tries.is_moving = False
            tries.was_lost = True
            self.moves["moved"] += 1
            tries.failed(route.agent_id)
            return
        if tries.successor == route.agent_id:
            tries.successor = ""
        self._registry.suspect(route.agent_id, reason)
        self.moves["lost"] += 1
        error = ModelUnavailable(
            f"agent {route.agent_id} stopped answering ({reason}), and no other agent can continue", retry_after_s=1.0
        )
        tries.was_lost = True
        tries.failed(route.agent_id, error)
        if forward.routed.begins and not route.must_hold:
            tries.hold(route.agent_id)
        log.warning(
            "an agent lost a request",
            extra={"request_id": forward.id, "agent": route.agent_id, "tries": tries.count, "reason": reason},
        )
        if tries.n_accepted > MAX_LOST:
            raise NotRepeated(error.message, retry_after_s=1.0)
        goes_on = bool(tries.version) and (tries.begun_text is None or self._goes_on(tries.begun_text))
        if tries.has_begun and not goes_on and not forward.is_bound:
            raise NotRepeated(
                f"the engine of {forward.routed.model} died, and it does not promise that another one gives the same "
                "answer; send the request again"
            )

    def _goes_on(self, text: TextStream) -> bool:
        return self._replays_text and text.can_go_on

    def _refused(self, route: Route, forward: Forward, tries: Tries, refusal: Refusal) -> None:
        """An engine has answered with an error. Raises it unless another agent may serve the request."""
        if refusal.moved_to and forward.is_bound and not tries.has_begun:
            tries.moved(route.agent_id, refusal, self._registry)
            return
        is_other_session = forward.is_bound and refusal.status == 404 and not tries.has_begun
        if not refusal.is_movable and not is_other_session:
            raise refusal
        self.moves["refused"] += 1
        # Behind a door an engine dies as a refusal: the agent lives.
        if route.engine is not None and route.engine.continues_text and refusal.code == "MODEL_UNAVAILABLE":
            tries.was_lost = True
            self._registry.doubt(route.agent_id)
        tries.failed(route.agent_id, refusal)
        if is_other_session:
            tries.lacks_session(route.agent_id, refusal)

    # ---------------------------------------------------------------- connections

    async def _send(
        self,
        route: Route,
        forward: Forward,
        extra: dict[str, str],
        method: str = "",
        path: str = "",
        output: bytes = b"",
        is_kept: bool = True,
        header: str = OUTPUT,
        begins: Begins | None = None,
        on_unread: Callable[[Route], bool] | None = None,
    ) -> Answer:
        """`output`: what follows the body, as `header` names it. `on_unread`: see `Registered`."""
        assert route.engine is not None
        headers = {**forward.headers, **extra}
        if route.engine.engine_key:
            headers["Authorization"] = f"Bearer {route.engine.engine_key}"
        method = method or forward.method
        body = forward.body if method == "POST" else b""
        if output:
            headers[header] = str(len(output))
        if route.must_hold:
            headers[SESSION] = EXISTING
        if ":" in route.engine.model_id:
            headers[WEIGHTS] = route.engine.digest
        if forward.id and is_kept:
            self.kept.put(forward, route.agent_id, route.engine)
        url = route.engine.engine_url + (path or forward.path)
        body = body + output if output else body
        opening = Opening(begins)
        take = opening.begin if begins is not None else None
        opened = self._client.open(method, url, headers, body, agent_id=route.agent_id, begins=take)
        with self._registered(route, forward, opening, on_unread=on_unread):
            return await opening.answer(opened)

    def _registered(
        self,
        route: Route,
        forward: Forward,
        exchange: E,
        end: Callable[[E], object] = lambda exchange: None,
        on_unread: Callable[[Route], bool] | None = None,
    ) -> Registered[E]:
        """The exchange ends early if its agent is lost. `end`: is called after it."""
        return Registered(self._answers, self._releases, route, forward, exchange, end, on_unread)

    async def _accept(self, route: Route, forward: Forward, answer: Answer, tries: Tries) -> None:
        """The engine has begun to answer. Raises `Refusal` for an error response."""
        await self._check_status(answer)
        self._accepted(route, forward, tries)
        self._router.name_pages(forward.routed, answer.headers.get(PAGES, ""))

    @staticmethod
    async def _check_status(answer: Answer) -> None:
        """Raises `Refusal` for an error response."""
        if answer.status != 200:
            raise Refusal(answer.status, answer.headers, await read_whole(answer, hold_answer))

    def _accepted(self, route: Route, forward: Forward, tries: Tries) -> None:
        assert route.engine is not None
        tries.n_accepted += 1
        self.kept.accepted(forward, route.agent_id, route.engine)

    async def _read_refusal(self, route: Route, forward: Forward, answer: Answer) -> Refusal:
        """An error response, after which its engine is asked once more. Raises `Unreachable`."""
        with self._registered(route, forward, answer, self._end):
            return Refusal(answer.status, answer.headers, await read_whole(answer, hold_answer))

    async def _check_same(self, route: Route, forward: Forward, answer: Answer) -> None:
        """Raises `Refusal` if the engine has another request with the key of this one."""
        refusal = await self._read_refusal(route, forward, answer)
        if refusal.is_of_key:
            raise refusal

    def _end(self, answer: Answer) -> None:
        """An exchange has ended, or is given up."""
        self._streams.pop(answer, None)
        self._fixed.discard(answer)
        self._handovers.ended(answer)
        answer.close()

    async def close(self) -> None:
        """Cancel what is still being sent."""
        await self.locator.close()
        await self._claims.close()
        await self._unread.close()
        await self._handovers.close()
        await self._releases.close()

    def lose_agent(self, agent_id: str, reason: str) -> int:
        """The agent is gone or silent: what it serves goes on elsewhere. The number of requests."""
        self.locator.lose_agent(agent_id, reason)
        answers = list(self._answers.get(agent_id, ()))
        for answer in answers:
            answer.abort(reason)
        return len(answers)

    def serves(self, agent_id: str) -> bool:
        """Whether requests are at the agent."""
        return bool(self._answers.get(agent_id))

    def move_streams(self, agent_id: str, reason: str) -> int:
        """The agent drains, or leaves: move the requests that another one can continue at once; how many it begins to.

        A stream goes on at this agent until another one has computed its prompt and tokens.
        """
        count = 0
        for answer, forward in list(self._answers.get(agent_id, {}).items()):
            if (
                answer in self._fixed
                or not forward.can_replay
                or not self._router.has_other(forward.routed.model, agent_id)
                or (isinstance(answer, Opening) and answer.has_begun)  # its task is about to run: at the next look
            ):
                continue
            cutter, tries = self._streams.get(answer, (None, None))
            if cutter is None or tries is None:
                answer.abort(reason)
                count += 1
            elif tries.version:
                switch = partial(self._switch, agent_id, answer, forward, tries, reason)
                count += self._handovers.begin(answer, agent_id, forward, cutter.output, tries, switch)
        return count

    def _switch(self, agent_id: str, answer: Abortable, forward: Forward, tries: Tries, reason: str) -> None:
        if answer in self._streams and self._router.has_other(forward.routed.model, agent_id):
            tries.is_moving = True
            answer.abort(reason)

    async def _send_copy(self, route: Route, copy: Forward, output: bytes) -> Answer:
        return await self._send(route, copy, {}, output=output, is_kept=False)
