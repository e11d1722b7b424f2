"""Chat templates for model files that have none, by what the vocabulary and the architecture say about the family.

A family is recognized by the control tokens of its turns.  Llama 2 and Mistral write their turns in plain text; for
them the architecture and the kind of vocabulary decide.  For other files there is no template: a wrong one is worse.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.models.vocabularies import SENTENCEPIECE
from shm.checkpoint import TokenizerData

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ message.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('there is no system role') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ message.content | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_PHI3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_GRANITE = (
    "{% for message in messages %}{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' }}"
    "{{ message.content }}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
_COMMAND_R = (
    "{{ bos_token }}{% for message in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
    "{% if message.role == 'system' %}{{ '<|SYSTEM_TOKEN|>' }}{% elif message.role == 'user' %}{{ '<|USER_TOKEN|>' }}"
    "{% else %}{{ '<|CHATBOT_TOKEN|>' }}{% endif %}{{ message.content | trim }}{{ '<|END_OF_TURN_TOKEN|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
_INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content | trim + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}"
    "{% else %}{{ raise_exception('there is no system role') }}{% endif %}{% endfor %}"
)
_LLAMA2 = (
    "{% set ns = namespace(system='') %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.system = '<<SYS>>\n' + message.content | trim + '\n<</SYS>>\n\n' %}"
    "{% elif message.role == 'user' %}{{ bos_token + '[INST] ' + ns.system + message.content | trim + ' [/INST]' }}"
    "{% set ns.system = '' %}"
    "{% else %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)


class _Family(NamedTuple):
    name: str
    tokens: tuple[str, ...]  # that the vocabulary must have
    source: str


_BY_TOKENS = (
    _Family("llama-3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA3),
    _Family("chatml", ("<|im_start|>", "<|im_end|>"), _CHATML),
    _Family("gemma", ("<start_of_turn>", "<end_of_turn>"), _GEMMA),
    _Family("phi-3", ("<|user|>", "<|assistant|>", "<|end|>"), _PHI3),
    _Family("granite", ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), _GRANITE),
    _Family("command-r", ("<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"), _COMMAND_R),
    _Family("mistral", ("[INST]", "[/INST]"), _INSTRUCTIONS),
)
_LLAMA2_ARCHITECTURES = ("llama", "mistral")


def fallback_template(architecture: str, data: TokenizerData) -> tuple[str, str] | None:
    """Return (name, source) of the template for a file without one; None if its family cannot be told."""
    tokens = set(data.tokens)
    for family in _BY_TOKENS:
        if tokens.issuperset(family.tokens):
            return family.name, family.source
    if architecture in _LLAMA2_ARCHITECTURES and data.model == SENTENCEPIECE:
        return "llama-2", _LLAMA2
    return None
