"""What the README shows must exist."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_imports_what_there_is() -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    code = compile(example[1], str(README), "exec")
    imports = "\n".join(line for line in example[1].splitlines() if line.startswith(("from ", "import ")))
    namespace: dict[str, object] = {}
    exec(imports, namespace)
    assert set(code.co_names) & {"generate", "fitted_decoder"} <= set(namespace)
