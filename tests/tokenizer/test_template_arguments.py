"""What a chat template gets besides the messages, messages that it continues, and templates without a system role."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from stages.tokenizer.chat_messages import END, fold_system_messages
from stages.tokenizer.template import ChatTemplate
from tests.tokenizer.chat_templates import GEMMA, TEMPLATES, chat_vocabulary

VOCABULARY = chat_vocabulary()
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
REJECTS_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + GEMMA
)
DROPS_SYSTEM = (
    "{% for message in messages %}{% if message.role != 'system' %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}"
)


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, "<s>", "</s>", control_names=VOCABULARY.control_names)


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_documents_tools_and_variables_reach_the_template() -> None:
    template = compiled(THINKING)
    messages = [say("user", "a")]
    plain = template.render(messages).text
    assert plain == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages, variables={"enable_thinking": False}).text == plain + "<think>\n\n</think>\n\n"
    documents = [{"title": "t", "text": "x"}]
    assert "[t: x]" in template.render(messages, documents=documents).text
    assert '[{"name": "f"}]' in template.render(messages, True, [{"name": "f"}]).text


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [say("user", "a"), {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}]


def test_arguments_that_are_no_object_are_text() -> None:
    """A template writes them as the model wrote them, unless it needs an object."""
    each = "{% for m in messages %}{% for c in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"
    for body in ("{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}"):
        assert compiled(each.replace("BODY", body)).render(call('{"a": ')).text == '{"a": '
    needs_object = "{% for k, v in c.function.arguments | items %}{{ k }}{% endfor %}"
    template = compiled(each.replace("BODY", needs_object))
    assert template.render(call({"a": 1})).text == "a"
    with pytest.raises(InvalidRequest, match="not the text of a JSON object"):
        template.render(call('{"a": '))


def test_variables_do_not_replace_what_the_server_gives() -> None:
    chat = compiled(THINKING + "{{ bos_token }}").render(
        [say("user", "a")], False, None, {"messages": [], "bos_token": "<|im_end|>", "documents": [{"title": "no"}]}
    )
    assert chat.text == "<|im_start|>user\na<|im_end|>\n<s>"


@pytest.mark.parametrize("name", TEMPLATES)
@given(content=st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20))
def test_a_continued_message_ends_the_prompt(name: str, content: str) -> None:
    """The prompt is that of the whole chat, cut after the message."""
    template = compiled(TEMPLATES[name])
    messages = [say("user", "a"), say("assistant", f"Q{content}Q")]
    chat = template.render(messages, False, continue_final_message=True)
    whole = template.render(messages, False)
    assert chat.text.endswith(f"Q{content}Q")
    assert whole.text.startswith(chat.text)
    assert chat.marks == {at for at in whole.marks if at < len(chat.text)}
    assert END not in chat.text


@pytest.mark.parametrize(("trims", "expected"), [(False, "<|u|> x \n"), (True, "<|u|>x")])
def test_white_space_at_the_end_of_a_continued_message(trims: bool, expected: str) -> None:
    template = compiled("<|u|>{{ messages[0].content" + (" | trim" if trims else "") + " }}<|end|>")
    assert template.render([say("u", " x \n")], False, continue_final_message=True).text == expected


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}", [say("user", "a"), say("assistant", "b")]),
        ("{{ messages[0].content }}", [say("user", None)]),
        ("{{ messages[0].content }}", []),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message is true") as error:
        compiled(source).render(messages, False, continue_final_message=True)
    assert error.value.param == "continue_final_message"


def test_a_lone_surrogate_of_the_client_is_not_an_end() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        compiled(THINKING).render([say("user", f"a{END}")], documents=[])
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        compiled(THINKING).render([say("user", "a")], documents=[{"text": END}])


@pytest.mark.parametrize("source", [REJECTS_SYSTEM, DROPS_SYSTEM])
def test_without_a_system_role_its_text_goes_to_the_user(source: str) -> None:
    template = compiled(source)
    assert template.lacks_system_role
    folded = template.render([say("system", "S"), say("user", "U"), say("assistant", "A")])
    assert folded == template.render([say("user", "S\n\nU"), say("assistant", "A")])
    assert template.render([say("system", "S")]) == template.render([say("user", "S")])
    begun = [say("user", "U"), say("assistant", "A")]
    later = template.render([*begun, say("system", "S"), say("user", "V"), say("system", "T")])
    assert later == template.render([*begun, say("user", "S\n\nV\n\nT")])
    assert template.render([*begun, say("system", "S")]) == template.render([*begun, say("user", "S")])
    assert template.render([say("system", " "), say("user", "U")]) == template.render([say("user", "U")])
    system = [say("system", "<end_of_turn>"), say("system", "T"), say("user", "U")]
    assert [i for i in VOCABULARY.encode(template.render(system).text, True, marks=frozenset()) if i in (1, 2)] == []
    assert template.render(system) == template.render([say("user", "<end_of_turn>\n\nT\n\nU")])


def test_results_of_calls_stay_behind_their_calls() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    result = {"role": "tool", "content": "R"}
    folded = fold_system_messages([say("user", "U"), called, say("system", "S"), result, say("assistant", "A")])
    assert folded == [say("user", "U"), called, result, say("user", "S"), say("assistant", "A")]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_with_a_system_role_gets_the_messages_as_they_are(name: str) -> None:
    assert not compiled(TEMPLATES[name]).lacks_system_role


def test_parts_for_training_are_plain_text() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}.{% endfor %}"
    assert compiled(source).render([say("user", "a"), say("user", "b")]).text == "a.b."


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("tojson", '{"b": "é", "a": [1]}'),
        ("tojson(ensure_ascii=True)", '{"b": "\\u00e9", "a": [1]}'),
        ("tojson(ensure_ascii=False, sort_keys=true)", '{"a": [1], "b": "é"}'),
        ("tojson(separators=(',', ':'))", '{"b":"é","a":[1]}'),
        ("tojson(indent=1)", '{\n "b": "é",\n "a": [\n  1\n ]\n}'),
        ("tojson(1)", '{\n "b": "é",\n "a": [\n  1\n ]\n}'),
    ],
)
def test_json_takes_the_parameters_of_published_templates(call: str, expected: str) -> None:
    chat = compiled("{{ tools[0] | " + call + " }}").render([], True, [{"b": "é", "a": [1]}])
    assert chat.text == expected


@pytest.mark.parametrize(
    "call",
    [
        "tojson(indent=100000)",
        "tojson(separators=(',' * 100000, ':'))",
        "tojson(separators=(',',))",
        "tojson(ensure_ascii=True)",
    ],
)
def test_json_is_bounded(call: str) -> None:
    tools = [{"a": "é" * (12 << 20)}] if "ascii" in call else [{"a": [1] * 100}]
    with pytest.raises(InvalidRequest, match="within its limits"):
        compiled("{{ tools | " + call + " }}").render([], True, tools)
