"""Chooses fp32 or bf16 for a model on a processor, by timing steps of a few layers of its sizes in both."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd_artifacts.files import cache_folder, remember
from ssd_artifacts.fingerprint import config_sha256
from ssd_runtime.devices.clock import STEADY, seconds
from ssd_runtime.devices.device import device_identity
from ssd_runtime.loading.checkpoints.sixteen_bits import keep_numbers
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.sequence.session import Session

CPU = torch.device("cpu")
CANDIDATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = (1, 8)
"""Numbers of rows that are timed: a plain step and a verification."""
CONTEXT = 256
"""Tokens before the timed steps, at most half of the model's context."""
ROUNDS = 7
TIMED_BYTES = 192 << 20
"""Least bytes of fp32 weights in the timed layers: more than a processor's cache holds."""
VOCABULARY = 512
"""Vocabulary of the timed model: the head is a projection like others, and embeddings take no time."""


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype's name, and the milliseconds of the timed layers by dtype and number of rows."""

    name: str
    milliseconds: dict[str, list[float]]

    def __str__(self) -> str:
        """A sentence for the user."""
        told = "; ".join(
            f"{name} " + ", ".join(f"{time:.1f} ms" for time in times) for name, times in self.milliseconds.items()
        )
        rows = " and ".join(map(str, ROWS))
        return f"--dtype auto: {self.name} decodes faster here (a few layers at {rows} rows: {told})"


def faster_dtype(config: PreTrainedConfig, kept: torch.dtype | None = None) -> DtypeChoice:
    """The dtype in which a plain step and a verification take less time together on this processor.

    bf16 must win at every number of rows; otherwise fp32 serves, with weights `kept` in that dtype if it is given
    (`keep_numbers`). It is measured once per device and kept.
    """
    about = [device_identity(CPU), torch.get_num_threads(), torch.__version__, config_sha256(config.to_dict())]
    about += [] if kept is None else [str(kept)]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    path = cache_folder() / "dtypes" / f"{digest}.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return DtypeChoice(str(known["name"]), {name: list(known["milliseconds"][name]) for name in CANDIDATES})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    taken = measured(config, kept)
    found = choice(taken)
    if max(max(times) / min(times) for times in taken.values()) < STEADY:
        remember(path, json.dumps({"name": found.name, "milliseconds": found.milliseconds}))
    return found


def choice(taken: dict[tuple[str, int], list[float]]) -> DtypeChoice:
    """Decide by the seconds of each round, by dtype and number of rows."""
    middle = {name: [median(taken[name, n]) * 1e3 for n in ROWS] for name in CANDIDATES}
    wins = all(narrow < wide for narrow, wide in zip(middle["bf16"], middle["fp32"], strict=True))
    return DtypeChoice("bf16" if wins else "fp32", middle)


@torch.inference_mode()
def measured(config: PreTrainedConfig, kept: torch.dtype | None = None) -> dict[tuple[str, int], list[float]]:
    """Seconds of steps after a short context in every round, by dtype and number of rows, in turn."""
    model = _few_layers(config)
    models = {name: deepcopy(model).to(dtype) for name, dtype in CANDIDATES.items()}
    if kept is not None:
        models["fp32"] = keep_numbers(model.to(kept))
    sessions = {name: Session(Decoder(each)) for name, each in models.items()}
    for session in sessions.values():
        session.prefill([1] * min(CONTEXT, session.decoder.shape.max_context // 2))
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for n in ROWS for name in CANDIDATES}
    for number in range(ROUNDS + 1):
        for (name, n), times in taken.items():
            elapsed = seconds(partial(sessions[name].forward, [1] * n), CPU)
            if number:  # the first round warms up
                times.append(elapsed)
    return taken


def _few_layers(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model of the config's sizes with as few layers as exceed the processor's cache."""
    small = deepcopy(config)
    small.vocab_size = VOCABULARY
    small.pad_token_id = None
    per_layer = 4 * (4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size)
    small.num_hidden_layers = min(config.num_hidden_layers, -(-TIMED_BYTES // per_layer))
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
    return model.eval()
