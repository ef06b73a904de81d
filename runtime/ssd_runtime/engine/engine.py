"""The front door from Python: a model on this device, with or without a bundle."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import config_sha256
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SkipMask
from ssd_profiles.prompts import Prompt
from ssd_runtime.engine.interrupts import uninterrupted
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import Generation
from ssd_runtime.engine.observed import Observation, ObservedPlanner
from ssd_runtime.engine.offline.result import Outcome
from ssd_runtime.engine.offline.runner import Runner, RunSettings, Turn
from ssd_runtime.engine.opening import read_source
from ssd_runtime.engine.request import Request
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.sequence.text_stream import TextStream
from ssd_runtime.loading.models import LoadedModel, conversation, load_model
from ssd_runtime.model.bitwise import require_bitwise
from ssd_runtime.model.exit_heads import ExitHeads
from ssd_runtime.model.parity import require_faithful
from ssd_runtime.planning.registry import check_strategy, find_strategy, read_settings
from ssd_runtime.planning.strategy import MakePlanner, make_strategy
from ssd_runtime.profiling.latency import bundled_latency, known_latency, measure_latency
from ssd_runtime.profiling.light import with_light
from ssd_runtime.profiling.memory import guard_memory, return_freed
from ssd_runtime.weights.draft_bits import DraftBits
from ssd_runtime.weights.draft_copies import make_copies
from ssd_runtime.weights.kernel_choice import SMALL_BYTES, fitted_decoder

MAX_STREAMS = 64
"""Number of streams whose statistics are kept; beyond it, the least recently used stream is dropped."""


class IgnoredSettingsWarning(UserWarning):
    """The model's generation config has settings that decoding ignores."""


class Engine:
    """Decodes with a loaded model, with or without a bundle.

        engine = Engine.open("bundle")
        print(engine.generate(["Why is the sky blue?"])[0].text)

    `add_request` and `step` serve requests that come and go; `runner` decodes one stream of prompts in turn. Threads
    may share an engine: a step advances the requests of all of them, so that `write` may be called in another thread.
    Ctrl-C takes effect between two steps and leaves the engine usable. The model is viewed and never changed. Raises
    UserError if the bundle belongs to another model or does not fit its sizes. Emits one IgnoredSettingsWarning if the
    model's generation config has settings that decoding ignores.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bundle: Bundle | None = None,
        where: str = "bundle",
        weight_memory: int | None = None,
        before_measuring: Callable[[], object] | None = None,
        draft_bits: DraftBits = "auto",
        before_copying: Callable[[str], object] | None = None,
        bitwise: bool = False,
    ) -> None:
        """View the model, check the bundle against it, and choose kernels for its projections.

        `where` names the bundle in errors. Copies of weights, in kernels' layouts and quantised to `draft_bits` for
        drafts, take at most `weight_memory` bytes, by default half of the free memory. With `bitwise`, a verification
        computes the logits of plain steps bit for bit, for one request at a time; raises UserError if the model, its
        kernels or this device cannot. `before_measuring` is called before this device is measured, and
        `before_copying` before weights are copied for drafts, with a sentence that states the memory.
        """
        self.loaded = loaded
        if bundle is not None:
            self.require_fitting(bundle, where)
        if loaded.unsupported_settings:
            names = ", ".join(loaded.unsupported_settings)
            warnings.warn(
                f"the model's generation config sets {names}, which decoding ignores",
                IgnoredSettingsWarning,
                stacklevel=2,
            )
        self.bundle = bundle
        with guard_memory("packing and checking the model", loaded.model.device):
            self.decoder = fitted_decoder(loaded.model, weight_memory, bitwise)
            require_faithful(self.decoder)
            if bitwise:
                require_bitwise(self.decoder)
        return_freed()
        self._before_measuring = before_measuring
        self._draft_bits = draft_bits
        self._before_copying = before_copying
        self._copied_for: list[SkipMask] | None = None
        """The masks that lighter copies were made for; None before there are any."""
        self.max_sequences = 1 if bitwise else 8
        """Most requests that are decoded at once; set it before the first request is added."""
        self.cache_bytes: int | None = None
        """Bytes for keys and values of all requests, by default half of the free memory; set it likewise."""
        self._streams: OrderedDict[tuple[str, str, Any], MakePlanner] = OrderedDict()
        """Makers of planners by (stream, strategy, parameters), the least recently used first."""
        self._requests: dict[Job[Generation], tuple[Request, TextStream]] = {}
        self._numbers = count(1)
        self._lock = RLock()
        """Held by the thread that adds, steps or cancels requests."""

    @classmethod
    def open(
        cls,
        artifact: str | Path | None = None,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        key: str | Path | None = None,
        draft_bits: DraftBits = "auto",
    ) -> Engine:
        """Load a bundle (a folder, an archive, `hf://…`, `oci://…` or `demo`) with its model, or a `model` alone.

        `model` is an argument of `load_model`; a bundle from elsewhere needs it, or the public `key` that signed it.
        `weights` is by default what the bundle was compiled with, else dense. Raises UserError if neither is given or
        one cannot be loaded.
        """
        source = read_source(artifact, model, Path(key) if key is not None else None)
        loaded = load_model(source.model, device, dtype, source.weights(weights))
        return cls(loaded, source.bundle, source.where, draft_bits=draft_bits)

    @cached_property
    def latency(self) -> LatencyTable:
        """This device's latency table: the bundle's, else one measured here, now or on an earlier run.

        Measuring takes well under a minute. A bundle's table is used only if its layer kinds are the model's.
        """

        def measure() -> LatencyTable:
            if self._before_measuring is not None:
                self._before_measuring()
            with guard_memory("measuring this device", self.decoder.device):
                return measure_latency(self.decoder)

        tables = self.bundle.latency if self.bundle is not None else {}
        model_key = config_sha256(self.loaded.model.config.to_dict())
        return known_latency(self.decoder, tables=tables, model_key=model_key, measure=measure)

    def lighten(self) -> bool:
        """Make lighter copies of the weights, unless they exist; returns whether there are any."""
        masks = self.bundle.light_masks if self.bundle is not None else []
        if self._copied_for != masks:
            self._copied_for = masks
            make_copies(self.decoder, self._draft_bits, masks, self._before_copying)
        return bool(self.decoder.light.kernels)

    @cached_property
    def light_latency(self) -> LatencyTable | None:
        """The latency table with the costs of lighter copies, measured now or on an earlier run; None without copies.

        Models that fit a processor's cache get no copies, because reading weights is not what their steps wait for.
        """
        if not self.decoder.light.kernels and self.decoder.packed.used <= SMALL_BYTES:
            return None
        if not self.lighten():
            return None
        return with_light(self.latency, self.decoder, config_sha256(self.loaded.model.config.to_dict()))

    def require_fitting(self, bundle: Bundle, where: str) -> None:
        """Raise UserError, which calls the bundle `where`, if it belongs to another model or does not fit its sizes."""
        config = self.loaded.model.config
        bundle.require_model(
            self.loaded.fingerprint(), hidden=config.hidden_size, vocabulary=config.vocab_size, where=where
        )

    def take_up(self, bundle: Bundle) -> None:
        """Use another bundle for new requests; running requests keep their planners.

        The bundle must have passed `require_fitting`. New streams begin without statistics.
        """
        with self._lock:
            if "latency" in self.__dict__:
                self.latency = bundled_latency(self.decoder, bundle.latency) or self.latency
            self.__dict__.pop("light_latency", None)
            self.bundle = bundle
            self.__dict__.pop("_exit_heads", None)
            self._streams.clear()

    @cached_property
    def scheduler(self) -> Scheduler:
        """The scheduler of all requests."""
        return Scheduler(self.decoder, self.max_sequences, self.cache_bytes)

    @cached_property
    def _exit_heads(self) -> ExitHeads:
        """The bundle's exit heads on this device, shared by all streams."""
        return ExitHeads(self.decoder, self.bundle.exits if self.bundle is not None else None)

    def planners(self, strategy: str = "auto", parameters: Any = None) -> MakePlanner:
        """Return a function that makes a planner per request of one stream; `parameters` are those of `RunSettings`.

        Its planners share the stream's statistics. Raises UserError if the strategy is unknown or needs a bundle.
        """
        with self._lock:
            check_strategy(strategy, self.bundle is not None)
            needs = find_strategy(strategy)
            parameters = read_settings(strategy, []) if parameters is None else parameters
            allowed = getattr(parameters, "light", None)
            if needs.needs_light or (allowed and not needs.uses_masks):
                self.lighten()
            latency = self.latency if needs.needs_latency else None
            priced = None
            if needs.uses_masks and (
                allowed or (allowed is None and self.bundle is not None and self.bundle.light_masks)
            ):
                priced = self.light_latency
            if latency is not None:
                # Without its costs no mask is expected to gain by lighter sub-layers.
                latency = priced or replace(latency, light={})
            return make_strategy(
                name=strategy,
                settings=parameters,
                decoder=self.decoder,
                bundle=self.bundle,
                latency=latency,
                heads=self._exit_heads,
                light=self.decoder.light.mask if priced is not None else None,
            )

    def runner(self, settings: RunSettings | None = None, write: Callable[[str], None] | None = None) -> Runner:
        """Return a runner that decodes prompts one after the other, with statistics shared among them.

        `write` receives the text of answers as it is decoded.
        """
        settings = settings or RunSettings()
        return self._runner(self.planners(settings.strategy, settings.parameters), settings, write)

    def add_request(
        self,
        prompt: str | Prompt | Sequence[int],
        settings: RunSettings | None = None,
        write: Callable[[str], None] | None = None,
        *,
        stream: str = "",
        on_tokens: Callable[[list[int]], None] | None = None,
        on_cycle: Callable[[Observation], None] | None = None,
        answered: Sequence[int] = (),
    ) -> Request:
        """Queue a prompt, or its token ids, which `step` decodes together with the other requests.

        Requests of one `stream`, one strategy and equal parameters share what planners learn. Those of one stream also
        share prefixes. `on_tokens` receives new tokens before `write` receives their text, and `on_cycle` every cycle.
        `answered` are the first tokens of the answer, where another run of the request, with the same seed, has chosen
        them: the answer goes on as that run would have, and neither they nor their text are reported again. Raises
        UserError if the chat template refuses the prompt. Other errors of the prompt are raised by its outcome.
        """
        settings = settings or RunSettings()
        with self._lock:
            make = self._planners_of(stream, settings)
            runner = self._runner(make, settings, write)
            turn = self._turn(prompt, runner)
        text = TextStream(self.loaded.decode, settings.stops, runner.write)
        text.skip(answered)

        def receive(tokens: list[int]) -> None:
            if on_tokens is not None:
                on_tokens(tokens)
            text.feed(tokens)

        with uninterrupted(), self._lock:
            job = runner.start(
                turn,
                scheduler=self.scheduler,
                on_tokens=receive,
                make_planner=make if on_cycle is None else lambda: ObservedPlanner(make(), on_cycle),
                owner=stream,
                answered=answered,
            )
            request = Request(runner, turn, job)
            self._requests[request.job] = request, text
        return request

    def _planners_of(self, stream: str, settings: RunSettings) -> MakePlanner:
        """The maker of planners of a stream's requests with these settings."""
        key = stream, settings.strategy, settings.parameters
        if key not in self._streams:
            self._streams[key] = self.planners(settings.strategy, settings.parameters)
            while len(self._streams) > MAX_STREAMS:
                self._streams.popitem(last=False)
        self._streams.move_to_end(key)
        return self._streams[key]

    def _turn(self, prompt: str | Prompt | Sequence[int], runner: Runner) -> Turn:
        """Number a prompt that has no id, and encode one that is not token ids yet."""
        if isinstance(prompt, Prompt):
            return runner.turn(prompt, place=0, messages=conversation(prompt), number=0)
        number = str(next(self._numbers))
        if isinstance(prompt, str):
            named = Prompt(number, turns=(prompt,))
            return runner.turn(named, place=0, messages=conversation(named), number=0)
        return Turn(prompt=Prompt(number), place=0, ids=list(prompt), sampling=runner.sampling(0), number=0)

    def step(self) -> list[Request]:
        """Advance all requests by one forward of the full model; returns those that have ended or failed."""
        ended = []
        with uninterrupted(), self._lock:
            for job in self.scheduler.step():
                request, text = self._requests.pop(job)
                if job.error is None:
                    try:
                        text.close()
                    except Exception as error:  # of the request's own `write`: other requests have ended, too
                        job.error = error
                ended.append(request)
        return ended

    def cancel(self, request: Request) -> None:
        """End a request at once; others are not affected."""
        with uninterrupted(), self._lock:
            self.scheduler.cancel(request.job)
            self._requests.pop(request.job, None)

    def generate(self, prompts: Sequence[str | Prompt], settings: RunSettings | None = None) -> list[Outcome]:
        """Decode prompts, up to `max_sequences` at once; returns outcomes in order. Raises the first UserError."""
        requests = list[Request]()
        try:
            for prompt in prompts:
                requests.append(self.add_request(prompt, settings))
            while self._advance(requests):
                pass
        finally:
            for request in requests:
                self.cancel(request)
        return [request.outcome() for request in requests]

    def _advance(self, requests: Sequence[Request]) -> bool:
        """Step unless all requests are done, maybe by the steps of another thread; returns whether it did."""
        with self._lock:
            if all(request.done for request in requests):
                return False
            self.step()
            return True

    def _runner(self, make: MakePlanner, settings: RunSettings, write: Callable[[str], None] | None) -> Runner:
        return Runner(
            loaded=self.loaded,
            decoder=self.decoder,
            make_planner=make,
            settings=settings,
            write=write or _discard,
        )


def _discard(text: str) -> None:
    """Ignore text: the `write` of a caller that wants the whole answer only."""
