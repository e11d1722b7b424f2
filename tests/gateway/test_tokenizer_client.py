"""A request that cannot be sent to the tokenizer now is sent later instead of failing."""

from __future__ import annotations

import asyncio

from pipeline.config.schema import Config, ModelConfig
from pipeline.protocol import messages as m
from stages.gateway.service import Service


def test_an_unsent_request_is_sent_later() -> None:
    async def run() -> tuple[int, ...]:
        sent: list[m.Frame] = []
        is_open = False

        def send(frame: m.Frame) -> bool:
            if is_open:
                sent.append(frame)
            return is_open

        service = Service(Config(models=(ModelConfig(name="m", path="m.gguf"),)), lambda frame: True, send)
        # The tokenizer has connected and its process has just exited, unnoticed.
        service.on_tokenizer_up(m.Hello("tokenizer", 1, 1, 1))
        asked = asyncio.create_task(service.tokenizer.encode("m", "x"))
        await asyncio.sleep(0)
        service.tick(None, None)
        assert not sent
        assert not asked.done()
        is_open = True
        service.tick(None, None)
        service.tick(None, None)
        (frame,) = [frame for frame in sent if isinstance(frame, m.Encode)]
        service.on_tokenizer(m.Encoded(frame.id, (7,), ()))
        return (await asked).tokens

    assert asyncio.run(run()) == (7,)
