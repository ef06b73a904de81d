"""The directory that `ssd-compile` writes and `ssd-run` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.files import new_folder, sha256_file
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.integrity import UNLISTED, carry_over, check_files, present_files, read_manifest
from ssd_artifacts.manifest import (
    ARCHIVE_SUFFIX,
    FIRST_FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    REPORT,
    REPORT_PAGE,
    FileEntry,
    Manifest,
)
from ssd_artifacts.successors import SuccessorSet
from ssd_artifacts.texts import read_text, read_yaml, to_yaml, validated
from ssd_profiles.errors import UserError, first_problem
from ssd_profiles.latency import LatencyTable
from ssd_profiles.mask import SubLayerPlan

ANCHORS = "anchors.safetensors"
EXITS = "exits.safetensors"
SUCCESSORS = "followers.safetensors"
RENAMED = {"potential": "oracle_speedup"}
"""Fields of `domains/NAME.yaml` whose name has changed: the former name to the present one."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled configuration. It can only change the speed of decoding, never the output.

    A bundle of several domains has one named `mix`, searched on all of them together. `latency` maps a device's slug to
    its table, and `report` is the text of report.json.
    """

    tool_version: str
    created: str
    model: ModelFingerprint
    domains: dict[str, DomainConfig]
    anchors: AnchorSet
    latency: dict[str, LatencyTable]
    report: str | None = None
    exits: ExitSet | None = None
    successors: SuccessorSet | None = None

    @property
    def format_version(self) -> int:
        """The oldest format that holds the bundle."""
        rated = (mask for domain in self.domains.values() for mask, _, _ in domain.search.rated)
        priced = any(table.light for table in self.latency.values())
        lighter = priced or bool(self.light_masks) or any("." in mask for mask in rated)
        return FORMAT_VERSION if lighter else FIRST_FORMAT

    @property
    def light_masks(self) -> list[SubLayerPlan]:
        """The masks of all frontiers that have light sub-layers."""
        entries = (entry for domain in self.domains.values() for entry in domain.frontier)
        masks = (entry.sub_layer_plan(self.model.num_layers) for entry in entries)
        return [mask for mask in masks if mask.light]

    def save(self, path: Path, page: str | None = None) -> None:
        """Write the bundle to `path`, whole or not at all, with `page` beside it as report.html.

        A bundle that stood there is replaced, except for the files in `KEPT`. Raises UserError for one beyond the
        format's limits.
        """
        with new_folder(path) as folder:
            carry_over(path, folder)
            contents: dict[str, bytes] = {ANCHORS: self.anchors.to_bytes()}
            contents |= {f"domains/{name}.yaml": to_yaml(config).encode() for name, config in self.domains.items()}
            contents |= {f"latency/{slug}.json": table.to_json().encode() for slug, table in self.latency.items()}
            contents |= {REPORT: self.report.encode()} if self.report is not None else {}
            for name, part in {EXITS: self.exits, SUCCESSORS: self.successors}.items():
                contents |= {name: part.to_bytes()} if part is not None else {}
            for name, content in contents.items():
                target = folder / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(content)
            try:
                manifest = Manifest(
                    format_version=self.format_version,
                    tool_version=self.tool_version,
                    created=self.created,
                    model=self.model,
                    domains=list(self.domains),
                    files={
                        name: FileEntry(sha256=sha256_file(folder / name), bytes=len(content))
                        for name, content in sorted(contents.items())
                    },
                )
            except ValidationError as error:
                raise UserError(f"{path}: no bundle holds this ({first_problem(error)}); put less into it") from None
            (folder / MANIFEST).write_text(to_yaml(manifest), encoding="utf-8")
            if page is not None:
                (folder / REPORT_PAGE).write_text(page, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and verify a bundle. Raises UserError when a file is missing, altered or not listed."""
        if not path.is_dir():
            raise UserError(f"{path}: no bundle there (no such folder); make one with ssd-compile")
        manifest = read_manifest(path)
        required = {ANCHORS, *(f"domains/{name}.yaml" for name in manifest.domains)}
        for name in sorted(required - set(manifest.files)):
            raise UserError(f"{path / MANIFEST}: does not list {name}; compile the bundle again")
        check_files(path, manifest)
        layers = manifest.model.num_layers
        domains = {name: _read_domain(path, name, layers) for name in manifest.domains}
        anchors = AnchorSet.from_file(str(path / ANCHORS), manifest.domains)
        bundle = cls(
            tool_version=manifest.tool_version,
            created=manifest.created,
            model=manifest.model,
            domains=domains,
            anchors=anchors,
            latency={file.stem: _read_latency(file, layers) for file in sorted((path / "latency").glob("*.json"))},
            report=read_text(path / REPORT) if REPORT in manifest.files else None,
            exits=(
                ExitSet.from_file(str(path / EXITS), layers, anchors.center.size) if EXITS in manifest.files else None
            ),
            successors=SuccessorSet.from_file(str(path / SUCCESSORS)) if SUCCESSORS in manifest.files else None,
        )
        if manifest.format_version != bundle.format_version:
            raise UserError(
                f"{path / MANIFEST}: format_version: expected {bundle.format_version}, got {manifest.format_version}; "
                "compile the bundle again"
            )
        return bundle

    def require_model(self, loaded: ModelFingerprint, hidden: int, vocabulary: int, where: str) -> None:
        """Check that the bundle belongs to the `loaded` model and that its tensors fit.

        `hidden` is the model's hidden size, `vocabulary` its number of tokens, and `where` names the bundle in
        messages. Raises UserError when anything differs.
        """
        self.model.require_same_model(loaded, where)
        if self.anchors.center.size != hidden:
            raise UserError(
                f"{where}: {ANCHORS}: expected the model's hidden size {hidden}, got {self.anchors.center.size}; "
                "compile the bundle again"
            )
        if self.successors is not None and self.successors.vocabulary > vocabulary:
            raise UserError(
                f"{where}: {SUCCESSORS}: expected token ids below {vocabulary}, got {self.successors.vocabulary - 1}; "
                "compile the bundle again"
            )


def require_replaceable(path: Path) -> None:
    """Raise UserError if a bundle's folder at `path` would pass for an archive, or delete anything but a bundle.

    The bundle that stands there may be of any format version.
    """
    if path.name.endswith(ARCHIVE_SUFFIX):
        raise UserError(f"{path} names an archive; name a folder, and make an archive of it with ssd-bundle pack")
    if path.is_mount() or Path.cwd().is_relative_to(path.resolve()):
        raise UserError(f"{path} is a mount point or contains the current folder, and cannot be replaced; name another")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        data = read_yaml(path / MANIFEST)
        listed = {str(name) for name in data["files"]} if "format_version" in data else None
    except (UserError, KeyError, TypeError):
        listed = None
    if listed is None:
        raise UserError(f"{path} exists and is not a bundle; choose another folder")
    for name in sorted(present_files(path) - listed - UNLISTED - {MANIFEST}):
        raise UserError(f"{path} holds {name}, which is not the bundle's and would be lost; choose another folder")
    if (path / ".git").exists():
        raise UserError(f"{path} is a repository, which would be lost; compile elsewhere and copy the bundle into it")


def require_free_out(out: Path) -> None:
    """Raise UserError, which names --out, if writing a bundle to `out` would delete anything but a bundle."""
    try:
        require_replaceable(out)
    except UserError as error:
        raise UserError(f"--out: {error}") from None


def _present_names(data: Any) -> Any:
    """The data of a domain file with former field names replaced by present ones."""
    if not isinstance(data, dict):
        return data
    renamed = {old: new for old, new in RENAMED.items() if new not in data}
    return {renamed.get(name, name): value for name, value in data.items()}


def _read_domain(folder: Path, name: str, num_layers: int) -> DomainConfig:
    path = folder / "domains" / f"{name}.yaml"
    config = validated(path, _present_names(read_yaml(path)), DomainConfig)
    if config.name != name:
        raise UserError(f"{path}: name: expected {name}, as the file is named; compile the bundle again")
    for index, entry in enumerate(config.frontier):
        try:
            entry.sub_layer_plan(num_layers)
        except ValueError as error:
            raise UserError(f"{path}: frontier[{index}]: {error}; compile the bundle again") from None
    if config.exit is not None and config.exit.stops[-1] >= num_layers:
        raise UserError(
            f"{path}: exit.stops: expected layers below {num_layers}, got {config.exit.stops[-1]}; "
            "compile the bundle again"
        )
    return config


def _read_latency(path: Path, num_layers: int) -> LatencyTable:
    try:
        table = LatencyTable.from_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}; compile the bundle again") from None
    if len(table.layer_kinds) != num_layers:
        raise UserError(
            f"{path}: layer_kinds: expected one for each of the model's {num_layers} layers, "
            f"got {len(table.layer_kinds)}; compile the bundle again"
        )
    if table.device.slug() != path.stem:
        raise UserError(
            f"{path}: device: expected the file to be named {table.device.slug()}.json, as its device is; "
            "compile the bundle again"
        )
    return table
