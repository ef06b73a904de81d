"""The card of a bundle on the Hub: what it is for, how to use it, and its validation table."""

from __future__ import annotations

import os
import shlex
from html import escape
from pathlib import Path

import yaml

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.sharing.hub import TAG
from ssd_artifacts.sharing.privacy import private_parts
from ssd_compiler.report.summary import domain_summary, speedup_text


def card_text(bundle: Bundle, place: str) -> str:
    """The Markdown of the card; `place` is the reference by which the bundle can be pulled."""
    model = bundle.model
    local = os.path.isabs(model.name) or model.name.startswith(".") or "@" in model.name
    about = {"library_name": "ssd-decoding", "tags": [TAG, "speculative-decoding", "self-speculative-decoding"]}
    if not local:
        about["base_model"] = model.name
    named = "MODEL" if local else shlex.quote(model.name)
    lines = [
        "---",
        yaml.safe_dump(about, sort_keys=True).strip(),
        "---",
        "",
        f"# A bundle for {_escaped(Path(model.name).name if local else model.name)}",
        "",
        "Masks, acceptance and anchors for decoding this model faster by self-speculation. A bundle can change the",
        "speed of decoding, never its output. Latency is measured again on your device.",
        "",
        f'    ssd-run --artifact {place} --model {named} "Why is the sky blue?"',
        "",
        f"Model: {_escaped(model.architecture)}, {model.num_layers} layers, compiled in {_escaped(model.dtype)}, "
        f"weights `{model.weights_sha256[:12]}…`. Compiled {_escaped(bundle.created)} on "
        f"{_escaped(', '.join(table.device.device for table in bundle.latency.values()) or 'an unknown device')}.",
        "",
        "| domain | skipped of " + str(2 * model.num_layers) + " | α | M | measured (95%) | prompts | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for config in bundle.domains.values():
        summary = domain_summary(config, model.num_layers)
        timed = config.validation
        figures = (
            (
                f"{timed.draft_acceptance_rate:.2f}",
                f"{timed.mean_acceptance_length:.2f}",
                speedup_text(timed),
                str(timed.prompts),
            )
            if timed is not None
            else ("–", "–", "–", "–")
        )
        skipped = summary["mixers_skipped"] + summary["mlps_skipped"]
        lines.append(f"| {config.name} | {skipped} | {' | '.join(figures)} | {summary['verdict']} |")
    lines += ["", "What it tells about the prompts and the machine that it was made with:", ""]
    lines += [f"- {_escaped(part)}" for part in private_parts(bundle)]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """The text with what Markdown and HTML would act on escaped."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#|!" else c for c in escape(text))
