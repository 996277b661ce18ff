"""What is heard at the addresses of a cluster.

python stranger.py [--keys FOLDER] ADDRESS ...    prints one line of JSON: for each address what was heard, by how
"""

import json
import socket
import ssl
import sys

from tfdp_rec.distribute.cluster import server_at

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # as gRPC begins


def heard(address, keys, secured):
    """The first bytes that come back, in hex; or nothing, and why."""
    host, port = address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            if secured:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                if keys:
                    context.load_cert_chain(f"{keys}/own.pem")
                connection = context.wrap_socket(connection)
            connection.sendall(HELLO)
            return {"bytes": connection.recv(64).hex()}
    except OSError as problem:
        return {"bytes": "", "why": f"{type(problem).__name__}: {problem}"}


def main(arguments):
    """Tries everything."""
    keys = None
    if arguments[0] == "--keys":
        keys, arguments = arguments[1], arguments[2:]
    found = {
        at: {"status": server_at(at), "plain": heard(at, None, False), "secured": heard(at, keys, True)}
        for at in arguments
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
