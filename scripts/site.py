"""`make site`: the documentation as a site in build/site/html, by MkDocs; a link or an anchor that leads
nowhere is an error.

The pages are those of docs/ and the others of PAGES, side by side. Links between them are written anew for
that; links to other files of the repository, which are not on the site, become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from scripts import environments
from scripts.environments import ROOT
from scripts.progress import Progress

SITE = ROOT / "build" / "site"
REQUIREMENTS = ("mkdocs==1.6.1", "mkdocs-material==9.8.2")
# Beside docs/: the file -> its name on the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "benchmarks/README.md": "BENCHMARKS.md",
    "benchmarks/RESULTS.md": "RESULTS.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def sources() -> dict[Path, str]:
    """Each page's file -> its name on the site."""
    docs = {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    return docs | {ROOT / path: name for path, name in PAGES.items()}


def rewritten(text: str, page: Path, names: dict[Path, str]) -> str:
    """The page's text with links as the site has them. Code blocks stay as they are."""

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        name = names.get(Path(os.path.normpath(page.parent / target)))
        return f"[{words}]({name}{anchor})" if name else words

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def write_pages(folder: Path) -> None:
    """All pages into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = sources()
    for page, name in names.items():
        (folder / name).write_text(rewritten(page.read_text(), page, names))


def main() -> None:
    progress = Progress(environments.cache() / "logs" / "site.log")
    tools = environments.programs(progress, "site", *REQUIREMENTS)
    write_pages(SITE / "pages")
    command: list[str | Path] = [
        tools.python,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        ROOT / "mkdocs.yml",
    ]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}  # of the theme, which says what will replace MkDocs
    progress.run("building the site", command, environments.clean_env() | quiet)
    progress.say(f"open {SITE / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
