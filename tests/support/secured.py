"""What the tests of security share: a file of tokens, credentials, certificates."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvpool.security.tokens import token_line
from kvpool.wire.credentials import Credentials
from kvpool.wire.principal import EVERY_TENANT, Scope

# name: (tenant, scopes, isolated)
HOLDERS: dict[str, tuple[str, list[Scope], bool]] = {
    "operator": (EVERY_TENANT, [Scope.ADMIN], False),
    "process": (EVERY_TENANT, [Scope.INTERNAL], False),
    "prometheus": (EVERY_TENANT, [Scope.METRICS], False),
    "worker-acme": ("acme", [Scope.INTERNAL], False),
    "acme": ("acme", [Scope.READ, Scope.WRITE], False),
    "acme-reader": ("acme", [Scope.READ], False),
    "bolt": ("bolt", [Scope.READ, Scope.WRITE], False),
    "vault": ("vault", [Scope.READ, Scope.WRITE], True),
    "safe": ("safe", [Scope.READ, Scope.WRITE], True),
}


def token(name: str) -> str:
    return f"kvp_of-{name}"


def credentials(name: str, **tls: Path) -> Credentials:
    return Credentials(token(name), **tls)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token(name)}"}


def tokens_file(directory: Path) -> Path:
    path = directory / "tokens.yaml"
    lines = [
        token_line(token(name), name, tenant, scopes, is_isolated=isolated)
        for name, (tenant, scopes, isolated) in HOLDERS.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(tokens: Path | None, **common: object) -> dict[str, str]:
    """Settings of all processes of a cluster; each shows the token of its kind.

    Isolated tenants get no nodes, unless the test sets `node.advanced.isolated_dram_bytes`.
    """
    settings: dict[str, object] = {"NODE__ADVANCED__ISOLATED_DRAM_BYTES": 0}
    for section, name in (("CONDUCTOR", "process"), ("NODE", "process"), ("WORKER", "worker-acme")):
        if tokens is not None:
            settings |= {f"{section}__TOKENS_PATH": tokens, f"{section}__TOKEN": token(name)}
        settings |= {f"{section}__{key.upper()}": value for key, value in common.items()}
    return {f"KVPOOL_{key}": str(value) for key, value in settings.items()}


class Certificates:
    """Two authorities, a server's certificate by the first, and a client's by each."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command is not installed, which makes the certificates")
        self._directory = directory
        for name in ("ca", "other-ca"):
            self._openssl(
                "req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-days", "2",
                "-addext", "keyUsage=critical,keyCertSign,cRLSign",
                "-keyout", f"{name}.key", "-out", f"{name}.pem",
            )  # fmt: skip
        self._sign("server", "ca", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        self._sign("client", "ca", "subjectAltName=DNS:client")
        self._sign("stranger", "other-ca", "subjectAltName=DNS:stranger")
        self.ca, self.other_ca = directory / "ca.pem", directory / "other-ca.pem"
        self.cert, self.key = directory / "server.pem", directory / "server.key"

    def of(self, name: str) -> tuple[Path, Path]:
        """Certificate and key."""
        return self._directory / f"{name}.pem", self._directory / f"{name}.key"

    def _sign(self, name: str, ca: str, extension: str) -> None:
        self._openssl("req", *_NEW_KEY, "-subj", f"/CN={name}",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        (self._directory / f"{name}.ext").write_text(extension)
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey",
                      f"{ca}.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext",
                      "-out", f"{name}.pem")  # fmt: skip

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=self._directory, check=True, capture_output=True
        )


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
