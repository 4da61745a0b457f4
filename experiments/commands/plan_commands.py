"""The commands that take a given plan."""

from pathlib import Path

from experiments.cli.command import EXAMPLE, Group, command, experiment, flag, option, path
from experiments.cli.commandline import OF_CLUSTER, PLANS, PROBLEM
from mistlab.engines.engine import names_for_plans
from simulators.registry import PREDICTORS

PLAN_COMMANDS: dict[str, Group] = {
    "Plans": {
        "predict": command(
            "experiments.prediction.predict:predict",
            {**dict.fromkeys(OF_CLUSTER), "json": False},
            option("plans", **path("PLAN.yaml"), default=[EXAMPLE], nargs="*"),
            option(
                "--simulator",
                "predict in closed form, or simulate task by task",
                "symbolic",
                choices=tuple(PREDICTORS),
            ),
            flag(
                "--breakdown",
                "show where the GPUs' time goes: arithmetic at the peak rate, what "
                "kernels lose to it, exposed communication by kind, waiting in the "
                "pipeline; the parts add up to the iteration",
            ),
            flag(
                "--cuda-graphs",
                "predict iterations that are replayed as CUDA graphs, in which the host "
                "launches no kernels",
            ),
            option(
                "--measured-step",
                "measured seconds of a step of the first plan: its prediction is compared"
                " with them, and predictions of all other plans are corrected by them",
                type=float,
            ),
            option(
                "--measured-gib",
                "measured GiB that torch's allocator held on the fullest GPU of the first plan",
                type=float,
            ),
            option(
                "--solve",
                "find the lowest inter_node_gbytes_per_s, intra_node_gbytes_per_s, "
                "memory_gib or gpus, or the highest latency_us, with which the plan "
                "reaches the goal of --for; or the longest sequence_length that fits",
                metavar="NUMBER",
            ),
            option(
                "--for",
                "with --solve: 5%% (default), of a step without that limit, or 12.5s",
                dest="goal",
                metavar="GOAL",
            ),
            option(
                "--timeline",
                "with --simulator events: write a trace for Perfetto and a picture of each plan",
                **path("DIR"),
            ),
            option(
                "--picture",
                "draw an SVG of the plan: a simulated iteration, what fills the fullest "
                "GPU, and where the time goes",
                **path("FILE.svg"),
            ),
            option(
                "--variability",
                "with --simulator events: how long iterations take under disturbances, "
                "such as jitter=0.1,slow_stage=0,slow_stage_factor=1.2. Keys: jitter; "
                "slow_stage with slow_stage_factor; slow_links_factor; clock_factor; "
                "samples, the number of simulated iterations (100; of long ones fewer, at"
                " least 20); seed of the random draws",
                metavar="NAME=NUMBER,...",
            ),
            examples={
                "what a plan takes, and where the time goes": "plan.yaml --breakdown",
                "the same on a slower network": "plan.yaml --inter-node-gbytes-per-s 50",
                "the network at which the step is within 5 % of an unlimited one": (
                    "plan.yaml --solve inter_node_gbytes_per_s --for 5%"
                ),
                "played task by task, as a picture": (
                    "plan.yaml --simulator events --timeline drawn"
                ),
                "the plan at a glance, as a picture": "plan.yaml --picture plan.svg",
            },
        ),
        "analyse": command(
            "experiments.prediction.analyse:analyse",
            {"json": False},
            option("plans", **path("PLAN.yaml"), default=[EXAMPLE], nargs="*"),
            examples={"what each stage holds": "plan.yaml"},
        ),
        "survey": command(
            "experiments.studies.survey:surveyed",
            {**PROBLEM, **experiment("survey")},
            examples={"every candidate of a space": "--model llama3-8b --hardware h100-80gb"},
        ),
        "export": command(
            "experiments.interchange.export:export",
            {"json": False},
            option("plan", **path("PLAN.yaml"), default=EXAMPLE, nargs="?"),
            option(
                "--to",
                "the framework or tool (default: that of the plan's engine, or megatron; "
                "for adapters a recipe)",
                choices=(
                    *("megatron", "deepspeed", "torchtitan", "torchtitan-toml", "accelerate"),
                    *("axolotl", "llama-factory", "trl", "torchtune", "automodel"),
                    "megatron-bridge",
                ),
            ),
            flag("--strict", "exit status 1 if the framework cannot express the plan exactly"),
            flag("--check", "build the framework's own configuration from the exported text"),
            examples={
                "flags of Megatron-LM": "plan.yaml --to megatron",
                "a file of DeepSpeed, if it says the plan exactly": (
                    "plan.yaml --to deepspeed --strict"
                ),
            },
        ),
        "import_plan": command(
            "experiments.interchange.import_plan:import_plan",
            {
                "model": None,
                "hardware": "l4-24gb",
                "nodes": None,
                "gpus_per_node": None,
                "sequence_length": None,
                "global_batch": None,
                "attention": None,
                "precision": None,
                "json": False,
            },
            option("file", default=PLANS / "pretrain-gpt3-2.7b.sh", metavar="FILE", nargs="?"),
            option(
                "--set",
                "a variable of a launch script, in place of the script's own value; may be "
                "repeated",
                [],
                action="append",
                metavar="NAME=VALUE",
            ),
            option(
                "--line", "line of the command to read, where a script starts several", type=int
            ),
            flag("--strict", "exit status 1 if anything was assumed or ignored"),
            option("--micro-batch", "sequences per micro-batch of a replica", type=int),
            option(
                "--vocab-size", "size of the vocabulary, if the tokenizer is not known", type=int
            ),
            option(
                "--engine",
                "engine that stands for the framework in predictions, such as megatron-core "
                "(default: megatron, deepspeed or fsdp)",
                choices=names_for_plans(),
                metavar="ENGINE",
            ),
            option(
                "--format",
                "format of the file (default: recognised by its keys)",
                choices=(
                    "megatron",
                    "megatron-test",
                    "megatron-yaml",
                    "megatron-bridge",
                    "nemo",
                    "primus",
                    "flagscale",
                    "deepspeed",
                    "accelerate",
                    "hf-trainer",
                    "torchtitan",
                    "nanotron",
                    "gpt-neox",
                    "llm-foundry",
                    "llama-factory",
                    "ms-swift",
                    "openrlhf",
                    "litgpt",
                    "firefly",
                    "qlora",
                    "verl",
                    "swift-megatron",
                    "axolotl",
                    "torchtune",
                    "nemo-automodel",
                ),
                metavar="FORMAT",
            ),
            takes_rest=True,
            examples={
                "a launch script as a plan": "launch.sh --hardware h100-80gb",
                "with a variable of the script": "launch.sh --set NNODES=4 --model llama3-8b",
            },
        ),
        "check_exports": command(
            "experiments.interchange.check_exports:check_exports",
            {**experiment("check_exports")},
            option(
                "--python",
                "the Python in which a target's framework is installed (default: this one)",
                metavar="TARGET=PATH",
                nargs="+",
            ),
            option(
                "--megatron-lm",
                "a checkout of Megatron-LM at core 0.16.1, whose parser takes launch lines",
                **path("DIR"),
            ),
            examples={"a first look": "--quick"},
        ),
        "check_imports": command(
            "experiments.interchange.check_imports:check_imports",
            {**experiment("check_imports"), "hardware": "a100-80gb"},
            option("folder", **path("FOLDER")),
            option("--list", "files to import (default: the package's own list)", **path("CSV")),
            option("--facts", "facts of files (default: the package's own)", **path("YAML")),
            option("--answers", "arguments of scripts (default: the package's)", **path("YAML")),
            arguments=["folder"],
            examples={"files of a folder": "launch-files --quick"},
        ),
        "page": command(
            "experiments.live_page.page_command:page",
            {},
            option("--port", "port on this machine", 8765),
            option("--seconds", "longest time of a search in seconds", 120.0),
            flag("--no-browser", "do not open the page in a browser"),
            examples={"the page on another port": "--port 9000"},
        ),
        "show": command(
            "experiments.shown.show_runs:show",
            {},
            option("runs", **path("RUN"), nargs="+"),
            option("--out", "the page to write", Path("runs/show.html"), metavar="PAGE.html"),
            arguments=["runs"],
            examples={"two runs side by side": "runs/first runs/second --out both.html"},
        ),
        "mcp": command(
            "experiments.agents.mcp_command:mcp",
            {},
            option("--seconds", "time limit of a question in seconds", 120.0),
            flag("--skill", "print a file that tells an agent when and how to ask"),
            examples={"what to give an agent": "--skill"},
        ),
    }
}
