"""The code that figures depend on, as a hash of the packages."""

from __future__ import annotations

import ast
import hashlib
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("ssd_profiles", "ssd_artifacts", "ssd_runtime", "ssd_compiler")


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
