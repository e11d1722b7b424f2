"""A question that the tokenizer cannot be sent just now is sent later: nobody is refused for its death."""

from __future__ import annotations

import asyncio

from pipeline.config.schema import Config, ModelConfig
from pipeline.protocol import messages as m
from stages.gateway.service import Service


def test_a_question_waits_for_its_way() -> None:
    async def run() -> tuple[int, ...]:
        sent: list[m.Frame] = []
        is_open = False

        def send(frame: m.Frame) -> bool:
            if is_open:
                sent.append(frame)
            return is_open

        service = Service(Config(models=(ModelConfig(name="m", path="m.gguf"),)), lambda frame: True, send)
        # It is up as far as anybody knows, and has just died.
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
