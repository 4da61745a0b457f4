"""The commands about machines and models, and about how good predictions are."""

from pathlib import Path

from experiments.cli.command import (
    DEVICES,
    FOLDS,
    KERNELS,
    UNLIMITED,
    Group,
    command,
    experiment,
    flag,
    option,
    path,
)
from mistlab.schedule.orders import ORDERS

# For how many minutes a call of ``gpu_report`` works by default.
MINUTES = 9.0

MACHINE_COMMANDS: dict[str, Group] = {
    "Machines": {
        "profile_hardware": command(
            "experiments.calibration.profile_hardware:profile",
            {"gpus_per_node": None, "seed": 0, "quick": False, "json": False},
            option(
                "--out",
                "the file to write",
                Path("runs/profile_hardware/this-machine.yaml"),
                metavar="HARDWARE.yaml",
            ),
            option("--device", "what to measure (default: GPUs if there are any)", choices=DEVICES),
            option(
                "--tables",
                "folder for the tables of measurements, where later calls find them "
                "(default: HARDWARE-tables beside --out)",
                **path("DIR"),
            ),
            option(
                "--datasheet",
                "take peaks, memory bandwidth and network from this hardware's datasheet,"
                " instead of measured peaks",
                metavar="HARDWARE",
            ),
            option(
                "--attention-kernel",
                "the kernel of fused attention (default: flash), as for run_plan",
                "flash",
                choices=KERNELS,
            ),
            option(
                "--only",
                "only measure and fill the tables, or only fit to tables that are there",
                choices=("measure", "fit"),
            ),
            flag(
                "--between-nodes",
                "measure the network between nodes, in processes that torchrun started on"
                " each node",
            ),
            examples={
                "this machine": "--out my-box.yaml",
                "peaks from a datasheet": "--datasheet h100-80gb --out my-box.yaml",
            },
        ),
        "calibrate": command(
            "experiments.calibration.calibrate:calibrate",
            {"hardware": "l4-24gb", "seed": 0, "json": False},
            option("--bandwidth", "table of transfers, each stream by itself", **path("TABLE.csv")),
            option("--collectives", "table of collectives inside a node", **path("TABLE.csv")),
            option("--point-to-point", "table of sends between two GPUs", **path("TABLE.csv")),
            option(
                "--interference", "table of streams that ran at the same time", **path("TABLE.csv")
            ),
            option("--operators", "table of operators of GPT blocks", **path("TABLE.csv")),
            option(
                "--attention", "table of attention kernels, beside --operators", **path("TABLE.csv")
            ),
            option(
                "--kernels",
                "table of single kernels by shape: GEMMs, attention",
                **path("TABLE.csv"),
            ),
            option(
                "--collective-tests",
                "table of the bus bandwidth of collectives by size",
                **path("TABLE.csv"),
            ),
            option(
                "--best-products",
                "table of the fastest GEMMs in 16 and in 8 bits",
                **path("TABLE.csv"),
            ),
            option(
                "--launch-us",
                "microseconds in which the host launches a kernel, beside --kernels",
                10.0,
            ),
            option(
                "--sustained",
                "share of its rates that a GPU keeps up in whole steps, beside --kernels",
                1.0,
            ),
            option(
                "--launches", "table of the host's times to launch kernels", **path("TABLE.csv")
            ),
            option("--runs", "table of whole runs, with their memory peaks", **path("TABLE.csv")),
            option(
                "--megatron-runs",
                "tables of whole Megatron-LM runs that recompute everything",
                **path("TABLE.csv"),
                nargs="+",
            ),
            option("--folds", "GPUs x layers of the runs to fit on", FOLDS),
            option(
                "--campaign", "the campaign to use (column `generation`), if tables have several"
            ),
            option("--attention-campaign", "the campaign to use (column `db`) of --attention"),
            option(
                "--table-hardware", "the machine to use (column `hardware`), if tables have several"
            ),
            flag(
                "--without-weight-gradients",
                "the backward times of operators lack the gradients of weights, which are"
                " counted as a forward pass",
            ),
            option(
                "--attention-tflops",
                "TFLOP/s of fused causal attention, if no table has them",
                type=float,
                metavar=("FORWARD", "BACKWARD"),
                nargs=2,
            ),
            option("--template", "published lines across nodes", **path("FILE.json")),
            option("--template-name", "the name of the template in it", "template-l4"),
            option(
                "--borrow",
                "hardware from which missing groups of figures are taken",
                metavar="HARDWARE",
            ),
            option("--out", "the file to write", **path("HARDWARE.yaml"), required=True),
            examples={
                "operators of a table": (
                    "--hardware my-box.yaml --operators operators.csv --out mine.yaml"
                ),
            },
        ),
        "calibrate_runs": command(
            "experiments.calibration.calibrate_runs:calibrate_runs",
            {"hardware": "h100-80gb", "json": False},
            option("tables", **path("TABLE.csv"), nargs="+"),
            option("--engine", "the engine of the runs", "nanotron"),
            option("--fit", "constants to fit (default: none)", [], metavar="NAME", nargs="+"),
            option(
                "--profile",
                "the profile of the cluster of all runs: ultrascale",
                "none",
                metavar="NAME",
            ),
            option(
                "--set",
                "constants that are given and not fitted",
                [],
                metavar="NAME=VALUE",
                nargs="+",
            ),
            option("--most-gpus", "leave out runs on more GPUs (default: none)", UNLIMITED),
            option("--most-tp", "leave out runs of higher tp (default: none)", UNLIMITED),
            option("--most-pp", "leave out runs of higher pp (default: none)", UNLIMITED),
            option(
                "--most-tp-in-pipelines",
                "leave out runs of higher tp among those with a pipeline (default: none)",
                UNLIMITED,
            ),
            option("--leave-out", "groups to leave out: model", [], metavar="COLUMN", nargs="+"),
            option("--evaluations", "steps of a fit", 8),
            option("--note", "a note on the source of the constants", ""),
            option("--out", "the file to write", **path("HARDWARE.yaml")),
            examples={
                "one constant, models left out": (
                    "runs.csv --engine megatron-core --fit sustained --leave-out model --out "
                    "mine.yaml"
                ),
            },
        ),
        "gpu_report": command(
            "experiments.gpu_reports.gpu_report:work",
            {"gpus_per_node": 1, "quick": False, "json": False},
            option("--out", "the folder of the report", Path("runs/gpu_report"), metavar="DIR"),
            option("--minutes", "time limit of this call", MINUTES),
            option("--device", "the device that runs plans", "cuda", choices=DEVICES),
            option(
                "--from",
                "let a folder that has not begun go on from a packed one (default: the one in it)",
                **path("REPORT.zip"),
                dest="packed",
            ),
            flag("--dry-run", "print the order of runs and the estimated time; run nothing"),
            flag("--draw", "write the page and pictures of the results so far; run nothing"),
            examples={
                "without a GPU, to see what it does": "--dry-run",
                "a node of eight GPUs": "--gpus-per-node 8 --out runs/node",
            },
        ),
    },
    "Models": {
        "trace": command(
            "experiments.models.trace:trace",
            {"json": False},
            option("source", "what to trace", metavar="SOURCE"),
            option("--out", "the file to write", **path("MODEL.json"), required=True),
            option("--name", "the model's name (default: that of the source)"),
            option(
                "--attention",
                "trace only one kind of attention of a configuration (default: both)",
                choices=("flash", "math"),
            ),
            option(
                "--precision",
                "trace only 16-bit or only 32-bit training (default: both)",
                choices=("fp16", "bf16", "fp32"),
            ),
            option(
                "--blocks", "attribute path of the list of blocks, if not found", metavar="PATH"
            ),
            option(
                "--sequence-length",
                "the number that decides where the model's code branches on the sequence",
                128,
            ),
            examples={"a model of one's own": "model.py --out model.json"},
        ),
        "build_graphs": command(
            "experiments.models.build_graphs:build_graphs",
            {},
            option("--out", "folder (default: the package's)", **path("DIR")),
            examples={"into a folder": "--out graphs"},
        ),
        "check_models": command(
            "experiments.models.check_models:check",
            {**experiment("check_models")},
            option(
                "--types",
                "write the table of types from the package's data, and count nothing",
                **path("PAGE.md"),
            ),
            examples={"two types": "--types llama,qwen3"},
        ),
    },
    "How good predictions are": {
        "predictor_error": command(
            "experiments.measured.predictor_error:errors",
            {**experiment("predictor_error")},
            option("--tables", "folder of measurement tables", **path("DIR")),
            option(
                "--launch",
                "only runs that a launch script or DeepSpeed JSON of this folder is named "
                "for, by the plans imported from these files",
                **path("DIR"),
            ),
            flag("--events", "play runs of whole layers task by task too"),
            examples={"a first look": "--quick"},
        ),
        "predict_collectives": command(
            "experiments.networks.predict_collectives:predict_collectives",
            {"json": False},
            option("tables", **path("TABLE.csv"), nargs="+"),
            flag("--leave-out", "predict each cluster by a fit to all others"),
            option("--page", "also write the errors as a page", **path("PAGE.md")),
            option(
                "--fit",
                "write the numbers that fit all rows, as the catalogue has them",
                **path("FILE.yaml"),
            ),
            examples={"clusters left out": "collectives.csv --leave-out"},
        ),
        "predict_operators": command(
            "experiments.measured.predict_operators:predict_operators",
            {"json": False},
            option("tables", **path("TABLE.csv"), nargs="+"),
            examples={"measured kernels as JSON": "operators.csv --json"},
        ),
        "predict_runs": command(
            "experiments.measured.predict_runs:predict_rows",
            {"json": False},
            option("tables", **path("TABLE.csv"), nargs="+"),
            option(
                "--profile",
                "the cluster whose own slowness is added: ultrascale",
                "none",
                metavar="NAME",
            ),
            option(
                "--hardware",
                "a hardware file, such as calibrate_runs writes: it stands for the GPUs of "
                "its name, and where a row says no hardware; for all rows if the catalogue "
                "has no such name (default: the catalogue's files)",
                metavar="NAME|FILE",
            ),
            examples={"measured runs as JSON": "runs.csv --json"},
        ),
        "report_runs": command(
            "experiments.measured.report_runs:report",
            {"out": Path("runs/measured_runs")},
            option("tables", **path("TABLE.csv"), nargs="+"),
            option("--profile", "a cluster's profile", "none", metavar="NAME"),
            option("--name", "name of the page and of its picture", "runs"),
            option(
                "--sureness",
                "also write the spreads of bounds by kind of run, for the catalogue",
                **path("FILE.yaml"),
            ),
            option(
                "--kernels",
                "tables of single kernels, to predict from datasheets",
                **path("TABLE.csv"),
                nargs="+",
            ),
            flag("--ablation", "also predict rows without groups of columns and parts"),
            examples={"the page of measured runs": "runs.csv --out runs.md"},
        ),
        "cross_check": command(
            "experiments.agreement.cross_check:cross_check",
            {**experiment("cross_check")},
            option("--plans", "number of plans (default: 1,000, and 40 with --quick)", type=int),
            option(
                "--space",
                "the dimensions of plans: Mist's and its rivals' (default), or those of "
                "today: all engines and orders, experts, context, sequences, recomputation in"
                " part; or plans that wait: slow links, hosts, V-shaped orders, many stages",
                "mist",
                choices=("mist", "wide-today", "strained"),
            ),
            option(
                "--order",
                "run the pipelines of engines that take any order in this one (default: all, "
                "in 1f1b)",
                "1f1b",
                choices=tuple(ORDERS),
            ),
            examples={"200 plans": "--plans 200"},
        ),
    },
}
