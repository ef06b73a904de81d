"""A real OCI registry on this machine: Debian's docker-registry, by plain HTTP on a free port."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOT_INSTALLED = "docker-registry is not installed (apt-get install docker-registry)"
CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Yield the registry's host and port; the test is skipped where the program is missing."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip(NOT_INSTALLED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "registry.yml").write_text(CONFIG.format(root=folder / "blobs", port=port))
    process = subprocess.Popen([program, "serve", str(folder / "registry.yml")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
