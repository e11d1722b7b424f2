"""Scenarios of the server under test alone, over HTTP: the worker's pauses between steps, CPU time at rest and under
load, a long prompt beside running streams, speculation, and memory over minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starling.bench.figures import percentile
from starling.bench.load import Run, drive
from starling.bench.response import ClientRequest
from tools.bench.http.server_under_test import CONTROL_PLANE, ServerUnderTest
from tools.bench.http.step_watch import StepWatch
from tools.bench.http.turns import Turns
from tools.bench.http.workload import OUTPUT, Prompts, body

LONG_PROMPT = 4000
OUTPUT_BESIDE = 480  # tokens of each stream beside such a prompt; more beside a longer one
LONG_S = 4 * 3600.0  # limit of a run with such a prompt
GAP_MS = 45.0  # longest gap of running streams that a long prompt may cause (policy/pacing.py), or
GAP_FACTOR = 3.0  # times their usual gap, if that is longer
FLAT = 0.02  # share by which a process's memory may grow
PASSAGES = 24  # passages that are tried until the model repeats one
REPEATS = 0.9  # share of a response that must stand in its prompt to count as repeating it
SETTLE_S = 30.0  # traffic before memory is measured for the first time
CLIENT = "client"  # this process, beside the stages


def watched(
    server: ServerUnderTest, clients: list[list[ClientRequest]], turns: Turns | None = None
) -> tuple[Run, StepWatch, dict[str, float]]:
    """Run the clients; returns also the times of the steps, and the share of a core of each stage and of `CLIENT`.

    turns: the server computes in turns with these. The shares are of the time in which it was not stopped.
    """
    watch = StepWatch(server)
    begun_s = client_s = time.process_time()

    def look(now: float) -> None:
        nonlocal client_s
        watch.look_sometimes(now)
        if turns is not None:
            turns.look(now, watch)
        client_s = time.process_time()  # not after the run: then the responses are parsed

    try:
        before = server.cpu_s()
        run = drive(server.address, clients, meanwhile=look)
        client_s -= turns.cpu_s if turns is not None else 0.0
        spent = {stage: cpu - before[stage] for stage, cpu in server.cpu_s().items()} | {CLIENT: client_s - begun_s}
        seconds = run.seconds - (turns.stopped_s if turns is not None else 0.0)
        watch.look()
        if turns is not None:
            turns.finish(watch)
        used = {stage: round(cpu / seconds, 4) for stage, cpu in spent.items()}
    finally:
        watch.close()
    return run, watch, used


def pauses(server: ServerUnderTest, prompts: Prompts, batch: int, output: int = 512) -> dict[str, Any]:
    """Steady decoding of `batch` streams: pauses between steps, CPU of the control plane."""
    requests = [[server.request(body(server.model, prompts.text(16), output))] for _ in range(batch)]
    run, watch, used = watched(server, requests)
    control = sum(used.get(stage, 0.0) for stage in CONTROL_PLANE)
    rate = sum(a.tokens for a in run.responses) / run.seconds
    return {
        "batch": batch,
        "tokens_per_s": round(rate, 1),
        "pause": watch.figures(batch),
        "cpu": used,
        "control_plane_cpu": round(control, 4),
        "failed": sum(not a.is_good for a in run.responses),
    }


def at_rest(server: ServerUnderTest, seconds: float = 10.0) -> dict[str, float]:
    """Share of one core that the whole server uses without requests."""
    time.sleep(2.0)  # until the last request's work is done
    before = server.cpu_s()
    time.sleep(seconds)
    used = {stage: round((cpu - before[stage]) / seconds, 4) for stage, cpu in server.cpu_s().items()}
    return {"all": round(sum(used.values()), 4), **used}


def beside_tokens(prompt: int) -> int:
    """Tokens of each stream beside a prompt of so many tokens, so that it runs until that has its first token."""
    return OUTPUT_BESIDE * max(1, 2 * prompt // LONG_PROMPT - 1)


def long_prompt(server: ServerUnderTest, prompts: Prompts, batch: int, tokens: int = LONG_PROMPT) -> dict[str, Any]:
    """Gaps of `batch` running streams, with and without a prompt of `tokens` tokens computed at the same time.

    Also the time to that prompt's first token, and whether all streams were running until then.  `RuntimeError` if the
    prompt is not answered.
    """
    output = beside_tokens(tokens)
    requests = [[server.request(body(server.model, prompts.text(16), output))] for _ in range(batch)]
    late = _Late(server, server.request(body(server.model, prompts.text(tokens), 4)), after_s=OUTPUT_BESIDE / 4 * 0.008)
    run = late.drive(requests)
    if not late.response.is_good:
        raise RuntimeError(f"the prompt of {tokens} tokens failed: {late.response.error or late.response.finish}")
    arrived, first = late.response.sent, late.response.times[0]
    beside, usual = [], []
    for response in run.responses:
        for begin, end in zip(response.times, response.times[1:], strict=False):
            if end <= arrived or begin >= first:
                usual.append(1e3 * (end - begin))
            else:
                beside.append(1e3 * (end - begin))
    usual_ms, beside_ms = percentile(usual, 0.99), percentile(beside, 0.99)
    allowed = max(GAP_MS, GAP_FACTOR * usual_ms)
    return {
        "batch": batch,
        "prompt": tokens,
        "usual_p50_ms": round(percentile(usual, 0.5), 2),
        "usual_p99_ms": round(usual_ms, 2),
        "beside_p50_ms": round(percentile(beside, 0.5), 2),
        "beside_p99_ms": round(beside_ms, 2),
        "gaps": len(beside),
        "allowed_ms": round(allowed, 2),
        "holds": beside_ms <= allowed,
        "first_token_ms": round(1e3 * (first - arrived), 1),
        "all_running": all(response.times[-1] >= first for response in run.responses),
        "failed": sum(not a.is_good for a in [*run.responses, late.response]),
    }


class _Late:
    """One more request, sent by a separate client during a run."""

    def __init__(self, server: ServerUnderTest, request: ClientRequest, after_s: float) -> None:
        self._server = server
        self._request = request
        self._after_s = after_s

    def drive(self, clients: list[list[ClientRequest]]) -> Run:
        found: list[Run] = []

        def later() -> None:
            time.sleep(self._after_s)
            found.append(drive(self._server.address, [[self._request]], LONG_S))

        thread = threading.Thread(target=later)
        thread.start()
        run = drive(self._server.address, clients, LONG_S)
        thread.join()
        self.response = found[0].responses[0]
        return run


# ------------------------------------------------------------------ speculation


def speculation(server: ServerUnderTest, prompts: Prompts, rounds: int, most: int = 8) -> dict[str, Any]:
    """Decoding at batch 1 with and without draft tokens, on text that repeats its prompt and on free text.

    Both alternate; the time is taken from the first token to the last, so the prompt does not count.  A small model
    does not always continue a passage that it is given twice: passages are tried until it does.
    """
    repeating, repeats = "", 0.0
    for _ in range(PASSAGES):
        passage = prompts.text(120)
        prompt = f"Copy.\n{passage}\nCopy.\n{passage}\nCopy.\n{' '.join(passage.split(' ')[:9])}"
        response = drive(server.address, [[server.request(body(server.model, prompt, 150, temperature=0))]]).responses[
            0
        ]
        share = repeated(response.text, prompt)
        if share > repeats or not repeating:
            repeating, repeats = prompt, share
        if repeats >= REPEATS:
            break
    speeds: dict[int, list[float]]
    kinds: dict[str, Callable[[], str]] = {"repeating": lambda: repeating, "free": lambda: prompts.text(40)}
    result: dict[str, Any] = {}
    for kind, text in kinds.items():
        speeds = {0: [], most: []}
        same = True
        for _ in range(rounds):
            prompt, texts = text(), set()
            # Greedy text of a small model soon repeats itself, so free text is sampled.
            sampling = {"temperature": 0} if kind == "repeating" else {"temperature": 1.0, "seed": len(speeds[0])}
            for drafts in speeds:
                request = server.request(body(server.model, prompt, 150, speculate=drafts, **sampling))
                response = drive(server.address, [[request]]).responses[0]
                speeds[drafts].append((response.tokens - 1) / (response.times[-1] - response.times[0]))
                texts.add(response.text)
            same = same and len(texts) == 1
        ratios = [b / a for a, b in zip(speeds[0], speeds[most], strict=True)]
        result[kind] = {
            "plain_tokens_per_s": round(percentile(speeds[0], 0.5), 1),
            "drafting_tokens_per_s": round(percentile(speeds[most], 0.5), 1),
            "ratio": round(percentile(ratios, 0.5), 2),
            "lowest": round(min(ratios), 2),
            "same_text": same,
        }
    result["repeating"]["repeats"] = round(repeats, 2)
    return result


def repeated(text: str, prompt: str, words: int = 4) -> float:
    """Share of the runs of `words` words in `text` that `prompt` contains as well."""
    new, old = text.split(), prompt.split()
    known = {tuple(old[i : i + words]) for i in range(len(old) - words + 1)}
    runs = [tuple(new[i : i + words]) in known for i in range(len(new) - words + 1)]
    return sum(runs) / len(runs) if runs else 0.0


# ------------------------------------------------------------------ memory


def memory(server: ServerUnderTest) -> dict[str, dict[str, float]]:
    """Private (anonymous) and resident memory of each process, in 10^6 bytes."""
    found = {}
    for stage, pids in server.stages().items():
        for i, pid in enumerate(pids):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                continue
            fields = {key: value for key, _, value in (line.partition(":") for line in lines)}
            kb = {name: int(fields[name].split()[0]) for name in ("RssAnon", "VmRSS")}
            found[f"{stage}/{i}" if i else stage] = {
                "private_mb": round(kb["RssAnon"] / 1e3, 2),
                "resident_mb": round(kb["VmRSS"] / 1e3, 2),
            }
    return found


def flat_memory(server: ServerUnderTest, prompts: Prompts, seconds: float, batch: int = 16) -> dict[str, Any]:
    """Send distinct prompts for `seconds`; returns every process's memory after `SETTLE_S` and at the end."""
    looks: list[dict[str, dict[str, float]]] = []
    began = time.perf_counter()
    total = failed = 0
    while (passed := time.perf_counter() - began) < seconds:
        if not looks and passed >= min(SETTLE_S, seconds / 2):
            looks.append(memory(server))
        requests = [
            [server.request(body(server.model, prompts.text(100), OUTPUT)) for _ in range(4)] for _ in range(batch)
        ]
        run = drive(server.address, requests)
        total += sum(a.tokens for a in run.responses)
        failed += sum(not a.is_good for a in run.responses)
    looks.append(memory(server))
    first, last = looks[0], looks[-1]
    growth = {
        name: {kind: round(last[name][kind] / first[name][kind] - 1, 4) for kind in first[name]}
        for name in first
        if name in last
    }
    worst = max(max(kinds.values()) for kinds in growth.values())
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "tokens": total,
        "failed": failed,
        "at_30_s": first,
        "at_end": last,
        "growth": growth,
        "worst": worst,
        "holds": worst <= FLAT,
        "cores": os.cpu_count(),
    }
