"""The pages say what is there: their commands are targets, their links lead somewhere, their code parses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for folder in (".", "docs", "deploy", "examples", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# Top-level folders and URL paths that a text may name; anything else would be some machine's own.
NEUTRAL = {
    "a",
    "api",
    "bin",
    "dev",
    "engines",
    "etc",
    "metrics",
    "mnt",
    "mock",
    "moonpool",
    "no",
    "proc",
    "run",
    "sys",
    "tmp",
    "ui",
    "usr",
    "v",
    "v1",
    "var",
    "x",
}
TEXT = {".cpp", ".hpp", ".md", ".pyi", ".py", ".sh", ".toml", ".yaml", ".yml", ""}


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosting sites make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(text: str, *languages: str) -> list[str]:
    return [
        body
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        if language in languages
    ]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_commands_are_targets(page: Path) -> None:
    named = re.findall(r"(?:^|`)(?:\$ )?(?:[A-Z_]+=\S+ )?make ([a-z]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= TARGETS


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_snippets_parse(page: Path) -> None:
    text = page.read_text()
    for body in blocks(text, "python"):
        compile(body, str(page), "exec")
    for body in blocks(text, "toml"):
        tomllib.loads(body)
    for body in blocks(text, "json"):
        json.loads(body)
    for body in blocks(text, "bash", "sh"):
        subprocess.run(["bash", "-n"], input=body, text=True, check=True)


def test_the_two_first_commands_come_first() -> None:
    commands = [
        line.split("#")[0].strip()
        for body in blocks((ROOT / "README.md").read_text(), "bash", "sh")
        for line in body.splitlines()
    ]
    assert [command for command in commands if command.startswith("make")][:2] == ["make demo", "make test"]


def test_readme_table_of_features_names_only_what_exists() -> None:
    """Every `moonpool X` command in the README is a subcommand."""
    from moonpool.cli.entry import make_app

    app = make_app()
    names = {
        command.name or (command.callback.__name__ if command.callback else "")
        for command in app.registered_commands
    }
    names |= {group.name or "" for group in app.registered_groups}
    used = re.findall(
        r"^(?:\$ )?moonpool ([a-z]+)", "\n".join(blocks((ROOT / "README.md").read_text(), "bash", "sh")), re.M
    )
    assert set(used) <= names


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    """Absolute paths are of folders that every Linux has; no file is too large for a repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    found = []
    for path in paths:
        if path.is_symlink() or not path.is_file():
            continue
        assert path.stat().st_size <= 1_000_000, f"{path} is too large to commit"
        if path.suffix in TEXT and path.name != ".gitignore":
            for match in re.finditer(
                r"(?<![\w.:/}\])~*-])/([a-z]+)/[A-Za-z]", path.read_text(errors="replace")
            ):
                if match[1] not in NEUTRAL:
                    found.append(f"{path.relative_to(ROOT)}: {match[0]}")
    assert not found


PASSED_ON = ("vllm", "sglang")  # whose other options are those of the engine


def commands_of(text: str) -> list[list[str]]:
    """The words of each line that begins with `moonpool`, with the lines that it goes on in."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(r"^(?: {4}|\$ )?moonpool ([a-z].*)$", joined, re.M)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_of_printed_commands_exist(page: Path) -> None:
    from moonpool.cli.entry import make_app

    wrong, top = [], typer.main.get_command(make_app())
    for words in commands_of(page.read_text()):
        command: Any = top
        for word in words:
            below = getattr(command, "commands", {})
            command = below.get(word) or below.get("run") or command
        parameters = command.get_params(typer.Context(command))
        known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        named = {word.partition("=")[0] for word in words if word.startswith("--") and len(word) > 2}
        if words[0] not in PASSED_ON and named - known:
            wrong.append(f"moonpool {' '.join(words)}: {', '.join(sorted(named - known))}")
    assert not wrong


@pytest.mark.parametrize("page", ["code_walk.md", "glossary.md"])
def test_tables_of_files_and_names_name_what_is_there(page: str) -> None:
    rows = re.findall(
        r"^\| .* \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "docs" / page).read_text(), re.MULTILINE
    )
    assert len(rows) > 40
    for file, name in rows:
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", (ROOT / file).read_text()), (file, name)
