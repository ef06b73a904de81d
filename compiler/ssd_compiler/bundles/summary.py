"""A bundle for people, as text: model, domains, masks, figures, and what is private."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.integrity import ORIGIN, SIGNATURE
from ssd_artifacts.reference_bundle import REFERENCE, bundle_path
from ssd_artifacts.sharing.archive import travelling_files
from ssd_artifacts.sharing.privacy import private_parts
from ssd_artifacts.sharing.receiving import Origin
from ssd_artifacts.texts import read_yaml, validated
from ssd_compiler.report.added import added_by
from ssd_compiler.report.summary import domain_summary, load_text, speedup_text
from ssd_profiles.latency import DeviceKey
from ssd_profiles.mask import SubLayerPlan

SKIPPED, KEPT = "█", "·"
LIGHTER = {8: "░", 4: "▒"}
ROW = 60
"""Layers per line of a mask's picture."""


def summary_text(bundle: Bundle, folder: Path) -> str:
    """The text that `ssd-bundle inspect` prints. All texts of a loaded bundle are printable."""
    model = bundle.model
    names = travelling_files(folder)
    size = sum((folder / name).stat().st_size for name in names)
    kind = f", {model.quantization}" if model.quantization else ""
    revision = f"@{model.revision}" if model.revision else ""
    lines = [
        f"model     {model.name}{revision} · {model.architecture}, {model.num_layers} layers, {model.dtype}{kind}",
        f"made      {bundle.created} by ssd-decoding {bundle.tool_version}",
        f"origin    {origin_text(folder)}",
        f"signed    {_signed(folder)}",
        f"size      {size / 1024:.0f} KiB in {len(names)} files",
        f"anchors   {len(bundle.anchors.features)} of {len(bundle.anchors.domains)} domains",
        *(f"latency   {table.device.device}, {_setting(table.device)}" for table in bundle.latency.values()),
    ]
    if bundle.exits is not None:
        lines.append(f"exits     after layers {', '.join(map(str, bundle.exits.layers))}")
    for config in bundle.domains.values():
        lines += ["", *_domain(config, model.num_layers)]
    if added := added_by(bundle):
        lines += ["", *(f"{name}: {figures.text}" for name, figures in added.items())]
    lines += ["", "What it tells about the prompts and the machine that it was made with:"]
    lines += [f"  {part}" for part in private_parts(bundle)]
    return "\n".join(lines)


def origin_text(folder: Path) -> str:
    """Source, revision and time of arrival of a bundle from elsewhere."""
    if folder == bundle_path(Path(REFERENCE)):
        return "comes with the package"
    if not (folder / ORIGIN).is_file():
        return "made on this machine, or copied here by hand"
    origin = validated(folder / ORIGIN, read_yaml(folder / ORIGIN), Origin)
    return f"{origin.source}, {origin.revision}, received {origin.received}"


def mask_picture(mask: SubLayerPlan) -> list[str]:
    """Lines that show which mixers and MLPs a mask skips or runs light, layer 0 on the left."""
    lines = []
    for begin in range(0, mask.num_layers, ROW):
        layers = range(begin, min(begin + ROW, mask.num_layers))
        for offset, name in enumerate(("mixer", "MLP")):
            cells = "".join(_cell(mask, 2 * layer + offset) for layer in layers)
            lines.append(f"  {name:<9} {cells}")
    return lines


def _cell(mask: SubLayerPlan, index: int) -> str:
    return SKIPPED if mask.skipped[index] else LIGHTER.get(mask.bits_of(index), KEPT)


def _domain(config: DomainConfig, layers: int) -> Iterator[str]:
    summary = domain_summary(config, layers)
    count = len(config.frontier)
    yield f"{config.name}: {count} mask{'' if count == 1 else 's'}, verdict: {summary['verdict']}"
    if config.choice is None:
        return
    mask = config.frontier[config.choice.entry].sub_layer_plan(layers)
    yield from mask_picture(mask)
    yield f"  skips     {mask.mixers_skipped} mixers and {mask.mlps_skipped} MLPs of {layers} layers"
    if summary["lighter"]:
        counts = " and ".join(f"{count} parts in {bits} bits" for bits, count in summary["lighter"].items())
        yield f"  lighter   {counts} (░ 8, ▒ 4), of {len(mask) + 1} with the head"
    if config.choice.predicted_speedup:
        yield f"  predicted {config.choice.predicted_speedup:.2f}x at {config.context} tokens of context"
    if config.validation is not None:
        timed = config.validation
        yield (
            f"  measured  {speedup_text(timed)} on {timed.prompts} prompts, "
            f"α {timed.draft_acceptance_rate:.2f}, M {timed.mean_acceptance_length:.2f}"
        )
    if told := load_text(config):
        yield f"  together  {told}"


def _signed(folder: Path) -> str:
    if not (folder / SIGNATURE).is_file():
        return "no"
    return "a signature is there, unverified; ssd-bundle verify --require-signature KEY.pub says whose"


def _setting(device: DeviceKey) -> str:
    return f"{device.threads} threads, torch {device.torch}, {device.dtype}"
