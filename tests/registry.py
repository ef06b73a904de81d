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

from tests.ports import unused_port

PROGRAM = "docker-registry"
CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Run a registry that keeps its blobs in `folder`; yields its host and port. Skips the test without the program."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed (apt-get install {PROGRAM})")
    port = unused_port()
    (folder / "registry.yml").write_text(CONFIG.format(root=folder / "blobs", port=port))
    process = subprocess.Popen(
        [PROGRAM, "serve", str(folder / "registry.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
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
