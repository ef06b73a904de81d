"""The code that figures depend on: a hash of the packages, and changes that are declared to leave every speed alone."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("ssd_profiles", "ssd_artifacts", "ssd_runtime", "ssd_compiler")
SAME_SPEED = Path(__file__).parent / "same_speed.json"
"""Changes of the packages that no figure depends on: a list of objects with the digests `before` and `after` a change,
and `why`. The pages print the reasons beside figures that were measured before. Steps of a cycle, searches, kernels and
planners never belong here: what touches them is measured again."""


def packages_digest() -> str:
    """Hash of the packages' code, by which outcomes of equal code are known.

    Comments, docstrings and help texts do not count, because no figure depends on them.
    """
    whole = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(each for each in root.rglob("*") if each.suffix in (".py", ".c", ".h")):
            whole.update(f"{package}/{path.relative_to(root)}\n".encode())
            code = path.read_bytes()
            whole.update(meaning(code) if path.suffix == ".py" else code)
    return whole.hexdigest()[:12]


def meaning(source: bytes) -> bytes:
    """Serialise the syntax tree of Python code without comments, docstrings and arguments named `help`."""
    return ast.dump(_WithoutTexts().visit(ast.parse(source))).encode()


class _WithoutTexts(ast.NodeTransformer):
    """Removes the texts that are for readers only."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Drop a text that stands by itself."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        """Drop a help text."""
        return None if node.arg == "help" else self.generic_visit(node)


def changes_since(measured: str | None, packages: str, declared: Path = SAME_SPEED) -> list[str] | None:
    """List the reasons of the declared changes from the code of the digest `measured` to that of `packages`.

    Empty for the same code; None if the digests are not linked by declared changes.
    """
    steps = {step["before"]: (step["after"], step["why"]) for step in json.loads(declared.read_text(encoding="utf-8"))}
    reasons = list[str]()
    while measured != packages:
        if measured not in steps:
            return None
        measured, why = steps.pop(measured)
        reasons.append(why)
    return reasons


def changes_section(measured: Iterable[str | None], packages: str, declared: Path = SAME_SPEED) -> str:
    """A section of a page about the declared changes since the code of some outcomes; empty without any."""
    found = [why for digest in measured for why in changes_since(digest, packages, declared) or ()]
    if not found:
        return ""
    lines = [f"- {why}" for why in dict.fromkeys(found)]
    return "\n".join(
        ["## Changes since", "", "No figure depends on what has changed since some were measured:", "", *lines, ""]
    )
