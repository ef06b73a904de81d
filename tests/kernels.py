"""The names of the kernels that multiply quantised weights on this machine."""

from __future__ import annotations

from ssd_runtime.weights.native.library import library


def kernel_name(bits: int, own: bool, form: str = "") -> str:
    """The name of our own kernel, which says for what instructions it was compiled, or of aten's.

    Our own kernel of a file's weights has the name of their `form`.
    """
    found = library()
    return f"{found.instructions}{form or bits}" if own and found is not None else f"int{bits}"
