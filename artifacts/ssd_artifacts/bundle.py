"""The directory that `ssd-compile` writes and `ssd-run` loads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.files import new_folder, sha256_file
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import FORMAT_VERSION, FileEntry, Manifest
from ssd_artifacts.successors import SuccessorSet
from ssd_artifacts.texts import read_text, read_yaml, to_yaml, validated
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable

MANIFEST = "manifest.yaml"
ANCHORS = "anchors.safetensors"
EXITS = "exits.safetensors"
SUCCESSORS = "followers.safetensors"
UNLISTED = frozenset({"README.md", ".gitattributes"})
"""Files that the manifest does not list, and that survive when a bundle is written anew."""
IGNORED = frozenset({".git", ".cache", ".DS_Store"})
"""Names that version control, the Hub's client and file managers put at the top of a folder."""
RENAMED = {"potential": "oracle_speedup"}
"""Fields of `domains/NAME.yaml` whose name has changed: the former name to the present one."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled configuration. It can only change the speed of decoding, never the output.

    A bundle of several domains has one named `mix`, searched on all of them together. `latency` maps a device's slug to
    its table, `reports` a file name to its text.
    """

    tool_version: str
    created: str
    model: ModelFingerprint
    domains: dict[str, DomainConfig]
    anchors: AnchorSet
    latency: dict[str, LatencyTable]
    reports: dict[str, str]
    exits: ExitSet | None = None
    successors: SuccessorSet | None = None

    def save(self, path: Path) -> None:
        """Write the bundle to `path`, whole or not at all.

        A bundle that stood there is replaced, except for its `UNLISTED` files.
        """
        with new_folder(path) as folder:
            for name in UNLISTED:
                if (path / name).is_file():
                    shutil.copy2(path / name, folder / name)
            contents: dict[str, bytes] = {ANCHORS: self.anchors.to_bytes()}
            contents |= {f"domains/{name}.yaml": to_yaml(config).encode() for name, config in self.domains.items()}
            contents |= {f"latency/{slug}.json": table.to_json().encode() for slug, table in self.latency.items()}
            contents |= {name: text.encode() for name, text in self.reports.items()}
            for name, part in {EXITS: self.exits, SUCCESSORS: self.successors}.items():
                contents |= {name: part.to_bytes()} if part is not None else {}
            for name, content in contents.items():
                target = folder / name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(content)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                tool_version=self.tool_version,
                created=self.created,
                model=self.model,
                domains=list(self.domains),
                files={
                    name: FileEntry(sha256=sha256_file(folder / name), bytes=len(content))
                    for name, content in sorted(contents.items())
                },
            )
            (folder / MANIFEST).write_text(to_yaml(manifest), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and verify a bundle. Raises UserError when a file is missing, altered or not listed."""
        if not path.is_dir():
            raise UserError(f"{path}: no bundle there (no such folder); make one with ssd-compile")
        manifest = _read_manifest(path / MANIFEST)
        _check_files(path, manifest)
        layers = manifest.model.num_layers
        return cls(
            tool_version=manifest.tool_version,
            created=manifest.created,
            model=manifest.model,
            domains={name: _read_domain(path, name, layers) for name in manifest.domains},
            anchors=AnchorSet.from_file(str(path / ANCHORS), manifest.domains),
            latency={file.stem: _read_latency(file, layers) for file in sorted((path / "latency").glob("*.json"))},
            reports={name: read_text(path / name) for name in manifest.files if name.startswith("report.")},
            exits=ExitSet.from_file(str(path / EXITS), layers) if EXITS in manifest.files else None,
            successors=SuccessorSet.from_file(str(path / SUCCESSORS)) if SUCCESSORS in manifest.files else None,
        )

    def require_model(self, loaded: ModelFingerprint, hidden: int, vocabulary: int, where: str) -> None:
        """Check that the bundle belongs to the `loaded` model and that its tensors fit.

        `hidden` is the model's hidden size, `vocabulary` its number of tokens, and `where` names the bundle in
        messages. Raises UserError when anything differs.
        """
        self.model.require_same_model(loaded, where)
        widths = {ANCHORS: self.anchors.center.size}
        if self.exits is not None:
            widths[EXITS] = self.exits.weights.shape[-1]
        for name, width in widths.items():
            if width != hidden:
                raise UserError(
                    f"{where}: {name} is for a hidden size of {width}, the model's is {hidden}; "
                    "compile the bundle again"
                )
        if self.successors is not None and self.successors.vocabulary > vocabulary:
            raise UserError(
                f"{where}: {SUCCESSORS} has tokens that the model does not have ({vocabulary} in all); "
                "compile the bundle again"
            )


def require_replaceable(path: Path) -> None:
    """Raise UserError if writing a bundle to `path` would delete anything but a bundle, of whatever format version."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        data = read_yaml(path / MANIFEST)
        listed = {str(name) for name in data["files"]} if "format_version" in data else None
    except (UserError, KeyError, TypeError):
        listed = None
    if listed is None:
        raise UserError(f"{path} exists and is not a bundle; choose another folder")
    for name in sorted(_present(path) - listed - UNLISTED - {MANIFEST}):
        raise UserError(f"{path} holds {name}, which is not the bundle's and would be lost; choose another folder")
    if (path / ".git").exists():
        raise UserError(f"{path} is a repository, which would be lost; compile elsewhere and copy the bundle into it")


def _present(path: Path) -> set[str]:
    """Relative paths of all files in a bundle's folder that are not `IGNORED`."""
    files = (file.relative_to(path) for file in path.rglob("*") if file.is_file() or file.is_symlink())
    return {file.as_posix() for file in files if file.parts[0] not in IGNORED}


def _check_files(path: Path, manifest: Manifest) -> None:
    present = _present(path)
    for name in sorted(set(manifest.files) - present):
        raise UserError(f"{path / name}: missing from the bundle; copy it again or compile it again")
    for name in sorted(present - set(manifest.files) - UNLISTED - {MANIFEST}):
        raise UserError(f"{path / name}: not listed in the bundle's manifest; remove it")
    required = {ANCHORS, *(f"domains/{name}.yaml" for name in manifest.domains)}
    for name in sorted(required - set(manifest.files)):
        raise UserError(f"{path / MANIFEST}: does not list {name}; compile the bundle again")
    for name, entry in manifest.files.items():
        file = path / name
        # A link may lead to a device, and reading a device may never end.
        if not file.is_file():
            raise UserError(f"{file}: not a file, or a link to nothing; copy the bundle again")
        if file.stat().st_size != entry.bytes or sha256_file(file) != entry.sha256:
            raise UserError(f"{file}: altered since the bundle was written; copy it or compile it again")


def _read_manifest(path: Path) -> Manifest:
    data = read_yaml(path)
    # The version comes first, because a newer format may hold fields that this version would reject.
    version = data.get("format_version", FORMAT_VERSION) if isinstance(data, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: bundle format {str(version)[:40]}, this version reads {FORMAT_VERSION}; "
            "compile it again or install a matching version"
        )
    return validated(path, data, Manifest)


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
            entry.skip_mask(num_layers)
        except ValueError as error:
            raise UserError(f"{path}: frontier[{index}]: {error}; compile the bundle again") from None
    if config.exit is not None and config.exit.stops[-1] >= num_layers:
        raise UserError(f"{path}: exit.stops: beyond the model's {num_layers} layers; compile the bundle again")
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
    return table
