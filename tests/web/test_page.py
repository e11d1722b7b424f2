"""The page at / in a browser: chats, faults while they run, settings, the API key, the state of the server."""

from __future__ import annotations

import importlib.util
import json
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.peers import output, text_of
from tests.gateway.server import Server
from tests.web.browser import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

IS_DONE = "!document.querySelector('.running') && document.querySelectorAll('.message').length === {}"
LONG = "The quick brown fox jumps over the lazy dog and then it walks home along the river."
OpenPage = Callable[..., Page]


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/"


def start(open_page: OpenPage, server: Server, **size: Any) -> Page:
    page = open_page(url(server), **size)
    wait_complete(page)
    return page


def wait_complete(page: Page) -> None:
    """The page knows the models and parameters."""
    page.wait("document.querySelector('#parameters input') && !document.querySelector('#model').disabled")


def send(page: Page, text: str) -> None:
    page.type("#prompt", text)
    page.press("Enter", 13, "\r")


def fill(page: Page, selector: str, value: str) -> None:
    """Set the value of a field, which may be in a closed part of the settings."""
    page.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = {json.dumps(value)};"
        "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind)); })()"
    )


def answer(page: Page) -> str:
    return page.text(".message:last-child .body")


def wait_done(page: Page, messages: int) -> None:
    page.wait(IS_DONE.format(messages))


@contextmanager
def held_after(server: Server, tokens: int) -> Iterator[Callable[[], None]]:
    """The scheduler generates so many tokens and then stands still, until the function that this yields is called."""
    left = [tokens]

    def hold() -> None:
        generator = server.peers.generator
        step = type(generator).step

        def limited(n: int = 1) -> None:
            if generator.running and left[0] > 0:
                left[0] -= 1
                step(generator, n)

        generator.step = limited  # type: ignore[method-assign]

    def release() -> None:
        left[0] = 1 << 30

    server.peers.do(hold)
    yield lambda: server.peers.do(release)
    server.peers.do(release)


def test_a_chat_streams_and_is_edited_and_regenerated(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    fill(page, "#parameter-seed", "7")
    fill(page, "#system", "Be brief.")
    send(page, "Hello")
    wait_done(page, 2)
    prompt = [*b"system: Be brief.\nuser: Hello\n"]
    assert answer(page) == text_of(output_of(prompt))
    statistics = page.text(".message:last-child .statistics")
    assert f"prompt of {len(prompt)}, 3 from the cache" in statistics
    assert "first token after" in statistics

    page.click(".message.assistant button")  # regenerate: the same seed gives the same text
    wait_done(page, 2)
    assert answer(page) == text_of(output_of(prompt))

    page.evaluate("document.querySelector('#prompt').focus()")
    page.press("ArrowUp", 38)  # edit the last message
    assert page.evaluate("document.querySelector('#prompt').value") == "Hello"
    page.call("Input.insertText", text=" please say <b>bold</b>")
    page.press("Enter", 13, "\r")
    wait_done(page, 2)
    assert answer(page) == "<b>bold</b>"  # as text
    assert page.text("#conversation-list button") == "Hello please say <b>bold</b>"


def test_nothing_is_sent_before_the_models_are_known(open_page: OpenPage, server: Server) -> None:
    """The text stays in its field; it went to a model of no name."""
    page = start(open_page, server)
    page.evaluate("document.querySelector('#model').disabled = true")  # as until the server has answered
    send(page, "please say it")
    assert "have not come from the server yet" in page.text("#problem")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0
    assert page.evaluate("document.querySelector('#prompt').value") == "please say it"
    page.evaluate("document.querySelector('#model').disabled = false")
    page.press("Enter", 13, "\r")
    wait_done(page, 2)
    assert answer(page) == "it"


def test_an_edit_that_is_left_changes_nothing(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    for count, text in ((2, "one"), (4, "two")):
        send(page, f"please say {text}")
        wait_done(page, count)
    page.type("#prompt", "a draft")
    page.click(".message.user button")
    assert page.evaluate("document.querySelector('#prompt').value") == "please say one"
    assert page.evaluate("document.querySelectorAll('.message.replaced').length") == 4
    page.press("Escape", 27)
    assert page.evaluate("document.querySelector('#prompt').value") == "a draft"
    assert page.evaluate("document.querySelectorAll('.message:not(.replaced)').length") == 4
    page.reload()
    page.wait(IS_DONE.format(4))
    wait_complete(page)
    assert answer(page) == "two"
    page.click(".message.user button")
    page.type("#prompt", " or three")
    page.press("Enter", 13, "\r")
    wait_done(page, 2)
    assert answer(page) == "one or three"


def test_a_conversation_is_exported(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    fill(page, "#system", "Be brief.")
    send(page, "please say yes")
    wait_done(page, 2)
    page.evaluate(
        "window.made = []; const make = URL.createObjectURL; "
        "URL.createObjectURL = (blob) => (window.made.push(blob), make.call(URL, blob)); null"
    )
    for kind in ("json", "text"):
        page.click(f"#export-{kind}")
    as_json, as_text = page.evaluate("Promise.all(window.made.map((blob) => blob.text()))")
    exported = json.loads(as_json)
    assert [(one["role"], one["content"]) for one in exported["messages"]] == [
        ("user", "please say yes"),
        ("assistant", "yes"),
    ]
    parts = ("# please say yes", "**System**", "Be brief.", "**User**", "please say yes", "**Assistant**", "yes\n")
    assert as_text == "\n\n".join(parts)


def output_of(prompt: list[int]) -> list[int]:
    return [token for token in output(array("i", prompt).tobytes(), 7, 0, 300, (256,)) if token < 256]


def test_a_stream_continues_after_a_reload_and_after_the_gateways_death(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    page.evaluate("document.querySelector('#probabilities').click()")
    with held_after(server, 20) as release:
        send(page, f"please say {LONG}")
        page.wait(f"document.querySelector('.message:last-child .body').textContent === {json.dumps(LONG[:20])}")
        page.reload()
        page.wait("document.querySelector('.running')")
        server.kill_and_restart()
        release()
        wait_done(page, 2)
    assert answer(page) == LONG
    assert page.evaluate("[...document.querySelectorAll('.token')].map((one) => one.textContent).join('')") == LONG
    assert page.evaluate("document.querySelectorAll('.token').length") == len(LONG)

    page.hover(".token:nth-child(3)")
    page.wait("!document.querySelector('#probability').hidden")
    assert page.text("#probability p") == '"e" 60.7 %'
    page.click("#view-server")
    assert page.evaluate("document.querySelector('#probability').hidden && !document.querySelector('.pointed')")
    page.hover("#view-server")  # a pointer that rests on a token would point at it again when it is shown
    page.click("#view-server")
    page.evaluate("document.querySelector('.tokens').focus()")
    for character in "Th":
        page.press("ArrowRight", 39)
        page.wait(f"document.querySelector('#announcer').textContent === '{character}: 60.7 %'")
    page.reload()  # from the browser's own store
    wait_done(page, 2)
    assert answer(page) == LONG


def test_a_stage_that_dies_is_shown_and_the_text_completes(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    with held_after(server, 10):
        send(page, f"please say {LONG}")
        page.wait("document.querySelector('.message:last-child .body').textContent.length === 10")
        page.click("#view-server")
        of_scheduler = "[...document.querySelectorAll('#stages tr')].find((row) => /^scheduler/.test(row.textContent))"
        page.wait(f"{of_scheduler}?.querySelector('.badge').textContent === 'ready'")
        server.peers.do(server.peers.kill_scheduler)
        page.wait(f"{of_scheduler}.querySelector('.badge').textContent !== 'ready'")
        server.peers.do(server.peers.start_scheduler)
        page.click("#view-server")
        wait_done(page, 2)
    assert answer(page) == LONG


def test_stop_cancels_the_request_and_keeps_its_text(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    with held_after(server, 10):
        before = server.peers.do(lambda: len(server.peers.generator.cancelled))
        send(page, f"please say {LONG}")
        page.wait("document.querySelector('.message:last-child .body').textContent.length === 10")
        page.press("Escape", 27)
        wait_done(page, 2)
        assert answer(page) == LONG[:10]
        # The server has cancelled it at once, although it had an idempotency key.
        deadline = time.monotonic() + 60
        while server.peers.do(lambda: len(server.peers.generator.cancelled)) == before:
            assert time.monotonic() < deadline
    assert "stopped" in page.text(".message:last-child .statistics")


def test_tools_and_structured_output_and_wrong_settings(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    fill(page, "#tools", json.dumps([tool])[:-1])
    send(page, "Hello")
    page.wait("document.querySelector('#tools-error').textContent")
    assert page.text("#problem").startswith("Tools: ")
    assert page.evaluate("document.querySelector('#prompt').value") == "Hello"  # nothing was sent
    fill(page, "#prompt", "")
    fill(page, "#tools", json.dumps([tool]))
    send(page, 'please say <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    wait_done(page, 2)
    assert page.text(".call code") == 'add({"a": 1})'
    page.type(".call textarea", "3")
    page.click(".calls > button")
    wait_done(page, 4)
    sent = server.peers.do(lambda: bytes(server.peers.generator.submitted[-1].prompt[::4]))
    assert b"<tool_response>\n3\n</tool_response>" in sent

    other = start(open_page, server)
    fill(other, "#constraint", "json_schema")
    fill(other, "#constraint-text", '{"type": "object"}')
    fill(other, "#parameter-temperature", "3")  # above its bound
    send(other, "please say {}")
    assert other.evaluate("document.querySelectorAll('.message').length") == 0
    fill(other, "#parameter-temperature", "0")
    send(other, "")
    wait_done(other, 2)
    submitted = server.peers.do(lambda: server.peers.generator.submitted[-1])
    assert submitted.sampling.temperature == 0
    assert submitted.constraint.text == '{"type":"object"}'


def test_the_page_asks_for_a_key_and_shows_tenants_to_administrators(open_page: OpenPage, guarded: Server) -> None:
    page = open_page(url(guarded))
    page.wait("document.querySelector('#key-dialog').open")
    for key, is_known in (("wrong", False), ("sk-user", True)):
        page.type("#key", key)
        page.click("#key-form .primary")
        note = "document.querySelector('#key-note').textContent"
        page.wait(f"{note}.includes('does not know')" if not is_known else "!document.querySelector('#model').disabled")
    page.wait("!document.querySelector('#key-dialog').open")
    send(page, "please say yes")
    wait_done(page, 2)
    assert answer(page) == "yes"
    stored = "JSON.stringify(Object.entries(localStorage)) + document.cookie"
    assert "sk-user" not in page.evaluate(stored)
    page.click("#view-server")
    page.wait("document.querySelector('#stages tr')")
    requests = "performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)"
    assert page.evaluate(f"[...new Set({requests})]") == [url(guarded)[:-1]]  # none to other servers


# The answer for the key "wrong" is held back until `release` is called; `isRead` is true when the page has handled it.
HOLD_WRONG = """(() => {
    const real = window.fetch;
    window.fetch = async (...given) => {
        const response = await real(...given);
        if (given[1]?.headers?.Authorization !== 'Bearer wrong') return response;
        await new Promise((resolve) => { window.release = resolve; });
        const body = await response.json();
        response.json = async () => { setTimeout(() => { window.isRead = true; }); return body; };
        return response;
    };
})()"""


def test_a_late_answer_for_a_key_that_was_replaced_asks_for_no_key(open_page: OpenPage, guarded: Server) -> None:
    page = open_page(url(guarded))
    page.wait("document.querySelector('#key-dialog').open")
    page.evaluate(HOLD_WRONG)
    page.type("#key", "wrong")
    page.click("#key-form .primary")
    page.wait("window.release")
    page.click("#change-key")
    page.type("#key", "sk-user")
    page.click("#key-form .primary")
    page.wait("!document.querySelector('#model').disabled")
    page.evaluate("window.release()")
    page.wait("window.isRead")
    assert not page.evaluate("document.querySelector('#key-dialog').open")
    assert page.text("#state") != "no key"


def test_pages_of_other_origins_use_the_api(open_page: OpenPage, server: Server, guarded: Server) -> None:
    """With `server.enable_cors`: all methods, and headers that clients add of their own."""
    page = open_page(url(server) + "health")  # which has no policy of its own
    headers = {"Authorization": "Bearer sk-user", "X-Stainless-Os": "Linux", "Idempotency-Key": "one"}
    for method, path, status in (("GET", "v1/models", 200), ("DELETE", "v1/requests/req-none", 404)):
        request = json.dumps({"method": method, "headers": headers})
        answered = f"fetch('{url(guarded)}{path}', {request}).then((it) => [it.status, it.headers.has('x-request-id')])"
        assert page.evaluate(answered) == [status, True]


@pytest.mark.parametrize("size", [{}, {"dark": True}, {"width": 390, "height": 780}], ids=["light", "dark", "phone"])
def test_axe_finds_nothing(open_page: OpenPage, server: Server, size: dict[str, Any]) -> None:
    page = start(open_page, server, **size)
    page.evaluate("document.querySelector('#probabilities').click()")
    send(page, "please say `code` and text")
    wait_done(page, 2)
    found = axe(page)
    page.click("#open-settings")
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    found += axe(page)
    page.click("#view-server")
    page.wait("document.querySelector('#stages tr')")
    found += axe(page)
    page.go(url(server) + "docs")
    page.wait("document.querySelector('details')")
    page.evaluate("document.querySelector('details').open = true")
    assert found + axe(page) == []


# A view that is drawn again while axe-core looks at it would be judged by halves: requests wait meanwhile, and after
# the answer of one that was under way the page is looked at again.
RUN_AXE = """(async () => {
    const real = window.fetch;
    let release;
    const end = new Promise((resolve) => { release = resolve; });
    window.fetch = (...given) => end.then(() => real(...given));
    let found, isChanged;
    for (let run = 0; run < 3; run++) {
        isChanged = false;
        const watch = new MutationObserver(() => { isChanged = true; });
        watch.observe(document.body, {childList: true, subtree: true, characterData: true});
        found = await axe.run();
        watch.disconnect();
        if (!isChanged) break;
    }
    window.fetch = real;
    release();
    return found.violations.map(({id, nodes}) => [id, nodes.map((one) => one.html)]);
})()"""


def axe(page: Page) -> list[tuple[str, Any]]:
    """What axe-core finds in the page: rules and the elements that break them."""
    page.wait("document.readyState === 'complete'")
    if not page.evaluate("'axe' in window"):
        package = importlib.util.find_spec("axe_playwright_python")
        assert package is not None and package.submodule_search_locations is not None
        page.evaluate((Path(package.submodule_search_locations[0]) / "axe.min.js").read_text() + ";0")
    return [(rule, nodes) for rule, nodes in page.evaluate(RUN_AXE)]


def test_conversations_are_bounded(open_page: OpenPage, server: Server) -> None:
    page = start(open_page, server)
    module = "import('/web/conversations.js')"
    fill = (
        f"{module}.then((store) => {{ for (let n = 0; n < 120; n++) store.save({{id: `c${{n}}`, "
        "messages: [{role: 'user', content: `chat ${n} ${'x'.repeat(60000)}`}]}); "
        "const entries = Object.keys(localStorage).filter((key) => key.startsWith('starling.conversation.'));"
        "return [store.list().length, entries.length, store.list()[0].title.slice(0, 8), store.load('c0')]; })"
    )
    count, entries, latest, oldest = page.evaluate(fill)
    assert count == entries <= 100
    assert (latest, oldest) == ("chat 119", None)
