"""The dashboard of a fleet: its agents and orchestrators, the variables `$agent` and `$orchestrator`."""

from __future__ import annotations

from tools.dashboard_panels import Dashboard, Panel, quantiles, rate, ratio

OF_ORCHESTRATOR = 'instance=~"$orchestrator"'
OF_AGENT = 'instance=~"$agent"'


def of_fleet(how: str, metric: str, by: str) -> str:
    """A gauge of orchestrators."""
    return f"{how} by ({by}) ({metric}{{{OF_ORCHESTRATOR}}})"


def of_agents(how: str, name: str, by: str) -> str:
    """A gauge of agents, starling_agent_NAME."""
    return f"{how} by ({by}) (starling_agent_{name}{{{OF_AGENT}}})"


FLEET = Dashboard(
    "starling-fleet",
    "Starling: fleet",
    (
        (
            Panel("Agents", "short", ((of_fleet("max", "starling_fleet_agents", "health"), "{{health}}"),)),
            Panel(
                "Leader and store",
                "short",
                (
                    (f"sum(starling_fleet_leader{{{OF_ORCHESTRATOR}}})", "orchestrators that lead"),
                    (f"min(starling_fleet_store_up{{{OF_ORCHESTRATOR}}})", "the store answers"),
                ),
            ),
            Panel("Agents that are degraded", "short", ((of_agents("max", "degraded", "instance"), "{{instance}}"),)),
        ),
        (
            Panel(
                "Requests",
                "reqps",
                ((rate("starling_requests_total", OF_ORCHESTRATOR, "endpoint"), "{{endpoint}}"),),
            ),
            Panel(
                "Duration of requests",
                "s",
                quantiles("starling_request_duration_seconds", OF_ORCHESTRATOR, "endpoint", "{{endpoint}}"),
            ),
            Panel(
                "Refused requests",
                "reqps",
                ((rate("starling_rejections_total", OF_ORCHESTRATOR, "code") + " or vector(0)", "{{code}}"),),
            ),
        ),
        (
            Panel(
                "Output tokens by model",
                "short",
                ((rate("starling_tokens_generated_total", OF_ORCHESTRATOR, "model"), "{{model}}"),),
                "Per second, as quotas count them.",
            ),
            Panel(
                "Tokens by tenant",
                "short",
                (
                    (
                        rate("starling_tenant_request_tokens_total", OF_ORCHESTRATOR, "tenant, kind"),
                        "{{tenant}} {{kind}}",
                    ),
                ),
                "Per second. Prompts are estimates from their bytes.",
            ),
            Panel(
                "Time to the first token",
                "s",
                quantiles("starling_time_to_first_token_seconds", OF_ORCHESTRATOR, "model", "{{model}}"),
                "Of streams.",
            ),
        ),
        (
            Panel(
                "Loads for requests",
                "short",
                (
                    (f"sum(starling_fleet_cold_waiting{{{OF_ORCHESTRATOR}}})", "requests that wait"),
                    (
                        f"sum by (outcome) (increase(starling_fleet_loads_total{{{OF_ORCHESTRATOR}}}[15m]))",
                        "loads {{outcome}}",
                    ),
                ),
                "Loads in 15 minutes.",
            ),
            Panel(
                "Requests and sessions that moved",
                "short",
                (
                    (rate("starling_fleet_moves_total", OF_ORCHESTRATOR, "cause") + " or vector(0)", "{{cause}}"),
                    (
                        rate("starling_fleet_session_moves_total", OF_ORCHESTRATOR, "outcome") + " or vector(0)",
                        "sessions {{outcome}}",
                    ),
                ),
                "Per second.",
            ),
            Panel(
                "Error of the estimated time to the first token",
                "s",
                (
                    (
                        ratio(
                            rate("starling_fleet_estimate_error_seconds_total", OF_ORCHESTRATOR),
                            f"({rate('starling_fleet_estimates_total', OF_ORCHESTRATOR)} > 0)",
                        )
                        + " or vector(0)",
                        "mean",
                    ),
                ),
            ),
        ),
        (
            Panel("Engines that are ready", "short", ((of_agents("sum", "model_ready", "model"), "{{model}}"),)),
            Panel(
                "Sequences at engines",
                "short",
                (
                    (of_agents("sum", "model_running_sequences", "model"), "{{model}} running"),
                    (of_agents("sum", "model_queue_length", "model"), "{{model}} waiting"),
                ),
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                ((of_agents("avg", "model_kv_cache_hit_ratio", "model"), "{{model}}"),),
            ),
        ),
        (
            Panel("Lease", "s", ((of_agents("min", "lease_seconds", "instance"), "{{instance}}"),)),
            Panel(
                "Restarts of engines since their load",
                "short",
                ((of_agents("sum", "model_engine_restarts", "model, instance"), "{{model}} on {{instance}}"),),
            ),
            Panel(
                "Last start of an engine",
                "s",
                ((of_agents("max", "model_load_seconds", "model, instance"), "{{model}} on {{instance}}"),),
            ),
        ),
        (
            Panel("Memory available", "bytes", ((of_agents("min", "memory_free_bytes", "instance"), "{{instance}}"),)),
            Panel(
                "Disk for downloads",
                "bytes",
                ((of_agents("min", "disk_free_bytes", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Models on the hosts",
                "bytes",
                ((of_agents("sum", "cached_bytes", "level"), "{{level}}"),),
            ),
        ),
    ),
)
