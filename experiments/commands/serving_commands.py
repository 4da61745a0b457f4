"""Commands about serving: measured runs predicted, and fits."""

from collections.abc import Mapping
from pathlib import Path

from experiments.cli.command import Command, Group, experiment, option, path

SERVING_COMMANDS: Mapping[str, Group] = {
    "Serving": {
        "predict_serving": Command(
            "experiments.serve.predict_serving:predict_serving",
            {"json": False},
            (option("tables", **path("TABLE.csv"), nargs="+"),),
        ),
        "serving_errors": Command(
            "experiments.serve.serving_errors:serving_errors",
            experiment("serving_errors"),
            (
                option("tables", **path("TABLE.csv"), nargs="+"),
                option(
                    "--leave-out",
                    "what is left out of the fit that predicts it (default: each of the three)",
                    ["configuration", "gpu", "model"],
                    choices=("configuration", "gpu", "model"),
                    nargs="+",
                ),
            ),
            arguments=["tables"],
        ),
        "calibrate_serving": Command(
            "experiments.serve.calibrate_serving:calibrate_serving",
            {},
            (
                option("--kernels", "the folder of the tables of kernels", **path("FOLDER")),
                option("--runs", "measured runs", [], **path("TABLE.csv"), nargs="+"),
                option("--out", "where files are written", Path("runs"), metavar="FOLDER"),
            ),
        ),
    },
}
