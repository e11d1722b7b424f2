"""`starling.Embedded`: the results of the reference implementation, whatever else the engine computes."""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import starling
from pipeline.config.load import resolve
from pipeline.errors import ConfigError, InvalidRequest, ModelNotFound, NotFound, ResourceError, StarlingError
from shm.arena import ArenaError
from starling.assembly import assemble
from starling.embedded import Embedded
from starling.generation import Generation
from tools.reference.exact_forward import ExactModel, ExactSequence
from tools.reference.sampling import Parameters, logprobs, sample
from tools.tiny_gguf import SHAPES, write_model

ROOT = Path(__file__).parents[2]
SHAPE = "odd"
VOCAB = SHAPES[SHAPE].vocab_size


def prompt(seed: int, n: int = 40) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, n)]


# One request of each kind: greedy, sampled, penalised, biased, with another order of sampler steps.
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7},
    {"seed": 2**64 - 1, "temperature": 0.7, "top_k": 20, "logprobs": 3},
    {"seed": 3, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"seed": 4, "logit_bias": {"5": 3.0, "9": -100.0}, "min_tokens": 4, "stop_token_ids": [11, 12]},
    {"seed": 5, "order": ["mask", "temperature", "top_k"], "top_k": 5, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("embedded") / "tiny.gguf", SHAPES[SHAPE], "Q4_0")


@pytest.fixture(scope="module", autouse=True)
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Checkpoints of these tests do not go into the developer's model directory."""
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.config.paths.models_dir", lambda env=None: directory)
        yield directory


@pytest.fixture
def engine(model_path: Path) -> Iterator[Embedded]:
    with Embedded.load(model_path, kv_cache_mb=4, ranks=2, page_tokens=16) as loaded:
        yield loaded
        if loaded._parts is not None:
            loaded._parts.kv.check()
            assert loaded.stats().kv_pages_leased == loaded.stats().requests_running == 0


def expected(path: Path, tokens: list[int], fields: dict[str, Any], n: int, eos: tuple[int, ...]) -> Generation:
    """What the reference implementation generates, with as many of the fields of a result as it defines."""
    stop_ids = tuple(sorted({*(() if fields.get("ignore_eos") else eos), *fields.get("stop_token_ids", ())}))
    p = Parameters(
        seed=fields.get("seed", 0),
        temperature=fields.get("temperature", 1.0),
        top_k=fields.get("top_k", 0),
        top_p=fields.get("top_p", 1.0),
        repetition=fields.get("repetition_penalty", 1.0),
        frequency=fields.get("frequency_penalty", 0.0),
        presence=fields.get("presence_penalty", 0.0),
        min_tokens=fields.get("min_tokens", 0),
        ignore_eos=fields.get("ignore_eos", False),
        mask_ids=stop_ids,
        bias=tuple((int(token), bias) for token, bias in fields.get("logit_bias", {}).items()),
        order=tuple(fields.get("order", Parameters.order)),
    )
    sequence = ExactSequence(ExactModel(path))
    history, new, finish = list(tokens), list(tokens), ""
    output: list[int] = []
    chosen: list[float] = []
    while not finish:
        logits = sequence.extend(new)[-1]
        token = sample(logits, np.array(history, np.int32), len(tokens), p)
        chosen.append(float(logprobs(logits, 1)[0][token]))
        history.append(token)
        output.append(token)
        new = [token]
        finish = "stop" if token in stop_ids else "length" if len(output) == n else ""
    if finish == "stop":
        output.pop()
    return Generation(
        id="",
        state="finished",
        text="",
        tokens=tuple(output),
        logprobs=tuple(chosen[: len(output)]),  # type: ignore[arg-type]
        finish_reason=finish,
        stop_string="",
        seed=p.seed,
        prompt_tokens=len(tokens),
        cached_tokens=0,
        error=None,
    )


# ------------------------------------------------------------------ the package


def test_importing_the_package_is_light() -> None:
    """No NumPy, no compiler and no sockets before `Embedded` is used; the version is the project's."""
    heavy = "[name for name in ('numpy', 'numba', 'zmq', 'aiohttp', 'stages', 'pipeline') if name in sys.modules]"
    code = f"import sys, starling; print(starling.__version__, {heavy}, 'Embedded' in dir(starling))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert done.stdout.split(maxsplit=1) == [version, "[] True\n"]


def test_the_package_has_no_other_public_names() -> None:
    assert starling.Embedded is Embedded
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = starling.Engine


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        ("other", {}, ModelNotFound, "no model 'other' is configured; configured: m"),
        ("m", {"spill_path": "/tmp"}, ConfigError, "spill_path has no effect inside one process"),
        ("m", {"draft_model": "m"}, ConfigError, "draft_model has no effect inside one process"),
        ("m", {"adapters": []}, ConfigError, "adapters has no effect inside one process"),
        ("m", {"pinned": True}, ConfigError, "pinned has no effect inside one process"),
        ("m", {"kv_type": "f8"}, ConfigError, "kv_type"),
        ("m", {"kv_cache": 3}, ConfigError, "kv_cache"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    model: str, settings: dict[str, Any], error: type[StarlingError], message: str
) -> None:
    config = resolve({"models": [{"name": "m", "path": "/none/m.gguf"}]}, {})
    with pytest.raises(error, match=message):
        Embedded.load(model, config=config, **settings)


def test_a_model_of_embeddings_is_refused() -> None:
    config = resolve({"models": [{"name": "bert", "path": "/none/bert.gguf"}]}, {})
    weights: Any = SimpleNamespace(hyper=SimpleNamespace(is_causal=False), digest=b"")
    with pytest.raises(ConfigError, match="model 'bert' has embeddings alone and generates no text"):
        assemble(config, config.models[0], weights)


# ------------------------------------------------------------------ results


@pytest.mark.slow
def test_results_equal_the_reference_implementation(engine: Embedded, model_path: Path) -> None:
    eos = engine._tokenizer.vocabulary.eos_ids
    ids = [engine.submit(prompt(i), max_tokens=12, **fields) for i, fields in enumerate(REQUESTS)]
    engine.run()
    for i, (request_id, fields) in enumerate(zip(ids, REQUESTS, strict=True)):
        found, wanted = engine.release(request_id), expected(model_path, prompt(i), fields, 12, eos)
        assert (found.tokens, found.finish_reason) == (wanted.tokens, wanted.finish_reason), fields
        if "logprobs" in fields:
            assert tuple(one.logprob for one in found.logprobs) == wanted.logprobs
            assert all(len(one.top) == 3 for one in found.logprobs)
        else:
            assert found.logprobs == ()
        assert found.text == engine.decode(found.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"ranks": 1}, {"ranks": 3, "page_tokens": 64}, {"max_batch_size": 2}])
def test_results_do_not_depend_on_the_batch_or_the_machine(model_path: Path, settings: dict[str, Any]) -> None:
    """Alone and together, on any number of ranks, with prompts that share pages, some of them from the cache."""
    shared = prompt(0, 70)
    prompts = [shared + prompt(i, 5 + i) for i in range(1, 9)]
    with Embedded.load(model_path, kv_cache_mb=4, ranks=1) as one:
        alone = [one.generate(tokens, max_tokens=9, seed=i).tokens for i, tokens in enumerate(prompts)]
    with Embedded.load(model_path, **{"kv_cache_mb": 4, **settings}) as many:
        for _ in range(2):
            ids = [many.submit(tokens, max_tokens=9, seed=i) for i, tokens in enumerate(prompts)]
            many.run()
            assert [many.release(one_id).tokens for one_id in ids] == alone
        assert many.stats().prompt_tokens_cached > 0


@pytest.mark.slow
def test_preempted_requests_finish_with_the_same_tokens(model_path: Path) -> None:
    """An arena that holds two of six sequences at their full length."""
    fields: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}
    with Embedded.load(model_path, kv_cache_mb=4, page_tokens=16) as roomy:
        alone = [roomy.generate(prompt(i), **fields).tokens for i in range(6)]
    with Embedded.load(model_path, kv_cache_mb=1, page_tokens=16) as tight:
        assert tight.stats().kv_pages < 6 * 190 // 16
        ids = [tight.submit(prompt(i), **fields) for i in range(6)]
        tight.run()
        assert [tight.release(one_id).tokens for one_id in ids] == alone
        assert tight.stats().preemptions > 0


@pytest.mark.slow
def test_without_max_tokens_an_output_ends_where_the_arena_does(model_path: Path) -> None:
    with Embedded.load(model_path, kv_cache_mb=1, page_tokens=16) as engine:
        room = 16 * engine.stats().kv_pages + 1  # the last token needs no page
        assert room < SHAPES[SHAPE].context_length
        found = engine.generate(prompt(1), temperature=0, ignore_eos=True)
        assert (found.finish_reason, len(found.tokens)) == ("length", room - found.prompt_tokens)


@pytest.mark.slow
def test_nothing_is_kept_of_ended_requests(engine: Embedded) -> None:
    for i in range(3):
        engine.generate(prompt(i), max_tokens=3, ignore_eos=True)
    parts = engine._open_parts()
    outbox = parts.scheduler.outbox
    assert not (outbox.tokens or outbox.rejected or outbox.pooled or outbox.events)
    assert not (parts.scheduler.table.live or parts.scheduler.table.scheduled)


@pytest.mark.slow
def test_text_grows_step_by_step_and_ends_before_a_stop_string(engine: Embedded) -> None:
    whole = engine.generate(prompt(1), max_tokens=60, temperature=0, ignore_eos=True)
    stop = whole.text[20:23]
    request_id = engine.submit(prompt(1), max_tokens=60, temperature=0, ignore_eos=True, stop=["never", stop])
    seen = [""]
    while engine.step():
        seen.append(engine.poll(request_id).text)
        assert seen[-1].startswith(seen[-2])
    found = engine.release(request_id)
    assert (found.finish_reason, found.stop_string) == ("stop", stop)
    assert found.text == whole.text[: whole.text.index(stop)]
    assert found.tokens == whole.tokens[: len(found.tokens)]
    assert len(found.tokens) < len(whole.tokens)


# ------------------------------------------------------------------ requests


@pytest.mark.slow
def test_requests_join_leave_and_are_forgotten(engine: Embedded) -> None:
    first = engine.submit(prompt(1), max_tokens=50, ignore_eos=True)
    for _ in range(5):
        assert engine.step()
    second = engine.submit(prompt(2), max_tokens=5, ignore_eos=True)
    while not engine.poll(second).is_finished:
        engine.step()
    assert engine.stats().requests_running == 1
    engine.cancel(first)
    cancelled = engine.poll(first)
    assert cancelled.finish_reason == "cancelled"
    assert 5 <= len(cancelled.tokens) < 50
    engine.cancel(first)  # ended already
    assert not engine.step()
    assert engine.release(first) == cancelled
    assert len(engine.release(second).tokens) == 5
    for forget in (engine.poll, engine.cancel, engine.release):
        with pytest.raises(NotFound, match=f"no request '{first}' is kept here"):
            forget(first)
    assert engine.stats().requests_kept == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature is 3"),
        ({"max_token": 3}, "max_token"),
        ({"n": 2}, "submit 2 times"),
        ({"stream": True}, "stream is a field of the HTTP server"),
        ({"session_id": ""}, "session_id is a field of the HTTP server"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids is {VOCAB}"),
        ({"max_tokens": 10**6}, "this model's maximum context length is"),
        ({"prompt_logprobs": 2}, "prompt_logprobs is a field of the HTTP server"),
        ({"keep_alive": "5m"}, "keep_alive is a field of the HTTP server"),
        ({"regex": "a+"}, "regex constrains the output, which only a server does"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["no token has this"]}, "which no token of the model has"),
    ],
)
def test_a_wrong_field_is_refused_by_name(engine: Embedded, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.submit([1, 2, 3], **fields)
    assert engine.stats().requests_kept == 0


@pytest.mark.slow
def test_a_parameter_whose_step_the_configured_order_leaves_out_is_refused(model_path: Path) -> None:
    with Embedded.load(model_path, kv_cache_mb=4, sampler_order=["mask", "temperature"]) as engine:
        with pytest.raises(InvalidRequest, match="top_k is 20, and the model's sampler_order"):
            engine.submit([1, 2, 3], top_k=20)
        engine.submit([1, 2, 3], top_k=20, order=["mask", "top_k"], max_tokens=1)


@pytest.mark.slow
def test_requests_of_a_lower_priority_number_are_computed_earlier(model_path: Path) -> None:
    with Embedded.load(model_path, kv_cache_mb=4, max_batch_size=1) as engine:
        ids = [engine.submit(prompt(i), max_tokens=30, ignore_eos=True, priority=5 - i) for i in range(6)]
        while not any(engine.poll(one).is_finished for one in ids):
            engine.step()
        assert [engine.poll(one).is_finished for one in ids] == [False] * 5 + [True]


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], [VOCAB], [-1], "", [1.5], [1, 2.5], [True], ["1"] * 2, [[1], [2]]])
def test_a_prompt_that_cannot_be_computed_is_refused(engine: Embedded, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        engine.submit(given, max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [b"text", bytearray(b"text"), memoryview(b"text"), {1: "a"}, {1, 2}, frozenset([1]), 5, None]
)
def test_a_prompt_that_is_neither_text_nor_a_sequence_is_refused(engine: Embedded, given: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt is of type {type(given).__name__}: expected a text or a seq"):
        engine.submit(given, max_tokens=1)
    assert engine.stats().requests_kept == 0


@pytest.mark.slow
def test_arenas_that_do_not_fit_are_a_resource_error(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ArenaError("/dev/shm has 4,096 bytes free")

    monkeypatch.setattr("starling.embedded.assemble", refuse)
    with pytest.raises(ResourceError, match="has 4,096 bytes free"):
        Embedded.load(model_path)


@pytest.mark.slow
def test_a_full_queue_refuses_and_recovers(model_path: Path) -> None:
    config = resolve({"scheduler": {"max_queue_depth": 3}}, {})
    with Embedded.load(model_path, config=config, kv_cache_mb=4, max_batch_size=1) as engine:
        ids = []
        with pytest.raises(StarlingError, match="queue of tiny is full") as caught:  # noqa: PT012
            for i in range(20):
                ids.append(engine.submit(prompt(i), max_tokens=3, ignore_eos=True))
        assert caught.value.code == "OVERLOADED"
        assert len(ids) >= 3
        engine.run()
        assert all(len(engine.release(one_id).tokens) == 3 for one_id in ids)
        engine.submit(prompt(0), max_tokens=3)


@pytest.mark.slow
def test_chat_messages_become_a_prompt_by_the_template(engine: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert "hello" in engine.decode(engine.render_chat(messages), skip_special=False)
    monkeypatch.setattr(engine, "_tokenizer", engine._tokenizer._replace(template=None))
    with pytest.raises(InvalidRequest, match="model 'tiny' has no chat template"):
        engine.render_chat(messages)


@pytest.mark.slow
def test_text_and_token_ids_of_a_prompt_are_the_same_request(engine: Embedded) -> None:
    text = "the lighthouse"
    by_text = engine.generate(text, max_tokens=6, seed=1)
    by_ids = engine.generate(engine.encode(text), max_tokens=6, seed=1)
    by_array = engine.generate(np.array(engine.encode(text)), max_tokens=6, seed=1)  # type: ignore[arg-type]
    assert (by_text.tokens, by_text.text) == (by_ids.tokens, by_ids.text) == (by_array.tokens, by_array.text)


def maps(folder: Path) -> list[str]:
    """Files below a folder that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {folder}/" in line]


@pytest.fixture
def arenas() -> Iterator[Path]:
    """A folder of the test alone: servers of other tests have arenas in /dev/shm, which come and go."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "not/there/yet"])
def test_the_directory_of_arenas_may_be_below_the_home_and_is_created(
    model_path: Path, arenas: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(arenas))
    config = resolve({"server": {"arena_dir": f"~/{name}"}}, {})
    with Embedded.load(model_path, config=config, kv_cache_mb=4, ranks=1):
        assert maps(arenas / name)


@pytest.mark.slow
def test_a_directory_of_arenas_that_cannot_be_made_is_a_resource_error(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = resolve({"server": {"arena_dir": str(tmp_path / "file" / "arenas")}}, {})
    with pytest.raises(ResourceError, match=r"server\.arena_dir.*/file/arenas: Not a directory") as caught:
        Embedded.load(model_path, config=config, kv_cache_mb=4, ranks=1)
    assert caught.value.param == "server.arena_dir"


@pytest.mark.slow
def test_closing_unmaps_everything_after_a_step_that_failed(
    model_path: Path, arenas: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the error and the results are kept."""

    def fail(step: int) -> int:
        raise MemoryError

    config = resolve({"server": {"arena_dir": str(arenas)}}, {})
    engine = Embedded.load(model_path, config=config, kv_cache_mb=4)
    request_id = engine.submit([1, 2, 3], max_tokens=50)
    monkeypatch.setattr(engine._open_parts().group, "compute", fail)
    with pytest.raises(MemoryError) as caught:
        engine.generate([1, 2, 3], max_tokens=50)
    monkeypatch.undo()
    result = engine.poll(request_id)
    gc.disable()
    try:
        engine.close()
        assert not maps(arenas)
    finally:
        gc.enable()
    assert result.error is not None and result.error.__cause__ is caught.value


def test_closing_leaves_nothing_behind(model_path: Path, arenas: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after Ctrl-C in `close`, which a second call completes."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config, threads = resolve({"server": {"arena_dir": str(arenas)}}, {}), set(threading.enumerate())
    engine = Embedded.load(model_path, config=config, kv_cache_mb=4, ranks=3)
    assert maps(arenas)
    assert not list(arenas.iterdir())  # mapped, and already without a name
    own = set(threading.enumerate()) - threads
    assert len(own) == 2
    request_id = engine.submit([1, 2, 3], max_tokens=50, ignore_eos=True)
    engine.step()
    for place, name in ((engine, "_fail_running"), (engine._owner, "own")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.close()
    engine.close()
    engine.close()
    assert not own & set(threading.enumerate())
    assert not maps(arenas)
    assert engine.release(request_id).finish_reason == "error"
    for call in (engine.step, engine.stats, lambda: engine.submit([1]), lambda: engine.generate([1])):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            call()
