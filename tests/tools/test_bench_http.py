"""The benchmark over HTTP: parsing of streams, refusals, fairness of tenants; and a run on a real server."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.config.schema import DEMO_MODEL, ModelConfig
from shm.checkpoint import load_index
from shm.pages import KvGeometry, pages_that_fit
from stages.scheduler.core.settings import Settings
from stages.worker.checkpoint.prepare import prepare_checkpoint
from starling.bench.figures import percentile
from starling.bench.load import Run, drive
from starling.bench.response import ClientRequest, Response
from tools.bench import disturbance
from tools.bench.http import baseline, command
from tools.bench.http.bound import first_token_lines, gap_lines
from tools.bench.http.command import main
from tools.bench.http.scenarios import repeated
from tools.bench.http.workload import WORKS, Outcome, Prompts, Row, ServerFigures, Work, order, outcome, table
from tools.bench.simulated import fit
from tools.simulate import Machine, Simulation, arrivals, poisson
from tools.tiny_gguf import SHAPES, write_model

WORK = Work(2, 10, requests=2)


def event(text: str = "", finish: str | None = None, **more: object) -> bytes:
    choices = [{"text": text, "index": 0, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


class _Streams(BaseHTTPRequestHandler):
    """Streams in chunks that split events, over persistent connections. The prompt chooses the behaviour."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "full":
            self.send_response(429)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"full")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        stream = event("a") + event() + event("b\n0\r\n\r\n") + event("", "length") + event(usage=usage)
        if body["prompt"] == "error":
            stream = event("a") + b'data: {"error": {"code": "TIMEOUT"}}\n\n'
        for at in range(0, len(stream), 37):
            piece = stream[at : at + 37]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        if body["prompt"] == "last":  # close the connection without announcing it
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streams) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_a_stream_is_parsed(address: tuple[str, int]) -> None:
    run = drive(
        address, [[ClientRequest({"prompt": "x"}), ClientRequest({"prompt": "y"})], [ClientRequest({"prompt": "z"})]]
    )
    assert [response.is_good for response in run.responses] == [True] * 3
    for response in run.responses:
        assert (response.text, response.tokens, response.prompt_tokens, response.finish) == (
            "ab\n0\r\n\r\n",
            3,
            7,
            "length",
        )
        assert len(response.times) == 2 and response.first_s > 0
    found = outcome(WORK, run)
    assert found.failed == 0 and found.tokens_per_s > 0 and found.order is None


def test_the_client_reconnects_when_the_server_has_closed(address: tuple[str, int]) -> None:
    run = drive(address, [[ClientRequest({"prompt": "last"}) for _ in range(4)] for _ in range(3)])
    assert [response.is_good for response in run.responses] == [True] * 12


def test_refusals_and_errors_count_as_failed(address: tuple[str, int]) -> None:
    requests = [ClientRequest({"prompt": p}) for p in ("full", "error", "x")]
    run = drive(address, [requests])
    full, error, good = run.responses
    assert (full.status, full.error, full.is_good) == (429, "full", False)
    assert "TIMEOUT" in error.error and not error.is_good
    assert good.is_good
    assert outcome(WORK, run).failed == 2


def _response(tenant: str, first: float) -> Response:
    response = Response(ClientRequest({}, tenant=tenant), 0.0)
    response.times = [first, first + 1]
    response.ended = first + 1
    return response


def test_fairness_is_measured_while_all_tenants_wait() -> None:
    names = "ab" + "abab" + "ab"
    even = order([_response(tenant, i) for i, tenant in enumerate(names)])
    assert even["spread"] <= 1
    uneven = order([_response(tenant, i) for i, tenant in enumerate("ab" + "aaaaa" + "bbbba")])
    assert uneven["spread"] == 5
    assert uneven["first_ms_a"] < uneven["first_ms_b"]


def test_rows_have_ratios() -> None:
    responses = [_response("a", 0.5)]
    responses[0].status, responses[0].finish, responses[0].tokens = 200, "length", 64
    found = outcome(WORKS[0], Run(responses, 0.0, 2.0))
    assert found.tokens_per_s == 42.7  # 64 tokens from the beginning to the last one at 1.5 s
    row = Row(WORKS[0], ServerFigures.of([found, found]), ServerFigures.of([found]))
    assert row.ratio == 1.0
    lines = table([row])
    assert len(lines) == 3 and "starling" in lines[1] and "llama-server" in lines[2]
    assert row.plain()["work"]["clients"] == 1


def test_each_row_is_compared_with_the_faster_baseline() -> None:
    """Of flash attention on and off: which one is faster differs between workloads, and between a row's figures."""

    def figures(tokens_per_s: float, first_ms: float) -> ServerFigures:
        speeds = (tokens_per_s, tokens_per_s - 30, tokens_per_s + 5)  # the median counts
        return ServerFigures.of([Outcome(speed, first_ms, first_ms, 1.0, 1.0, 0, 100) for speed in speeds])

    on, off = "llama-server", "llama-server -fa off"
    rows = [Row(work, figures(300, 50)) for work in WORKS[:3]]
    command.compare(rows[0], {on: figures(100, 200), off: figures(120, 250)})
    command.compare(rows[1], {on: figures(150, 200), off: figures(120, 100)})
    command.compare(rows[2], {})
    assert [(row.baseline_name, row.ratio, row.first_ratio) for row in rows] == [
        (off, 2.5, 0.25),
        (on, 2.0, 0.5),
        (on, None, None),
    ]
    assert [re.split("  +", line)[1] for line in table(rows[:2])[1:]] == ["starling", off, "starling", on]


def test_first_tokens_are_compared_with_their_target() -> None:
    def row(clients: int, ratio: float | None, shared: int = 0) -> Row:
        return Row(Work(clients, 100, shared=shared), served, first_ratio=ratio)

    responses = [_response("a", 0.5)]
    responses[0].status, responses[0].finish, responses[0].tokens = 200, "length", 64
    served = ServerFigures.of([outcome(WORKS[0], Run(responses, 0.0, 2.0))])
    rows = [row(1, 0.2), row(8, 0.4), row(16, 0.41), row(16, 0.1, shared=400), row(8, None)]
    assert first_token_lines(rows) == [
        "8 clients, 100 tokens: first token after 0.40 of the baseline's time, target 0.4: met",
        "16 clients, 100 tokens: first token after 0.41 of the baseline's time, target 0.4: MISSED",
    ]


def test_gaps_are_compared_with_their_targets() -> None:
    report = {
        "rows": [
            {
                "work": "16 streams",
                "served_tokens_per_s": [930.0, 900.0, 940.0],
                "kernels_tokens_per_s": [1000.0, 990.0, 1010.0],
                "gap": [0.07, 0.06, 0.11],
                "control": 0.084,
                "client": 0.02,
                "taken": 0.061,
                "without_step": 0.012,
                "target": 0.1,
                "holds": True,
            }
        ]
    }
    gap, parts = gap_lines(report)
    assert gap == "16 streams: 930 of 1,000 tokens/s of the kernels alone, gap 7 % (6 to 11), target 10 %: met"
    assert parts.startswith("  control plane 0.084 and client 0.020 of a core; ")
    assert parts.endswith("; ranks waited for their cores 6.1 % of the time, without a step 1.2 %")


def test_clients_may_begin_later(address: tuple[str, int]) -> None:
    run = drive(address, [[ClientRequest({"prompt": "x"})] for _ in range(3)], starts=[0.0, 0.1, 0.2])
    assert all(response.is_good for response in run.responses)
    assert all(a.sent - run.began >= at for a, at in zip(run.responses, (0.0, 0.1, 0.2), strict=True))


def test_the_cost_of_steps_is_fitted_despite_outliers() -> None:
    rng = random.Random(3)
    steps = []
    for _ in range(300):
        tokens, positions = rng.randrange(1, 500), rng.randrange(1, 100_000)
        took = 2000 + 300 * tokens + 0.1 * positions
        steps.append((tokens, positions, took * (3.0 if rng.random() < 0.05 else rng.uniform(0.97, 1.03))))
    found = fit(steps)
    assert found.fixed_us == pytest.approx(2000, rel=0.1)
    assert found.token_us == pytest.approx(300, rel=0.03)
    assert found.position_us == pytest.approx(0.1, rel=0.2)
    with pytest.raises(ValueError, match="at least 16"):
        fit(steps[:5])


def test_simulated_and_real_traffic_are_the_same() -> None:
    plan = list(arrivals(5.0, 20.0, 100, 50, seed=4))
    sim = Simulation(Settings("m", 8), Machine(fixed_us=500.0, token_us=10.0))
    poisson(sim, 5.0, 20.0, 100, 50, 4)
    sim.run()
    assert [record.submitted for record in sim.records.values()] == [when for when, _, _ in plan]
    assert [len(record.tokens) for record in sim.records.values()] == [output for _, _, output in plan]


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [[], [100], [4_000_000, 3, 33, 64]])
def test_the_kv_cache_holds_all_sequences_at_once(tmp_path: Path, sequences: list[int]) -> None:
    model = ModelConfig(name="m", path=str(write_model(tmp_path / "m.gguf", SHAPES["small"], "Q4_0")))
    index = prepare_checkpoint(model, tmp_path / "models")
    geometry = KvGeometry.of(load_index(index).hyper, 32, "f16")
    size = command.kv_cache_mb(model, index, sequences)
    n_pages = pages_that_fit(geometry, size << 20)
    assert n_pages >= sum(-(-tokens // 32) for tokens in sequences)
    assert size >= 512
    if len(sequences) > 1:
        assert pages_that_fit(geometry, (size - 2) << 20) < 125_000 + 1 + 2 + 2


def test_percentiles_without_values_are_zero() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_the_share_of_repeated_words() -> None:
    prompt = "a b c d e f g"
    assert repeated("c d e f g", prompt) == 1.0
    assert repeated("c d e f x y z w v", prompt) == pytest.approx(1 / 6)
    assert repeated("a b c", prompt) == 0.0


@pytest.mark.slow
def test_prompts_have_their_number_of_tokens(demo_gguf: Path, tmp_path: Path) -> None:
    from stages.tokenizer.opened_models import ModelSource, open_model

    index = prepare_checkpoint(ModelConfig(name=DEMO_MODEL, path=str(demo_gguf)), tmp_path)
    prompts, vocabulary = Prompts(index, 1), open_model(ModelSource(index)).vocabulary
    for work in WORKS:
        clients = prompts.requests(work, "m", {"a": "key"})
        assert len(clients) == work.clients and all(len(requests) == work.requests for requests in clients)
        texts = [request.body["prompt"] for requests in clients for request in requests]
        assert len(set(texts)) == len(texts)
        assert {len(vocabulary.encode(t, False, add_bos=True)) for t in texts} == {work.prompt + work.shared}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "has_words"), [(2000, True), (300, False)])
def test_prompts_of_a_random_model_consist_of_its_words(tmp_path: Path, size: int, has_words: bool) -> None:
    from stages.tokenizer.opened_models import ModelSource, open_model

    gguf = write_model(tmp_path / "m.gguf", SHAPES["small"]._replace(vocab_size=size), "Q8_0")
    index = prepare_checkpoint(ModelConfig(name="m", path=str(gguf)), tmp_path)
    if not has_words:
        with pytest.raises(RuntimeError, match="words that are one token, at least 32 are needed"):
            Prompts(index, 1)
        return
    vocabulary = open_model(ModelSource(index)).vocabulary
    texts = [Prompts(index, seed).text(1000) for seed in range(3)]
    assert len(set(texts)) == 3
    assert {len(vocabulary.encode(text, False)) for text in texts} == {1000}


@pytest.mark.slow
def test_it_runs_on_a_real_server_when_the_baseline_fails(
    demo_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "llama-server"
    broken.write_text("#!/bin/sh\necho what is wrong >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(baseline, "native_server", lambda: broken)
    monkeypatch.setattr(disturbance, "REPEATS", 0)  # the figures do not matter
    monkeypatch.setattr(command, "WORKS", (Work(1, 20), Work(4, 20, shared=40, requests=2)))
    arguments = ["--rounds", "1", "--only", "table", "--slots", "4"]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    value = json.loads(result.output.splitlines()[-1])["http"]["table"]
    assert "llama-server ended with code 3:\nwhat is wrong\nmeasuring Starling alone" in result.output
    assert (value["slots"], value["baseline"]) == (4, [])
    assert all(
        row["candidate"]["failed"] == 0 and row["candidate"]["tokens_per_s"]["median"] > 0 for row in value["rows"]
    )
