"""A request on its way: what is sent to engines, what was tried, and where the answer goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from pipeline.api.idempotency_key import HEADER, is_other_body
from pipeline.errors import MOVED_TO, ModelUnavailable, Overloaded, StarlingError
from shm.decoding import DECODE_ERRORS
from stages.orchestrator.interfaces import RoutedRequest
from stages.orchestrator.key_claims import KeyClaim
from stages.orchestrator.text_stream import TextStream

# Errors with which an engine refuses a request that another engine may serve.
MOVABLE = frozenset({"DRAINING", "MODEL_UNAVAILABLE", "OVERLOADED", "MODEL_NOT_FOUND", "INVALID_API_KEY"})
# And errors in the middle of a stream after which another engine may continue it.
MOVABLE_IN_STREAM = frozenset({"DRAINING", "MODEL_UNAVAILABLE", "INTERNAL"})
_PASSED_ON = frozenset({"retry-after", "x-should-retry", "content-type"})  # headers of a refusal


class NotRepeated(ModelUnavailable):
    """An engine has died under a request which must not be sent again, also if another agent is there."""


class StillLoading(ModelUnavailable):
    """An agent has not loaded a model in time, and goes on: another one would only begin anew."""


class NotRefused(ModelUnavailable):
    """A load has ended without the agent's answer: it was not asked, or is lost. It may be asked at any time."""


class Forward(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request as it is sent to engines, the same to each of them."""

    routed: RoutedRequest
    path: str
    body: bytes
    headers: dict[str, str]  # of the content, and X-Starling-Request
    method: str = "POST"
    is_stream: bool = False
    n_choices: int = 1  # of all prompts
    is_bound: bool = False  # to a session, also a new one: no other agent can go on with it
    last_id: str = ""  # the client's Last-Event-ID
    is_only_continued: bool = False  # its conversation may have changed: another engine would give another answer
    was_sent: bool = False  # before, for a client that reads the answer again
    in_background: bool = False  # a response that goes on without its client
    digest: bytes = b""  # of the body as it was sent, of a request with an Idempotency-Key

    @property
    def id(self) -> str:
        """The request's id."""
        return self.routed.request_id

    @property
    def can_replay(self) -> bool:
        """Whether another engine gives the same answer from its beginning."""
        return self.method == "POST" and not self.is_bound and not self.is_only_continued

    @property
    def is_claimed(self) -> bool:
        """Whether orchestrators agree on its agent: it has a key, and goes to any agent for the first time."""
        is_first = self.method == "POST" and not (self.in_background or self.was_sent)
        return is_first and "Idempotency-Key" in self.headers and not (self.routed.is_held or self.routed.begins)

    @property
    def may_be_response(self) -> bool:
        """Whether the answer may be one of /v1/responses: what is read again does not say."""
        return self.path == "/v1/responses" or self.method == "GET"

    @property
    def is_read_again(self) -> bool:
        """Whether a client may have had a part of the answer before."""
        return self.was_sent or self.method == "GET" or bool(self.last_id)

    @property
    def outlives_client(self) -> bool:
        """Whether an engine finishes it although its client has left: the client will repeat it, or another has it."""
        return "Idempotency-Key" in self.headers or self.in_background or self.method == "GET"


class Refusal(Exception):
    """An engine's error response, which can be passed on as it is."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = {name: value for name, value in headers.items() if name.lower() in _PASSED_ON}
        self.body = body
        self.code, self.message = read_error(body)
        self.param = read_param(body)
        # The agent that has the session of the request; "": this refusal is about something else.
        self.moved_to = next((value for name, value in headers.items() if name.lower() == MOVED_TO.lower()), "")

    @property
    def is_movable(self) -> bool:
        """Whether another engine may serve the request."""
        return (self.status in (502, 503, 504) and self.code != "TIMEOUT") or self.code in MOVABLE

    @property
    def is_of_key(self) -> bool:
        """Whether the engine has had the request's Idempotency-Key with another body."""
        return self.status == 409 and (self.param == HEADER or is_other_body(self.message))

    def to_error(self) -> StarlingError:
        """The same as an error of this process, for a stream that has begun."""
        message = self.message or f"the engine answered with {self.status}"
        return StarlingError(self.code or "INTERNAL", message, status=self.status)


def read_error(body: bytes) -> tuple[str, str]:
    """Code and message of an error body or event of this project's servers, or of OpenAI's form; "" if it has none.

    Anthropic's form has no codes. Each of its types but `timeout_error` stands for several.
    """
    try:
        error = msgspec.json.decode(body)["error"]
        code = str(error.get("code") or error.get("type") or "")
        return "TIMEOUT" if code == "timeout_error" else code, str(error.get("message") or "")
    except (*DECODE_ERRORS, KeyError, TypeError, AttributeError):
        return "", ""


def read_param(body: bytes) -> str:
    """The field at fault that an error body names; "" if it names none."""
    try:
        return str(msgspec.json.decode(body)["error"].get("param") or "")
    except (*DECODE_ERRORS, KeyError, TypeError, AttributeError):
        return ""


class Out(Protocol):
    """The response to the client."""

    @property
    def is_begun(self) -> bool:
        """Whether the head is sent, or about to be."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head."""

    async def write(self, data: bytes) -> None:
        """Send a part of the body: whole events and comments."""

    def write_now(self, data: bytes) -> bool:
        """Send them if nothing must be waited for; False: `write` must send them."""

    async def fail(self, error: StarlingError, open_choices: Sequence[int]) -> None:
        """Send what ends a stream with an error. `open_choices`: those that end with it."""


class Bounds(NamedTuple):
    """How long a request waits for an agent, s."""

    new_s: float = 10.0  # while no engine has taken it
    begun_s: float = 60.0  # after its engine has died
    silent_s: float = 3.0  # for a suspect agent's answer about a request


class Agents(Protocol):
    """What is asked of the registry."""

    def find(self, agent_id: str) -> object | None:
        """The record of an agent; None if it is not registered."""

    def has_emptied(self, agent_id: str) -> bool:
        """Whether the agent has left after all its sessions had moved."""


class Tries:
    """What was tried for one request. `clock` is monotonic, s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self.first_event_s = 0.0  # from its beginning to the first event of a stream; 0: none has come
        self.count = 0
        self.n_accepted = 0  # attempts since the answer last advanced that an engine has begun
        self.visited: set[str] = set()  # agents that may have the request
        self.excluded: set[str] = set()  # that have just failed it
        self.unfit: set[str] = set()  # that cannot load its model, or do not have its session
        self.not_held: Refusal | None = None  # the answer of an agent that does not have its session
        self.holder = ""  # the agent that has, or may have, its session, as was found out with it
        self.gone = ""  # an agent that has left, and may have taken its session with it
        self.may_begin = False  # its session: no agent has it
        self.version = ""  # that has begun the answer
        self.text: TextStream | None = None  # the stream, if its engine promises no equal bytes
        self.was_lost = False  # an engine died under it, or it has left one
        self.awaited: set[str] = set()  # agents that had the time to say whether they live, since the answer advanced
        self._referrers: set[str] = set()  # agents that have named another one
        self.n_referred = 0  # how often an engine has named another agent as its session's
        self.claim: KeyClaim | None = None  # of a request with a key
        self.has_asked = False  # the engines of other agents whether one has it
        self.claimed = ""  # the agent that it was claimed for
        self.unreached: set[str] = set()  # agents of claims that did not become ready here
        self.waits_since: float | None = None  # s of the clock: for that agent
        self.successor = ""  # the agent that has computed its prompt and tokens for it
        self.is_moving = False  # it leaves an agent that can still answer
        self.has_begun = False  # a part of the answer was delivered
        self.was_copy_late = False  # a further copy of the model was not loaded in time
        self.failure: Refusal | StarlingError | None = None  # the last one
        self._failing_since: float | None = None
        self._load_s = 0.0  # that the longest load for it took since it began to fail, s
        self._was_load_vain = False  # no engine of its version has been there since its own load

    @property
    def may_copy(self) -> bool:
        """Whether it may wait for a further copy of its model: not after one was late."""
        return not self.was_copy_late

    @property
    def begun_text(self) -> TextStream | None:
        """The stream, if such an engine has begun it."""
        return self.text if self.text is not None and self.text.has_begun else None

    def failed(self, agent_id: str, failure: Refusal | StarlingError | None = None) -> None:
        """An agent has failed it."""
        self.visited.add(agent_id)
        self.excluded.add(agent_id)
        if self.claimed == agent_id:
            self.claimed = ""
        self.failure = failure or self.failure
        self.wait()

    def routed(self, forward: Forward) -> RoutedRequest:
        """What routing uses of it for the next attempt."""
        known = forward.routed
        unchanged = not (self.excluded or self.unfit or self.version or self.holder or self.successor or self.claimed)
        if unchanged and not known.begins:
            return known
        pinned = self.successor or self.holder or self.claimed or ("" if known.pinned in self.unfit else known.pinned)
        return msgspec.structs.replace(
            known,
            excluded=frozenset(self.excluded | self.unfit),
            version=self.version,
            pinned=pinned,
            is_held=known.is_held or bool(self.holder) or bool(known.begins and not self.may_begin),
        )

    def lacks_session(self, agent_id: str, refusal: Refusal) -> None:
        """The agent has answered that it does not have the session, so that it has not begun the request either."""
        if agent_id == self.holder:  # the session has ended there since it moved
            self.holder = ""
            self.unfit |= self._referrers
        if agent_id == self.gone:
            self.gone = ""
        self.unfit.add(agent_id)
        self.visited.discard(agent_id)
        self.not_held = refusal

    def not_loaded(self, forward: Forward, agent_id: str, error: StarlingError, *, is_further: bool = False) -> None:
        """The agent cannot load the model, or a further copy.

        Raises the error if there is no use in asking another one.
        """
        asked = self.routed(forward)
        if isinstance(error, StillLoading) and is_further:
            self.was_copy_late = True  # others have the model
            return
        is_holder = asked.is_held and asked.pinned == agent_id
        if isinstance(error, Overloaded | StillLoading) or (is_holder and not self.was_lost):
            raise error
        (self.excluded if is_holder or isinstance(error, NotRefused) else self.unfit).add(agent_id)
        if not is_further:  # else others have it
            self.failure = error

    def hold(self, agent_id: str) -> None:
        """The agent has, or may have, the session of the request."""
        self.holder = agent_id
        self.unfit.clear()

    def begin_session(self, asked: RoutedRequest) -> bool:
        """Whether every agent has answered that it does not have the session, so that one of them may begin it."""
        if not (asked.is_held and asked.begins) or asked.pinned or self.gone or self.unasked:
            return False
        self.may_begin = True
        self.unfit.clear()
        self.excluded.clear()
        return True

    @property
    def unasked(self) -> set[str]:
        """Agents that have failed, so that they may have its session."""
        return self.excluded - self.unfit

    def referred(self, agent_id: str, by: str) -> None:
        """The engine of `by` has named the agent that has the session."""
        self.n_referred += 1
        self._referrers.add(by)
        self.hold(agent_id)
        self.excluded.discard(agent_id)
        self.wait()

    def moved(self, by: str, refusal: Refusal, agents: Agents) -> None:
        """The engine of `by` has named the agent that has the session, or had it: a tombstone may be old."""
        named = refusal.moved_to
        if agents.find(named) is not None:
            self.referred(named, by)
            return
        if not agents.has_emptied(named):  # else the session has moved on, or has ended
            self.gone = named
        self.failed(by, refusal)
        self.lacks_session(by, refusal)

    def check_referrals(self) -> None:
        """Raises `ModelUnavailable` once if a move is not complete: then the two agents name each other."""
        if self.n_referred > 1:
            self.n_referred = 1
            raise ModelUnavailable(f"the session is moving to or from agent {self.holder}; try again", "session_id")

    @property
    def waits_for_load(self) -> bool:
        """Whether it waits although agents cannot load its model: an engine that has died may start again."""
        return self.was_lost and self.not_held is None

    @property
    def may_load(self) -> bool:
        """Whether its model may be loaded for it: an answer that has begun has one load in vain, not one per agent."""
        return not (self.version and self._was_load_vain)

    def loaded(self, *, is_own: bool) -> None:
        """Its model was loaded.

        `is_own`: at the agent that was chosen for it; false: it waited for the load of others, at another agent.
        """
        self._was_load_vain = self._was_load_vain or is_own

    def sent(self) -> None:
        """An engine gets it."""
        self.count += 1
        self._was_load_vain = False

    def waited_for_load(self, seconds: float) -> None:
        """It has waited for a load: of the longest one, that time is none in which no agent was there."""
        if self._failing_since is not None:
            self._load_s = max(self._load_s, seconds)

    def wait(self) -> None:
        """There is no agent for it: the time in which one must come begins."""
        if self._failing_since is None:
            self._failing_since = self._clock()

    def give_up(self, error: StarlingError, forward: Forward, bounds: Bounds, may_be_there: bool = False) -> None:
        """No agent can serve the request now. Raises if no one is expected to in time.

        `may_be_there`: agents that have not answered yet may have its session.
        """
        failure = self.failure or error
        is_full = isinstance(error, Overloaded)  # so that an agent was not asked
        may_be_held = forward.is_bound and bool(self.unasked or self.gone or is_full or may_be_there)
        if self.unfit and not may_be_held and not self.waits_for_load:
            raise self.not_held or failure
        if failure is self.not_held:
            failure = error
        if is_full and not self.has_begun:
            raise failure
        if isinstance(self.failure, Refusal) and self.failure.status == 429 and not self.has_begun:
            raise self.failure
        self.wait()
        if self.is_late(bounds):
            raise failure

    def is_late(self, bounds: Bounds) -> bool:
        """Whether no agent has been there for as long as it may wait."""
        return self.failing_s() >= (bounds.begun_s if self.was_lost else bounds.new_s)

    def advanced(self) -> None:
        """A part of the answer has come."""
        if not self.has_begun:
            self.first_event_s = self._clock() - self._begun
        self.has_begun = True
        self.n_accepted = 0
        self._failing_since = None
        self._load_s = 0.0
        if self.was_lost:
            self.awaited.clear()

    def failing_s(self) -> float:
        """How long nothing has come since the first failure, without the longest load."""
        return self._clock() - self._failing_since - self._load_s if self._failing_since is not None else 0.0
