"""A bundle with its model loaded, as the measurements use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.reference_bundle import bundle_path
from ssd_profiles.latency import LatencyTable
from ssd_runtime.decoder import Decoder
from ssd_runtime.kernels import fitted_decoder
from ssd_runtime.models import LoadedModel, load_model
from ssd_runtime.profiler import known_latency, measure_latency


@dataclass(frozen=True, slots=True)
class Opened:
    """What a bundle decodes with on this device."""

    bundle: Bundle
    loaded: LoadedModel
    decoder: Decoder
    latency: LatencyTable

    @classmethod
    def of(cls, artifact: Path, model: str | None = None) -> Opened:
        """The bundle, its model or the one given, and this device's latencies, measured where nobody has."""
        bundle = Bundle.load(bundle_path(artifact))
        loaded = load_model(model or bundle.model.spec(str(artifact)))
        decoder = fitted_decoder(loaded.model)
        key = loaded.fingerprint().config_sha256
        latency = known_latency(decoder, bundle.latency, key, lambda: measure_latency(decoder))
        return cls(bundle, loaded, decoder, latency)
