"""Parameters of vLLM and llama-server that this server does not have, with the values that mean the same as none.

Their clients send many of them in every request, with defaults that change nothing: those values are accepted.  Any
other one is refused by name, with what this server has instead.  `docs/api/compatibility.md` lists them all.
"""

from __future__ import annotations

from pipeline.api.fields import Unsupported

_TEXT_ONLY = "this server accepts text only"
_NO_LOCAL_SWITCH = "it configures another server"

# Of vLLM's chats and completions.
VLLM: dict[str, Unsupported] = {
    "add_special_tokens": Unsupported(hint="the chat template, and a text's BOS token, have what the model expects"),
    "allowed_token_ids": Unsupported(hint="use choice, regex, grammar or logit_bias"),
    "bad_words": Unsupported([], hint="use logit_bias"),
    "chat_template": Unsupported(hint="models[].chat_template of the configuration sets it"),
    "ec_transfer_params": Unsupported({}, hint=_NO_LOCAL_SWITCH),
    "include_stop_str_in_output": Unsupported(False, hint="/v1/generate returns it as stop_string"),
    "kv_transfer_params": Unsupported({}, hint=_NO_LOCAL_SWITCH),
    "length_penalty": Unsupported(1, 1.0, hint="it belongs to beam search"),
    "logprob_token_ids": Unsupported(hint="use top_logprobs"),
    "media_io_kwargs": Unsupported({}, hint=_TEXT_ONLY),
    "mm_processor_kwargs": Unsupported({}, hint=_TEXT_ONLY),
    "prompt_embeds": Unsupported(hint="send a text or token ids"),
    "repetition_detection": Unsupported(hint="use dry_multiplier"),
    "request_id": Unsupported(hint="send the header X-Request-Id"),
    "return_mm_kwargs": Unsupported(True, hint=_TEXT_ONLY),
    "return_prompt_text": Unsupported(False),
    "return_token_ids": Unsupported(False, hint="/v1/generate returns them as tokens"),
    "return_token_offsets": Unsupported(False, hint="/v1/tokenize returns them"),
    "return_tokens_as_token_ids": Unsupported(False, hint="/v1/generate returns ids"),
    "routed_experts_prompt_start": Unsupported(0),
    "session_id": Unsupported(hint="sessions belong to /v1/generate; equal prefixes are found without it"),
    "spaces_between_special_tokens": Unsupported(True),
    "stream_interval": Unsupported(1, hint="a stream has an event for each step"),
    "thinking_token_budget": Unsupported(-1, hint="max_tokens counts the reasoning, too"),
    "truncate_prompt_tokens": Unsupported(hint="send a shorter prompt"),
    "truncation_side": Unsupported(hint="send a shorter prompt"),
    "use_beam_search": Unsupported(False, hint="use n or best_of"),
    "vllm_xargs": Unsupported({}, hint=_NO_LOCAL_SWITCH),
    "watermarking": Unsupported(False),
}

# Of llama-server's `/completion`, which its chats accept, too.
LLAMA_SERVER: dict[str, Unsupported] = {
    "adaptive_decay": Unsupported(hint="it belongs to adaptive_target"),
    "adaptive_target": Unsupported(-1, -1.0, hint="use min_p, typical_p or top_n_sigma"),
    "backend_sampling": Unsupported(False),
    "cache_prompt": Unsupported(True, hint="prefixes are always cached; cache_salt separates them"),
    "dynatemp_exponent": Unsupported(1, 1.0, hint="it belongs to dynatemp_range"),
    "dynatemp_range": Unsupported(0, 0.0, hint="use temperature"),
    "grammar_lazy": Unsupported(False, hint="use tools with strict"),
    "grammar_triggers": Unsupported([], hint="use tools with strict"),
    "id_slot": Unsupported(-1, hint="equal prefixes are found without it"),
    "lora": Unsupported([], hint="name the adapter in model: NAME:ADAPTER"),
    "min_keep": Unsupported(0, 1),
    "n_cache_reuse": Unsupported(0),
    "n_cmpl": Unsupported(1, hint="use n"),
    "n_discard": Unsupported(0, hint="the context is never shifted"),
    "n_indent": Unsupported(0),
    "n_keep": Unsupported(0, hint="the context is never shifted"),
    "n_predict": Unsupported(-1, hint="use max_tokens"),
    "n_probs": Unsupported(0, hint="use logprobs"),
    "parse_tool_calls": Unsupported(True, hint='send tool_choice "none"'),
    "post_sampling_probs": Unsupported(False, hint="logprobs are those before sampling"),
    "preserved_tokens": Unsupported([]),
    "reasoning_budget_end_tag": Unsupported(hint="models[].reasoning names the marks"),
    "reasoning_budget_message": Unsupported(""),
    "reasoning_budget_start_tag": Unsupported(hint="models[].reasoning names the marks"),
    "reasoning_budget_tokens": Unsupported(-1, hint="max_tokens counts the reasoning, too"),
    "reasoning_control": Unsupported(False),
    "reasoning_in_content": Unsupported(False, hint='send reasoning_format "none"'),
    "repeat_last_n": Unsupported(-1, hint="repetition_penalty counts all tokens"),
    "repeat_penalty": Unsupported(1, 1.0, hint="use repetition_penalty, which counts all tokens"),
    "response_fields": Unsupported([]),
    "return_progress": Unsupported(False, hint="a stream's headers arrive when the prompt is computed"),
    "return_tokens": Unsupported(False, hint="/v1/generate returns them"),
    "samplers": Unsupported(hint="use order"),
    "sse_ping_interval": Unsupported(hint="server.sse_ping_interval_s sets it for all streams"),
    "t_max_predict_ms": Unsupported(-1, 0, hint="use max_tokens"),
    "timings_per_token": Unsupported(False, hint="starling logs and GET /metrics have timings"),
    "verbose": Unsupported(False),
}

OTHER_SERVERS = {**VLLM, **LLAMA_SERVER}
