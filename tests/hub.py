"""A Hub on this machine: as much of its HTTP interface as its client needs to push and pull small files."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    """Repositories by name; each is a list of commits, and a commit maps paths to contents."""

    url: str = ""
    repositories: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that the Hub says files have, where it lies."""

    def commit_id(self, name: str, number: int) -> str:
        """The hash of a commit."""
        return hashlib.sha1(f"{name} {number}".encode()).hexdigest()

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """A commit's id and files."""
        for number, files in reversed(list(enumerate(self.repositories.get(name, [])))):
            if revision in ("main", self.commit_id(name, number)):
                return self.commit_id(name, number), files
        return None


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a Hub on a free port."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._file()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if not path.startswith("/api/models/"):
                self._file()
                return
            name, _, revision = (
                path.removeprefix("/api/models/").replace("/tree/", "/revision/").partition("/revision/")
            )
            found = hub.files(name, revision or "main")
            if found is None:
                self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif "/tree/" in path:
                sizes = {key: len(value) for key, value in found[1].items()}
                self._json(
                    [{"type": "file", "path": key, "size": size, "oid": "0" * 40} for key, size in sizes.items()]
                )
            else:
                siblings = [{"rfilename": key} for key in found[1]]
                self._json({"id": name, "modelId": name, "sha": found[0], "siblings": siblings, "private": False})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            name = path.removeprefix("/api/models/").split("/preupload/")[0].split("/commit/")[0]
            if path == "/api/repos/create":
                about = json.loads(body)
                name = "/".join(part for part in (about.get("organization"), about["name"]) if part)
                hub.repositories.setdefault(name, [{}])
                self._json({"url": f"{hub.url}/{name}", "name": name})
            elif "/preupload/" in path:
                names = [each["path"] for each in json.loads(body)["files"]]
                files = [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in names]
                self._json({"files": files})
            elif "/commit/" in path:
                self._commit(name, body)
            else:
                self._json({})

        def _commit(self, name: str, body: bytes) -> None:
            files = dict(hub.repositories[name][-1])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            hub.repositories[name].append(files)
            commit = hub.commit_id(name, len(hub.repositories[name]) - 1)
            url = f"{hub.url}/{name}/commit/{commit}"
            self._json({"commitUrl": url, "commitOid": commit, "success": True})

        def _file(self) -> None:
            name, _, rest = unquote(urlsplit(self.path).path)[1:].partition("/resolve/")
            revision, _, path = rest.partition("/")
            found = hub.files(name, revision)
            if found is None or path not in found[1]:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound" if found else "RepoNotFound"})
                return
            content = found[1][path]
            headers = {"X-Repo-Commit": found[0], "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            self._answer(200, content, headers, hub.sizes.get(path))

        def _json(self, data: object) -> None:
            self._answer(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

        def _answer(self, code: int, content: bytes, headers: dict[str, str], size: int | None = None) -> None:
            self.send_response(code)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(size if size is not None else len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
