"""The commands about serving: predictions of measured serving runs, and fits to them."""

from collections.abc import Mapping
from pathlib import Path

from experiments.cli.command import Group, command, experiment, flag, option, path

TINY_PHASES = Path(__file__).parents[1] / "serve" / "tiny_phases.yaml"

SERVING_COMMANDS: Mapping[str, Group] = {
    "Serving": {
        "serve_plan": command(
            "experiments.serve.serve_plan:serve_plan",
            {"seed": 0, "json": False, "quick": False},
            option("--model", "a model's name", "llama3-70b"),
            option("--gpu", "the GPU: A100, H100, H200, B200, L4, A10, ...", "H100"),
            option("--gpus", "how many of them", 8),
            option("--weights", "precision of weights: bf16, fp8, nvfp4, ...", "bf16"),
            option("--cache", "precision of keys and values (default: by the weights)"),
            option("--engine", choices=("vllm", "sglang", "trtllm"), default="vllm"),
            option("--prompt", "tokens of a prompt in the mean", 1000.0),
            option("--output", "tokens of an output in the mean", 500.0),
            option(
                "--lengths",
                "how lengths vary",
                "lognormal",
                choices=("fixed", "uniform", "lognormal"),
            ),
            option(
                "--trace",
                "requests, with arrival_s, prompt_tokens and output_tokens",
                **path("TRACE.csv"),
            ),
            option(
                "--histogram",
                "prompt_tokens and output_tokens, and how many requests have them",
                **path("HISTOGRAM.csv"),
            ),
            option("--rate", "requests a second (default: as many as can be)", type=float),
            option("--ttft", "goal: seconds to the first token", type=float),
            option("--tpot", "goal: seconds of each further token", type=float),
            option("--share", "share of requests of which percentiles are told", 0.95),
            option("--context", "tokens of the longest request (default: the model's)", type=int),
            option("--budget", "tokens of prompts in a step", 8192),
            option("--sequences", "requests that run on a replica at once", 1024),
            option("--dollars", "dollars an hour of a GPU", type=float),
            flag("--splits", "separate GPUs for prompts, too"),
            flag("--fewest", "the fewest GPUs for --rate under the goals"),
            option("--top", "layouts to list", 8),
            option("--export", "command lines", choices=("vllm", "sglang")),
            examples={
                "70B on 8 H100 under a goal": "--model llama3-70b --gpu H100 --gpus 8 --tpot 0.03",
                "the fewest GPUs for a rate": "--model llama3-8b --gpu L4 --rate 2 --fewest",
            },
        ),
        "serving": command(
            "experiments.serve.serving:serving",
            experiment("serving"),
            flag("--within-context", "requests end at the context of the weights"),
            examples={"a first look": "--quick"},
        ),
        "run_serving": command(
            "experiments.serve.run_serving:run_serving",
            {"seed": 0, "json": False},
            option(
                "plan",
                "a model, two layouts and requests",
                **path("PLAN.yaml"),
                default=TINY_PHASES,
                nargs="?",
            ),
            flag("--check", "answer all requests by one process, too, and compare"),
            option("--timeout", "seconds to wait for other ranks", 300.0, metavar="SECONDS"),
            ends="at once after a failure",
            examples={"one process, small": "--check", "a file of yours": "plan.yaml --check"},
        ),
        "predict_serving": command(
            "experiments.serve.predict_serving:predict_serving",
            {"json": False},
            option("tables", **path("TABLE.csv"), nargs="+"),
            examples={"measured runs as JSON": "runs.csv --json"},
        ),
        "play_logs": command(
            "experiments.serve.play_logs:play_logs",
            {"json": False},
            option("logs", **path("LOGS.csv")),
            option("runs", **path("RUNS.csv")),
            examples={"logs under their layouts": "requests.csv runs.csv"},
        ),
        "serving_errors": command(
            "experiments.serve.serving_errors:serving_errors",
            experiment("serving_errors"),
            option("tables", **path("TABLE.csv"), nargs="+"),
            option(
                "--leave-out",
                "what is left out of the fit that predicts it (default: each of the three)",
                ["configuration", "gpu", "model"],
                choices=("configuration", "gpu", "model"),
                nargs="+",
            ),
            arguments=["tables"],
            examples={"GPUs left out": "runs.csv --leave-out gpu"},
        ),
        "calibrate_serving": command(
            "experiments.serve.calibrate_serving:calibrate_serving",
            {},
            option("--kernels", "the folder of the tables of kernels", **path("FOLDER")),
            option("--runs", "measured runs", [], **path("TABLE.csv"), nargs="+"),
            option("--out", "where files are written", Path("runs"), metavar="FOLDER"),
            examples={"from tables": "--kernels tables --runs runs.csv --out fitted"},
        ),
    }
}
