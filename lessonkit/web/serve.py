"""The built book on this machine's loopback address. No other machine reaches it, and no other site's page may ask it.

A page of another site can make a browser send requests to 127.0.0.1, or give its own name that address. So a request
must name this server in `Host`, and an `Origin`, where there is one, must be this server's. What a learner has written
is run only for a page that this server has served: such a page has a token, which other sites cannot read.
"""

import gzip
import hmac
import io
import json
import secrets
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lessonkit.web.grader import Busy, Ended, Grader

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost")
POLICY = (  # what a page may load: its own files, and the small scripts that the theme writes into it
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
ASK = "/api/ask"
TOKEN = "X-Course-Token"
TEXT = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}  # sent compressed
MOST = 256 * 1024  # bytes of a request; an answer has some thousand


class Handler(SimpleHTTPRequestHandler):
    """Files below one folder, by GET and HEAD; answers to exercises and quizzes, by POST."""

    server: "Server"
    timeout = 30  # seconds for the next bytes of a request

    def parse_request(self) -> bool:
        """Refuse, before a method is chosen, what does not come from a page of this server."""
        if not super().parse_request():
            return False
        allowed = {f"{name}:{self.server.server_port}" for name in NAMES}
        if self.headers.get_all("Host", []) not in [[host] for host in allowed]:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "Host is not this server")
            return False
        if (origin := self.headers.get("Origin")) and origin not in {f"http://{host}" for host in allowed}:
            self.send_error(HTTPStatus.FORBIDDEN, "Origin is not this server")
            return False
        return True

    def send_head(self):  # type: ignore[no-untyped-def]
        """A file of the folder. One outside of it, by .. or by a link, is not found; folders are not listed."""
        root = Path(self.directory).resolve()
        asked = unquote(urlsplit(self.path).path)
        path = (root / asked.lstrip("/")).resolve() if "\0" not in asked else root.parent
        if path.is_dir():
            path = path / "index.html"
        if ".." in asked.replace("\\", "/").split("/") or not path.is_relative_to(root) or not path.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        if path.suffix not in TEXT:
            return super().send_head()
        page = path.read_bytes()
        if path.suffix == ".html":
            page = page.replace(b"</head>", self.server.mark + b"</head>", 1)
        self.send_response(HTTPStatus.OK)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            page = gzip.compress(page, 5)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{TEXT[path.suffix]}; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        return io.BytesIO(page)

    def do_POST(self) -> None:
        """A page asks for an exercise's state, a hint, the stub or a verdict, or has a quiz's answers kept."""
        length = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(self.headers.get(TOKEN, "").encode(), self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "The token is not this server's: load the page again")
        elif self.path != ASK:
            self.send_error(HTTPStatus.NOT_FOUND)
        elif self.headers.get_content_type() != "application/json":
            self.send_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        elif not length.isascii() or not length.isdecimal():
            self.send_error(HTTPStatus.LENGTH_REQUIRED)
        elif int(length) > MOST:
            self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._ask(self.rfile.read(int(length)))

    def _ask(self, body: bytes) -> None:
        try:
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("no object")
            said = json.dumps(self.server.grader.ask(request)).encode()
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "The body is not a JSON object")
        except Busy:
            self.send_error(HTTPStatus.CONFLICT, "Another answer is being graded")
        except Ended:
            self.send_error(HTTPStatus.BAD_GATEWAY, "The grader has ended: ask again")
        else:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-cache")  # a page that is built anew is shown anew
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """A reader's terminal stays empty."""


class Server(ThreadingHTTPServer):
    """Serves `folder` on the loopback address. port 0: any that is free."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__((ADDRESS, port), partial(Handler, directory=str(folder)))
        self.grader = Grader()
        self.token = secrets.token_urlsafe()
        self.mark = f'<meta name="course-token" content="{self.token}">'.encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who leaves a page before its answer has come is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self.grader.end()

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. Raises OSError if the port is taken."""
    with Server(folder, port) as server:
        server.grader.begin()
        say(server.address)
        server.serve_forever()
