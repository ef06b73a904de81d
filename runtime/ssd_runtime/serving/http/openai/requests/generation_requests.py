"""Turns HTTP requests into generation requests for the engine's thread."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from ssd_profiles.errors import UserError
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.planning.registry import STRATEGIES, check_strategy, find_strategy, read_settings
from ssd_runtime.sampling.filters import filters_of
from ssd_runtime.sampling.params import COLD, SamplingParams
from ssd_runtime.sampling.processors import RowProcessors
from ssd_runtime.serving.http.logits import CountPenalties, LogprobRecorder
from ssd_runtime.serving.http.openai.errors import invalid, too_long, too_many_answers
from ssd_runtime.serving.http.openai.requests.fields import EFFORT
from ssd_runtime.serving.http.openai.requests.prompt_encoder import PromptEncoder
from ssd_runtime.serving.http.openai.requests.requests import ChatRequest, CommonRequest, CompletionRequest
from ssd_runtime.serving.http.pending import GenerationRequest
from ssd_runtime.serving.http.settings import MOST_ANSWERS, ServerSettings
from ssd_runtime.structure.structure import Structure, StructureError

COMPLETION_TOKENS = 16
"""New tokens of a completion that names no limit, as in OpenAI's interface."""


def chat_requests(
    request: ChatRequest, encoder: PromptEncoder, settings: ServerSettings, stream: str, stop: Event | None = None
) -> list[GenerationRequest]:
    """The generation requests of a chat request, one per choice. Raises ApiError for what cannot be honoured.

    The work ends soon after `stop` is set.
    """
    variables = dict(request.chat_template_kwargs or {})
    if encoder.takes_effort and request.reasoning_effort is not None:
        variables[EFFORT] = request.reasoning_effort
    elif request.reasoning_effort not in (None, "none"):
        raise invalid(EFFORT, "the model has no such setting; omit it", "unsupported_parameter")
    ids = encoder.chat(request.messages, request.offered_tools, variables, stop)
    found = _requests(request, encoder, prompts=[ids], settings=settings, stream=stream, usual=settings.max_context)
    structure = _chat_structure(request, encoder)
    return [replace(each, settings=replace(each.settings, structure=structure)) for each in found]


def _chat_structure(request: ChatRequest, encoder: PromptEncoder) -> Structure | None:
    """The form of an answer, which may be calls. Raises ApiError for one that cannot be read."""
    structure = request.structure()
    tools = [(tool.function.name, tool.function.parameters) for tool in request.forced_tools or request.offered_tools]
    try:
        tokens = encoder.loaded.prompts.added
        if request.forced_tools:
            return encoder.call_form.structure(tools, request.parallel, tokens)
        if tools and structure is not None and structure.kind == "json_schema":
            return encoder.call_form.structure(tools, request.parallel, tokens, json.loads(structure.text))
    except StructureError as error:
        raise invalid("tools", str(error).removeprefix("structure: ")) from None
    return structure


def completion_requests(
    request: CompletionRequest, encoder: PromptEncoder, settings: ServerSettings, stream: str
) -> list[GenerationRequest]:
    """The generation requests of a completion request: `n` for the first prompt, then for the second, …

    Raises ApiError.
    """
    choices = request.n or 1
    if (wanted := choices * len(request.prompt)) > MOST_ANSWERS:
        raise too_many_answers(wanted, MOST_ANSWERS, choices)
    prompts = [encoder.text(prompt, settings.vocabulary) for prompt in request.prompt]
    found = _requests(request, encoder, prompts=prompts, settings=settings, stream=stream, usual=COMPLETION_TOKENS)
    structure = request.structure()
    return [replace(each, settings=replace(each.settings, structure=structure)) for each in found]


def compiled(requests: list[GenerationRequest], loaded: LoadedModel) -> list[GenerationRequest]:
    """The requests, all of one structure, with its grammar. Raises ApiError if it cannot be honoured."""
    structure = requests[0].settings.structure
    assert structure is not None, "only requests with a structure are compiled"
    try:
        grammar = loaded.grammars.compiled(structure)
    except StructureError as error:
        raise invalid(None, str(error), "invalid_structure") from None
    found = list[GenerationRequest]()
    for each in requests:
        sampling = replace(each.settings.sampling, grammar=grammar)
        found.append(replace(each, settings=replace(each.settings, structure=None, sampling=sampling)))
    return found


def _requests(
    request: CommonRequest,
    encoder: PromptEncoder,
    prompts: list[list[int]],
    settings: ServerSettings,
    stream: str,
    usual: int,
) -> list[GenerationRequest]:
    """Requests for all prompts, each with the request's settings and `n` seeds; `usual` is the default token limit."""
    choices = request.n or 1
    for ids in prompts:
        if not ids:
            raise invalid("prompt", "it has no tokens; give some text")
        if len(ids) > settings.longest_prompt:
            raise too_long(f"{len(ids)}", settings.longest_prompt)
    strategy, parameters = _strategy(request, settings)
    common = RunSettings(
        strategy=strategy,
        parameters=parameters,
        stops=tuple(request.stop or ()),
        raw=True,
        sampling=_sampling(request, settings),
    )
    biases = _biases(request, settings)
    most = _new_tokens(request, settings, usual)
    wanted = partial(GenerationRequest, stream=stream, in_blocks=bool(request.stream))
    found = list[GenerationRequest]()
    for ids in prompts:
        for choice in range(choices):
            recorder = None if request.noted_logprobs is None else LogprobRecorder(request.noted_logprobs)
            sampling = replace(common.sampling, seed=common.sampling.seed + choice)
            processors = _processors(request, len(ids), biases, recorder, encoder.loaded)
            if processors:
                processors += filters_of(sampling)
                before = torch.empty(0, dtype=torch.long, device=encoder.loaded.model.device)
                sampling = replace(sampling, processors=RowProcessors(processors, before))
            room = settings.max_context - len(ids)
            one = replace(common, sampling=sampling, max_new_tokens=min(most, room))
            found.append(wanted(ids=ids, settings=one, logprobs=recorder))
    return found


def _processors(
    request: CommonRequest,
    prompt_tokens: int,
    biases: dict[int, float],
    recorder: LogprobRecorder | None,
    loaded: LoadedModel,
) -> list[LogitsProcessor]:
    """Logits processors for what the sampler cannot do, the repetition penalty included; empty if it can do all."""
    processors: list[LogitsProcessor] = [recorder] if recorder is not None else []
    presence = request.presence_penalty or 0.0
    frequency = request.frequency_penalty or 0.0
    if not (processors or presence or frequency or biases):
        return []
    own = loaded.repetition_penalty
    penalty = own if request.repetition_penalty is None else request.repetition_penalty
    if penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=float(penalty)))
    if presence or frequency:
        processors.append(CountPenalties(prompt_tokens, presence, frequency))
    if biases:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()}))
    return processors


def _biases(request: CommonRequest, settings: ServerSettings) -> dict[int, float]:
    """The biases by token id. Raises ApiError for what is no id of this model."""
    biases = dict[int, float]()
    for name, value in (request.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 12 and int(name) < settings.vocabulary):
            raise invalid("logit_bias", f"{name[:40]!r} is no token id of this model; give ids as text")
        biases[int(name)] = value
    return biases


def _new_tokens(request: CommonRequest, settings: ServerSettings, usual: int) -> int:
    """The limit of new tokens. Raises ApiError for more than the server allows."""
    most = settings.options.max_new_tokens
    asked = request.asked_tokens
    if asked is None:
        return usual if most is None else min(usual, most)
    if most is not None and asked > most:
        raise invalid("max_tokens", f"{asked} new tokens, but this server allows {most}; ask for fewer")
    return asked


def _sampling(request: CommonRequest, settings: ServerSettings) -> SamplingParams:
    """The sampling of the first choice; without a seed a random one is drawn."""
    temperature = settings.options.temperature if request.temperature is None else request.temperature
    if temperature < COLD:
        # At temperature 0 the most probable token is chosen, which every filter keeps.
        return SamplingParams(repetition_penalty=request.repetition_penalty)
    return SamplingParams(
        temperature=temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=request.repetition_penalty,
        seed=secrets.randbelow(1 << 31) if request.seed is None else request.seed,
    )


def _strategy(request: CommonRequest, settings: ServerSettings) -> tuple[str, Any]:
    """The strategy with its parameters: the request's, else the server's."""
    asked, own = request.ssd, settings.options.strategy
    if asked is None or (asked.strategy is None and not asked.parameters):
        return own, settings.parameters
    name = asked.strategy or own
    try:
        check_strategy(name, settings.has_bundle)
    except UserError as error:
        raise invalid("ssd.strategy", str(error).partition(": ")[2]) from None
    known = find_strategy(name)
    chosen = {own, *settings.options.allow_strategies}
    if not known.offered and not {name, known.name} & chosen:
        offered = {each.name for each in STRATEGIES if each.offered} | chosen
        raise invalid(
            "ssd.strategy",
            f"{name!r} is not offered here; use one of {', '.join(sorted(offered))}, or start the server with "
            f"--allow-strategies {name}",
        )
    try:
        base = settings.parameters if name == own else None
        parameters = read_settings(name, [f"{key}={value}" for key, value in asked.parameters.items()], base)
    except UserError as error:
        raise invalid("ssd.parameters", str(error).removeprefix("--set ")) from None
    if not settings.light and getattr(parameters, "light", False):
        if "light" in asked.parameters:
            raise invalid("ssd.parameters", "light: this server has no light copies of the weights; omit it")
        parameters = replace(parameters, light=0)
    return name, parameters
