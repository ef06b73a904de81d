"""Links, figures and commands of the documents hold."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

from bench.benchmarks.__main__ import OUTCOMES
from bench.benchmarks.page import QUOTE, QUOTING, quoted
from bench.harness.outcomes import read_outcomes
from ssd_artifacts.reference_bundle import bundle_path
from ssd_compiler import cli
from ssd_compiler.bundles import cli as bundles
from ssd_runtime.commands import run, serve
from ssd_runtime.profiling import latency

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for found in LINK.findall(page.read_text(encoding="utf-8")):
            link = found[0] or found[1]
            if link.startswith(("http", "mailto:")):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 12
    assert not broken


BENCHMARKS = ROOT / "docs" / "benchmarks.md"
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
NUMBER = r"\d{1,3}\.\d{1,2}"
INTERVAL = rf"\(({NUMBER})–({NUMBER})\)"
FOLLOWED = rf"(?:<!--/f-->)?\s*(?:×|x\b|times\b|of plain\b|\({NUMBER}–{NUMBER}\))"
SPEED = re.compile(rf"(?<![\w.])({NUMBER})(?={FOLLOWED})|{INTERVAL}")
"""A number that is followed by ×, x, `times`, `of plain` or an interval in brackets, and the ends of an interval."""
EXAMPLE = re.compile(r"^.*<!-- example -->$", re.MULTILINE)
"""A line whose figures show a form of output, not a measurement."""


def speeds(text: str) -> set[str]:
    """The speed figures of a text, as they are written."""
    found = SPEED.findall(EXAMPLE.sub("", text).replace("**", ""))
    return {number for groups in found for number in groups if number}


def unknown(text: str, page: str) -> set[str]:
    """The speed figures of a text that a page has not."""
    return speeds(text) - set(re.findall(rf"(?<![\w.])({NUMBER})(?![\w.]|\d)", page))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_speed_is_on_the_page_of_the_benchmarks(path: Path) -> None:
    missing = unknown(path.read_text(encoding="utf-8"), BENCHMARKS.read_text(encoding="utf-8"))
    assert not missing, f"{path.name}: not in docs/benchmarks.md: {', '.join(sorted(missing))}"


def test_quoted_figures_are_those_of_the_outcomes() -> None:
    outcomes = read_outcomes(OUTCOMES)
    assert {path.resolve() for path in QUOTING} == set(TEXTS)
    marks = 0
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        marks += len(QUOTE.findall(text))
        assert quoted(text, outcomes) == text, f"{path.name}: run python -m bench.benchmarks --page"
    assert marks > 5


README = ROOT / "README.md"
GUIDE = TEXTS[1:]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_every_page_of_the_guide_begins_with_a_command(page: Path) -> None:
    assert re.match(r"# .+\n\n    (ssd-\w+|pip|pytest|python) ", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", [run, serve, cli, bundles], ids=["run", "serve", "compile", "bundle"])
def test_the_guide_names_every_option(module: ModuleType) -> None:
    command = typer.main.get_command(module.app)
    commands = [command, *getattr(command, "commands", {}).values()]
    options = {name for each in commands for option in each.params for name in option.opts if name.startswith("--")}
    shared = {"--version", "--help", "--install-completion", "--show-completion"}
    named = set(re.findall(r"--[a-z][\w-]*", "\n".join(page.read_text(encoding="utf-8") for page in GUIDE)))
    assert len(options) > 12
    assert not options - shared - named


def test_the_guide_stays_short() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in GUIDE) <= 6_000


def test_the_texts_list_every_variable_of_the_environment_that_is_read() -> None:
    def read_by(*places: str) -> set[str]:
        sources = [file.read_text(encoding="utf-8") for place in places for file in (ROOT / place).rglob("*.py")]
        return {name for source in sources for name in re.findall(r'"(SSD_[A-Z_]+)"', source)}

    def table(page: str) -> set[str]:
        return set(re.findall(r"^\| `(SSD_\w+)` \|", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE))

    packages = read_by("profiles", "artifacts", "runtime", "compiler")
    assert table("docs/guide/README.md") == packages
    assert table("CONTRIBUTING.md") == read_by("tests") - packages


@pytest.mark.model
@pytest.mark.usefixtures("made_up_latencies")
def test_the_python_example_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.delenv("SSD_CACHE")  # where the converted model is
    monkeypatch.setattr(latency, "remember", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("bundle").symlink_to(bundle_path(Path("demo")))
    shorter = example[1].replace("max_new_tokens=64", "max_new_tokens=8")
    assert shorter != example[1]
    exec(compile(shorter, str(README), "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5
