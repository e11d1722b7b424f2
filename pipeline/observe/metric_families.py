"""The table of metric families: names, kinds, help texts, labels and histogram buckets.

Names are public.  Every stage counts into these families, and `exposition.py` renders them in this order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Other servers' dashboards let their user choose a target among these as well, which must be a bucket's bound.
FIRST_TOKEN_SECONDS = tuple(sorted((*SECONDS, 0.75)))
PER_TOKEN_SECONDS = tuple(sorted((*SECONDS, 0.075, 0.15, 0.2, 0.3)))
REQUEST_SECONDS = (*SECONDS, 240.0, 480.0, 960.0)
BATCH = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
ACCEPTED = tuple(range(16))  # each number below the most draft tokens of a step: positions are counted exactly

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One metric. Counters end in `_total`; `labels` are positional where values are given.

    `is_peak`: a gauge of the highest value since the start of the server, which outlives its process.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # histogram: upper bounds, ascending, without +Inf
    is_peak: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the values of a process that has ended still count."""
        return self.kind != "gauge" or self.is_peak


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # gateway
        Family("starling_requests_total", "counter", "HTTP requests answered.", ("endpoint", "status")),
        Family(
            "starling_request_duration_seconds",
            "histogram",
            "Time from the first byte of the request to the last byte of the answer.",
            ("endpoint",),
            SECONDS,
        ),
        Family(
            "starling_time_to_first_token_seconds",
            "histogram",
            "Time from the first byte of the request to its first token.",
            ("model",),
            FIRST_TOKEN_SECONDS,
        ),
        Family(
            "starling_time_per_output_token_seconds",
            "histogram",
            "Mean time between the output tokens of a request, from its first token to its end.",
            ("model",),
            PER_TOKEN_SECONDS,
        ),
        Family(
            "starling_inter_token_seconds",
            "histogram",
            "Each gap between two output tokens of a sequence; 0 between tokens that came together.",
            ("model",),
            SECONDS,
        ),
        Family(
            "starling_end_to_end_seconds",
            "histogram",
            "Time from the first byte of a request for text to its end.",
            ("model",),
            REQUEST_SECONDS,
        ),
        Family(
            "starling_prefill_seconds",
            "histogram",
            "Time of a sequence from the end of its wait in the queue to its first token.",
            ("model",),
            REQUEST_SECONDS,
        ),
        Family(
            "starling_decode_seconds",
            "histogram",
            "Time of a sequence from its first token to its last one.",
            ("model",),
            REQUEST_SECONDS,
        ),
        Family(
            "starling_inference_seconds",
            "histogram",
            "Time of a sequence from the end of its wait in the queue to its last token.",
            ("model",),
            REQUEST_SECONDS,
        ),
        Family(
            "starling_request_prompt_tokens",
            "histogram",
            "Tokens of the prompts of a request for text.",
            ("model",),
            REQUEST_TOKENS,
        ),
        Family(
            "starling_request_computed_tokens",
            "histogram",
            "Tokens of the prompts of a request for text that were not cached.",
            ("model",),
            REQUEST_TOKENS,
        ),
        Family(
            "starling_request_output_tokens",
            "histogram",
            "Output tokens of a request for text, of all its choices.",
            ("model",),
            REQUEST_TOKENS,
        ),
        Family(
            "starling_request_longest_output_tokens",
            "histogram",
            "Output tokens of the longest choice of a request for text.",
            ("model",),
            REQUEST_TOKENS,
        ),
        Family(
            "starling_request_max_tokens",
            "histogram",
            "Output tokens that each choice of a request for text may have.",
            ("model",),
            REQUEST_TOKENS,
        ),
        Family("starling_request_choices", "histogram", "Choices for each prompt of a request.", ("model",), CHOICES),
        Family(
            "starling_context_tokens_max",
            "gauge",
            "Most tokens that a sequence has had, prompt and output, since the start of the server.",
            ("model",),
            is_peak=True,
        ),
        Family("starling_tenant_requests_total", "counter", "HTTP requests answered, by tenant.", ("tenant",)),
        Family(
            "starling_tenant_request_tokens_total",
            "counter",
            "Tokens of ended requests for text, by kind: prompt, cached (of the prompt), output.",
            ("tenant", "kind"),
        ),
        Family(
            "starling_http_bytes_total",
            "counter",
            "Bytes of HTTP connections over TCP, with those of TLS, by direction: received, sent. "
            "Of a TLS connection those count that a scrape has seen before its end.",
            ("direction",),
        ),
        Family("starling_requests_in_flight", "gauge", "HTTP requests being answered."),
        Family(
            "starling_model_requests_in_flight", "gauge", "Requests for text by model, or MODEL:ADAPTER.", ("model",)
        ),
        Family("starling_model_requests_total", "counter", "Those of them that have ended.", ("model",)),
        Family("starling_tls_certificate_expiry_seconds", "gauge", "When the certificate expires, in s since 1970."),
        Family("starling_recoveries_total", "counter", "Sequences submitted again after a stage died."),
        Family("starling_journal_left_out_total", "counter", "Requests that the journal had no room for."),
        Family(
            "starling_traces_total",
            "counter",
            "Traces for OpenTelemetry, by outcome: sent, failed (not taken by the collector), dropped (queue full).",
            ("outcome",),
        ),
        Family("starling_idempotency_keys", "gauge", "Idempotency keys of running and answered requests."),
        Family("starling_idempotency_bytes", "gauge", "Size of the keys and of the answers stored for them in bytes."),
        Family(
            "starling_idempotency_attached_total", "counter", "Repetitions that got the request of an earlier attempt."
        ),
        Family("starling_idempotency_evictions_total", "counter", "Keys forgotten before their time, for a bound."),
        Family("starling_journal_unreadable_total", "counter", "Journals that could not be read and were renamed."),
        Family(
            "starling_plugin_requests_total",
            "counter",
            "Requests by what became of them in a plugin's pre_inference: done, refused, failed or skipped.",
            ("plugin", "outcome"),
        ),
        Family("starling_plugin_restarts_total", "counter", "Restarts of a plugin's process.", ("plugin",)),
        Family("starling_rejections_total", "counter", "Requests refused, by error code.", ("code",)),
        Family(
            "starling_response_cache_hits_total", "counter", "Requests answered from the response cache.", ("model",)
        ),
        Family(
            "starling_response_cache_misses_total",
            "counter",
            "Requests that missed the response cache.",
            ("model",),
        ),
        Family(
            "starling_response_cache_evictions_total",
            "counter",
            "Answers removed because the cache was full or their ttl had passed.",
            ("reason",),
        ),
        Family("starling_response_cache_entries", "gauge", "Answers in the response cache."),
        Family("starling_response_cache_bytes", "gauge", "Size of the response cache in bytes."),
        # orchestrator
        Family("starling_fleet_agents", "gauge", "Registered agents, by what their last poll found.", ("health",)),
        Family("starling_fleet_leader", "gauge", "1 while this orchestrator leads: it carries out placements."),
        Family("starling_fleet_store_up", "gauge", "1 while the coordination store answers this orchestrator."),
        Family("starling_fleet_moves_total", "counter", "Requests sent to another agent, by cause.", ("cause",)),
        Family("starling_fleet_continued_tokens_total", "counter", "Output tokens from which moved streams went on."),
        Family("starling_fleet_replayed_texts_total", "counter", "Streams of other engines that went on from text."),
        Family(
            "starling_fleet_page_transfers_total",
            "counter",
            "KV pages of moved streams: sent, computed because that is faster, or failed and computed.",
            ("outcome",),
        ),
        Family("starling_fleet_page_bytes_total", "counter", "KV pages that agents have sent each other, in bytes."),
        Family(
            "starling_fleet_prefix_moves_total",
            "counter",
            "Prefixes of agents that drained: sent, held by another agent, skipped for want of room or time, failed.",
            ("outcome",),
        ),
        Family("starling_fleet_prefix_bytes_total", "counter", "KV pages of prefixes that were sent, in bytes."),
        Family(
            "starling_fleet_session_moves_total",
            "counter",
            "Sessions that have moved to another agent, and attempts that have failed.",
            ("outcome",),
        ),
        Family("starling_fleet_cold_waiting", "gauge", "Requests that wait for a model that is loading."),
        Family(
            "starling_fleet_loads_total",
            "counter",
            "Models loaded for requests that waited, and for placements.",
            ("outcome",),
        ),
        Family("starling_fleet_estimates_total", "counter", "Requests whose time to the first token was estimated."),
        Family(
            "starling_fleet_estimate_error_seconds_total",
            "counter",
            "Sum of the differences between estimated and measured times to the first token.",
        ),
        # tokenizer
        Family(
            "starling_tokenizer_tokens_total",
            "counter",
            "Tokens encoded, and tokens decoded for /v1/detokenize.",
            ("direction",),
        ),
        # scheduler
        Family("starling_tokens_generated_total", "counter", "Output tokens.", ("model",)),
        Family("starling_tokens_per_second", "gauge", "Output tokens per second over the last 5 s.", ("model",)),
        Family(
            "starling_prompt_tokens_per_second",
            "gauge",
            "Prompt tokens computed per second over the last 5 s.",
            ("model",),
        ),
        Family("starling_prompt_tokens_total", "counter", "Prompt positions, by source.", ("model", "source")),
        Family("starling_tenant_tokens_total", "counter", "Tokens computed for a tenant.", ("tenant",)),
        Family("starling_queue_depth", "gauge", "Sequences that wait for their first step.", ("model",)),
        Family(
            "starling_deferred_sequences",
            "gauge",
            "Sequences that have left the queue and wait for pages, or for a prefix that another one computes.",
            ("model",),
        ),
        Family("starling_running_sequences", "gauge", "Sequences being generated.", ("model",)),
        Family(
            "starling_queue_wait_seconds",
            "histogram",
            "Time from arrival, or from the end of the model's load if that is later, to the first step.",
            ("model",),
            SECONDS,
        ),
        Family("starling_batch_size", "histogram", "Sequences per step.", ("model",), BATCH),
        Family(
            "starling_step_tokens",
            "histogram",
            "Positions that a step computes, of prompts and outputs, without the steps of draft models.",
            ("model",),
            STEP_TOKENS,
        ),
        Family(
            "starling_step_seconds",
            "histogram",
            "Duration of a step on the worker, by phase: prefill (it computes positions of prompts), decode (outputs "
            "alone), draft (of a draft model).",
            ("model", "phase"),
            SECONDS,
        ),
        Family("starling_steps_total", "counter", "Steps computed.", ("model",)),
        Family(
            "starling_worker_group_ready",
            "gauge",
            "1 while the worker group can compute steps, 0 while it waits. Of models with several groups.",
            ("model", "group"),
        ),
        Family("starling_steps_repeated_total", "counter", "Steps computed again after a worker's death.", ("model",)),
        Family(
            "starling_discarded_samples_total",
            "counter",
            "Tokens sampled past a stop or a cancel, which were dropped.",
            ("model",),
        ),
        Family(
            "starling_quarantined_total",
            "counter",
            "Sequences ended because the worker died or stalled each time it computed them.",
            ("model",),
        ),
        Family("starling_sequences_submitted_total", "counter", "Sequences that the queue took.", ("model",)),
        Family(
            "starling_sequences_refused_total",
            "counter",
            "Sequences refused, or removed from the queue to make room.",
            ("model",),
        ),
        Family("starling_preemptions_total", "counter", "Running sequences preempted.", ("model",)),
        Family("starling_finished_total", "counter", "Sequences ended, by finish reason.", ("model", "reason")),
        Family(
            "starling_draft_tokens_total",
            "counter",
            "Draft tokens, by outcome and by proposer: lookup (in the text itself, or in a prediction) or model (a "
            "draft model).",
            ("model", "outcome", "source"),
        ),
        Family(
            "starling_draft_accepted_tokens",
            "histogram",
            "Draft tokens that a verification has accepted.",
            ("model",),
            ACCEPTED,
        ),
        # kv
        Family(
            "starling_kv_cache_bytes", "gauge", "KV pages, by state: allocated, resident, spilled, saved.", ("state",)
        ),
        Family(
            "starling_kv_cache_fragmentation_ratio",
            "gauge",
            "Unused share of reserved space: positions of leased pages (arena), page slots of files (spilled, saved).",
            ("model", "where"),
        ),
        Family(
            "starling_kv_cache_compacted_bytes_total",
            "counter",
            "Bytes returned to the file system by compacting page files.",
        ),
        Family("starling_kv_cache_pages", "gauge", "KV pages, by state: free, cached, leased.", ("model", "state")),
        Family("starling_kv_cache_evictions_total", "counter", "KV pages evicted."),
        Family(
            "starling_kv_cache_expired_pages_total", "counter", "KV pages evicted because they were not used in time."
        ),
        Family(
            "starling_kv_cache_unread_rows_total",
            "counter",
            "Times that full pages could not be named because their tokens could not be read.",
        ),
        Family("starling_kv_cache_hits_total", "counter", "KV pages found in the prefix cache.", ("model",)),
        Family(
            "starling_kv_cache_misses_total",
            "counter",
            "KV pages not found in the prefix cache.",
            ("model",),
        ),
        Family(
            "starling_kv_cache_checksum_failures_total",
            "counter",
            "Pages dropped because of a wrong checksum.",
        ),
        Family(
            "starling_kv_cache_disk_errors_total",
            "counter",
            "Page writes and reservations that failed because the disk was full or faulty.",
        ),
        Family(
            "starling_state_file_errors_total",
            "counter",
            "Failed operations on files of sessions, the journal, the quotas, stored responses and the API keys.",
            ("files",),
        ),
        Family("starling_kv_cache_spilled_pages_total", "counter", "Evicted pages written to the disk."),
        Family(
            "starling_kv_cache_restored_pages_total",
            "counter",
            "Pages read back from a disk, or copied from another version of the same model file.",
        ),
        Family(
            "starling_kv_cache_imported_pages_total",
            "counter",
            "Pages that another engine of the fleet had computed, and sent.",
            ("model",),
        ),
        Family(
            "starling_kv_cache_warmed_pages_total",
            "counter",
            "Pages of the most used prefixes, loaded into memory before a request needed them.",
            ("model",),
        ),
        Family("starling_kv_cache_warm_hits_total", "counter", "Warmed pages that a request then found.", ("model",)),
        Family("starling_kv_cache_restore_seconds", "histogram", "Time to restore a page.", (), SECONDS),
        Family("starling_sessions", "gauge", "Open sessions.", ("model",)),
        Family(
            "starling_sessions_moving",
            "gauge",
            "Sessions whose move from or to another agent of a fleet is not complete.",
            ("model",),
        ),
        # several stages
        Family(
            "starling_late_frames_total",
            "counter",
            "Frames for sequences that had ended, which is normal, by the stage that received them.",
            ("stage",),
        ),
        Family(
            "starling_token_gaps_total", "counter", "Times that tokens were missing and a sequence was submitted again."
        ),
        Family("starling_sessions_damaged_total", "counter", "Sessions that lost turns by a damaged file."),
        # worker
        Family(
            "starling_model_load_seconds",
            "gauge",
            "Duration of each phase of the last load of a model (of its first worker group): open, download, ingest, "
            "verify, start ranks, ...",
            ("model", "phase"),
        ),
        # every stage
        Family("starling_stage_up", "gauge", "1 while the process of the stage runs.", ("stage",)),
        Family("starling_stage_ready", "gauge", "1 while the stage accepts work.", ("stage",)),
        Family("starling_stage_restarts_total", "counter", "Restarts by the supervisor, or by systemd.", ("stage",)),
        Family(
            "starling_frames_dropped_total",
            "counter",
            "Frames that did not decode or came from an unknown peer.",
            ("stage", "edge"),
        ),
        Family(
            "starling_frames_refused_total",
            "counter",
            "Frames not sent because the peer was not up or its queue was full.",
            ("stage", "edge"),
        ),
        Family(
            "starling_connections_refused_total",
            "counter",
            "Connections to a tcp:// edge that did not prove the key, or this stage's own that the other side refused.",
            ("stage", "edge"),
        ),
        Family("starling_heartbeats_total", "counter", "Heartbeats received from peers.", ("stage", "edge")),
        Family(
            "starling_peers_lost_total",
            "counter",
            "Peers that went down, by reason: ended, silent, frames lost, replaced.",
            ("stage", "edge", "reason"),
        ),
        Family(
            "starling_edge_bytes_total",
            "counter",
            "Bytes of frames between stages, by direction: received, sent.",
            ("stage", "edge", "direction"),
        ),
        Family(
            "starling_arena_bytes",
            "gauge",
            "Shared memory of a model: arenas kv, steps and activations; reserved, and used by sequences.",
            ("model", "arena", "state"),
        ),
        Family(
            "starling_process_cpu_seconds_total",
            "counter",
            "CPU time of a process: STAGE, its descendant STAGE/N, or STAGE/supervisor.",
            ("stage",),
        ),
        Family(
            "starling_process_resident_bytes",
            "gauge",
            "Resident memory of a process, shared pages included.",
            ("stage",),
        ),
        Family(
            "starling_process_private_bytes", "gauge", "Resident memory of a process that no file backs.", ("stage",)
        ),
        Family(
            "starling_process_io_bytes_total",
            "counter",
            "Bytes that a process has read from disks and written to them, by direction: read, written.",
            ("stage", "direction"),
        ),
        Family("starling_process_open_fds", "gauge", "Open file descriptors of a process.", ("stage",)),
        Family("starling_process_max_fds", "gauge", "File descriptors that a process may open.", ("stage",)),
        Family("starling_process_start_time_seconds", "gauge", "When a process started, in s since 1970.", ("stage",)),
    )
}
