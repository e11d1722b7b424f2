"""What an agent says of its host's GPUs: their drivers' numbers, and nothing without one."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from pipeline.fleet.bodies import HeartbeatResponse, LoadedModel, ModelState
from pipeline.fleet.model_states import translate_loading
from stages.agent import gpus as gpus_module
from stages.agent.gpus import MEBIBYTE, Gpus, GpuUse, parse_query
from stages.agent.heartbeat import GPU_AGE_S, GPU_SILENT_S
from stages.agent.metrics import AgentMetrics
from tests.fleet.coordination_stores import until
from tests.fleet.test_engines import Busy
from tests.fleet.test_heartbeat import placed, reporter_of

GIB = 1 << 30


def nvidia_smi(folder: Path, script: str) -> Gpus:
    """A host with this program and no other GPU."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Gpus({"PATH": str(folder)}, folder / "drm")


def test_the_numbers_are_those_of_nvidia_smi(tmp_path: Path) -> None:
    script = """echo "$@" > "${0%/*}/arguments"; echo "50, 1024"; echo "100, 3072" """
    assert nvidia_smi(tmp_path, script).read() == GpuUse(0.75, 4 * GIB)
    asked = (tmp_path / "arguments").read_text().split()
    assert asked == ["--query-gpu=utilization.gpu,memory.free", "--format=csv,noheader,nounits"]
    # The parts of a divided GPU have no common use, and some GPUs have the host's memory.
    assert nvidia_smi(tmp_path, 'echo "[N/A], 1024"; echo "20, [N/A]"').read() == GpuUse(0.2, GIB)
    assert nvidia_smi(tmp_path, 'echo "[Not Supported], [Not Supported]"').read() == GpuUse(None, None)


def test_a_program_without_a_driver_is_no_gpu(tmp_path: Path) -> None:
    assert nvidia_smi(tmp_path, "echo No devices were found, 6; exit 6").read() is None
    assert nvidia_smi(tmp_path, "").read() is None
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")  # of another machine
    assert Gpus({"PATH": str(tmp_path)}, tmp_path / "drm").read() is None
    assert Gpus({}, tmp_path / "drm").read() is None


def test_a_program_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus_module, "ANSWER_S", 0.1)
    with pytest.raises(TimeoutError, match=r"nvidia-smi has not answered within 0\.1 s"):
        nvidia_smi(tmp_path, "exec /bin/sleep 600").read()


def test_the_numbers_are_those_of_amd_drivers(tmp_path: Path) -> None:
    def card(name: str, **files: str) -> None:
        device = tmp_path / name / "device"
        device.mkdir(parents=True)
        for file, text in files.items():
            (device / file).write_text(text)

    host = Gpus({}, tmp_path)
    card("card0")  # of another vendor
    assert host.read() is None
    card("card1", gpu_busy_percent="30\n", mem_info_vram_total=f"{8 * GIB}\n", mem_info_vram_used=f"{GIB}\n")
    card("card1-DP-1", gpu_busy_percent="99\n", mem_info_vram_total=f"{8 * GIB}\n", mem_info_vram_used="0\n")
    assert host.read() == GpuUse(0.3, 7 * GIB)
    card("card2", gpu_busy_percent="no number", mem_info_vram_total="100", mem_info_vram_used="200")
    assert host.read() == GpuUse(0.3, 7 * GIB)


@given(st.text() | st.lists(st.tuples(st.integers(), st.integers())).map(lambda rows: "\n".join(map(str, rows))))
def test_any_answer_is_read(text: str) -> None:
    for one in parse_query(text):
        assert one.utilization is None or 0.0 <= one.utilization <= 1.0
        assert one.memory_free is None or 0 <= one.memory_free < MEBIBYTE * 10**15


def gpu_of(report: HeartbeatResponse) -> GpuUse:
    """As in a body that is sent: what is left out is None."""
    body = msgspec.json.decode(msgspec.json.encode(report))
    return GpuUse(body.get("gpu_utilization"), body.get("gpu_memory_free"))


async def test_a_heartbeat_has_the_last_answer_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now, may_answer, answers = 0.0, threading.Event(), [GpuUse(0.5, GIB), GpuUse(0.25, None)]
    asked = 0

    def read() -> GpuUse | None:
        nonlocal asked
        asked += 1
        assert may_answer.wait(60)
        may_answer.clear()
        if not answers:
            raise TimeoutError
        return answers.pop(0)

    reporter = reporter_of([], lambda: now, patience_s=60, gpus=read)
    monkeypatch.setattr(reporter, "_look", lambda: ((), 5, ""))

    async def answer() -> None:
        """The question that is under way ends."""
        may_answer.set()
        await until(lambda: reporter._gpus._task is None)

    assert gpu_of(await reporter.report()) == (None, None)  # which has not waited for it
    await answer()
    assert gpu_of(await reporter.report()) == (0.5, GIB) and asked == 1
    now = GPU_AGE_S
    assert gpu_of(await reporter.report()) == (0.5, GIB)
    await answer()
    assert gpu_of(await reporter.report()) == (0.25, None)
    now += GPU_AGE_S
    assert gpu_of(await reporter.report()) == (0.25, None)
    await answer()  # there was none in time
    now += GPU_SILENT_S
    assert gpu_of(await reporter.report()) == (0.25, None)
    now += 1
    assert gpu_of(await reporter.report()) == (None, None)
    await answer()


class OnGpu(Busy):
    """An engine of vLLM."""

    adapter = "vllm"


async def test_only_vllm_on_a_host_with_a_gpu_is_resident_there(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [await placed("large", OnGpu()), await placed("small", Busy())]

    async def levels(use: GpuUse | None) -> dict[str, str]:
        reporter = reporter_of(models, lambda: 0.0, patience_s=60, gpus=lambda: use)
        monkeypatch.setattr(reporter, "_look", lambda: ((), 5, ""))
        await reporter.report()
        await until(lambda: reporter._gpus._task is None)
        return {one.model_id: one.cache_level for one in (await reporter.report()).loaded_models}

    assert await levels(None) == {"large": "CPU_RESIDENT", "small": "CPU_RESIDENT"}
    assert await levels(GpuUse(None, None)) == {"large": "GPU_RESIDENT", "small": "CPU_RESIDENT"}
    for one in models:
        await one.stop()


def test_orchestrators_say_loading_of_engines_on_the_cpu() -> None:
    def model(name: str, state: ModelState, engine: str) -> LoadedModel:
        return LoadedModel(model_id=name, model_state=state, cache_level="NVME_CACHED", engine=engine)

    report = HeartbeatResponse(
        agent_id="a",
        incarnation="1",
        state="LOADING_MODEL",
        gpu_memory_free=GIB,
        loaded_models=(
            model("on-gpu", "LOADING_TO_GPU", "vllm"),
            model("on-cpu", "LOADING_TO_GPU", "starling"),
            model("ready", "READY", "starling"),
        ),
    )

    def states(report: HeartbeatResponse) -> list[str]:
        return [one.model_state for one in translate_loading(report).loaded_models]

    assert states(report) == ["LOADING_TO_GPU", "LOADING", "READY"]
    assert states(msgspec.structs.replace(report, gpu_memory_free=UNSET)) == ["LOADING", "LOADING", "READY"]


def test_a_host_without_a_gpu_has_no_metrics_of_one() -> None:
    metrics = AgentMetrics()
    report = HeartbeatResponse(agent_id="a", incarnation="1", state="IDLE")
    with_gpu = msgspec.structs.replace(report, gpu_utilization=0.5, gpu_memory_free=GIB)

    def of_gpus(report: HeartbeatResponse) -> list[str]:
        lines = metrics.render(report, 0).decode().splitlines()
        return [line.removeprefix("starling_agent_gpu_") for line in lines if line.startswith("starling_agent_gpu_")]

    assert of_gpus(report) == []
    assert of_gpus(with_gpu) == ["utilization_ratio 0.5", "memory_free_bytes 1.073741824e+09"]
    assert of_gpus(report) == ["utilization_ratio NaN", "memory_free_bytes NaN"]
