"""Bundles through a real registry, and through one that lies."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.integrity import ORIGIN, SIGNATURE
from ssd_artifacts.sharing.archive import pack
from ssd_artifacts.sharing.opening import open_bundle
from ssd_artifacts.sharing.receiving import receive
from ssd_artifacts.sharing.reference import read_reference
from ssd_artifacts.sharing.registry import MEDIA_TYPE, _target, push_to_registry
from ssd_artifacts.sharing.signature import sign
from ssd_profiles.errors import UserError
from tests.bundles import bundle
from tests.damage import contents
from tests.keys import key_pair


def test_a_bundle_comes_back_as_it_was_pushed(host: str, saved: Path, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path, "mine")
    sign(saved, private)
    digest = push_to_registry(saved, read_reference(f"oci://{host}/team/bundles:v1"), {"made-by": "a test"})
    pulled = receive(read_reference(f"oci://{host}/team/bundles:v1"), tmp_path / "pulled")
    found = contents(pulled)
    assert digest in found.pop(ORIGIN).decode()
    assert found == contents(saved)
    assert SIGNATURE in found
    opened = open_bundle(f"oci://{host}/team/bundles:v1")
    assert not opened.trusted
    assert open_bundle(f"oci://{host}/team/bundles:v1", public).model_spec() == "tiny"
    assert push_to_registry(saved, read_reference(f"oci://{host}/team/bundles"), {}) == digest, "the same bytes"
    assert open_bundle(f"oci://{host}/team/bundles").folder == opened.folder, "fetched once; the tag is `latest`"


@pytest.mark.parametrize(("given", "named"), [("localhost", "localhost:80"), ("hub", "hub:443"), ("a.b", "a.b")])
def test_a_host_is_never_taken_for_a_part_of_the_name(given: str, named: str) -> None:
    assert _target(read_reference(f"oci://{given}/team/x:y")) == f"{named}/team/x:y"


def test_a_new_bundle_under_the_tag_is_seen(host: str, saved: Path) -> None:
    place = f"oci://{host}/moving:v1"
    push_to_registry(saved, read_reference(place), {})
    before = open_bundle(place)
    bundle(one=bundle().domains["one"]).save(saved)
    push_to_registry(saved, read_reference(place), {})
    after = open_bundle(place)
    assert set(before.bundle.domains) == {"one", "two"}
    assert set(after.bundle.domains) == {"one"}


def test_a_pull_replaces_a_bundle_from_elsewhere_and_nothing_else(host: str, saved: Path, tmp_path: Path) -> None:
    reference = read_reference(f"oci://{host}/replaced:v1")
    push_to_registry(saved, reference, {})
    out = tmp_path / "out"
    bundle(one=bundle().domains["one"]).save(out)
    (out / "README.md").write_text("the user's")
    with pytest.raises(UserError, match="was made here"):
        receive(reference, out)
    assert set(Bundle.load(out).domains) == {"one"}
    (out / ORIGIN).write_text("source: elsewhere\n")
    receive(reference, out)
    assert set(Bundle.load(out).domains) == {"one", "two"}
    assert (out / "README.md").read_text() == "the user's"
    (out / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="holds precious"):
        receive(reference, out)
    assert (out / "precious.txt").read_text() == "mine"


def test_eight_pulls_into_one_place_leave_one_whole_bundle(host: str, saved: Path, tmp_path: Path) -> None:
    reference = read_reference(f"oci://{host}/contended:v1")
    push_to_registry(saved, reference, {})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: receive(reference, tmp_path / "out"), range(8)))
    Bundle.load(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "out"]


@pytest.mark.parametrize("name", ["nothing/here:v1", "bundles:other", f"bundles@sha256:{'0' * 64}"])
def test_what_is_not_there_is_one_line(host: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"oci://.*check the name"):
        receive(read_reference(f"oci://{host}/{name}"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_registry_that_is_not_there_is_answered_soon(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no connection to"):
        receive(read_reference("oci://127.0.0.1:9/x:v1"), tmp_path / "out")


@contextmanager
def lying(manifest: bytes, blob: bytes) -> Iterator[str]:
    """A registry that answers every request for a manifest or a blob with these."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = manifest if "/manifests/" in self.path else blob
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def described(blob: bytes, **changes: object) -> bytes:
    layer = {"mediaType": MEDIA_TYPE, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}
    return json.dumps({"schemaVersion": 2, "layers": [layer | changes]}).encode()


LIES = {
    "no JSON": lambda blob: (b"<html>", blob),
    "nested JSON": lambda blob: (b"[" * 100_000, blob),
    "an endless manifest": lambda blob: (b" " * (2 << 20), blob),
    "a list": lambda blob: (b"[]", blob),
    "no layers": lambda blob: (b"{}", blob),
    "another type": lambda blob: (described(blob, mediaType="application/x-python"), blob),
    "two layers": lambda blob: (json.dumps({"layers": json.loads(described(blob))["layers"] * 2}).encode(), blob),
    "another digest": lambda blob: (described(blob, digest="sha256:" + "0" * 64), blob),
    "a digest that is a path": lambda blob: (described(blob, digest="sha256:../../x"), blob),
    "more than promised": lambda blob: (described(blob, size=10), blob),
    "less than promised": lambda blob: (described(blob, size=len(blob) + 512), blob),
    "an endless size": lambda blob: (described(blob, size=10**15), blob),
    "another blob": lambda blob: (described(blob), blob[:-1] + b"x"),
    "escapes": lambda blob: (described(blob, mediaType="\x1b[2J"), blob),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_registry_that_lies_is_refused_in_one_line(saved: Path, tmp_path: Path, lie: str) -> None:
    pack(saved, tmp_path / "b")
    with lying(*LIES[lie]((tmp_path / "b").read_bytes())) as host:
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(UserError) as error:
            receive(read_reference(f"oci://{host}/x:v1"), tmp_path / "out")
    assert str(error.value).isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text",
    [
        "oci://",
        "oci://host",
        "oci://host/UPPER:v1",
        "oci://host/../x:v1",
        "hf://one",
        "hf://a/b/c",
        "hf://../b",
        "s3://b/x",
    ],
)
def test_references_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="give"):
        read_reference(text)


def test_references() -> None:
    read = read_reference("oci://ghcr.io:443/org/team/name:v1.2")
    assert (read.kind, read.name, read.revision) == ("registry", "ghcr.io:443/org/team/name", "v1.2")
    pinned = read_reference(f"oci://host/name@sha256:{'a' * 64}")
    assert pinned.revision == f"sha256:{'a' * 64}"
    hub = read_reference("hf://org/name@main")
    assert (hub.kind, hub.name, hub.revision) == ("hub", "org/name", "main")
    assert read_reference("build/bundle").kind == "folder"
    assert read_reference("bundle.ssd.tar").kind == "archive"
