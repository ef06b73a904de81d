"""The socket that a server listens on."""

from __future__ import annotations

import os
import socket

from ssd_profiles.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket; port 0 asks the system for a free one. Raises UserError if the address cannot be had.

    Connections are refused until the server starts, so that nobody takes it for ready before.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Linux lets two servers that reuse addresses bind the same one until one of them listens.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UserError(f"--host, --port: {host}:{port} cannot be listened on ({reason}); give others") from None


def url_of(listener: socket.socket) -> str:
    """The address of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
