"""Writes the Grafana dashboards of configs/grafana/dashboards from the tables below: `python -m tools.dashboards`.

A dashboard is a list of rows, a row a list of panels, a panel a title, a unit and its queries with their legends.
`$instance` and `$model` are variables of every dashboard that uses them.  The one of a fleet is in fleet_dashboard.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboard_panels import OF_MODEL, OF_SERVER, Dashboard, Panel, quantiles, rate, ratio
from tools.fleet_dashboard import FLEET

DIRECTORY = Path(__file__).parents[1] / "configs" / "grafana" / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
WIDTH, HEIGHT = 24, 8  # of the grid, of a panel
# The metric and its label that have the values of a variable.
VARIABLES = {
    "instance": ("starling_stage_up", "instance"),
    "model": ("starling_steps_total", "model"),
    "orchestrator": ("starling_fleet_agents", "instance"),
    "agent": ("starling_agent_degraded", "instance"),
}

# Probes and scrapes are left out: /ready answers 503 while the server is drained.
FAILED = rate("starling_requests_total", f'{OF_SERVER}, endpoint=~"/v1/.*", status=~"5..|429"') + " or vector(0)"
ACCEPTED = rate("starling_draft_tokens_total", f'{OF_MODEL}, outcome="accepted"', "model")
HITS = rate("starling_kv_cache_hits_total", OF_MODEL, "model")
MISSES = rate("starling_kv_cache_misses_total", OF_MODEL, "model")
PEERS_LOST = f"sum by (stage, reason) (increase(starling_peers_lost_total{{{OF_SERVER}}}[15m]))"
LEASED = f'sum by (model) (starling_kv_cache_pages{{{OF_SERVER}, state="leased"}})'
TOKENS = (
    (rate("starling_tokens_generated_total", by="model"), "{{model}} output"),
    (rate("starling_prompt_tokens_total", by="model, source"), "{{model}} prompt, {{source}}"),
)
TTFT = quantiles("starling_time_to_first_token_seconds", OF_MODEL, "model", "{{model}}")
STEP = quantiles("starling_step_seconds", OF_MODEL, "model, phase", "{{model}} {{phase}}")
TPOT = quantiles("starling_time_per_output_token_seconds", OF_MODEL, "model", "{{model}}")
GAPS = quantiles("starling_inter_token_seconds", OF_MODEL, "model", "{{model}}")
STAGES_UP = ((f"min by (stage) (starling_stage_ready{{{OF_SERVER}}})", "{{stage}}"),)
BATCH = (
    (
        ratio(rate("starling_batch_size_sum", OF_MODEL, "model"), rate("starling_batch_size_count", OF_MODEL, "model")),
        "{{model}}",
    ),
)
CPU = ((rate("starling_process_cpu_seconds_total", by="stage"), "{{stage}}"),)
MEMORY = ((f"sum by (stage) (starling_process_resident_bytes{{{OF_SERVER}}})", "{{stage}}"),)

DASHBOARDS = (
    Dashboard(
        "starling-overview",
        "Starling: overview",
        (
            (
                Panel("Requests", "reqps", ((rate("starling_requests_total", by="endpoint"), "{{endpoint}}"),)),
                Panel("Tokens", "short", TOKENS, "Per second."),
                Panel("Stages that accept work", "short", STAGES_UP, "1: ready."),
            ),
            (
                Panel("Time to the first token", "s", TTFT),
                Panel("Time per output token", "s", TPOT),
                Panel(
                    "Failed and refused requests",
                    "reqps",
                    (
                        (FAILED, "5xx and 429"),
                        (rate("starling_rejections_total", by="code") + " or vector(0)", "{{code}}"),
                    ),
                ),
            ),
            (
                Panel(
                    "Requests in flight",
                    "short",
                    (
                        (f"sum(starling_requests_in_flight{{{OF_SERVER}}})", "HTTP"),
                        (f"sum(starling_running_sequences{{{OF_SERVER}}})", "running sequences"),
                        (f"sum(starling_queue_depth{{{OF_SERVER}}})", "waiting sequences"),
                    ),
                ),
                Panel(
                    "Restarts and recoveries",
                    "short",
                    (
                        (
                            f"sum by (stage) (increase(starling_stage_restarts_total{{{OF_SERVER}}}[15m]))",
                            "restarts of {{stage}}",
                        ),
                        (f"sum(increase(starling_recoveries_total{{{OF_SERVER}}}[15m]))", "sequences submitted again"),
                    ),
                    "In 15 minutes.",
                ),
                Panel("CPU cores", "short", CPU),
            ),
        ),
    ),
    Dashboard(
        "starling-model",
        "Starling: models",
        (
            (
                Panel(
                    "Tokens",
                    "short",
                    ((rate("starling_tokens_generated_total", OF_MODEL, "model"), "{{model}}"),),
                    "Per second.",
                ),
                Panel(
                    "Prompt tokens by source",
                    "short",
                    ((rate("starling_prompt_tokens_total", OF_MODEL, "model, source"), "{{model}} {{source}}"),),
                ),
                Panel("Sequences per step", "short", BATCH),
            ),
            (
                Panel("Time to the first token", "s", TTFT),
                Panel("Time per output token", "s", TPOT),
                Panel(
                    "Wait in the queue", "s", quantiles("starling_queue_wait_seconds", OF_MODEL, "model", "{{model}}")
                ),
            ),
            (
                Panel("Gaps between tokens", "s", GAPS),
                Panel("Duration of a step", "s", STEP),
                Panel(
                    "Ended sequences",
                    "short",
                    ((rate("starling_finished_total", OF_MODEL, "model, reason"), "{{model}} {{reason}}"),),
                ),
                Panel(
                    "Draft tokens accepted",
                    "percentunit",
                    (
                        (
                            ratio(ACCEPTED, rate("starling_draft_tokens_total", OF_MODEL, "model")) + " or vector(0)",
                            "{{model}}",
                        ),
                    ),
                ),
            ),
            (
                Panel(
                    "KV pages",
                    "short",
                    ((f"sum by (model, state) (starling_kv_cache_pages{{{OF_MODEL}}})", "{{model}} {{state}}"),),
                ),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    (
                        (
                            ratio(HITS, f"({HITS} + {MISSES})"),
                            "{{model}}",
                        ),
                    ),
                ),
                Panel(
                    "Load of the model",
                    "s",
                    ((f"sum by (model, phase) (starling_model_load_seconds{{{OF_MODEL}}})", "{{model}} {{phase}}"),),
                ),
            ),
        ),
    ),
    Dashboard(
        "starling-tenants",
        "Starling: tenants",
        (
            (
                Panel("Requests", "reqps", ((rate("starling_tenant_requests_total", by="tenant"), "{{tenant}}"),)),
                Panel(
                    "Tokens",
                    "short",
                    ((rate("starling_tenant_tokens_total", by="tenant"), "{{tenant}}"),),
                    "Computed per second.",
                ),
            ),
            (
                Panel(
                    "Share of the tokens",
                    "percentunit",
                    (
                        (
                            ratio(
                                rate("starling_tenant_tokens_total", by="tenant"),
                                f"scalar({rate('starling_tenant_tokens_total')})",
                            ),
                            "{{tenant}}",
                        ),
                    ),
                ),
                Panel(
                    "Refusals", "reqps", ((rate("starling_rejections_total", by="code") + " or vector(0)", "{{code}}"),)
                ),
            ),
        ),
    ),
    Dashboard(
        "starling-stages",
        "Starling: stages",
        (
            (
                Panel("Running", "short", ((f"min by (stage) (starling_stage_up{{{OF_SERVER}}})", "{{stage}}"),)),
                Panel("Accepting work", "short", STAGES_UP),
                Panel(
                    "Restarts",
                    "short",
                    ((f"sum by (stage) (increase(starling_stage_restarts_total{{{OF_SERVER}}}[15m]))", "{{stage}}"),),
                    "In 15 minutes.",
                ),
            ),
            (
                Panel("CPU cores", "short", CPU),
                Panel("Memory", "bytes", MEMORY),
                Panel(
                    "Open files",
                    "short",
                    ((f"sum by (stage) (starling_process_open_fds{{{OF_SERVER}}})", "{{stage}}"),),
                ),
            ),
            (
                Panel(
                    "Steps repeated, sequences submitted again",
                    "short",
                    (
                        (rate("starling_steps_repeated_total") + " or vector(0)", "steps"),
                        (rate("starling_recoveries_total"), "sequences"),
                    ),
                ),
                Panel(
                    "Frames",
                    "short",
                    (
                        (rate("starling_frames_dropped_total") + " or vector(0)", "dropped"),
                        (rate("starling_frames_refused_total") + " or vector(0)", "refused"),
                        (rate("starling_late_frames_total") + " or vector(0)", "late"),
                    ),
                ),
                Panel(
                    "Peers lost",
                    "short",
                    (
                        (
                            f"{PEERS_LOST} or vector(0)",
                            "{{stage}} {{reason}}",
                        ),
                    ),
                    "In 15 minutes.",
                ),
                Panel(
                    "Traces for OpenTelemetry",
                    "short",
                    ((rate("starling_traces_total", by="outcome") + " or vector(0)", "{{outcome}}"),),
                ),
            ),
        ),
    ),
    Dashboard(
        "starling-capacity",
        "Starling: capacity",
        (
            (
                Panel(
                    "KV cache", "bytes", ((f"sum by (state) (starling_kv_cache_bytes{{{OF_SERVER}}})", "{{state}}"),)
                ),
                Panel(
                    "KV pages in use",
                    "percentunit",
                    (
                        (
                            ratio(LEASED, f"sum by (model) (starling_kv_cache_pages{{{OF_SERVER}}})"),
                            "{{model}}",
                        ),
                    ),
                ),
                Panel(
                    "Pages evicted, spilled, restored",
                    "short",
                    (
                        (rate("starling_kv_cache_evictions_total"), "evicted"),
                        (rate("starling_kv_cache_spilled_pages_total"), "spilled"),
                        (rate("starling_kv_cache_restored_pages_total"), "restored"),
                        (rate("starling_kv_cache_warmed_pages_total") + " or vector(0)", "warmed"),
                    ),
                ),
            ),
            (
                Panel(
                    "Arenas",
                    "bytes",
                    (
                        (
                            f"sum by (model, arena, state) (starling_arena_bytes{{{OF_SERVER}}})",
                            "{{model}} {{arena}} {{state}}",
                        ),
                    ),
                ),
                Panel("Disk", "Bps", ((rate("starling_process_io_bytes_total", by="direction"), "{{direction}}"),)),
                Panel("Network", "Bps", ((rate("starling_http_bytes_total", by="direction"), "{{direction}}"),)),
            ),
            (
                Panel("Memory", "bytes", MEMORY),
                Panel("CPU cores", "short", CPU),
                Panel(
                    "Waiting sequences",
                    "short",
                    ((f"sum by (model) (starling_queue_depth{{{OF_SERVER}}})", "{{model}}"),),
                ),
            ),
            (
                Panel("Preemptions", "short", ((rate("starling_preemptions_total") + " or vector(0)", "per second"),)),
                Panel("Sessions", "short", ((f"sum(starling_sessions{{{OF_SERVER}}}) or vector(0)", "open"),)),
                Panel(
                    "Failed disk operations",
                    "short",
                    (
                        (rate("starling_kv_cache_disk_errors_total"), "KV pages"),
                        (rate("starling_state_file_errors_total", by="files") + " or vector(0)", "{{files}}"),
                    ),
                ),
            ),
        ),
    ),
    FLEET,
)


def render(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    for y, row in enumerate(dashboard.rows):
        width = WIDTH // len(row)
        for x, panel in enumerate(row):
            place = {"x": x * width, "y": y * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
    used = json.dumps(panels)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["starling"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable(name, *of) for name, of in VARIABLES.items() if f"${name}" in used]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "exemplar": True,
            }
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, metric: str, label: str) -> dict[str, Any]:
    # Of a fleet "All" are those that have the metric, and no others: servers count requests, too.
    every = {} if name in ("orchestrator", "agent") else {"allValue": ".*"}
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        **every,
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> None:
    """Write all files."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        path = DIRECTORY / f"{dashboard.uid.removeprefix('starling-')}.json"
        path.write_text(json.dumps(render(dashboard), indent=1) + "\n")


if __name__ == "__main__":
    main()
