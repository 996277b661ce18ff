r"""`tfdp-rec serve`.

  tfdp-rec serve runs/spring
  curl -d '{"instances": [{"history": ["sku-1", "sku-2"]}]}' \
       http://127.0.0.1:8501/v1/models/recommender:predict

RUN is a folder that `tfdp-rec train` or `model.export` wrote. The interface is TensorFlow Serving's REST interface, so
that TensorFlow Serving answers the same requests (docs/serving.md). By default the server listens to this machine
alone. It writes no log of requests. On SIGTERM or Ctrl-C it answers what was asked, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading

from tfdp_rec.cli import quiet
from tfdp_rec.core.ground import interruption
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.settings import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `serve`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, or an exported model")
    port = "port, 0 for any that is free (default: %(default)s)"
    parser.add_argument("--port", type=integer, default=8501, help=port)
    parser.add_argument("--name", default="recommender", help="name of the model in its path (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--open-to-the-network", action="store_true", help="allow an address that other machines reach, unprotected"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    optional("uvicorn", "serve")
    quiet.import_tensorflow()
    from tfdp_rec.job.run_folder import find_servable, read_statement
    from tfdp_rec.serving.rest import Served
    from tfdp_rec.serving.server import Server

    folder = find_servable(args.folder).resolve()  # the model's own: a link may be moved to another
    served = Served(folder)
    # After the model: a run writes its statement before its model, so this one is never of a smaller epsilon.
    covered = read_statement(folder)
    server = Server(served, args.name, args.host, args.port, args.open_to_the_network, statement=covered)
    code = interruption.exit_code()  # of a second Ctrl-C, which does not wait for answers
    try:
        with server, contextlib.suppress(KeyboardInterrupt):  # which SIGTERM is, too
            print(f"tfdp-rec serve: {args.folder} at {server.url}:predict (Ctrl-C ends it)", flush=True)
            threading.Event().wait()
        code = 0
    finally:
        if server.is_answering:  # still, though its caller waits no more: Python would wait for all threads
            os._exit(code)
    return code
