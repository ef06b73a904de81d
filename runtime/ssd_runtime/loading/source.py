"""The model and the bundle that a user names, before any weights are loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import file_digest
from ssd_artifacts.sharing.opening import OpenedBundle, open_given, trusted_bundle
from ssd_profiles.errors import UserError
from ssd_runtime.loading.paths import require_there


@dataclass(frozen=True)
class ModelSource:
    """The model that a command decodes, and the bundle that it decodes with."""

    model: str
    """Hub id, folder, `.gguf` file or `demo`."""
    opened: OpenedBundle | None

    @property
    def bundle(self) -> Bundle | None:
        """The bundle, if one was given."""
        return self.opened.bundle if self.opened is not None else None

    @property
    def where(self) -> str:
        """Name of the bundle in error messages."""
        return self.opened.where if self.opened is not None else "bundle"

    def read_ahead(self) -> Thread | None:
        """Read and hash a `.gguf` file in a thread of its own, while imports take their seconds; None for others."""

        def read() -> None:
            with suppress(OSError):  # told where the file is loaded
                file_digest(Path(self.model))

        if not self.model.endswith(".gguf"):
            return None
        thread = Thread(target=read, name="ssd-read", daemon=True)
        thread.start()
        return thread

    def weights(self, given: str | None, device: str | None, dtype: str | None) -> str:
        """The `weights` of `load_model`: `given`, else those of a trusted bundle's compile, else the file's own."""
        # This import takes seconds.
        from ssd_runtime.loading.models import weights_of

        return given or weights_of(trusted_bundle(self.opened), self.model, device, dtype)


def read_source(artifact: str | Path | None, model: str | None, key: Path | None = None) -> ModelSource:
    """Open the bundle, if one is given; its model is the default, unless it comes from elsewhere.

    With `key`, the bundle must be signed by that public key, and may then choose the model. Raises UserError if neither
    a bundle nor a model is given, or if the model is a path to nothing.
    """
    opened = open_given(artifact, key)
    if model is None:
        if opened is None:
            raise UserError("--model: none given; give a model, or a --bundle that names one")
        model = opened.model_spec()
    require_there(model)
    return ModelSource(model, opened)
