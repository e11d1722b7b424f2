"""The encode queue takes tenants in turn, whatever each of them has sent."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Generator
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from stages.tokenizer.encode_queue import EncodeQueue


class Job(NamedTuple):
    """A text to be submitted, by a client for a tenant."""

    tenant: str
    client: str
    n_steps: int  # until the one that has the result


class Tenants:
    """A queue that runs in the test's thread: what is submitted and dropped meanwhile is done within steps.

    At each step the order is compared with what each tenant may expect.
    """

    def __init__(self, *later: Job | str) -> None:
        """`later`: what is done within steps, one in each: a submission, or the client that leaves."""
        self.queue: EncodeQueue[str] = EncodeQueue(self._on_done)
        self.later = deque(later)
        self.order: list[str] = []  # tenants of the steps
        self.results: list[str] = []
        self.finished: list[str] = []
        self._jobs: dict[str, Job] = {}  # unfinished, by name
        self._n_submitted = 0
        self._running = ""
        # For each tenant with work: steps of others since its last one, or since it has work.
        self._since: dict[str, Counter[str]] = {}
        self._expected: defaultdict[str, deque[str]] = defaultdict(deque)  # of each tenant alone: its jobs in turn

    def submit(self, job: Job) -> None:
        name = str(self._n_submitted)
        self._n_submitted += 1
        self._jobs[name] = job
        self._since.setdefault(job.tenant, Counter())
        self._expected[job.tenant].append(name)
        assert self.queue.submit(job.client.encode(), 1, self._steps(name, job), job.tenant)

    def drop(self, client: str) -> None:
        for name in [name for name, job in self._jobs.items() if job.client == client]:
            self._forget(name)
        self.queue.drop_client(client.encode())

    def run(self) -> None:
        self.queue.run()
        assert not self._jobs, "lost"
        assert sorted(self.results) == sorted(self.finished)

    def _steps(self, name: str, job: Job) -> Generator[None, None, str]:
        for _ in range(job.n_steps):
            self._step(name, job.tenant)
            yield
        self._step(name, job.tenant)
        if name in self._jobs:
            self.finished.append(name)
            self._forget(name)
        return name

    def _step(self, name: str, tenant: str) -> None:
        if self._running in self._jobs:  # it goes behind what its tenant has submitted meanwhile
            self._expected[self._jobs[self._running].tenant].append(self._running)
        assert self._expected[tenant].popleft() == name, "another order than that of the tenant alone"
        self._running = name
        self.order.append(tenant)
        for other, steps in self._since.items():
            steps[tenant] += other != tenant
            assert max(steps.values()) <= 1, f"{tenant} has a second step while {other} waits"
        self._since[tenant].clear()
        if self.later:
            action = self.later.popleft()
            if isinstance(action, Job):
                self.submit(action)
            else:
                self.drop(action)

    def _forget(self, name: str) -> None:
        job = self._jobs.pop(name)
        if name in self._expected[job.tenant]:
            self._expected[job.tenant].remove(name)
        if all(other.tenant != job.tenant for other in self._jobs.values()):
            self._since.pop(job.tenant, None)

    def _on_done(self) -> None:
        self.results += [result for _, result in self.queue.take_results()]
        if not self._jobs:
            self.queue.stop()


def test_one_text_of_a_tenant_does_not_wait_for_each_of_many_of_another() -> None:
    tenants = Tenants()
    for _ in range(200):
        tenants.submit(Job("many", "g", 1))
    tenants.submit(Job("one", "g", 9))
    tenants.run()
    assert tenants.order[:20] == ["many", "one"] * 10


jobs = st.builds(Job, st.sampled_from(["", "a", "b", "c"]), st.sampled_from("xy"), st.integers(0, 4))


@given(first=st.lists(jobs, min_size=1, max_size=12), later=st.lists(jobs | st.sampled_from("xy"), max_size=12))
def test_between_two_steps_of_a_tenant_each_other_one_has_at_most_one(first: list[Job], later: list[Job | str]) -> None:
    tenants = Tenants(*later)
    for job in first:
        tenants.submit(job)
    tenants.run()
