"""Self-speculation inside transformers' own `generate`."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from threading import RLock
from types import FrameType
from typing import Any, cast

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.sharing.opening import open_given
from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine, IgnoredSettingsWarning
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.loading.checkpoints.pretrained import read_tokenizer
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.sources import source_of
from ssd_runtime.planning.registry import check_strategy
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.serving.generate.generate_call import GenerateCall, stock
from ssd_runtime.serving.generate.row import batch_of, rows_of

FOLDER = str(Path(__file__).parent / "recipe")
"""Folder for `generate(custom_generate=FOLDER, trust_remote_code=True)`, which may also be pushed to the Hub."""
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
LIBRARIES = frozenset({"ssd_runtime", "transformers", "torch", "contextlib"})
"""Packages whose frames are skipped when a warning looks for the user's line."""


class StockDecodingWarning(UserWarning):
    """A call of `generate` was left to transformers; the message says why."""


class CustomGenerate:
    """Decodes faster inside transformers' `generate`, with the same tokens.

        fast = CustomGenerate("bundle")
        model.generate(**inputs, max_new_tokens=64, custom_generate=fast)

    Keep the object: it holds the engine of the latest model, with what it has learned, and so keeps the model. Rows of
    a batch are sequences of their own, of which up to `max_sequences` are decoded at once. Calls it cannot serve are
    decoded by transformers, with one StockDecodingWarning. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        artifact: str | Path | Bundle | None = None,
        strategy: str = "auto",
        parameters: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_sequences: int = 8,
        key: str | Path | None = None,
    ) -> None:
        """`artifact` is a bundle or what `Engine.open` takes; `parameters` are those of `RunSettings`.

        With `key`, the bundle must be signed by that public key. `generate` hands no tokenizer to a callable: give it
        here for `stop_strings`, and for a bundle if the model's folder has none. Raises UserError if the bundle cannot
        be loaded, or if the strategy is unknown or needs one.
        """
        if isinstance(artifact, Bundle):
            bundle: Bundle | None = artifact
        else:
            opened = open_given(artifact, Path(key) if key is not None else None)
            bundle = opened.bundle if opened is not None else None
        check_strategy(strategy, bundle is not None)
        self.tokenizer = tokenizer
        self._streamer: BaseStreamer | None = None
        self._engines = _Engines(
            bundle=bundle,
            where="bundle" if isinstance(artifact, Bundle) else str(artifact),
            strategy=strategy,
            parameters=parameters,
            max_sequences=max_sequences,
        )

    def streaming_to(
        self, streamer: BaseStreamer | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> CustomGenerate:
        """Return a callable for one call, which shares the engine and puts its tokens into `streamer`."""
        other = copy(self)
        other._streamer = streamer
        other.tokenizer = tokenizer or self.tokenizer
        return other

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode one call: the interface of transformers' decoding methods. Raises UserError if memory runs out.

        `stop_strings` is a parameter here because `generate` rejects it without a tokenizer and passes no tokenizer to
        a callable; arguments that this signature names reach the callable unchecked.
        """
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings is not None:
            if self.tokenizer is None:
                raise UserError("stop_strings: no tokenizer to find them with; give CustomGenerate(tokenizer=…)")
            criteria.append(StopStringCriteria(self.tokenizer, cast(Any, stop_strings)))
        call = GenerateCall(
            model=model,
            input_ids=input_ids,
            processors=logits_processor,
            criteria=criteria,
            config=generation_config,
            arguments=model_kwargs,
            streamer=self._only_streamer(),
        )
        reason = call.reason_for_stock()
        if reason is None:
            try:
                return self._engines.decoded(call, self.tokenizer)
            except NotServedError as error:
                reason = str(error)
        _warn(reason)
        return stock(call)

    def _only_streamer(self) -> BaseStreamer | None:
        """The streamer of this object or of the caller's `generate`. Raises UserError for two."""
        given = _streamer_of_caller()
        if None not in (given, self._streamer) and given is not self._streamer:
            raise UserError("streamer: generate has one and streaming_to another; give one of them")
        return self._streamer or given

    def generate(
        self,
        model: PreTrainedModel,
        arguments: Mapping[str, Any],
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_model: PreTrainedModel | None = None,
    ) -> Any:
        """Call `model.generate` with its `arguments`, including the three that it hands to no callable."""
        given: dict[str, Any] = dict(arguments)
        own = getattr(model.generation_config, "stop_strings", None)
        if assistant_model is not None or own is not None:
            _warn("an assistant_model is given" if own is None else "the model's generation config has stop_strings")
            given.update(streamer=streamer, tokenizer=tokenizer, assistant_model=assistant_model)
            return model.generate(**given)
        config = given.get("generation_config")
        if config is not None and config.stop_strings is not None:
            given.setdefault("stop_strings", config.stop_strings)
            given["generation_config"] = config = deepcopy(config)
            config.stop_strings = None
        return model.generate(**given, custom_generate=self.streaming_to(streamer, tokenizer))


def _warn(reason: str) -> None:
    """Emit a warning whose location is the user's line that called `generate`."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        level += 1
        frame = frame.f_back
    warnings.warn(f"transformers decodes this call, no faster: {reason}", StockDecodingWarning, stacklevel=level)


class NotServedError(Exception):
    """The engine cannot decode this model or prompt."""


@dataclass(slots=True)
class _Engines:
    """The engine of the latest model, with the scheduler and the stream that its calls share."""

    bundle: Bundle | None
    where: str
    strategy: str
    parameters: Any
    max_sequences: int
    _lock: Any = field(default_factory=RLock)
    _busy: bool = False
    _engine: Engine | None = None
    _scheduler: Scheduler | None = None
    _make_planner: MakePlanner | None = None

    def decoded(self, call: GenerateCall, tokenizer: PreTrainedTokenizerBase | None) -> Any:
        """Decode a call. Raises NotServedError if the engine cannot, and UserError if memory runs out."""
        if call.rows > self.max_sequences and any(isinstance(each, MaxTimeCriteria) for each in call.criteria):
            raise NotServedError(f"max_time is for all rows, of which {self.max_sequences} are decoded at once")
        with self._lock:
            if self._busy:
                raise NotServedError("a processor or criterion of another call calls it")
            self._busy = True
            try:
                engine = self._engine_of(call.model, tokenizer)
                most = engine.decoder.shape.max_context
                if call.input_ids.shape[1] - min(call.padding) >= most:
                    raise NotServedError(f"a prompt fills the model's context of {most} tokens")
                result, generations = self._rows(call, engine)
            except NotServedError:
                raise
            except BaseException:
                # A processor, a streamer or Ctrl-C stopped a step half-way.
                self._scheduler = None
                raise
            finally:
                self._busy = False
        if any(each.finish_reason == "context" for each in generations):
            warnings.warn(f"an answer ended where the model's context of {most} tokens is full", stacklevel=3)
        if call.streamer is not None:
            call.streamer.end()
        return result

    def _rows(self, call: GenerateCall, engine: Engine) -> tuple[Any, list[Generation]]:
        assert self._make_planner is not None, "_engine_of() comes first"
        if self._scheduler is None:
            self._scheduler = Scheduler(engine.decoder, self.max_sequences)
        rows = rows_of(call)
        jobs = [row.start(self._scheduler, self._make_planner) for row in rows]
        while not all(job.done for job in jobs):
            self._scheduler.step()
        generations = [job.ended() for job in jobs]
        return batch_of(call, rows, [each.token_ids for each in generations]), generations

    def _engine_of(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Engine:
        known = self._engine
        if known is not None and known.loaded.model is model and known.decoder.device == model.device:
            with suppress(UserError):  # what the decoder rests on has changed
                known.decoder.refresh()
                return known
        self._engine = self._scheduler = self._make_planner = None  # frees the memory first
        try:
            engine = self._made(model, tokenizer)
            self._make_planner = engine.planners(self.strategy, self.parameters)
        except UserError as error:
            raise NotServedError(str(error)) from None
        self._engine = engine
        return engine

    def _made(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Engine:
        if tokenizer is None and self.bundle is not None:
            try:
                tokenizer = read_tokenizer("model", source_of(model).folder, model.config)
            except UserError:
                raise UserError(
                    "the bundle is for one tokenizer, and the model's folder has none; give CustomGenerate(tokenizer=…)"
                ) from None
        with warnings.catch_warnings():
            # `generate` turns these settings into processors, which are called.
            warnings.simplefilter("ignore", IgnoredSettingsWarning)
            # Only bundles and texts need the tokenizer.
            loaded = LoadedModel.of(model, cast(PreTrainedTokenizerBase, tokenizer))
            return Engine(loaded, self.bundle, self.where, say=getLogger(__name__).warning)


def _streamer_of_caller() -> BaseStreamer | None:
    """The streamer that the user gave to `generate`, found in its frame because no callable receives it.

    `generate` has put the prompt into it already. Without the answer, a reader of the streamer would wait for ever.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return frame.f_locals.get("streamer") if frame is not None else None
