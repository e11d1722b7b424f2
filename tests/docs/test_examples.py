"""The example of docs/deploying.md with several models and several tenants: `starling up` serves it as it stands."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import share_caches
from tests.e2e.server import ROOT
from tests.e2e.up_server import Up
from tools.checks import markdown
from tools.tiny_gguf import SHAPES, write_model

pytestmark = pytest.mark.slow


def example(folder: Path) -> dict[str, list[dict[str, object]]]:
    """The configuration of the page, with models in `folder` instead of /data."""
    text = (ROOT / "docs/deploying.md").read_text()
    text = text[text.index("## Several models and several tenants") :]
    block = next(block for block in markdown.blocks(text) if block.info == "yaml")
    found: dict[str, list[dict[str, object]]] = yaml.safe_load(block.text.replace("/data/", f"{folder}/"))
    return found


def test_each_tenant_reaches_every_model_by_a_key_of_its_own(tmp_path: Path) -> None:
    config = example(tmp_path)
    for model in config["models"]:
        write_model(Path(str(model["path"])), SHAPES["small"], "Q4_0")
    share_caches(tmp_path)
    names = [str(model["name"]) for model in config["models"]]
    keys = [(str(key["key"]), str(key["tenant"])) for key in config["auth"]["api_keys"]]  # type: ignore[call-overload]
    assert len(names) == len(keys) == 2
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, "seed": 1}
    with Up(tmp_path, config) as server:
        assert server.request("POST", "/v1/generate", {**body, "model": names[0]})[0] == 401
        answers = []
        for key, _ in keys:
            for name in names:
                headers = {"Authorization": f"Bearer {key}"}
                status, answer, _ = server.request("POST", "/v1/generate", {**body, "model": name}, headers)
                assert status == 200, answer
                assert answer["model"] == name
                answers.append(answer["choices"])
        assert all(answer == answers[0] for answer in answers)  # two names of the same weights
        status, listed, _ = server.request("GET", "/v1/models", None, {"Authorization": f"Bearer {keys[0][0]}"})
        assert {model["id"] for model in listed["data"]} == set(names)
        assert server.stop(signal.SIGINT) == 0
    assert server.leftovers() == []
