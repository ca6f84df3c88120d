"""A small Hugging Face Hub on this machine: what the client sends is honoured, everything is in memory.

Repositories have branches, commits with parents, and large files kept apart. Faults can be switched on per route, and
every request is written down: that is what tests count.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 1000
#: Files from this size on, and those that are no text, are kept apart, as on the real Hub.
LARGE = 64 * 1024


@dataclass
class Commit:
    oid: str
    parent: str | None
    files: dict[str, tuple[bytes, bool]]
    message: str


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    card: dict[str, Any] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, tuple[bytes, bool]], message: str, ref: str = "main") -> Commit:
        parent = self.refs.get(ref)
        made = Commit(secrets.token_hex(20), parent, files, message)
        self.commits[made.oid] = made
        self.refs[ref] = made.oid
        return made

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))

    @property
    def head(self) -> Commit:
        return self.commits[self.refs["main"]]

    def history(self, ref: str = "main") -> list[Commit]:
        found, at = [], self.commits.get(self.refs[ref])
        while at is not None:
            found.append(at)
            at = self.commits.get(at.parent) if at.parent else None
        return found


@dataclass
class Fault:
    """What goes wrong with requests whose ``METHOD path`` matches, ``times`` times."""

    route: str
    kind: Literal["status", "cut", "wrong", "slow", "lands", "drops", "trickle"] = "status"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1_000_000


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    host: str
    authorization: str | None

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what faults are for."""


class FakeHub:
    """The server. ``tokens`` may read and write everything; without one, public repositories can be read."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens = {"hf_goodtokengoodtoken"}
        self.lock = threading.RLock()
        self.before_commit: Callable[[], None] = lambda: None
        self.always_public = False
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, files: dict[str, bytes] | None = None, **settings: Any) -> Repo:
        repo = self.repos[name] = Repo(**settings)
        repo.commit({path: (data, False) for path, data in (files or {}).items()}, "initial commit")
        return repo

    @contextmanager
    def counted(self) -> Iterator[list[Request]]:
        """The requests made within, but for the uploads of large files."""
        start = len(self.requests)
        found: list[Request] = []
        yield found
        found += [each for each in self.requests[start:] if each.method != "PUT"]

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.route, request):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.route = unquote(url.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        authorization = self.headers.get("Authorization")
        request = Request(self.command, self.route, self.headers.get("Host", ""), authorization)
        with self.hub.lock:
            self.hub.requests.append(request)
        self.token = (authorization or "").removeprefix("Bearer ") or None
        self.broken = self.hub.fault(str(request))
        if self.broken is not None and self.broken.kind == "slow":
            time.sleep(0.3)
        if self.broken is not None and self.broken.kind == "status":
            self._answer(self.broken.status, {"error": "a fault"}, self.broken.headers)
            return
        if self.broken is not None and self.broken.kind == "drops":
            self.close_connection = True
            return
        if self.token is not None and self.token not in self.hub.tokens:
            self._answer(
                401, {"error": "bad token"}, {"X-Error-Message": "Invalid credentials in Authorization header"}
            )
            return
        for pattern, method in _ROUTES:
            if found := re.fullmatch(pattern, f"{self.command} {self.route}"):
                getattr(self, method)(*found.groups())
                return
        self._answer(404, {"error": f"no route {request}"})

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        fault = self.broken
        if fault is not None and fault.kind == "wrong" and status == 200:
            data = bytes(255 - byte for byte in data)
        if fault is not None and fault.kind == "lands":
            status, data = fault.status, b"{}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.kind == "cut" and status == 200:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        if fault is not None and fault.kind == "trickle":
            for byte in data:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.02)
            return
        self.wfile.write(data)

    def _repo(self, name: str, *, write: bool = False) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.token is None):
            status = 404 if self.token else 401
            self._answer(status, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if write and self.token is None:
            self._answer(403, {"error": "no right to write"}, {"X-Error-Message": "no right to write"})
            return None
        return repo

    def _commit_at(self, repo: Repo, revision: str) -> Commit | None:
        commit = repo.at(revision)
        if commit is None:
            self._answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        return commit

    # -- routes --------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if self.token is None:
            self._answer(401, {"error": "log in first"})
        elif name in self.hub.repos:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{name}"})
        else:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.add(name, {".gitattributes": b""}, private=private and not self.hub.always_public)
            self._answer(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def whoami(self) -> None:
        if self.token is None:
            self._answer(401, {"error": "log in first"})
        else:
            self._answer(200, {"name": "me", "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def validate(self) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def info(self, name: str, revision: str | None = None) -> None:
        repo = self._repo(name)
        if repo is None or (commit := self._commit_at(repo, revision or "main")) is None:
            return
        facts = {
            "sha": commit.oid,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "cardData": repo.card,
            "tags": [],
            "siblings": [{"rfilename": path} for path in commit.files],
        }
        asked = parse_qs(urlsplit(self.path).query).get("expand", list(facts))
        self._answer(200, {"id": name, "modelId": name, **{key: facts[key] for key in asked}})

    def tree(self, name: str, revision: str, folder: str = "") -> None:
        repo = self._repo(name)
        if repo is None or (commit := self._commit_at(repo, revision)) is None:
            return
        start = f"{folder.strip('/')}/" if folder.strip("/") else ""
        paths = sorted(path for path in commit.files if path.startswith(start))
        if not paths:
            self._answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
            return
        after = self.query.get("cursor", "")
        page = [path for path in paths if path > after][:PAGE]
        items = [{"type": "file", "path": path, "size": len(commit.files[path][0]), "oid": "0" * 40} for path in page]
        headers = {}
        if page and page[-1] != paths[-1]:
            link = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={page[-1]}"
            headers["Link"] = f'<{link}>; rel="next"'
        self._answer(200, items, headers)

    def paths_info(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if repo is None or (commit := self._commit_at(repo, revision)) is None:
            return
        asked = parse_qs(self.body.decode()).get("paths", [])
        there = [path for path in asked if path in commit.files]
        self._answer(200, [{"type": "file", "path": path, "size": 1, "oid": "0" * 40} for path in there])

    def branch(self, name: str, branch: str) -> None:
        repo = self._repo(name, write=True)
        if repo is None:
            return
        if branch in repo.refs:
            self._answer(409, {"error": "Reference already exists"})
            return
        repo.refs[branch] = repo.refs["main"]
        self._answer(200, {})

    def preupload(self, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        if repo is None or (commit := self._commit_at(repo, revision)) is None:
            return
        files = []
        for asked in json.loads(self.body)["files"]:
            is_text = b"\0" not in base64.b64decode(asked["sample"])
            mode = "regular" if is_text and asked["size"] < LARGE else "lfs"
            known = commit.files.get(asked["path"])
            oid = None if known is None else _oid(*known)
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer(200, {"files": files})

    def batch(self, name: str) -> None:
        if self._repo(name, write=True) is None:
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            item = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.large:
                item["actions"] = {"upload": {"href": f"{self.hub.endpoint}/large/{asked['oid']}", "header": {}}}
            objects.append(item)
        self._send(
            200,
            json.dumps({"transfer": "basic", "objects": objects}).encode(),
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._answer(400, {"error": "other bytes"})
            return
        self.hub.large[oid] = self.body
        self._answer(200, {})

    def commit(self, name: str, revision: str) -> None:
        repo = self._repo(name, write=True)
        if repo is None:
            return
        self.hub.before_commit()
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        with self.hub.lock:
            base = self._commit_at(repo, revision)
            if base is None:
                return
            parent = header.get("parentCommit")
            is_pr = self.query.get("create_pr") == "1"
            if parent and parent != base.oid and not is_pr:
                self._answer(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            files = dict(base.files)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = (base64.b64decode(value["content"]), False)
                elif line["key"] == "lfsFile":
                    files[value["path"]] = (self.hub.large[value["oid"]], True)
            ref = revision
            if is_pr:
                ref = f"refs/pr/{1 + sum(each.startswith('refs/pr/') for each in repo.refs)}"
                repo.refs[ref] = base.oid
            made = repo.commit(files, header["summary"], ref)
        answer = {"commitOid": made.oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{made.oid}", "success": True}
        if is_pr:
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{name}/discussions/{ref.rpartition('/')[2]}"
        self._answer(200, answer)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        if repo is None:
            return
        if repo.gated and self.token is None:
            self._answer(401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return
        commit = self._commit_at(repo, revision)
        if commit is None:
            return
        found = commit.files.get(path)
        headers = {"X-Repo-Commit": commit.oid}
        if found is None:
            self._answer(404, {"error": "Entry not found"}, {**headers, "X-Error-Code": "EntryNotFound"})
            return
        data, is_large = found
        headers["ETag"] = f'"{_oid(data, is_large)}"'
        if is_large:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            location = f"http://localhost:{self.hub.port}/large/{hashlib.sha256(data).hexdigest()}"
            self._send(302, b"", {**headers, "Location": location})
        else:
            self._send(200, data, headers)

    def large(self, oid: str) -> None:
        data = self.hub.large.get(oid)
        if data is None:
            self._answer(404, {"error": "no such object"})
        else:
            self._send(200, data, {"ETag": f'"{oid}"'})


def _oid(data: bytes, is_large: bool) -> str:
    if is_large:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    ("POST /api/repos/create", "create"),
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/validate-yaml", "validate"),
    (f"GET /api/models/{_NAME}", "info"),
    (f"GET /api/models/{_NAME}/revision/(.+)", "info"),
    (f"GET /api/models/{_NAME}/tree/([^/]+)/?(.*)", "tree"),
    (f"POST /api/models/{_NAME}/paths-info/([^/]+)", "paths_info"),
    (f"POST /api/models/{_NAME}/branch/(.+)", "branch"),
    (f"POST /api/models/{_NAME}/preupload/(.+)", "preupload"),
    (f"POST /api/models/{_NAME}/commit/(.+)", "commit"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT /large/([0-9a-f]{64})", "upload"),
    ("(?:GET|HEAD) /large/([0-9a-f]{64})", "large"),
    (f"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", "resolve"),
)
