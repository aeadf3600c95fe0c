"""Runs one command in a network that contains only MNIST's mirrors.

Start it with ``unshare --net --mount python -m tests.ddptrain.internet MNIST FOLDER COMMAND…``. In these namespaces the
mirrors' names resolve to a server on loopback, which uses TLS with a certificate made for them. The command runs in
FOLDER and connects to the mirrors' unchanged addresses.
"""

from __future__ import annotations

import http.server
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

from ddptrain.data.download import MIRRORS

_TIMEOUT = 240  # seconds


def serve(mnist: Path, certificate: Path, key: Path) -> None:
    """Serve the files of every mirror from a daemon thread."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = mnist / self.path.rsplit("/", 1)[-1]
            self.send_response(200 if file.is_file() else 404)
            self.end_headers()
            self.wfile.write(file.read_bytes() if file.is_file() else b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 443), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main(mnist: Path, folder: Path, command: list[str]) -> int:
    """Run the command and return its exit code."""
    names = [str(urlsplit(mirror).hostname) for mirror in MIRRORS]
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=60)
        (here / "hosts").write_text("127.0.0.1 localhost " + " ".join(names) + "\n")
        subprocess.run(["mount", "--bind", here / "hosts", "/etc/hosts"], check=True, timeout=60)
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=mirrors"]
        made += ["-addext", "subjectAltName=" + ",".join(f"DNS:{name}" for name in names)]
        files = ["-keyout", str(here / "key.pem"), "-out", str(here / "certificate.pem")]
        subprocess.run([*made, *files], check=True, capture_output=True, timeout=60)
        serve(mnist, here / "certificate.pem", here / "key.pem")
        trusting = {**os.environ, "SSL_CERT_FILE": str(here / "certificate.pem")}
        return subprocess.run(command, cwd=folder, env=trusting, check=False, timeout=_TIMEOUT).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
