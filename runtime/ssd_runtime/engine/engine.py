"""The front door from Python: a model on this device with what its bundle knows of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import config_sha256
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_runtime.engine.runner import Runner, RunSettings
from ssd_runtime.loading.models import LoadedModel, load_model
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.parity import require_faithful
from ssd_runtime.planning.registry import check_strategy, needs_latency, read_settings
from ssd_runtime.planning.strategy import MakePlanner, make_strategy
from ssd_runtime.profiling.latency import known_latency, measure_latency
from ssd_runtime.profiling.memory import guard_memory
from ssd_runtime.weights.kernel_choice import fitted_decoder


class IgnoredSettingsWarning(UserWarning):
    """The model's generation config asks for something that decoding does not do."""


class Engine:
    """What decodes: a loaded model, of which it is a view, with or without a bundle.

        engine = Engine.open("bundle")
        print(engine.runner().answer("Why is the sky blue?").text)

    Nothing of the model is changed. Raises UserError where the bundle is of another model, or does not fit its sizes.
    Emits one IgnoredSettingsWarning where the model's generation config has settings that decoding ignores.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bundle: Bundle | None = None,
        where: str = "bundle",
        weight_memory: int | None = None,
        before_measuring: Callable[[], object] | None = None,
    ) -> None:
        """`where` names the bundle in errors; packed copies of weights take `weight_memory` bytes at most.

        By default that is half of what is free. `before_measuring` is called where no table has this device's.
        """
        if bundle is not None:
            config = loaded.model.config
            bundle.require_model(loaded.fingerprint(), config.hidden_size, config.vocab_size, where)
        if loaded.unsupported_settings:
            names = ", ".join(loaded.unsupported_settings)
            warnings.warn(
                f"the model's generation config sets {names}, which decoding ignores",
                IgnoredSettingsWarning,
                stacklevel=2,
            )
        self.loaded, self.bundle = loaded, bundle
        with guard_memory("packing and checking the model", loaded.model.device):
            self.decoder = fitted_decoder(loaded.model, weight_memory)
            require_faithful(self.decoder)
        self._before_measuring = before_measuring

    @classmethod
    def open(
        cls,
        artifact: str | Path | None = None,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> Engine:
        """Load a bundle, which is a folder or `demo`, and its model; or a `model` alone, as `load_model` takes it.

        Raises UserError saying what to give instead.
        """
        bundle = Bundle.load(bundle_path(Path(artifact))) if artifact is not None else None
        if model is None:
            if bundle is None:
                raise UserError("engine: neither a bundle nor a model is given; give one of them")
            model = bundle.model.spec(str(artifact))
        return cls(load_model(model, device, dtype), bundle, str(artifact))

    @cached_property
    def latency(self) -> LatencyTable:
        """This device's: the bundle's, else one measured here, now (well under a minute) or on an earlier run.

        A bundle's table of other layer kinds than the model's is not used.
        """

        def measure() -> LatencyTable:
            if self._before_measuring is not None:
                self._before_measuring()
            with guard_memory("measuring this device", self.decoder.device):
                return measure_latency(self.decoder)

        tables = self.bundle.latency if self.bundle is not None else {}
        model_key = config_sha256(self.loaded.model.config.to_dict())
        return known_latency(self.decoder, tables, model_key, measure)

    @cached_property
    def _exit_heads(self) -> ExitHeads:
        """The bundle's exit heads on this device, shared by all streams."""
        return ExitHeads(self.decoder, self.bundle.exits if self.bundle is not None else None)

    def planners(self, strategy: str = "auto", parameters: Any = None) -> MakePlanner:
        """What makes a planner for each request of one stream; `parameters` as in `RunSettings`."""
        check_strategy(strategy, self.bundle is not None)
        latency = self.latency if needs_latency(strategy) else None
        parameters = read_settings(strategy, []) if parameters is None else parameters
        return make_strategy(strategy, parameters, self.decoder, self.bundle, latency, self._exit_heads)

    def runner(self, settings: RunSettings | None = None, write: Callable[[str], None] | None = None) -> Runner:
        """What decodes one stream of prompts: what one of them shows of the model serves the next.

        `write` receives text as it comes.
        """
        settings = settings or RunSettings()
        make = self.planners(settings.strategy, settings.parameters)
        return Runner(self.loaded, self.decoder, make, settings, write or _nowhere)


def _nowhere(text: str) -> None:
    """Of a user who waits for the whole answer."""
