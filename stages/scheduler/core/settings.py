"""Settings of one model's engine, taken from the configuration."""

from __future__ import annotations

from typing import NamedTuple

from pipeline.models import arena_sizes
from shm.step_ring import StepsGeometry


class Settings(NamedTuple):
    """Bounds and switches of one model version."""

    model: str
    max_batch_size: int
    max_queue_depth: int = 1000
    max_tenant_depth: int = 0
    max_step_tokens: int = 512
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    batch_timeout_s: float = 0.0
    speculate: int = 0  # draft tokens of a sequence whose request does not set a number; less than 0: none
    run_ahead: bool = True
    refuses_late: bool = True  # sequences that will probably miss their deadline
    max_draft_sequences: int = 0  # draft sequences that this model computes for other models
    prefix_cache: bool = True  # kv shares pages among prompts with a common prefix
    worker_groups: int = 1

    @property
    def n_rows(self) -> int:
        """Rows of the step arena."""
        return arena_sizes.n_rows(self.max_batch_size, self.max_draft_sequences)

    @property
    def max_samples(self) -> int:
        """Samples of one step."""
        return arena_sizes.max_samples(self.max_batch_size)

    def steps_geometry(
        self, context: int, page_tokens: int, vocab_size: int, width: int, n_groups: int = 1
    ) -> StepsGeometry:
        """Size of the step arena for sequences of up to `context` positions, with `n_groups` pages of each place."""
        return arena_sizes.steps_geometry(
            self.max_batch_size, self.max_draft_sequences, context, page_tokens, vocab_size, width, n_groups
        )
