"""Frames between scheduler and worker. Steps and samples are in the step ring (shm/step_ring.py)."""

from __future__ import annotations

from pipeline.protocol.messages.frame import Frame, Heartbeat, Hello


class WorkerReady(Frame, tag="w"):
    """The worker group has mapped the weights, loaded its kernels and computes no step.

    `error` is set in the answer to an `Attach` that failed, for instance because the file system of the arenas is full.
    """

    model: str
    digest: str
    epoch: int
    ranks: int
    pids: tuple[tuple[int, int], ...]  # (pid, start_ticks) of every rank, rank 0 first
    vocab_size: int
    context_length: int
    isa: str = ""
    vocabulary: str = ""  # digest of the vocabulary, set where draft models must match it
    error: str = ""
    width: int = 0  # values of a hidden state
    is_causal: bool = True  # False: prompts are pooled alone, each in one step
    adapters: tuple[tuple[str, str], ...] = ()  # name and digest (hex) of each LoRA adapter that it has in memory
    window: int = 0  # positions that attention reads in layers with a window; 0: pages behind it are not released
    page_groups: tuple[int, int] = (1, 0)  # as `shm.layer_groups.LayerGroups`
    kernels: str = ""  # names its compiled kernels: another name, other sources, another CPU or other object files
    nodes: tuple[int, ...] = ()  # ranks of each memory node; (): one node, or the ranks are not pinned
    group: int = 0  # which of the version's worker groups it is; it computes the ring of this number


class Attach(Frame, tag="A"):
    """Use these arenas from step `next_step` on. Answered by `WorkerReady`.

    `generation` is the ring's: slots and doorbells of other generations are ignored.  `doorbell` is the path of
    a Unix datagram socket: any datagram there wakes a sleeping scheduler as `StepDone` does, at a tenth of the
    cost to both ("": none exists).  A datagram that is refused because the socket is full counts as delivered.
    """

    model: str
    generation: int
    steps_path: str
    kv_path: str
    next_step: int
    doorbell: str = ""


class Detach(Frame, tag="Z"):
    """Finish the current step, detach from the arenas and send `WorkerReady` again."""

    generation: int


class StepPublished(Frame, tag="s"):
    """Doorbell to a sleeping worker; the ring's counters are authoritative."""

    generation: int
    step: int


class StepDone(Frame, tag="o"):
    """Doorbell from rank 0 to a sleeping scheduler; the ring's counters are authoritative."""

    generation: int
    step: int


SchedulerToWorker = Hello | Heartbeat | Attach | Detach | StepPublished
WorkerToScheduler = Hello | Heartbeat | WorkerReady | StepDone
