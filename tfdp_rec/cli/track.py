r"""`tfdp-rec track`.

  tfdp-rec track runs/spring --uri http://127.0.0.1:5000
  tfdp-rec track runs/spring --experiment clicks --report

Makes a run of MLflow with ε and δ as metrics, and with statement, ledger and model card as artifacts: what is in
release/, but for the model. With --report, the report is added, which names the log's files and columns; exact figures
never are. MLflow's own reports of its use to its makers are off unless MLFLOW_DISABLE_TELEMETRY is set.
"""

from __future__ import annotations

import argparse
import os
import pathlib

import tfdp_rec
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.run_folder import CARD, LEDGER, PRIVATE, STATEMENT, find_servable, read_statement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `track`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, or a copy of its release/")
    parser.add_argument("--uri", help="tracking server (default: what MLflow is set to)")
    parser.add_argument("--experiment", default="tfdp-rec", help="experiment of MLflow (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="the report, too, which names the log's files")


def run(args: argparse.Namespace) -> int:
    """Makes the run of MLflow."""
    from tfdp_rec.serving.promise import describe_statement

    servable = find_servable(args.folder)
    files = [servable.with_name(name) for name in (STATEMENT, LEDGER, CARD)]
    if args.report:
        files.append(servable.parent.with_name(PRIVATE) / "report.html")
    if missing := [str(file) for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is not there: give the folder of a run that has ended.")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = optional("mlflow", "mlflow")
    promised = describe_statement(read_statement(servable))
    try:
        if args.uri:
            mlflow.set_tracking_uri(args.uri)
        mlflow.set_experiment(args.experiment)
        with mlflow.start_run(run_name=pathlib.Path(args.folder).resolve().name) as begun:
            mlflow.set_tag("tfdp_rec", tfdp_rec.__version__)
            mlflow.log_metrics({name: promised[name] for name in ("epsilon", "delta") if promised[name] is not None})
            for file in files:
                mlflow.log_artifact(str(file))
    except mlflow.exceptions.MlflowException as problem:
        raise OSError(f"MLflow refuses: {str(problem)[:300].rstrip('.')}.") from problem
    print(f"{args.folder} is run {begun.info.run_id} of the experiment {args.experiment}")
    return 0
