"""Plugins for tests; the process of a gateway under test imports them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

from starling.plugins import InferenceRequest, InferenceResponse, Plugin, Refused
from starling.plugins.redaction import Redaction


class Answers(Redaction):
    """Redacts answers alone."""

    def pre_inference(self, request: InferenceRequest) -> None:
        pass


class Trouble(Plugin):
    """Does what a request says. Each call of `pre_inference` adds a line to the file `log`."""

    def initialize(self, options: dict[str, Any]) -> None:
        self._log = Path(options["log"])

    def pre_inference(self, request: InferenceRequest) -> None:
        with self._log.open("a") as log:
            log.write(f"{request.id}\n")
        text = request.messages[-1]["content"] if request.messages else str(request.prompts)
        for word in ("raise", "exit", "hang", "grow", "role", "type", "rename", "refuse"):
            if f"pre-{word}" in text:
                getattr(self, f"_{word}")(request)

    def post_inference(self, response: InferenceResponse) -> None:
        for word in ("raise", "exit", "hang", "grow", "rewrite", "none", "refuse"):
            if f"post-{word}." in response.text:
                getattr(self, f"_{word}")(response)
                return

    def _raise(self, it: Any) -> None:
        raise KeyError("a secret of the request")

    def _exit(self, it: Any) -> None:
        os._exit(3)

    def _hang(self, it: Any) -> None:
        while True:
            time.sleep(3600)

    def _grow(self, it: Any) -> None:
        blocks = []
        while True:
            blocks.append(bytearray(1 << 24))

    def _role(self, it: Any) -> None:
        it.messages[-1]["role"] = "wizard"

    def _type(self, it: Any) -> None:
        it.messages = "all of them"

    def _rename(self, it: Any) -> None:
        it.tenant = "another"

    def _rewrite(self, it: Any) -> None:
        it.text = "x" + it.text

    def _none(self, it: Any) -> None:
        it.text = None

    def _refuse(self, it: Any) -> None:
        raise Refused("this is not discussed here", "messages")


class Settings(Plugin):
    """Changes everything that may be changed, in a coroutine."""

    async def pre_inference(self, request: InferenceRequest) -> None:
        request.seed, request.max_tokens, request.temperature, request.stop = 7, 20, 0.5, ["zz"]
        if request.messages is not None:
            request.messages = [{"role": "system", "content": "be kind"}, *request.messages]
        print("a plugin may print")


class Whole(Plugin):
    """Reverses whole answers."""

    streams: ClassVar[bool] = False

    def post_inference(self, response: InferenceResponse) -> None:
        assert response.is_final
        response.text = response.text[::-1]


class Broken(Plugin):
    """Cannot be initialized while the file `broken` exists."""

    def initialize(self, options: dict[str, Any]) -> None:
        if Path(options["broken"]).exists():
            raise OSError("there is no list")
