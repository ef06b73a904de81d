"""Bundles in repositories of the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

from ssd_artifacts.bundle import EXITS, SUCCESSORS
from ssd_artifacts.integrity import MAX_SIGNATURE_BYTES, SIGNATURE, read_manifest
from ssd_artifacts.manifest import MANIFEST, REPORT, REPORT_PAGE
from ssd_artifacts.sharing.archive import travelling_files
from ssd_artifacts.sharing.reachable import hub_reachable
from ssd_artifacts.sharing.reference import Reference, client_errors
from ssd_artifacts.texts import MAX_TEXT_BYTES
from ssd_profiles.errors import UserError

CARD = "README.md"
TAG = "ssd-bundle"
"""Tag of the Hub's card, by which bundles are found there."""

_OPTIONAL = (SIGNATURE, REPORT, REPORT_PAGE, EXITS, SUCCESSORS)
"""Files that an earlier bundle in a repository may have had, and a new one not."""
_hub_errors = partial(client_errors, host="the Hub", check="the name, your login and the network")


def hub_commit(reference: Reference) -> str:
    """The commit that a reference means now; without a network, the one that the client's cache knows."""
    return _download(reference, MANIFEST, MAX_TEXT_BYTES).parent.name


def fetch_from_hub(reference: Reference, commit: str, folder: Path) -> None:
    """Copy a commit's bundle into an empty folder: the files that its manifest lists, and its signature.

    Sizes are compared with the manifest's before a file is fetched. Raises UserError when the Hub cannot give it.
    """
    pinned = Reference(reference.text, "hub", reference.name, commit)
    shutil.copyfile(_download(pinned, MANIFEST, MAX_TEXT_BYTES), folder / MANIFEST)
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        if name != REPORT_PAGE:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(_download(pinned, name, entry.bytes), folder / name)
    signature = _signature(pinned)
    if signature is not None:
        shutil.copyfile(signature, folder / SIGNATURE)


def push_to_hub(folder: Path, reference: Reference, card: str, private: bool) -> str:
    """Upload a bundle's files and a card in one commit; returns the commit's address.

    The repository is made if there is none. Files of an earlier bundle in it are deleted.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    if not hub_reachable():
        raise UserError(f"{reference.text}: no connection to the Hub; check the network")
    api = HfApi()
    with _hub_errors(reference):
        api.create_repo(reference.name, private=private, exist_ok=True)
        if private and not api.repo_info(reference.name).private:
            raise UserError(
                f"--private: {reference.name} is there already, and public; make it private, or name another"
            )
        names = [*travelling_files(folder), CARD]
        known = api.list_repo_files(reference.name, revision=reference.revision)
        gone = set(known) - set(names)
        stale = [name for name in sorted(gone) if name in _OPTIONAL or name.startswith(("domains/", "latency/"))]
        additions = [CommitOperationAdd(name, str(folder / name)) for name in names if name != CARD]
        commit = api.create_commit(
            reference.name,
            [
                *additions,
                CommitOperationAdd(CARD, card.encode()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message="A bundle for self-speculative decoding",
            revision=reference.revision,
        )
    return str(commit.commit_url)


def _download(reference: Reference, name: str, most: int) -> Path:
    """The path of a file in the client's cache, fetched if necessary."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import LocalEntryNotFoundError

    online = hub_reachable()
    with _hub_errors(reference):
        if online:
            size = get_hf_file_metadata(hf_hub_url(reference.name, name, revision=reference.revision)).size or 0
            if size > most:
                raise UserError(f"{reference.text}: {name} has {size} bytes, {most} are expected; ask who pushed it")
        try:
            path = hf_hub_download(reference.name, name, revision=reference.revision, local_files_only=not online)
        except LocalEntryNotFoundError:
            raise UserError(
                f"{reference.text}: the Hub cannot be reached, and {name} was not fetched before; check the network"
            ) from None
    return Path(os.path.abspath(path))


def _signature(reference: Reference) -> Path | None:
    from huggingface_hub import file_exists

    with _hub_errors(reference):
        try:
            if hub_reachable() and not file_exists(reference.name, SIGNATURE, revision=reference.revision):
                return None
            return _download(reference, SIGNATURE, MAX_SIGNATURE_BYTES)
        except UserError:
            if hub_reachable():
                raise
            return None
