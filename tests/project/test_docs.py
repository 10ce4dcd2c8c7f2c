"""The documentation: it builds without a warning and without the network, and what its pages show is what happens.

In docs/*.md a `pycon` block is a doctest and a `python` block is run, in order, in one namespace a page. A block with a
title is a file; `console` blocks are commands, run beside those files, with their output. The options in `bash` blocks
are checked against the command line, and nothing more: they need machines, or time.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import thinwire as tw
import thinwire.methods
from bench import bytes_table
from tests.cluster import free_port
from thinwire.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
INCLUDED = re.compile(r"^--8<--\n(.+)\n--8<--$", re.M)
EQUATION = re.compile(r"\$[^$`]+\$")
RUN_ELSEWHERE = {"migration.md"}  # tests/integrations/test_migration.py
AS_PRINTED = doctest.ELLIPSIS

one_build = pytest.mark.xdist_group("docs")  # one site serves all of its tests


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str
    line: int


def blocks(page: str, *languages: str) -> list[Block]:
    text = INCLUDED.sub(lambda found: (ROOT / found[1]).read_text(), PAGES[page])
    found = [Block(m[1], m[2], m[3], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]
    return [block for block in found if block.language in languages]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if blocks(page, *languages)]


# -- the site ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with warnings as errors, where no address can be reached through a proxy that is not there."""
    target = tmp_path_factory.mktemp("site")
    offline = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def html_of(site: Path) -> dict[str, str]:
    return {str(path.relative_to(site)): path.read_text() for path in sorted(site.rglob("*.html"))}


@one_build
def test_every_page_is_built(site: Path) -> None:
    assert {page.replace(".md", ".html") for page in PAGES} <= set(html_of(site))


@one_build
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loading = re.compile(r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//|<link[^>]*\bhref="?(?:https?:)?//')
    for name, html in html_of(site).items():
        assert not loading.search(html), name
    for css in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", css.read_text()), css.name


@one_build
def test_equations_are_drawn_by_the_browser(site: Path) -> None:
    built = html_of(site)
    for page, text in PAGES.items():
        html = built[page.replace(".md", ".html")]
        assert ("<math" in html) == bool(EQUATION.search(FENCE.sub("", text))), page
        assert 'class="arithmatex"' not in html, page
        for equation in re.findall(r"<math.*?</math>", html, re.S):  # no LaTeX is left in it
            assert not re.search(r"\\|&(?!#x)", equation), f"{page}: {equation}"


@one_build
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ")[0].rpartition(".")[2] for line in zlib.decompress(inventory).decode().splitlines()}
    assert set(tw.__all__) <= documented, set(tw.__all__) - documented


# -- what the pages say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in pages_with("python", "pycon") if page not in RUN_ELSEWHERE])
def test_python_blocks(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    with torch.random.fork_rng():
        for block in blocks(page, "python", "pycon"):
            if block.language == "pycon":
                check_doctest(page, block, names)
            elif block.title is None:
                exec(compile(block.text, f"{page}:{block.line}", "exec", dont_inherit=True), names)


def check_doctest(page: str, block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=AS_PRINTED, verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    names.update(test.globs)
    assert runner.failures == 0, "".join(said)


@pytest.mark.xdist_group("project")
@pytest.mark.parametrize("page", pages_with("console"))
def test_console_blocks(page: str, tmp_path: Path) -> None:
    """All commands of a page run side by side: those of two machines must meet."""
    port = free_port()
    for block in blocks(page, "python"):
        if block.title is not None:
            (tmp_path / block.title).write_text(here(block.text, port))
    commands = [Command(here(block.text, port), tmp_path) for block in blocks(page, "console")]
    try:
        for command in sorted(commands, key=lambda command: command.serves):
            command.check()
    finally:
        for command in commands:
            command.process.kill()
            command.process.wait()


def here(text: str, port: int) -> str:
    """The addresses of the pages, on this machine."""
    found = text.replace("192.0.2.2:29500", f"127.0.0.1:{port}")
    return found.replace("29510", str(port)).replace("29511", str(port + 1))


class Command:
    """A console block: its first line runs, and prints the others. A coordinator serves until it is ended."""

    def __init__(self, text: str, folder: Path) -> None:
        line, self.wanted = text.split("\n", 1)
        prompt, name, *options = shlex.split(line)
        assert prompt == "$", line
        modules = {"python": [], "thinwire": ["-m", "thinwire"], "torchrun": ["-m", "torch.distributed.run"]}
        self.process = subprocess.Popen(
            [sys.executable, *modules[name], *options],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RUST_LOG": "warn"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.serves = "coordinator" in options
        self.said = "".join(self._lines()) if self.serves else ""  # it is ready once it has spoken

    def _lines(self) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in self.wanted.splitlines()]

    def check(self) -> None:
        if self.serves:
            self.process.terminate()
        out, err = self.process.communicate(timeout=120)
        printed = re.sub(r" +$", "", self.said + out, flags=re.M)
        same = doctest.OutputChecker().check_output(self.wanted, printed, AS_PRINTED)
        assert same, f"{shlex.join(map(str, self.process.args))} prints\n{printed}\n{err}"


def commands(page: str) -> list[list[str]]:
    """The words after `thinwire` of every command line in bash blocks."""
    found = []
    for line in (line for block in blocks(page, "bash") for line in block.text.splitlines()):
        words = shlex.split(line.split(" > ")[0], comments=True)
        if "thinwire" in words:
            found.append(words[words.index("thinwire") + 1 :])
        elif "thinwire.plan" in words:
            found.append(["plan", *words[words.index("thinwire.plan") + 1 :]])
    return found


@pytest.mark.parametrize("page", pages_with("bash"))
def test_command_lines_have_options_that_exist(page: str) -> None:
    group: Any = typer.main.get_command(app)
    for name, *words in commands(page):
        command = group.get_command(None, name)
        assert command is not None, name
        command.make_context(name, words)


def test_the_command_line_page_has_every_option() -> None:
    group: Any = typer.main.get_command(app)
    text = PAGES["api/cli.md"]
    for name in group.list_commands(None):
        assert f"## thinwire {name}" in text
        for option in group.get_command(None, name).params:
            assert option.opts[0] in text or option.param_type_name == "argument", f"thinwire {name}: {option.opts[0]}"


def test_every_method_has_a_page() -> None:
    shown = "\n".join(text for page, text in PAGES.items() if page.startswith("methods/"))
    for name in thinwire.methods.__all__:
        assert f"print(tw.{name}(" in shown, f"no page prints the rows of tw.{name}"


def test_bytes_of_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    bytes_table.main()
    assert capsys.readouterr().out in PAGES["methods/index.md"]


def test_every_kind_of_event_is_explained() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "thinwire").rglob("*.py"))
    kinds = set(re.findall(r'(?:(?:events\.add|notify)\(\s*|_tell\((?="\w+", \())"(\w+)"', source))
    assert kinds, "the pattern finds no event any more"
    for kind in kinds:
        assert f"| `{kind}` |" in PAGES["troubleshooting.md"], kind


def decimals(text: str) -> set[str]:
    """Every number with a decimal point, 0.7 and .7 alike."""
    return {number.lstrip("0") for number in re.findall(r"(?<![\w.])\d*\.\d+", text)}


@pytest.mark.parametrize("page", [page for page in PAGES if "\n## Ours\n" in PAGES[page]])
def test_our_numbers_are_in_the_log(page: str) -> None:
    found = re.search(r"^## Ours\n(.*?)(?=^## |\Z)", PAGES[page], re.M | re.S)
    recorded = decimals((ROOT / "LOG.md").read_text() + (ROOT / "bench" / "README.md").read_text())
    assert found is not None
    assert not decimals(found[1]) - recorded
