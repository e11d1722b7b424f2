"""The files for containers and continuous integration agree with the rest of the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config.schema import Config

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "configs" / "container"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def schema_errors(schema: str, *files: Path) -> str:
    """What `check-jsonschema` finds by a schema that it contains; "" if the files are valid."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_workflows_and_compose_file_are_valid_by_their_published_schemas(tmp_path: Path) -> None:
    assert schema_errors("vendor.github-workflows", *WORKFLOWS) == ""
    assert schema_errors("vendor.compose-spec", CONTAINER / "compose.yaml") == ""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("on: push\njobs:\n  one:\n    runs-on: ubuntu-24.04\n    steps:\n      - runs: make\n")
    assert "runs" in schema_errors("vendor.github-workflows", wrong)
    wrong.write_text("services:\n  one:\n    image: starling\n    port: 8080\n")
    assert "port" in schema_errors("vendor.compose-spec", wrong)


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def steps(workflow: Path) -> list[str]:
    return [step["run"] for job in jobs(workflow).values() for step in job.get("steps", ()) if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {target for step in steps(workflow) for target in re.findall(r"make ([a-z-]+)", step)}
    assert called
    assert called <= known


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_tests_of_upgrades_have_the_previous_release(workflow: Path) -> None:
    """Without it they are skipped: a checkout has one commit by default."""
    for name, job in jobs(workflow).items():
        done = "\n".join(step.get("run", "") for step in job.get("steps", ()))
        if re.search(r"make test-(slow|upgrade)\b", done):
            [checkout] = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
            assert checkout.get("with", {}).get("fetch-depth") == 0, name


def test_a_release_is_tested_first() -> None:
    found = jobs(ROOT / ".github" / "workflows" / "release.yml")
    called = found["test"]["uses"]
    assert (ROOT / called).is_file()
    assert "workflow_call" in yaml.safe_load((ROOT / called).read_text())[True]  # YAML 1.1: `on` is true
    assert {"test", "wheel", "debian"} == set(found["release"]["needs"])


def test_every_supported_python_is_tested() -> None:
    tested: list[str] = jobs(ROOT / ".github" / "workflows" / "ci.yml")["fast"]["strategy"]["matrix"]["python"]
    assert f">={tested[0]}" == PROJECT["project"]["requires-python"]
    assert {"3.11", "3.12", "3.13"} <= set(tested)


def test_the_image_copies_what_the_wheel_packs() -> None:
    text = (CONTAINER / "Containerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    packed = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packed <= copied
    assert {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_wheel_has_the_whole_chart() -> None:
    package = ROOT / "starling" / "launchers"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["starling.launchers"]
    packed = {file for pattern in patterns for file in package.glob(pattern) if file.is_file()}
    assert packed == {file for file in (package / "chart").rglob("*") if file.is_file()}


def test_chart_and_image_are_of_this_version() -> None:
    chart = yaml.safe_load((ROOT / "starling" / "launchers" / "chart" / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"]} == {PROJECT["project"]["version"]}
    [lock] = re.findall(r"^COPY (locks/.+) \./$", (CONTAINER / "Containerfile").read_text(), re.MULTILINE)
    pinned = set(re.findall(r"^([a-z-]+)==", (ROOT / lock).read_text(), re.MULTILINE))
    assert {"aetcd", "obstore", "aiohttp"} <= pinned


def test_the_variables_are_configuration_keys() -> None:
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    names = set(compose["services"]["starling"]["environment"])
    names |= set(re.findall(r"(STARLING_[A-Z]+__[A-Z_]+)=", (CONTAINER / "Containerfile").read_text()))
    assert len(names) > 2
    for name in names:
        found: Any = Config()
        for key in name.removeprefix("STARLING_").lower().split("__"):
            found = getattr(found, key)


def test_the_image_is_of_this_version() -> None:
    compose = yaml.safe_load((CONTAINER / "compose.yaml").read_text())["services"]["starling"]
    assert compose["image"] == f"starling:{PROJECT['project']['version']}"
    assert (ROOT / compose["build"]["dockerfile"]).is_file()
    assert (CONTAINER / compose["build"]["context"]).resolve() == ROOT
