"""A server that answers the client of the Hugging Face Hub, with one data set."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_COMMIT = "1" * 40


@contextmanager
def hub_with(name: str, files: dict[str, bytes]) -> Iterator[dict[str, str]]:
    """Serves the files of a data set, without folders, and yields the environment of a client."""

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(b"")

        def do_GET(self) -> None:
            self.answer(b"")

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, body: bytes) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith(f"/datasets/{name}/resolve/") and path.rpartition("/")[2] in files:
                self.send(files[path.rpartition("/")[2]])
            elif path.startswith(f"/api/datasets/{name}/tree/"):
                self.send_json([] if path.count("/") > 6 else [self.entry(file) for file in files])
            elif path.startswith(f"/api/datasets/{name}/paths-info/"):
                self.send_json([self.entry(file) for file in parse_qs(body.decode()).get("paths", []) if file in files])
            elif path.startswith(f"/api/datasets/{name}") and "resolve" not in path:
                self.send_json({"id": name, "sha": _COMMIT, "siblings": [{"rfilename": file} for file in files]})
            else:
                missing = "EntryNotFound" if path.startswith(f"/datasets/{name}/") else "RepoNotFound"
                self.send(b"{}", 404, {"X-Error-Code": missing})

        def entry(self, file: str) -> dict[str, Any]:
            return {"type": "file", "path": file, "size": len(files[file]), "oid": _digest(files[file])}

        def send_json(self, value: Any) -> None:
            self.send(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

        def send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            sent = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": _COMMIT} | (headers or {})
            if status == 200 and "Range" in self.headers:
                start, _, stop = self.headers["Range"].removeprefix("bytes=").partition("-")
                total = len(content)
                content = content[int(start) : int(stop) + 1 if stop else total]
                status = 206
                sent["Content-Range"] = f"bytes {start}-{int(start) + len(content) - 1}/{total}"
            self.send_response(status)
            for key, value in (sent | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
        server.shutdown()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
