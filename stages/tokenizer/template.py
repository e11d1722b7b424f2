"""Chat templates: from messages to a prompt, with the Jinja template of the model file.

A model file is not trusted, so its template runs in Jinja's immutable sandbox, with the globals that published
templates expect (`raise_exception`, `strftime_now`, `bos_token`, `eos_token`, `tools`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.errors import InvalidRequest, ModelUnavailable


class _Rejected(Exception):
    """The template itself called `raise_exception`."""


def _raise(message: str) -> NoReturn:
    raise _Rejected(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A compiled template. The constructor raises `ModelUnavailable` for a template that is not valid Jinja."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnavailable(f"tokenizer.chat_template is not a valid Jinja template: {error}") from None
        self._always = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises `InvalidRequest` if the template fails or rejects the messages."""
        try:
            return self._template.render(
                **{
                    **(variables or {}),
                    **self._always,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _Rejected as rejection:
            raise InvalidRequest(
                f"the model's chat template rejects the messages: {rejection}", param="messages"
            ) from None
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and can fail in any way
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from None
