"""Runs the application for `ssd-serve --replicas`, until it is asked to stop."""

from __future__ import annotations

import logging
import re
import signal
import threading
from contextlib import suppress

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from ssd_profiles.errors import UserError, first_line
from ssd_runtime.engine.interrupts import handling
from ssd_runtime.serving.http.settings import ServiceOptions
from ssd_runtime.serving.ray_app.application import QUIET, application
from ssd_runtime.serving.ray_app.ray_cluster import ray_cluster
from ssd_runtime.serving.ray_app.scale import Scale

log = logging.getLogger("ssd_serve")
NAME = "ssd"


def serve_replicas(options: ServiceOptions, scale: Scale, address: str, host: str, port: int) -> None:
    """Serve on a cluster until SIGTERM or Ctrl-C; open requests then have `scale.grace` seconds to end.

    Raises UserError if there is no cluster or one on which Ray Serve runs, or if a replica cannot load the model.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with ray_cluster(address), handling(signal.default_int_handler):
        if options.load.device is None:
            scale = scale.on_cards(int(ray.cluster_resources().get("GPU", 0)))
        _require_free(address)
        serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        try:
            log.info("waiting for hosts that have room for %d replicas (`ray status` shows them)", scale.least)
            _run(application(options, scale))
            told = str(scale.most) if scale.least == scale.most else f"{scale.least} to {scale.most}"
            log.info("serving %s replicas on http://%s:%d", told, host, port)
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
            log.info("stopping: open requests have %g s to end", scale.grace)
        finally:
            with handling(signal.SIG_IGN):
                serve.delete(NAME)
                # Somebody may have added an application meanwhile, which goes on.
                if not serve.status().applications:
                    serve.shutdown()


def _require_free(address: str) -> None:
    """Raise UserError where Ray Serve runs already."""
    before = serve.status()
    if before.proxies or before.applications:
        there = ", ".join(before.applications) or "no application"
        raise UserError(
            f"--ray {address}: Ray Serve runs there already ({there}); add this one with `serve run`, or end the "
            "others with `serve shutdown`"
        )


def _run(app: serve.Application) -> None:
    """Start the application. Raises UserError if it does not start."""
    try:
        serve.run(app, name=NAME, route_prefix="/", logging_config=QUIET)
    except (RuntimeError, RayServeException) as error:
        raise UserError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Why the replicas do not start: the last error of a replica in Ray Serve's report."""
    started = serve.status().applications.get(NAME)
    messages = [each.message for each in started.deployments.values()] if started is not None else []
    text = "\n".join([str(error), *messages])
    found = re.findall(r"UserError: (.*)", text)
    return found[-1] if found else f"--replicas: they do not start ({first_line(RuntimeError(text))})"
