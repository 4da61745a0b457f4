"""The commands that search for plans, and those that recompute Mist's published evaluation."""

from pathlib import Path

from experiments.cli.command import Group, command, experiment, option, path
from experiments.cli.commandline import PLANS, PROBLEM

SWEEP_EXAMPLE = PLANS.parent / "sweeps" / "small.yaml"

SEARCH_COMMANDS: dict[str, Group] = {
    "Searches": {
        "tune": command(
            "experiments.tuning.tune:tune",
            {"json": False, "quick": False},
            option(
                "--searcher",
                "name of the searcher (default: mist, or aceso for models that mist "
                "refuses, such as deepseek-v3)",
            ),
            option(
                "--out", "the plan file to write", Path("runs/tune/plan.yaml"), metavar="PLAN.yaml"
            ),
            option(
                "--from",
                "instead of searching, name the few changes of this plan that gain most; "
                "model, cluster and batch are those of the plan",
                **path("PLAN.yaml"),
                dest="start",
            ),
            searches=True,
            examples={
                "the fastest plan for two nodes": (
                    "--model llama3-8b --hardware h100-80gb --nodes 2 --gpus-per-node 8 "
                    "--global-batch 128 --precision bf16"
                ),
                "a model of one's own, on Megatron-core": (
                    "--model config.json --space megatron-core"
                ),
                "what to change in a plan": "--from plan.yaml --out better.yaml",
            },
            takes_line=True,
        ),
        "sweep": command(
            "experiments.sweeps.sweep:sweep",
            {**experiment("sweep")},
            option(
                "sweep",
                "the file that lists the problems (default: %(default)s)",
                SWEEP_EXAMPLE,
                metavar="SWEEP.yaml",
                nargs="?",
            ),
            option("--jobs", "cells at once (default: 1; with --cluster, its CPUs)", type=int),
            option(
                "--cluster",
                "solve cells on a Ray cluster: one that is started here, or the one at an address",
                metavar="ray[:ADDRESS]",
            ),
            arguments=["sweep"],
            examples={"the problems of a file, two at once": "sweep.yaml --jobs 2"},
        ),
        "compare_searchers": command(
            "experiments.tuning.compare_searchers:compare",
            {"out": Path("runs/compare_searchers"), "page": None, "json": False, "quick": False},
            option(
                "--searchers",
                "the searchers to compare (default: all that can ask the predictor, once each)",
                metavar="A,B,...",
            ),
            searches=True,
            examples={
                "three searchers on one problem": "--searchers mist,exact,aceso --model gpt3-1.3b",
                "all of them, in haste": "--quick",
            },
        ),
        "speedups": command(
            "experiments.studies.speedups:speedups",
            {**experiment("speedups"), "hardware": None},
            examples={"on one GPU": "--hardware a100-40gb --quick"},
        ),
        "search_quality": command(
            "experiments.studies.search_quality:compared",
            {**experiment("search_quality")},
            option(
                "--problems",
                "which of the study's problems (default: %(default)s)",
                "default,7b-l4,22b-l4,uneven,llama-a100,llama-h100",
                metavar="A,B,...",
            ),
            option(
                "--searchers",
                "the searchers to compare (default: %(default)s)",
                "mist,mist:published,exact,aceso,alpa,optuna,rl,random",
                metavar="A,B,...",
            ),
            option("--seeds", "seeds for each searcher that draws at random", 5),
            option("--evaluations", "the budget of a search in evaluations", 200),
            option(
                "--cpu-seconds",
                "the budget of a search in CPU seconds, instead of evaluations",
                type=float,
            ),
            examples={"two searchers over three seeds": "--searchers mist,optuna --seeds 3"},
        ),
        "search_growth": command(
            "experiments.studies.search_growth:grown",
            {**PROBLEM, **experiment("search_growth"), "global_batch": 32, "space": "mist"},
            option(
                "--seconds",
                "time limit of a search, which then leaves a gap (default: 8, --quick 1)",
                type=float,
            ),
            examples={"with a limit of two seconds": "--seconds 2 --quick"},
        ),
    },
    "Figures of the evaluation": {
        "end_to_end": command(
            "experiments.evaluation.end_to_end:evaluated",
            {**experiment("end_to_end"), "hardware": None},
            examples={"on one GPU": "--hardware l4-24gb --quick"},
        ),
        "speedup_breakdown": command(
            "experiments.evaluation.speedup_breakdown:broken_down",
            {**experiment("speedup_breakdown"), "hardware": None},
            option(
                "--view",
                "what searches see until they know about first and last micro-batches: blind "
                "or average",
                "blind",
            ),
            examples={"first and last passes spread": "--view average --quick"},
        ),
        "overlap": command(
            "experiments.evaluation.overlap:overlapped",
            {**experiment("overlap"), "hardware": None},
            option("--plans", "random plans to order", 1000),
            examples={"a first look": "--quick"},
        ),
        "tuning_time": command(
            "experiments.evaluation.tuning_time:timed",
            {**experiment("tuning_time"), "hardware": "l4-24gb"},
            option(
                "--plans",
                "end a search after this many predicted plans; 1,000 stage candidates "
                "count as one plan",
                3000,
            ),
            examples={"a first look": "--quick"},
        ),
        "motivation": command(
            "experiments.evaluation.motivation:motivated",
            {**experiment("motivation"), "hardware": "l4-24gb"},
            examples={"the motivating case": "--quick"},
        ),
    },
}
