"""The names of the kernels that multiply quantised weights on this machine."""

from __future__ import annotations

from ssd_runtime.weights.native.library import library


def kernel_name(bits: int, own: bool) -> str:
    """The name of our own kernel, which says for what instructions it was compiled, or of aten's."""
    found = library()
    return f"{found.instructions if own and found is not None else 'int'}{bits}"
