"""Entries of the compiler's commands, at which Ctrl-C is as at the runtime's."""

from __future__ import annotations

from ssd_runtime.commands.start import starting


def compile_() -> None:
    """Run `ssd-compile`."""
    with starting():
        from ssd_compiler.cli import main
    main()


def bundle() -> None:
    """Run `ssd-bundle`."""
    with starting():
        from ssd_compiler.bundles.cli import main
    main()
