"""All plugins of a gateway, in the configured order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from pipeline.api.requests.generation_request import GenerationRequest
from pipeline.config.schema import Config
from pipeline.errors import Conflict, InvalidRequest, StarlingError
from pipeline.observe.log_names import log_names
from pipeline.observe.metrics import Metrics
from pipeline.plugin_objects import object_of
from stages.gateway.plugins.process_client import PluginProcess
from stages.gateway.plugins.request_hook import ask
from stages.gateway.plugins.text_filter import Outlet, TextFilter, identity_of
from stages.gateway.requests.state import SequenceState

log = logging.getLogger("starling.gateway.plugins")

MIN_REPLY_BYTES = 16 << 20


class Plugins:
    """One per gateway that has plugins. `clock` is monotonic, in s; `on_change`: see `problem`."""

    def __init__(self, config: Config, clock: Callable[[], float], metrics: Metrics) -> None:
        """Raises `ConfigError` for a plugin that is not installed."""
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._metrics = metrics
        self._timeout_s = config.server.request_timeout_ms / 1000
        max_reply = max(MIN_REPLY_BYTES, 2 * config.server.max_body_mb << 20)
        self.processes = [
            PluginProcess(one, object_of(one), max_reply, lambda: self.on_change(), self._restarted(one.name))
            for one in config.plugins
        ]

    def _restarted(self, name: str) -> Callable[[], None]:
        return lambda: self._metrics.add("starling_plugin_restarts_total", name)

    def start(self) -> None:
        """Start the processes, in the running event loop."""
        for process in self.processes:
            process.start()

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(process.close() for process in self.processes))

    @property
    def problem(self) -> str:
        """Why requests would be refused now; "": they are not. A plugin that may be skipped is no reason."""
        for process in self.processes:
            if process.problem and process.config.on_failure == "refuse":
                return f"plugin {process.name}: {process.problem}"
        return ""

    # ---------------------------------------------------------------- requests

    async def before(
        self, generation: GenerationRequest, request_id: str, tenant: str, started_at: float
    ) -> GenerationRequest:
        """Return the request as the plugins leave it. Raises `StarlingError`."""
        try:
            async with asyncio.timeout(started_at + self._timeout_s - self._clock()):
                for process in self.processes:
                    generation = await self._before(process, generation, request_id, tenant)
            # A hint that would be journaled as it came, and whose usage tells whether the model wrote the same.
            generation = msgspec.structs.replace(generation, prediction=msgspec.UNSET)
        except TimeoutError:
            raise StarlingError(
                "TIMEOUT",
                f"the plugins did not process the request within {self._timeout_s:g} s, the time a request may take "
                "(server.request_timeout_ms); try again when the server is less busy",
            ) from None
        shown = next((p.name for p in self._post_processes()), "")
        if shown and generation.logprobs:
            raise InvalidRequest(
                f"logprobs would show the tokens of a text that the server's plugin {shown!r} may change; leave it out",
                "logprobs",
            )
        return generation

    async def _before(
        self, process: PluginProcess, generation: GenerationRequest, request_id: str, tenant: str
    ) -> GenerationRequest:
        outcome = "failed"  # also if the request's time ends meanwhile, or its client leaves
        try:
            changed = await ask(process, generation, request_id, tenant)
            outcome = "done"
            return changed
        except StarlingError as error:
            outcome = "refused" if error.code == "REFUSED_BY_PLUGIN" else "failed"
            if outcome == "refused" or process.config.on_failure == "refuse":
                raise
            outcome = "skipped"
            names = log_names(request_id, generation.model, tenant, generation.session_id or "")
            log.warning(
                "a plugin was skipped",
                extra={**names, "plugin": process.name, "reason": error.message},
            )
            return generation
        finally:
            self._metrics.add("starling_plugin_requests_total", process.name, outcome)

    def _post_processes(self) -> list[PluginProcess]:
        return [p for p in self.processes if (info := p.info or p.last_info) is not None and info.has_post]

    def chain(self) -> tuple[str, ...]:
        """The identities of the plugins that change answers, for `RequestSpec.plugins`."""
        return tuple(identity_of(process) for process in self._post_processes())

    def open_filter(self, sequence: SequenceState, outlet: Outlet) -> TextFilter:
        """Return the way of a sequence's text. Raises `Conflict` if the plugins are not those of its admission."""
        return TextFilter(sequence, [(self._process_of(one), one) for one in sequence.request.spec.plugins], outlet)

    def _process_of(self, identity: str) -> PluginProcess:
        name, _, rest = identity.rpartition("@")
        for process in self.processes:
            if process.name == name and rest.rpartition("#")[2] == process.options_digest:
                return process
        raise not_configured(identity)


def not_configured(identity: str) -> Conflict:
    """Return the error of a request whose answer needs a plugin that the server does not have."""
    return Conflict(
        f"the request was admitted with plugin {identity}, which is not configured any more or has other options: its "
        "answer would differ; send the request again"
    )
