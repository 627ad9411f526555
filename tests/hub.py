"""A server on 127.0.0.1 that answers as the Hugging Face Hub does, for the folders of a test."""
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40


class Handler(BaseHTTPRequestHandler):
    """Serves root/USER/NAME as a model and as a data set. `broken` are names of files whose connection is reset."""
    protocol_version = "HTTP/1.1"
    root, broken = None, ()

    def log_message(self, *arguments):
        """Print nothing."""

    def reply(self, code, content, **headers):
        """Send an answer."""
        self.send_response(code)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        """Answer any request."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        parts = [part for part in parts if part not in ("datasets", "models")]
        if parts[0] == "api":
            return self.answer(parts[1:], body)
        file = self.root.joinpath(*parts[:2], *parts[4:])  # USER/NAME/resolve/REVISION/FILE
        if file.name in self.broken and self.command == "GET":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif file.is_file():
            self.reply(200, file.read_bytes(), ETag=f'"{file.stat().st_size}"')
        else:
            self.reply(404, b"", X_Error_Code="EntryNotFound")

    do_HEAD = do_POST = do_GET

    def answer(self, parts, body):
        """Answer a question about a repository: USER/NAME/..."""
        folder = self.root.joinpath(*parts[:2])
        if len(parts) < 2 or not folder.is_dir():
            return self.reply(404, b"{}", X_Error_Code="RepoNotFound")
        files = [{"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size,
                  "oid": str(path.stat().st_size)} for path in sorted(folder.rglob("*")) if path.is_file()]
        found = {"id": "/".join(parts[:2]), "sha": COMMIT, "private": False, "gated": False, "tags": [],
                 "siblings": [{"rfilename": file["path"]} for file in files]}
        if "tree" in parts:
            found = files
        elif "paths-info" in parts:
            found = [file for file in files if file["path"] in body]
        self.reply(200, json.dumps(found).encode(), Content_Type="application/json")


@contextmanager
def serve(root):
    """Serve the folders in `root`; yields the address and the handler."""
    handler = type("OfTest", (Handler,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
