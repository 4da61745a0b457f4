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
            option("--model", "name of the model", "llama3-70b"),
            option("--gpu", "the GPU: A100, H100, H200, B200, L4, A10, ...", "H100"),
            option("--gpus", "number of GPUs", 8),
            option("--weights", "precision of weights: bf16, fp8, nvfp4, ...", "bf16"),
            option("--cache", "precision of keys and values (default: by the weights)"),
            option("--engine", choices=("vllm", "sglang", "trtllm"), default="vllm"),
            option("--prompt", "mean number of tokens in a prompt", 1000.0),
            option("--output", "mean number of tokens in an output", 500.0),
            option(
                "--lengths",
                "how lengths vary",
                "lognormal",
                choices=("fixed", "uniform", "lognormal"),
            ),
            option(
                "--trace",
                "file of requests, with arrival_s, prompt_tokens and output_tokens",
                **path("TRACE.csv"),
            ),
            option(
                "--histogram",
                "file with prompt_tokens, output_tokens, and how many requests have these numbers",
                **path("HISTOGRAM.csv"),
            ),
            option("--rate", "requests per second (default: as many as can be)", type=float),
            option("--ttft", "goal for the seconds until the first token", type=float),
            option("--tpot", "goal for the seconds per further token", type=float),
            option("--share", "share of requests of which percentiles are told", 0.95),
            option("--context", "tokens of the longest request (default: the model's)", type=int),
            option("--budget", "prompt tokens in a step", 8192),
            option("--sequences", "requests that a replica runs at once", 1024),
            option("--dollars", "dollars per GPU hour", type=float),
            flag(
                "--splits",
                "also consider separate GPUs for prompts (prefill) and for outputs (decoding)",
            ),
            flag("--fewest", "find the fewest GPUs that serve --rate within the goals"),
            option("--top", "number of layouts to list", 8),
            option(
                "--export", "print the command lines for this engine", choices=("vllm", "sglang")
            ),
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
            flag("--check", "answer all requests in a single process as well, and compare"),
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
