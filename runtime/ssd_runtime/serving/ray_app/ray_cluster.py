"""Connects a command to Ray: a cluster that runs, or one of this machine alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ssd_profiles.errors import UserError, first_line, require_packages

LOCAL = "local"
"""The address that starts a cluster on this machine, which ends with the command."""
STORE_BYTES = 128 << 20
"""Memory for objects that processes of a local cluster share: prompts and results, which are small."""


@contextmanager
def ray_cluster(address: str) -> Iterator[None]:
    """Join the cluster at an address for the length of a block; `local` starts one on this machine.

    Raises UserError if Ray is not installed, or if there is no cluster.
    """
    require_packages("--ray", "ray", "ray")
    own: dict[str, Any] = {}
    failure, see = "no cluster can be joined there", "ray status"
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"num_cpus": os.cpu_count(), "include_dashboard": False, "object_store_memory": STORE_BYTES}
        failure, see = "Ray did not start on this machine", "ray start --head"
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # Ray raises bare exceptions where a cluster does not start in time
        raise UserError(f"--ray {address}: {failure} ({first_line(error)}); see `{see}`") from None
    try:
        yield
    finally:
        ray.shutdown()
