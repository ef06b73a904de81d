"""The directory that `ssd-compile` writes and `ssd-run` loads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.domain_config import DomainConfig
from ssd_artifacts.exits import ExitSet
from ssd_artifacts.files import new_folder, sha256_file
from ssd_artifacts.fingerprint import ModelFingerprint
from ssd_artifacts.manifest import FORMAT_VERSION, FileEntry, Manifest
from ssd_artifacts.successors import SuccessorSet
from ssd_profiles.errors import UserError
from ssd_profiles.latency import LatencyTable

MANIFEST, ANCHORS = "manifest.yaml", "anchors.safetensors"
EXITS, SUCCESSORS = "exits.safetensors", "followers.safetensors"
UNLISTED = frozenset({"README.md", ".gitattributes"})
"""Files that a manifest does not list, and that stay where a bundle is written anew."""
IGNORED = frozenset({".git", ".cache", ".DS_Store"})
"""What repositories, the Hub's client and file managers leave at the top of a folder."""
MAX_YAML_BYTES, MAX_YAML_DEPTH = 16 << 20, 32

M = TypeVar("M", bound=BaseModel)

# libyaml's parser, where PyYAML was built with it: ten times as fast.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled configuration: it can only ever change the speed of decoding, never the output.

    Of several domains one is named `mix`, searched on all of them together. `latency` maps a device's slug to its
    table.
    """

    tool_version: str
    created: str
    model: ModelFingerprint
    domains: dict[str, DomainConfig]
    anchors: AnchorSet
    latency: dict[str, LatencyTable]
    reports: dict[str, str]
    """File name to text."""
    exits: ExitSet | None = None
    successors: SuccessorSet | None = None

    def save(self, path: Path) -> None:
        """Write the bundle to `path`, whole or not at all; of a bundle there only what is `UNLISTED` it stays."""
        with new_folder(path) as folder:
            for name in UNLISTED:
                if (path / name).is_file():
                    shutil.copy2(path / name, folder / name)
            contents: dict[str, bytes] = {ANCHORS: self.anchors.to_bytes()}
            contents |= {f"domains/{name}.yaml": _dump(record).encode() for name, record in self.domains.items()}
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
            (folder / MANIFEST).write_text(_dump(manifest), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Bundle:
        """Read and verify a bundle. Raises UserError when anything is missing, altered or surplus."""
        if not path.is_dir():
            raise UserError(f"{path}: no bundle there (no such folder); make one with ssd-compile")
        manifest = _read_manifest(path / MANIFEST)
        _check_files(path, manifest)
        records = {name: _read(path / "domains" / f"{name}.yaml", DomainConfig) for name in manifest.domains}
        for name, record in records.items():
            _check_layers(path / "domains" / f"{name}.yaml", record, manifest.model.num_layers)
        return cls(
            manifest.tool_version,
            manifest.created,
            manifest.model,
            records,
            AnchorSet.from_file(str(path / ANCHORS)),
            {file.stem: _latency(file) for file in sorted((path / "latency").glob("*.json"))},
            {name: _text(path / name) for name in manifest.files if name.startswith("report.")},
            ExitSet.from_file(str(path / EXITS), manifest.model.num_layers) if EXITS in manifest.files else None,
            SuccessorSet.from_file(str(path / SUCCESSORS)) if SUCCESSORS in manifest.files else None,
        )


def require_replaceable(path: Path) -> None:
    """Raise UserError where writing a bundle to `path` would take away anything but a bundle, of whatever format."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        data = _yaml(path / MANIFEST)
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
    """Every file of a bundle's folder but what is `IGNORED`."""
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
        size = (path / name).stat().st_size
        if size != entry.bytes or sha256_file(path / name) != entry.sha256:
            raise UserError(f"{path / name}: altered since the bundle was written; copy it or compile it again")


def _check_layers(path: Path, record: DomainConfig, num_layers: int) -> None:
    for index, entry in enumerate(record.frontier):
        try:
            entry.skip_mask(num_layers)
        except ValueError as error:
            raise UserError(f"{path}: frontier[{index}]: {error}; compile the bundle again") from None
    if record.exit is not None and record.exit.stops[-1] >= num_layers:
        raise UserError(f"{path}: exit.stops: beyond the model's {num_layers} layers; compile the bundle again")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as text ({error}); compile the bundle again") from None


def _latency(path: Path) -> LatencyTable:
    try:
        return LatencyTable.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {error}; compile the bundle again") from None


def _read_manifest(path: Path) -> Manifest:
    data = _yaml(path)
    # Before anything else: a newer format may hold what this version does not know.
    version = data.get("format_version", FORMAT_VERSION) if isinstance(data, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: bundle format {version}, this version reads {FORMAT_VERSION}; "
            "compile it again or install a matching version"
        )
    return _validated(path, data, Manifest)


def _read(path: Path, model: type[M]) -> M:
    return _validated(path, _yaml(path), model)


def _validated(path: Path, data: Any, model: type[M]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {place}: {first['msg']}; compile the bundle again") from None


def _yaml(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise UserError(f"{path}: larger than any such file of a bundle; compile the bundle again")
        text = path.read_text(encoding="utf-8")
        _check_structure(text)
        return yaml.load(text, Loader=_StrictLoader)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is this a bundle?") from None
    # ValueError: what the loader makes of a date or a number that cannot be one.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not valid YAML ({line}); compile the bundle again") from None


def _dump(model: BaseModel) -> str:
    return yaml.dump(model.model_dump(mode="json"), Dumper=_FlowListDumper, sort_keys=False, width=110)


def _check_structure(text: str) -> None:
    """No tags; no aliases, by which a small file unfolds into a huge one; no depth that a parser in C would die of."""
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        if getattr(event, "tag", None) is not None:
            raise yaml.YAMLError("tags are not allowed")
        depth += isinstance(event, yaml.events.CollectionStartEvent)
        depth -= isinstance(event, yaml.events.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_YAML_DEPTH}")


class _StrictLoader(_SafeLoader):  # type: ignore[misc]
    """Safe YAML that repeats no key."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key stands twice among {sorted(keys)[:5]}")
        return super().construct_mapping(node, deep)


class _FlowListDumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        numbers = all(isinstance(item, (int, float)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=numbers)


_FlowListDumper.add_representer(list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data))
