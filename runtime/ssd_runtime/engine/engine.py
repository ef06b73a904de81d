"""The front door from Python: a model on this device, with or without a bundle."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.fingerprint import config_sha256
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable
from ssd_profiles.prompts import Prompt
from ssd_runtime.devices.memory import guard_memory, return_freed
from ssd_runtime.engine.interrupts import uninterrupted
from ssd_runtime.engine.job import Job
from ssd_runtime.engine.latency_tables import LatencyTables
from ssd_runtime.engine.observed import Observation
from ssd_runtime.engine.offline.runner import Runner
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.result import Outcome
from ssd_runtime.engine.output.text_stream import TextStream
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.stream_planners import StreamPlanners
from ssd_runtime.engine.turn import Request, RunSettings, Turn
from ssd_runtime.loading.checks.bitwise import require_bitwise
from ssd_runtime.loading.checks.parity import require_faithful
from ssd_runtime.loading.loaded_model import LoadedModel, conversation
from ssd_runtime.loading.models import load_model
from ssd_runtime.loading.source import read_source
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.profiling.kernel_choice import fitted_decoder
from ssd_runtime.weights.draft_bits import DraftBits, read_draft_bits


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
        draft_bits: DraftBits = "auto",
        say: Callable[[str], object] | None = None,
        bitwise: bool = False,
        kv_bits: int | None = None,
        measure_later: bool = False,
    ) -> None:
        """View the model, check the bundle against it, and choose kernels for its projections.

        `where` names the bundle in errors. Copies of weights, in kernels' layouts and quantised to `draft_bits` for
        drafts, take at most `weight_memory` bytes, by default half of the free memory. With `bitwise`, a verification
        computes the logits of plain steps bit for bit, for one request at a time; raises UserError if the model, its
        kernels or this device cannot. `say` receives a sentence before this device is measured and before weights are
        copied for drafts, and where the device is too busy to be measured, so that plans have coarse latencies.
        `kv_bits` of 8 holds keys and values in 8 bits, which changes the model's output a little, and drafts and plain
        decoding alike; raises UserError where our own attention does not serve all layers. With `measure_later`, a
        device that is not known is measured by `measure`; until then `auto` drafts by guesses alone.
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
            self.decoder = fitted_decoder(loaded.model, weight_memory, bitwise, kv_bits)
            require_faithful(self.decoder)
            if bitwise:
                require_bitwise(self.decoder)
        return_freed()
        self._tables = LatencyTables(
            self.decoder,
            bundle,
            model_key=config_sha256(loaded.model.config.to_dict()),
            draft_bits=read_draft_bits(draft_bits),
            say=say,
            later=measure_later,
        )
        self._planners = StreamPlanners(self.decoder, bundle, self._tables)
        self._max_sequences = 1 if bitwise else 8
        self._cache_bytes: int | None = None
        self._requests: dict[Job[Generation], tuple[Request, TextStream]] = {}
        self._ended: list[Request] = []
        """Requests that have ended and that no step has returned: Ctrl-C is raised before its own step returns."""
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
        allow_special: bool = False,
    ) -> Engine:
        """Load a bundle (a folder, an archive, `hf://…`, `oci://…` or `demo`) with its model, or a `model` alone.

        `model` is an argument of `load_model`; a bundle from elsewhere needs it, or the public `key` that signed it.
        `weights` defaults to what the bundle was compiled with if it is your own or signed, else as `load_model`. With
        `allow_special`, control tokens that prompts spell take effect. Raises UserError if there is neither a bundle
        nor a `model`, or if one of them cannot be loaded.
        """
        source = read_source(artifact, model, Path(key) if key is not None else None)
        loaded = load_model(source.model, device, dtype, source.weights(weights, device, dtype), allow_special)
        return cls(loaded, source.bundle, source.where, draft_bits=draft_bits)

    @property
    def latency(self) -> LatencyTable:
        """This device's latency table: the bundle's, else one measured here, now or on an earlier run.

        Measuring takes well under a minute.
        """
        return self._tables.table

    @latency.setter
    def latency(self, table: LatencyTable) -> None:
        self._tables.use(table)

    @property
    def must_be_measured(self) -> bool:
        """Whether a strategy drafts by guesses alone until `measure` has been called."""
        return self._tables.must_be_measured

    def measure(self, between: Callable[[], object] | None = None) -> None:
        """Measure this device, which takes about half a minute, and plan new requests with the result.

        `between` is called between two parts of it, about ten times per second. It may step this engine. An error that
        it raises ends measuring; what was complete is kept.
        """
        self._tables.measure(between)

    def require_fitting(self, bundle: Bundle, where: str) -> None:
        """Raise UserError, which calls the bundle `where`, if it belongs to another model or does not fit its sizes."""
        config = self.loaded.model.config
        bundle.require_model(
            self.loaded.fingerprint(), hidden=config.hidden_size, vocabulary=config.vocab_size, where=where
        )

    def use_bundle(self, bundle: Bundle) -> None:
        """Use another bundle for new requests; running requests keep their planners.

        The bundle must have passed `require_fitting`. New streams begin without statistics.
        """
        with self._lock:
            self._tables.use_bundle(bundle)
            self._planners.use_bundle(bundle)
            self.bundle = bundle

    @property
    def max_sequences(self) -> int:
        """Most requests that are decoded at once.

        Raises UserError if it is set after the first request was added, or to more than one with `bitwise`.
        """
        return self._max_sequences

    @max_sequences.setter
    def max_sequences(self, most: int) -> None:
        self._require_unused("max_sequences")
        if self.decoder.bitwise and most > 1:
            raise UserError("max_sequences: bitwise decodes one request at a time; omit one of the two")
        self._max_sequences = most

    @property
    def cache_bytes(self) -> int | None:
        """Bytes for keys and values of all requests; None, the default, for half of the free memory.

        Raises UserError if it is set after the first request was added.
        """
        return self._cache_bytes

    @cache_bytes.setter
    def cache_bytes(self, most: int | None) -> None:
        self._require_unused("cache_bytes")
        self._cache_bytes = most

    def _require_unused(self, setting: str) -> None:
        if "scheduler" in self.__dict__:
            raise UserError(f"{setting}: requests were added already; set it before, or make a new engine")

    @cached_property
    def scheduler(self) -> Scheduler:
        """The scheduler of all requests."""
        return Scheduler(self.decoder, self.max_sequences, self.cache_bytes, perf_counter)

    def planners(self, strategy: str = "auto", parameters: Any = None) -> MakePlanner:
        """Return a function that makes a planner per request of one stream; `parameters` are those of `RunSettings`.

        Its planners share the stream's statistics. Raises UserError if the strategy is unknown or needs a bundle.
        """
        with self._lock:
            return self._planners.new(strategy, parameters)

    def runner(self, settings: RunSettings | None = None, write: Callable[[str], None] | None = None) -> Runner:
        """Return a runner that decodes prompts one after the other, with statistics shared among them.

        `write` receives the text of answers as it is decoded.
        """
        settings = settings or RunSettings()
        return Runner(
            loaded=self.loaded,
            decoder=self.decoder,
            make_planner=self.planners(settings.strategy, settings.parameters),
            settings=settings,
            write=write,
        )

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
        `answered` resumes a request: it holds the first tokens of the answer, as another run with the same seed chose
        them. Decoding continues after them, and neither they nor their text are reported again. Only the first turn of
        a `Prompt` is decoded. Callbacks may add and cancel requests, their own too. Raises
        UserError if the chat template refuses the prompt or `settings` ask for a comparison. Other errors of the prompt
        are raised by its outcome.
        """
        settings = settings or RunSettings()
        if settings.compare:
            raise UserError("compare: requests are not compared; use Engine.runner or ssd-run --compare")
        with self._lock:
            make = self._planners.of_stream(stream, settings.strategy, settings.parameters)
            turn = self._turn(prompt, settings)
        text = TextStream(self.loaded.decode, settings.stops, write)
        text.skip(answered)

        def receive(tokens: list[int]) -> None:
            if on_tokens is not None:
                on_tokens(tokens)
            text.feed(tokens)

        request: Request | None = None
        try:
            with uninterrupted(), self._lock:
                job = turn.start(self.scheduler, make(), receive, on_cycle, owner=stream, answered=answered)
                request = Request(turn, job)
                self._requests[request.job] = request, text
        except KeyboardInterrupt:
            # It is raised at the end of the block, and the caller cannot cancel a request that it has not got.
            if request is not None:
                self.cancel(request)
            raise
        return request

    def _turn(self, prompt: str | Prompt | Sequence[int], settings: RunSettings) -> Turn:
        """Number a prompt that has no id, and encode one that is not token ids yet."""
        if not isinstance(prompt, Prompt):
            number = str(next(self._numbers))
            if not isinstance(prompt, str):
                return Turn(loaded=self.loaded, settings=settings, prompt=Prompt(number), ids=list(prompt))
            prompt = Prompt(number, turns=(prompt,))
        return Turn.encode(self.loaded, settings, prompt, conversation(prompt))

    def step(self) -> list[Request]:
        """Advance all requests by one forward of the full model; returns those that have ended or failed.

        Requests whose drafts or searches take long advance less (`Scheduler`), so that the others need not wait.
        """
        with uninterrupted(), self._lock:
            for job in self.scheduler.step():
                if (known := self._requests.pop(job, None)) is None:
                    continue  # cancelled in this step, by the callback of another request
                request, text = known
                if job.error is None:
                    try:
                        text.close()
                    except Exception as error:  # of the request's own `write`: other requests have ended, too
                        job.error = error
                self._ended.append(request)
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def cancel(self, request: Request) -> None:
        """End a request: at once, or when its own callback returns, if that is the caller. Others are not affected."""
        with uninterrupted(), self._lock:
            self.scheduler.cancel(request.job)
            self._requests.pop(request.job, None)

    def generate(self, prompts: Sequence[str | Prompt], settings: RunSettings | None = None) -> list[Outcome]:
        """Decode prompts, up to `max_sequences` at once; returns outcomes in order. Raises the first UserError.

        Prompt n has the seed of `settings` + n - 1. Only the first turn of a `Prompt` is decoded.
        """
        if isinstance(prompts, str):  # whose characters would be prompts
            raise UserError("prompts: expected a list of them, got one text; give [prompt]")
        settings = settings or RunSettings()
        requests = list[Request]()
        try:
            for number, prompt in enumerate(prompts):
                requests.append(self.add_request(prompt, settings.of_prompt(number)))
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
