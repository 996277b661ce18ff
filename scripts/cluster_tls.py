"""Mutual TLS around a cluster: for each of its processes a folder with keys, proxies and a way in.

TensorFlow's servers know neither password nor encryption. So each process of the cluster lives in a network of its own
that has a loopback and nothing else, and two small proxies (HAProxy) are the only way in and out:

    command | 127.0.0.1 | inner proxy | sockets in the folder | outer proxy | TLS, certificates of both | other hosts
    ------- a network of its own ---- | --- files, 0600 ----- | ------------- the host's network ------------------

Every process sees every other one at the same loopback address, on whatever host it is.

    python scripts/cluster_tls.py cluster.json --out keys      # cluster.json: who is where, as hosts see each other
    scp -r keys/ps-0 10.0.0.7:                                 # to each host what is its own, and nothing else
    ps-0/enter tfdp-rec server --cluster ps-0/cluster.json     # on 10.0.0.7
    chief/enter tfdp-rec train --cluster chief/cluster.json

The key of the authority that signs the certificates is never written: nobody can make another certificate for this
cluster, and a cluster of other processes needs a new folder for each of them. docs/scaling-tls.md says more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from tfdp_rec.distribute.cluster import Cluster

FIRST_PORT = 10001  # on loopback, where nothing else listens

OUTER = """\
global
  log stderr format raw daemon notice
  ssl-default-bind-options ssl-min-ver TLSv1.3
  ssl-default-server-options ssl-min-ver TLSv1.3
"""
DEFAULTS = """\
defaults
  mode tcp
  timeout connect 5s
  timeout client 20d
  timeout server 20d
  option clitcpka
  option srvtcpka
"""
TLS = "ssl crt own.pem ca-file authority.pem verify required"
ENTER = """\
#!/bin/sh
# Runs a command where nothing but the cluster is: ./enter COMMAND. Its proxies end with it.
here=$(cd "$(dirname "$0")" && pwd)
(cd "$here" && exec setsid setpriv --pdeathsig TERM haproxy -db -f outer.cfg) &
exec unshare -rn sh -c '
  ip link set lo up
  (cd "$0" && exec setsid setpriv --pdeathsig TERM haproxy -db -f inner.cfg) &
  exec "$@"' "$here" "$@"
"""


def proxies(name: str, places: dict[str, str], loopback: dict[str, str]) -> dict[str, str]:
    """The two proxies' configurations.

    Args:
        name: of the process that they serve.
        places: where all processes that can be called are, by name, as hosts see each other.
        loopback: where they all see them.
    """
    outer, inner = [OUTER, DEFAULTS], [DEFAULTS]
    if name in places:
        outer.append(f"listen in\n  bind {places[name]} {TLS}\n  server here unix@./in.sock\n")
        inner.append(f"listen in\n  bind unix@./in.sock mode 600\n  server here {loopback[name]}\n")
    for other in places.keys() - {name}:
        server = f"server there {places[other]} {TLS} verifyhost {other}"
        outer.append(f"listen {other}\n  bind unix@./{other}.sock mode 600\n  {server}\n")
        inner.append(f"listen {other}\n  bind {loopback[other]}\n  server there unix@./{other}.sock\n")
    return {"outer.cfg": "\n".join(outer), "inner.cfg": "\n".join(inner)}


class Authority:
    """Signs the certificates of one cluster, and is forgotten.

    Args:
        days: how long they hold.
    """

    def __init__(self, days: int):
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._now, self._days = datetime.datetime.now(datetime.UTC), days
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tfdp_rec cluster")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = _pem(self._signed(self._name, self._key, basic))

    def issue(self, name: str) -> bytes:
        """A new key and its certificate, as PEM.

        Args:
            name: of the process that it is for.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        called = x509.SubjectAlternativeName([x509.DNSName(name)])
        certificate = self._signed(subject, key, x509.BasicConstraints(ca=False, path_length=None), called)
        plain = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return _pem(certificate) + private

    def _signed(self, subject: Any, key: Any, *extensions: Any) -> Any:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        hour = datetime.timedelta(hours=1)  # for hosts whose clocks are behind
        builder = builder.not_valid_before(self._now - hour)
        builder = builder.not_valid_after(self._now + datetime.timedelta(days=self._days))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)  # type: ignore[no-any-return]


def write(cluster: Cluster, folder: Path, days: int = 365) -> list[Path]:
    """Writes a folder for each process, and one for the chief; readable by their owner alone.

    Args:
        cluster: who is where, as hosts see each other.
        folder: in which they are made.
        days: how long the certificates hold.

    Returns:
        The folders.

    Raises:
        FileExistsError: one of them is there already.
    """
    places = {name.replace(" ", "-"): at for name, at in cluster.places.items()}
    loopback = {name: f"127.0.0.1:{FIRST_PORT + number}" for number, name in enumerate(places)}
    jobs = {job: [loopback[f"{job}-{i}"] for i in range(len(cluster.jobs[job]))] for job in ("worker", "ps")}
    authority, made = Authority(days), []
    for name in [*places, "chief"]:
        made.append(folder / name)
        made[-1].mkdir(mode=0o700, parents=True)
        job, _, index = name.partition("-")
        task = {"task": {"type": job, "index": int(index)}} if index else {}
        described = json.dumps({"cluster": jobs, **task}, indent=1)
        files = {**proxies(name, places, loopback), "enter": ENTER, "cluster.json": described}
        files |= {"own.pem": authority.issue(name).decode(), "authority.pem": authority.certificate.decode()}
        for file, text in files.items():
            _write(made[-1] / file, text, 0o700 if file == "enter" else 0o600)
    return made


def _write(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def main() -> int:
    """Writes the folders and says where each belongs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cluster", help="TF_CONFIG's JSON, with the addresses at which hosts reach each other")
    parser.add_argument("--out", type=Path, required=True, help="where to make the folders")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates hold")
    chosen = parser.parse_args()
    cluster = Cluster.read(chosen.cluster)
    for folder, at in zip(write(cluster, chosen.out, chosen.days), [*cluster.places.values(), "whoever trains"]):
        print(f"{folder}: for {at}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
