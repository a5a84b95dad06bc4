"""A server of shards that can misbehave."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path


class Server:
    """Serves the files of a folder over http; `plans[name]` says what single requests get.

    A plan is a list, used up from its front: a number of bytes after which the connection is
    closed, "stall" after the header, or a status as "503". `requests` notes (name, Range header).
    Replies bear `headers_sent`.
    """

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.plans: dict[str, list] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.headers: list[dict[str, str]] = []
        self.headers_sent = {"ETag": '"1"'}
        released = self._released = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.split("?")[0].lstrip("/")
                wanted = self.headers.get("Range") if ranges else None
                server.requests.append((name, self.headers.get("Range")))
                server.headers.append(dict(self.headers))
                plan = (server.plans.get(name) or [None]).pop(0)
                if isinstance(plan, str) and plan.isdigit():
                    return self.send_error(int(plan))
                if not (folder / name).is_file():
                    return self.send_error(404)
                data = (folder / name).read_bytes()
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(data) - start))
                for header, value in server.headers_sent.items():
                    self.send_header(header, value)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.end_headers()
                if plan == "stall":
                    released.wait()
                else:
                    self.wfile.write(data[start:] if plan is None else data[start : start + plan])

            def log_message(self, *arguments):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
