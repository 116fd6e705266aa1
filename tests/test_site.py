"""The site of the documentation: its list has each page once, and its links lead to pages of the site."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from scripts import site

ROOT = Path(__file__).resolve().parent.parent


def test_each_page_is_listed_once() -> None:
    _, _, listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    names = Counter(re.findall(r"^ +- (\S+\.md)$", listed, re.MULTILINE))
    assert set(names) == set(site.sources().values())
    assert set(names.values()) == {1}


def test_links_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    """That their anchors are there is for `make site` to see: MkDocs fails where one is not."""
    site.write_pages(tmp_path)
    pages = {path.name for path in tmp_path.iterdir()}
    links = [
        (page.name, target)
        for page in tmp_path.iterdir()
        for _, target, _ in site.LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if "://" not in target
    ]
    assert len(links) > 300
    assert [(page, target) for page, target in links if target not in pages] == []


def test_other_files_become_text_and_code_stays() -> None:
    names = site.sources()
    text = "[run](../benchmarks/RESULTS.md#a) [test](../tests/x.py) [web](https://x.y/z.md)\n```\n[a](b.md)\n```\n"
    expected = "[run](RESULTS.md#a) test [web](https://x.y/z.md)\n```\n[a](b.md)\n```\n"
    assert site.rewritten(text, ROOT / "docs" / "store.md", names) == expected
