"""What the benchmark looks at beside throughput: the worker's pauses, CPU at rest and under load, a long prompt
beside running streams, speculation, and memory over minutes.  All of Starling alone, over HTTP.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import paths
from pipeline.config.schema import Config, ModelConfig, ServerConfig
from shm import step_ring as sh
from shm.step_ring import attach_steps
from tools.bench.http.client import Ask, Run, drive
from tools.bench.http.server_under_test import CONTROL_PLANE, Starling
from tools.bench.http.workload import OUTPUT, Prompts, body, percentile

LONG_PROMPT = 4000
GAP_MS = 25.0  # running streams may pause so long for a long prompt, or
GAP_FACTOR = 3.0  # so many times their usual gap
FLAT = 0.02  # memory may grow by this part
PASSAGES = 24  # tried at most for one that is repeated
REPEATS = 0.9  # of an answer that repeats its prompt
SETTLE_S = 30.0  # before memory is looked at for the first time


class StepWatch:
    """Reads the times of steps from the steps arena: `look` often, at least once in eight steps."""

    def __init__(self, server: Starling) -> None:
        config = Config(server=ServerConfig(run_dir=str(server.run_dir)), models=(ModelConfig(name=server.model),))
        path = paths.arena_dir(config) / f"{config.models[0].slug}.steps"
        self._arena, self._steps, _ = attach_steps(Path(path))
        self._last = int(self._steps.control[sh.DONE])
        self._before = (0, 0, 0)  # step, entries, end
        self.pauses: list[tuple[int, float]] = []  # entries of a step and us between the one before and it
        self.steps: list[tuple[int, int, float]] = []  # tokens, attention positions, us
        self.missed = 0

    def look(self, _now: float = 0.0) -> None:
        steps = self._steps
        done = int(steps.control[sh.DONE])
        for number in range(self._last + 1, done + 1):
            if int(steps.control[sh.HEAD]) - number >= sh.SLOTS:  # another has its slot
                self.missed += 1
                continue
            slot = number % sh.SLOTS
            _, begun, ended, _ = steps.timing[slot].tolist()
            entries = int(steps.slot_head[slot, sh.SLOT_ENTRIES])
            parts = steps.entries[slot, :entries, sh.START : sh.COUNT + 1].tolist()
            tokens = sum(count for _, count in parts)
            positions = sum(count * start + count * (count + 1) // 2 for start, count in parts)
            self.steps.append((tokens, positions, (ended - begun) / 1e3))
            before, n, end = self._before
            if before == number - 1 and n == entries:
                self.pauses.append((entries, (begun - end) / 1e3))
            self._before = (number, entries, ended)
        self._last = done

    def figures(self, entries: int) -> dict[str, float]:
        """Pauses between two steps of that many sequences, microseconds."""
        found = [us for n, us in self.pauses if n == entries]
        return {
            "steps": len(found),
            "p50_us": round(percentile(found, 0.5), 1),
            "p95_us": round(percentile(found, 0.95), 1),
            "p99_us": round(percentile(found, 0.99), 1),
        }

    def close(self) -> None:
        self._arena.close()


def watched(server: Starling, clients: list[list[Ask]]) -> tuple[Run, StepWatch, dict[str, float]]:
    """A run with the worker's pauses, and the share of one core that each stage used meanwhile."""
    watch = StepWatch(server)
    try:
        before, began = server.cpu_s(), time.perf_counter()
        run = drive(server.address, clients, meanwhile=watch.look)
        seconds = time.perf_counter() - began
        used = {stage: round((cpu - before[stage]) / seconds, 4) for stage, cpu in server.cpu_s().items()}
    finally:
        watch.close()
    return run, watch, used


def pauses(server: Starling, prompts: Prompts, batch: int, output: int = 512) -> dict[str, Any]:
    """Steady decoding of `batch` streams: pauses between steps, CPU of the control plane."""
    asks = [[server.ask(body(server.model, prompts.text(16), output))] for _ in range(batch)]
    run, watch, used = watched(server, asks)
    control = sum(used.get(stage, 0.0) for stage in CONTROL_PLANE)
    rate = sum(a.tokens for a in run.answers) / run.seconds
    return {
        "batch": batch,
        "tokens_per_s": round(rate, 1),
        "pause": watch.figures(batch),
        "cpu": used,
        "control_plane_cpu": round(control, 4),
        "failed": sum(not a.is_good for a in run.answers),
    }


def at_rest(server: Starling, seconds: float = 10.0) -> dict[str, float]:
    """Share of one core that the whole server uses while nobody asks."""
    time.sleep(2.0)  # what the last request left to do
    before = server.cpu_s()
    time.sleep(seconds)
    used = {stage: round((cpu - before[stage]) / seconds, 4) for stage, cpu in server.cpu_s().items()}
    return {"all": round(sum(used.values()), 4), **used}


def long_prompt(server: Starling, prompts: Prompts, batch: int, tokens: int = LONG_PROMPT) -> dict[str, Any]:
    """Gaps of `batch` running streams with and without a prompt of `tokens` being computed beside them."""
    output = 480
    asks = [[server.ask(body(server.model, prompts.text(16), output))] for _ in range(batch)]
    late = _Late(server, server.ask(body(server.model, prompts.text(tokens), 4)), after_s=output / 4 * 0.008)
    run = late.drive(asks)
    arrived, first = late.answer.sent, late.answer.times[0]
    beside, usual = [], []
    for answer in run.answers:
        for begin, end in zip(answer.times, answer.times[1:], strict=False):
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
        "failed": sum(not a.is_good for a in [*run.answers, late.answer]),
    }


class _Late:
    """One more request, sent by a client of its own while a run is under way."""

    def __init__(self, server: Starling, ask: Ask, after_s: float) -> None:
        self._server = server
        self._ask = ask
        self._after_s = after_s

    def drive(self, clients: list[list[Ask]]) -> Run:
        found: list[Run] = []

        def later() -> None:
            time.sleep(self._after_s)
            found.append(drive(self._server.address, [[self._ask]]))

        thread = threading.Thread(target=later)
        thread.start()
        run = drive(self._server.address, clients)
        thread.join()
        self.answer = found[0].answers[0]
        return run


# ------------------------------------------------------------------ speculation


def speculation(server: Starling, prompts: Prompts, rounds: int, most: int = 8) -> dict[str, Any]:
    """Decoding at batch 1 with drafts against without, on text that repeats its prompt and on free text.

    Alternating; the time is from the first token to the last, so that the prompt counts for nothing.
    A small model does not always go on with a passage that it is given twice: one is taken with which it does.
    """
    repeating, repeats = "", 0.0
    for _ in range(PASSAGES):
        passage = prompts.text(120)
        prompt = f"Copy.\n{passage}\nCopy.\n{passage}\nCopy.\n{' '.join(passage.split(' ')[:9])}"
        answer = drive(server.address, [[server.ask(body(server.model, prompt, 150, temperature=0))]]).answers[0]
        share = repeated(answer.text, prompt)
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
            # Greedy text of a small model soon goes round in circles: free text is drawn.
            sampling = {"temperature": 0} if kind == "repeating" else {"temperature": 1.0, "seed": len(speeds[0])}
            for drafts in speeds:
                ask = server.ask(body(server.model, prompt, 150, speculate=drafts, **sampling))
                answer = drive(server.address, [[ask]]).answers[0]
                speeds[drafts].append((answer.tokens - 1) / (answer.times[-1] - answer.times[0]))
                texts.add(answer.text)
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
    """The part of the runs of so many words in `text` that stand in `prompt`, too."""
    new, old = text.split(), prompt.split()
    known = {tuple(old[i : i + words]) for i in range(len(old) - words + 1)}
    runs = [tuple(new[i : i + words]) in known for i in range(len(new) - words + 1)]
    return sum(runs) / len(runs) if runs else 0.0


# ------------------------------------------------------------------ memory


def memory(server: Starling) -> dict[str, dict[str, float]]:
    """By process, in 10^6 bytes: `private` (anonymous) and `resident` memory."""
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


def flat_memory(server: Starling, prompts: Prompts, seconds: float, batch: int = 16) -> dict[str, Any]:
    """Traffic of distinct prompts for so long; every process's memory after 30 s and at the end."""
    looks: list[dict[str, dict[str, float]]] = []
    began = time.perf_counter()
    total = failed = 0
    while (passed := time.perf_counter() - began) < seconds:
        if not looks and passed >= min(SETTLE_S, seconds / 2):
            looks.append(memory(server))
        asks = [[server.ask(body(server.model, prompts.text(100), OUTPUT)) for _ in range(4)] for _ in range(batch)]
        run = drive(server.address, asks)
        total += sum(a.tokens for a in run.answers)
        failed += sum(not a.is_good for a in run.answers)
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
