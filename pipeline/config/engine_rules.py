"""What the configuration of other engines (`fleet.agent.engines`) must not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.config.schema import Config

# Arguments that the agent gives the programs itself, or that would take an engine out of its hands.
# The programs read `_` as `-`.
OWN_ARGUMENTS = {
    "llama-server": frozenset(
        {
            *("-m", "--model", "--host", "--port", "-a", "--alias", "--api-key", "--api-key-file", "--metrics"),
            *("--prefill-assistant", "--no-prefill-assistant", "--reuse-port", "--api-prefix", "--slots"),
            *("--ssl-key-file", "--ssl-cert-file", "--context-shift", "--path", "--log-file"),
            *("-hf", "-hfr", "--hf-repo", "-mu", "--model-url", "--models-dir", "--config"),
        }
    ),
    "vllm": frozenset(
        {
            *("--model", "--served-model-name", "--host", "--port", "--uds", "--api-key", "--root-path"),
            *("--reasoning-parser", "--ssl-keyfile", "--ssl-certfile"),
            *("--generation-config", "--trust-remote-code", "--headless", "--enable-log-requests"),
            *("--config", "--hf-repo", "--model-url", "--models-dir"),
        }
    ),
}


def problems(config: Config, name_problem: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Key, value and reason of each problem. `name_problem`: why it is no model's name; "" when it is."""
    seen: set[str] = set()
    for index, engine in enumerate(config.fleet.agent.engines):
        key = f"fleet.agent.engines.{index}"
        if reason := name_problem(engine.model):
            yield f"{key}.model", repr(engine.model), reason
        if engine.model in seen or config.model(engine.model) is not None:
            reason = "another model has this name: in `models`, or in fleet.agent.engines; rename one"
            yield f"{key}.model", repr(engine.model), reason
        seen.add(engine.model)
        if not engine.path.startswith("/"):
            yield f"{key}.path", repr(engine.path), "expected an absolute path: engines run in a directory of their own"
        for argument in engine.args:
            if "\0" in argument or argument.partition("=")[0].replace("_", "-") in OWN_ARGUMENTS[engine.engine]:
                yield f"{key}.args", repr(argument), "the agent sets this argument itself; leave it out"
        if "\0" in engine.program + engine.path:
            yield f"{key}.program", "", "has a NUL character"
