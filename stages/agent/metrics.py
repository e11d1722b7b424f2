"""`/metrics` of an agent: its state, and that of its models, in the Prometheus text format."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from pipeline.fleet.bodies import HeartbeatResponse


class AgentMetrics:
    """Counters of the API, and gauges that are set from a heartbeat when they are asked for."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, expiry: Callable[[], float] | None = None) -> None:
        """`expiry`: the end of the agent's certificate, s since 1970; None: it has none."""
        registry = self._registry = CollectorRegistry()
        self._of_gpus: dict[str, Gauge] = {}  # those that have had a value

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"starling_agent_{name}", text, labels, registry=registry)

        self._requests = Counter(
            "starling_agent_requests", "Requests answered.", ("endpoint", "status"), registry=registry
        )
        self._degraded = gauge("degraded", "1 while the agent is degraded.")
        self._lease = gauge("lease_seconds", "Time for which the agent serves unless its lease is renewed.")
        self._memory = gauge("memory_free_bytes", "Memory available on the host.")
        self._disk = gauge("disk_free_bytes", "Space that downloads may take.")
        self._rate = gauge("download_bytes_per_second", "Speed of the last download.")
        self._standby = gauge("standby_engines", "Processes that wait to become the engine of a model.")
        model = ("model",)
        self._ready = gauge("model_ready", "1 while the engine of a model answers.", model)
        self._running = gauge("model_running_sequences", "Sequences being generated.", model)
        self._waiting = gauge("model_queue_length", "Sequences that wait.", model)
        self._hits = gauge("model_kv_cache_hit_ratio", "KV pages found in the prefix cache.", model)
        self._restarts = gauge("model_engine_restarts", "Restarts of the engine since the model was loaded.", model)
        self._load = gauge("model_load_seconds", "Time that the last start of the engine took.", model)
        if expiry is not None:
            text = "When the certificate of fleet.tls expires, in s since 1970; 0 if it is outdated."
            gauge("certificate_expiry_seconds", text).set_function(expiry)
        self._cached = gauge("cached_bytes", "Size of the models on this host, by where they are.", ("level",))

    def answered(self, endpoint: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(endpoint, str(status)).inc()

    def render(self, report: HeartbeatResponse, standby: int) -> bytes:
        """The text. `standby`: number of standby engines."""
        self._standby.set(standby)
        self._degraded.set(float(report.state == "DEGRADED"))
        self._lease.set(report.lease_s)
        self._memory.set(report.memory_free)
        self._disk.set(report.disk_free)
        self._set_of_gpus("gpu_utilization_ratio", "Time in which the GPUs compute, mean.", report.gpu_utilization)
        self._set_of_gpus("gpu_memory_free_bytes", "Memory available on all GPUs.", report.gpu_memory_free)
        self._rate.set(report.download_bytes_per_s)
        for one in (self._ready, self._running, self._waiting, self._hits, self._restarts, self._load, self._cached):
            one.clear()
        for model in report.loaded_models:
            name = model.model_id
            self._ready.labels(name).set(float(model.model_state == "READY"))
            self._running.labels(name).set(model.running)
            self._waiting.labels(name).set(model.vllm_queue_length)
            self._hits.labels(name).set(model.kv_cache_hit_rate)
            self._restarts.labels(name).set(model.restarts)
            self._load.labels(name).set(model.load_s)
        for cached in report.cached_models:
            self._cached.labels(cached.cache_level).inc(cached.bytes)
        return generate_latest(self._registry)

    def _set_of_gpus(self, name: str, text: str, value: float | UnsetType) -> None:
        """A host without a GPU has no such metric: 0 would be a value of one. NaN: the driver does not say it now."""
        if name not in self._of_gpus:
            if isinstance(value, UnsetType):
                return
            self._of_gpus[name] = Gauge(f"starling_agent_{name}", text, registry=self._registry)
        self._of_gpus[name].set(math.nan if isinstance(value, UnsetType) else value)
