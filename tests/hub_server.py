"""A local HTTP server that answers huggingface_hub as the Hub does: model info, file tree in pages, resolve with ranges.

Large files are redirected to another path, as the Hub redirects LFS files to its storage. Every request is recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

COMMIT = "a" * 40
PAGE = 7
SMALL = 10_000


@dataclass
class Hub:
    """One model repository, its files in a folder.

    ``gated``: access must be asked for. ``ranges``: whether ranges are served. ``broken``: requests for files that fail first.
    ``together``: requests that must be there at once before a shard is served.
    """

    repo: str
    root: Path
    endpoint: str = ""
    gated: bool = False
    ranges: bool = True
    broken: int = 0
    together: int = 1
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Condition = field(default_factory=threading.Condition)

    def reads(self) -> list[tuple[str, str]]:
        """Path and range of every request for a file's bytes."""
        return [(path, ranges) for _, path, ranges in self.requests if "/storage/" in path or "/resolve/" in path]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; ``hub`` is set per server."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        with hub.lock:
            hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
            hub.at_once += 1
            hub.most_at_once = max(hub.most_at_once, hub.at_once)
            hub.lock.notify_all()
        try:
            self._route(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with hub.lock:
                hub.at_once -= 1

    def _route(self, body: bool) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if m := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(m[1], m[2])
        elif m := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            self._tree(parse_qs(url.query))
        elif m := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(m[3], body)
        elif m := re.fullmatch(r"/storage/(.+)", path):
            self._bytes(self.hub.root / m[1], body)
        else:
            self._fail(404, "EntryNotFound")

    def _info(self, repo: str, revision: str | None) -> None:
        if repo != self.hub.repo:
            return self._fail(404, "RepoNotFound")
        if self.hub.gated:
            return self._fail(403, "GatedRepo")
        if revision not in (None, "main", "v1", COMMIT):
            return self._fail(404, "RevisionNotFound")
        return self._json({"_id": "0", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": [], "private": False, "tags": []})

    def _tree(self, query: dict[str, list[str]]) -> None:
        entries: list[dict[str, Any]] = []
        for p in sorted(self.hub.root.rglob("*")):
            name = p.relative_to(self.hub.root).as_posix()
            oid = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
            if p.is_dir():
                entries.append({"type": "directory", "oid": oid, "size": 0, "path": name})
                continue
            entry: dict[str, Any] = {"type": "file", "oid": oid, "size": p.stat().st_size, "path": name}
            if p.stat().st_size > SMALL:
                entry["lfs"] = {"oid": hashlib.sha256(name.encode()).hexdigest(), "size": p.stat().st_size, "pointerSize": 134}
            entries.append(entry)
        start = int(query.get("cursor", ["0"])[0])
        link = {}
        if start + PAGE < len(entries):
            link = {"Link": f'<{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}>; rel="next"'}
        self._json(entries[start : start + PAGE], link)

    def _resolve(self, name: str, body: bool) -> None:
        file = self.hub.root / name
        if not file.is_file():
            return self._fail(404, "EntryNotFound")
        if file.stat().st_size <= SMALL:
            return self._bytes(file, body)
        self.send_response(302)
        for key, value in self._file_headers(file).items():
            self.send_header(key, value)
        self.send_header("Location", f"{self.hub.endpoint}/storage/{name}")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _file_headers(self, file: Path) -> dict[str, str]:
        tag = hashlib.sha256(str(file).encode()).hexdigest()
        size = str(file.stat().st_size)
        return {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{tag}"',
            "X-Linked-Etag": f'"{tag}"',
            "X-Linked-Size": size,
            "Accept-Ranges": "bytes",
        }

    def _bytes(self, file: Path, body: bool) -> None:
        with self.hub.lock:
            fail = self.hub.broken > 0
            self.hub.broken -= fail
            if file.suffix == ".safetensors":
                self.hub.lock.wait_for(lambda: self.hub.most_at_once >= self.hub.together, timeout=5)
        if fail:
            return self._fail(503, "ServiceUnavailable")
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.hub.ranges else None
        start = int(wanted[1]) if wanted else 0
        end = min(int(wanted[2]) + 1 if wanted and wanted[2] else size, size)
        self.send_response(206 if wanted else 200)
        for key, value in self._file_headers(file).items():
            self.send_header(key, value)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if not body:
            return None
        with file.open("rb") as f:
            f.seek(start)
            left = end - start
            while left and (chunk := f.read(min(left, 1 << 16))):
                self.wfile.write(chunk)
                left -= len(chunk)
                with self.hub.lock:
                    self.hub.sent += len(chunk)
        return None

    def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        for key, text in {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Server(ThreadingHTTPServer):
    """Does not mind clients that stop reading."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def serve(repo: str, root: Path) -> Iterator[Hub]:
    """Serve a folder as a model repository until the block ends."""
    hub = Hub(repo, root)
    server = Server(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stand_in(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take a local server for the Hub, with an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
