"""Runs the application for `ssd-serve --replicas`, until it is asked to stop."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve

from ssd_profiles.errors import UserError, first_line
from ssd_runtime.serving.http.opening import ServiceOptions
from ssd_runtime.serving.ray_app.application import QUIET, application
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster
from ssd_runtime.serving.ray_app.scale import Scale

log = logging.getLogger("ssd_serve")
NAME = "ssd"


def serve_replicas(options: ServiceOptions, scale: Scale, address: str, host: str, port: int) -> None:
    """Serve on a cluster until SIGTERM or Ctrl-C; open requests then have `scale.grace` seconds to end.

    Raises UserError if there is no cluster, or if a replica cannot load the model.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with ray_cluster(address), _stopped_by_signals() as stop:
        if options.load.device is None:
            scale = scale.on_cards(int(ray.cluster_resources().get("GPU", 0)))
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        try:
            try:
                serve.run(application(options, scale), name=NAME, route_prefix="/", logging_config=QUIET)
            except RuntimeError as error:
                raise UserError(_reason(error)) from None
            told = str(scale.most) if scale.least == scale.most else f"{scale.least} to {scale.most}"
            log.info("serving %s replicas on http://%s:%d", told, host, port)
            stop.wait()
            log.info("stopping: open requests have %g s to end", scale.grace)
        finally:
            serve.delete(NAME)
            serve.shutdown()


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set."""
    stop = threading.Event()
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda *_: stop.set()) for kind in kinds}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _reason(error: RuntimeError) -> str:
    """Why the replicas do not start: the last error of a replica in Ray Serve's report."""
    message = serve.status().applications[NAME].deployments
    text = "\n".join([str(error), *(each.message for each in message.values())])
    found = re.findall(r"UserError: (.*)", text)
    return found[-1] if found else f"--replicas: they do not start ({first_line(RuntimeError(text))})"
