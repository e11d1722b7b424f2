"""The files of the page: small, without scripts or styles in the HTML, and without addresses of other servers."""

from __future__ import annotations

import re

from pipeline.api.held_bytes import UNCOUNTED_BYTES
from stages.gateway.web import files


def test_the_files_are_small_and_refer_to_each_other_only() -> None:
    found = files()
    assert {"index.html", "page.css", "main.js", "docs.html", "docs.js"} <= set(found)
    for name, file in found.items():
        text = file.data.decode()
        assert len(file.data) < UNCOUNTED_BYTES, name
        assert not re.search(r"(?:https?:)?//\w", re.sub(r'xmlns="[^"]*"|^\s*//.*|\s//\s.*', "", text, flags=re.M)), (
            name
        )
        for wanted in re.findall(r'(?:"/web/|from "\./)([\w.]+)"', text):
            assert wanted in found, (name, wanted)
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text), name


def test_the_entity_tags_tell_contents_apart() -> None:
    tags = [file.etag for file in files().values()]
    assert len(set(tags)) == len(tags)
