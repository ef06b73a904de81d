"""Paths that name models."""

from __future__ import annotations

import os
from pathlib import Path

from ssd_profiles.errors import UserError


def require_there(model: str) -> None:
    """Raise UserError for a model that is named by a path to nothing."""
    path = expanded(model)
    if model.endswith(".gguf") and not os.path.isfile(path):
        raise UserError(f"{model}: no such file; give a .gguf file, a folder, a Hub id or `demo`")
    if (path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1) and not os.path.exists(path):
        raise UserError(f"{model}: no such folder; give a .gguf file, a folder, a Hub id or `demo`")


def expanded(model: str) -> Path:
    """The path that names a model; of those that name none, any."""
    # os.path is used, since pathlib's tests raise for names that are too long or begin with an unknown user's home.
    return Path(os.path.expanduser(model))
