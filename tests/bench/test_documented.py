"""Every `bench.…` module that a text names is there: moves must not leave commands behind that fail."""

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<![\w./])bench(?:\.[a-z_]+){1,3}(?![\w(])")


def named(path: Path) -> set[str]:
    return {name.removesuffix(".py") for name in NAMED.findall(path.read_text(encoding="utf-8"))}


def test_modules_that_texts_name_are_there() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", *ROOT.glob("bench/**/*.py")]
    commands = {name: path for path in texts if path.name != "CHANGELOG.md" for name in named(path)}
    assert len(commands) > 10
    missing = {name: path.name for name, path in commands.items() if find_spec(name) is None}
    assert not missing
