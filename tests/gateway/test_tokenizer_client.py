"""A request that cannot be sent to the tokenizer now is sent later instead of failing. Bounds of a tenant's texts.

Requests that have no caller left are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from pipeline.api.requests.generation_request import TemplateArguments
from pipeline.config.schema import Config, ModelConfig
from pipeline.errors import ModelUnavailable, Overloaded, StarlingError
from pipeline.protocol import messages as m
from stages.gateway.service import Service
from stages.gateway.tokenizer_client import MAX_TENANT_PENDING, TextOwner, TokenizerClient


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


@pytest.mark.parametrize(
    ("param", "message", "shown"),
    [
        ("prompt", "prompt has too long a word", ("input", "input[1] has too long a word")),
        ("suffix", "suffix is given", ("suffix", "suffix is given")),
    ],
)
def test_an_error_names_the_field_of_the_request(param: str, message: str, shown: tuple[str, str]) -> None:
    async def run() -> tuple[str, str]:
        client = TokenizerClient(lambda frame: True)
        asked = asyncio.create_task(client.encode("m", "x", field="input[1]"))
        await asyncio.sleep(0)
        client.on_reply("q1", StarlingError("INVALID_REQUEST", message, param))
        with pytest.raises(StarlingError) as refused:
            await asked
        return refused.value.param, refused.value.message

    assert asyncio.run(run()) == shown


def test_an_error_of_the_template_names_the_field_of_the_request() -> None:
    async def run() -> tuple[str, str]:
        client = TokenizerClient(lambda frame: True)
        asked = asyncio.create_task(client.render("m", [], TemplateArguments(), field="input"))
        await asyncio.sleep(0)
        client.on_reply("q1", StarlingError("INVALID_REQUEST", "the template rejects the messages", "messages"))
        with pytest.raises(StarlingError) as refused:
            await asked
        return refused.value.param, refused.value.message

    assert asyncio.run(run()) == ("input", "the template rejects the messages")


def test_the_texts_of_one_tenant_leave_room_for_those_of_others() -> None:
    async def run() -> None:
        sent: list[m.Encode] = []

        def send(frame: m.Frame) -> bool:
            if isinstance(frame, m.Encode):
                sent.append(frame)
            return True

        client = TokenizerClient(send)
        busy, quiet = TextOwner(tenant="busy"), TextOwner(tenant="quiet")
        asked = [asyncio.create_task(client.encode("m", "x", owner=busy)) for _ in range(MAX_TENANT_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="of your texts are waiting"):
            await client.encode("m", "x", owner=busy)
        other = asyncio.create_task(client.encode("m", "x", owner=quiet))
        await asyncio.sleep(0)
        client.on_reply(sent[-1].id, m.Encoded(sent[-1].id, (7,)))
        assert (await other).tokens == (7,)
        asked.pop().cancel()
        await asyncio.sleep(0)
        asked.append(asyncio.create_task(client.encode("m", "x", owner=busy)))
        await asyncio.sleep(0)
        assert len(sent) == MAX_TENANT_PENDING + 2
        for task in asked:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_a_request_without_a_caller_is_cancelled() -> None:
    """Its client has left, or its time is over; not one that was answered or was never sent."""

    async def run() -> list[m.Frame]:
        sent: list[m.Frame] = []
        is_open = True

        def send(frame: m.Frame) -> bool:
            if is_open:
                sent.append(frame)
            return is_open

        client = TokenizerClient(send)
        left, answered = (asyncio.create_task(client.encode("m", "x")) for _ in range(2))
        await asyncio.sleep(0)
        client.on_reply("q2", m.Encoded("q2", (7,)))
        assert (await answered).tokens == (7,)
        with pytest.raises(ModelUnavailable, match="has not replied"):
            await client.request(lambda key: m.Encode(key, "m", "x"), timeout_s=0)
        is_open = False
        unsent = asyncio.create_task(client.encode("m", "x"))
        await asyncio.sleep(0)
        is_open = True
        for task in (left, unsent):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        client.on_reply("q1", m.Encoded("q1", (7,)))  # a late one
        return [frame for frame in sent if not isinstance(frame, m.Encode)]

    assert asyncio.run(run()) == [m.CancelText("q3"), m.CancelText("q1")]
