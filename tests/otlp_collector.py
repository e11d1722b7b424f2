"""An OpenTelemetry collector for tests: OTLP over HTTP on a port of its own, decoded with the real messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 120.0


class Collector:
    """Stores spans until it is closed. `status` other than 200: it refuses; `gate` not set: it does not answer."""

    def __init__(self, port: int = 0) -> None:
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.posts = 0  # that have arrived
        self.bodies: list[bytes] = []  # of those that were taken
        self.headers: list[dict[str, str]] = []
        self._spans: list[Any] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._arrived()
                collector.gate.wait()
                status = collector.status
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                if status == 200:
                    collector._take(self.path, body, dict(self.headers))

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _arrived(self) -> None:
        with self._changed:
            self.posts += 1
            self._changed.notify_all()

    def _take(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        assert path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            self.headers.append(headers)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans += scope.spans
            self._changed.notify_all()

    def wait(self, is_met: Callable[[], bool]) -> None:
        """Wait until something that has arrived makes it true."""
        with self._changed:
            assert self._changed.wait_for(is_met, WAIT_S), f"not met; spans: {[span.name for span in self._spans]}"

    def trace(self, trace_id: str) -> list[Any]:
        """The spans of a trace, which has arrived as a whole; its root first."""

        def found() -> list[Any]:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]

        self.wait(lambda: bool(found()))
        spans = found()
        ids = {span.span_id for span in spans}
        assert len(ids) == len(spans)
        (root,) = [span for span in spans if span.parent_span_id not in ids]
        return [root, *(span for span in spans if span is not root)]

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span or of an event."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
