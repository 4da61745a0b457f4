"""The commands about whole training runs: what they cost, and how they run."""

from experiments.cli.command import (
    DEVICES,
    KERNELS,
    PRECISION,
    TINY,
    Group,
    command,
    experiment,
    flag,
    option,
    path,
)
from experiments.cli.commandline import PLANS, PROBLEM_OF_ENGINES, TRAINED

TRAINING_COMMANDS: dict[str, Group] = {
    "What a run takes in all": {
        "will_it_fit": command(
            "experiments.budget.will_it_fit:will_it_fit",
            {
                **PROBLEM_OF_ENGINES,
                **TRAINED,
                **experiment("will_it_fit"),
                "keep_free_gib": None,
                "engine": None,
            },
            PRECISION,
            option("plan", **path("PLAN.yaml"), nargs="?"),
            option(
                "--tensor-parallel",
                "GPUs that share each layer (tensor parallelism)",
                1,
                metavar="N",
            ),
            option("--stages", "pipeline stages", 1, metavar="N"),
            option("--micro-batch", "sequences per micro-batch of a replica", 1, metavar="N"),
            option(
                "--zero",
                "ZeRO level: replicas shard nothing (0), optimizer states (1), also "
                "gradients (2), or also weights (3)",
                0,
                metavar="N",
            ),
            option(
                "--checkpointed-layers",
                "blocks that each stage recomputes: a number, or all",
                0,
                metavar="N",
                type="blocks",
            ),
            arguments=["plan"],
            examples={
                "a plan, with 8 GiB kept free": "plan.yaml --keep-free-gib 8",
                "sizes without a plan": (
                    "--model llama3-8b --hardware rtx-4090-24gb --gpus-per-node 8 --zero 3"
                ),
                "a plan on other GPUs": "plan.yaml --hardware a100-40gb",
            },
            takes_line=True,
        ),
        "estimate": command(
            "experiments.budget.estimate:estimate",
            {
                **PROBLEM_OF_ENGINES,
                **TRAINED,
                **experiment("estimate"),
                "model": "gpt3-175b",
                "hardware": "a100-80gb",
                "nodes": None,
                "gpus_per_node": 8,
                "sequence_length": 2048,
                "global_batch": None,
                "attention": None,
            },
            PRECISION,
            option(
                "--tokens",
                "tokens to train on: a number; published, as many as the model's "
                "published training; or chinchilla, 20 per parameter (default: "
                "%(default)s)",
                "published",
            ),
            option(
                "--samples",
                "samples of a data set, in place of --tokens: each is counted as a full sequence",
                type=int,
                metavar="N",
            ),
            option("--epochs", "with --samples: times that each is trained on", type=float),
            option("--plan", "predict this plan", **path("PLAN.yaml")),
            option(
                "--gpu-hours",
                "only compute the bill for this many GPU hours",
                type=float,
                metavar="HOURS",
            ),
            option(
                "--utilisation",
                "share of the GPUs' peak rate that training reaches, for the estimate by formula",
                0.44,
                metavar="X",
            ),
            option(
                "--goodput",
                "share of the time in which the run makes progress, for predictions; the "
                "command reliability computes it",
                1.0,
                metavar="X",
            ),
            option("--usd-per-gpu-hour", "price of a GPU hour", 2.0, metavar="X"),
            option(
                "--prices",
                "table of prices: estimate the run on rented GPUs of each kind in it; it "
                "also has the prices' date and source",
                **path("PRICES.yaml"),
            ),
            option(
                "--by",
                "with --prices: also name the cheapest GPUs with which the run ends by "
                "friday, by 2026-12-04 or in 36h",
                metavar="TIME",
            ),
            option(
                "--under",
                "with --prices: also name the GPUs that end the run first for at most "
                "this many dollars",
                type=float,
                metavar="USD",
            ),
            option(
                "--starting",
                "with --by: the time at which the run begins (default: now)",
                metavar="TIME",
            ),
            option(
                "--space",
                "search space of the plan that mist finds (default: mist; with --prices fsdp; "
                "trainer for adapters)",
            ),
            option(
                "--overhead",
                "watts that the building takes for each watt of a GPU",
                1.0,
                metavar="X",
            ),
            option(
                "--kg-per-kwh", "kilograms of carbon dioxide per kilowatt-hour", 0.414, metavar="X"
            ),
            option(
                "--watts",
                "power of a GPU's board (default: the hardware's)",
                type=float,
                metavar="X",
            ),
            examples={
                "days and dollars": (
                    "--model llama3-8b --nodes 16 --tokens 1e12 --usd-per-gpu-hour 2.5"
                ),
                "of a plan of yours": "--plan plan.yaml --tokens chinchilla",
                "which GPUs to rent for a fine-tuning": (
                    "--model llama3-8b --train lora --rank 16 --base 4bit --precision bf16 "
                    "--tokens 2e8 --global-batch 64 --prices prices.yaml --by friday --under 500"
                ),
            },
            takes_line=True,
        ),
        "reliability": command(
            "experiments.budget.reliability:reliability",
            {**experiment("reliability")},
            option("--gpus", default=992),
            option(
                "--gpu-hours-between-failures",
                "mean hours between two failures of one GPU",
                8163.0,
                metavar="HOURS",
            ),
            option(
                "--checkpoint-s",
                "seconds that writing a checkpoint keeps the GPUs waiting",
                60.0,
                metavar="SECONDS",
            ),
            option("--detection-s", "seconds until a failure is noticed", 300.0, metavar="SECONDS"),
            option("--restart-s", "seconds to start all processes again", 300.0, metavar="SECONDS"),
            option("--reload-s", "seconds to read the checkpoint", 60.0, metavar="SECONDS"),
            option(
                "--interval-s",
                "seconds of work between checkpoints (default: the best)",
                type=float,
                metavar="SECONDS",
            ),
            option("--days", default=60.0),
            option("--runs", "number of simulated runs", 200),
            examples={"of 4,096 GPUs for 30 days": "--gpus 4096 --days 30"},
        ),
    },
    "Training": {
        "measure_speedup": command(
            "experiments.speedup.measure_speedup:measure",
            {
                **experiment("measure_speedup"),
                "hardware": "h100-80gb",
                "gpus_per_node": 1,
                "sequence_length": 2048,
                "attention": "flash",
                "precision": "bf16",
            },
            option("--models", "models, separated by commas", "gpt3-1.3b"),
            option("--cap-gib", "limits of a GPU's memory in GiB, separated by commas", "24,40,80"),
            option("--batches", "numbers of sequences per step, separated by commas", "8,16,32,64"),
            option(
                "--systems",
                "systems, separated by commas; the others are compared with the first",
                "mistlab,megatron,deepspeed,deepcompile,fsdp",
            ),
            option("--device", default="cuda", choices=DEVICES),
            option("--trials", "plans that are tried for each system", 4),
            option("--repeats", "runs of each system's best plan", 3),
            option("--steps", "steps per run", 6),
            option("--seconds", "time limit of this call in seconds", 540, type=float),
            examples={"on this machine's CPU": "--device cpu --quick"},
        ),
        "run_plan": command(
            "experiments.training.run_plan:run_plan",
            {"seed": 0, "out": None, "json": False},
            option("plan", **path("PLAN.yaml"), default=TINY, nargs="?"),
            option("--steps", "steps to train", 5),
            option("--device", default="cpu", choices=DEVICES),
            option(
                "--data",
                "file of tokens to train on, or synthetic (default)",
                "synthetic",
                metavar="FILE",
            ),
            option(
                "--lengths",
                "train on documents of these lengths: a file or a distribution "
                "(lognormal:MEDIAN:SIGMA, ...), as for document_lengths; or ends:TOKEN, "
                "if each document of --data ends with this token",
                metavar="SOURCE",
            ),
            option(
                "--filling",
                "packed: several documents fill a sequence, and each attends to itself "
                "only (default); padded: each document is a sequence; sorted: the same, by length, "
                "as short as a micro-batch allows; balanced: micro-batches of equal cost without "
                "padding",
                choices=("packed", "padded", "sorted", "balanced"),
            ),
            flag("--cut", "cut documents that are longer than a sequence"),
            option("--learning-rate", "the highest learning rate (default: 3e-4)", 0.0003),
            option(
                "--decay",
                "how the learning rate decreases after the warm-up",
                "constant",
                choices=("constant", "linear", "cosine"),
            ),
            option(
                "--warmup-steps", "steps in which the learning rate increases at the beginning", 0
            ),
            option(
                "--total-steps",
                "the step at which the learning rate has decreased fully (default: --steps)",
                type=int,
            ),
            option("--clip-norm", "scale gradients down to at most this norm", type=float),
            option("--epsilon", "AdamW's epsilon (default: 1e-8)", 1e-08),
            option(
                "--loss-scale",
                "the loss scale at the beginning (default: 65536 in fp16, else none)",
                type=float,
            ),
            option(
                "--resume",
                "a checkpoint from which to train --steps more steps; or latest: the "
                "newest checkpoint in --out, if any, from which the run goes on until it "
                "has --steps steps in all",
                metavar="DIR",
            ),
            option(
                "--restarts",
                "after a crash, start again from the newest checkpoint, at most this many times",
                0,
                metavar="N",
            ),
            option(
                "--save-every", "steps between checkpoints, which are written to --out; 0: none", 0
            ),
            option("--export", "write the final weights to this file", **path("FILE.safetensors")),
            option(
                "--weights",
                "first weights: a folder of Hugging Face, its config.json the model's",
                **path("DIR"),
            ),
            option(
                "--export-weights",
                "write the final weights to this folder, with the names that tensors of "
                "--weights have",
                **path("DIR"),
            ),
            option(
                "--stage", "run only stage N, counted from 0, on one device", type=int, metavar="N"
            ),
            flag(
                "--serialise",
                "run one task after another, to compare with overlapping tasks (cuda)",
            ),
            flag(
                "--cuda-graphs",
                "capture an iteration as a CUDA graph and replay it, so that the host "
                "launches no kernels (cuda); times of single tasks are not measured",
            ),
            flag(
                "--deterministic",
                "compute the same bits from the same inputs in every run, to compare "
                "runs; takes longer",
            ),
            flag(
                "--draw-on-device",
                "draw the initial weights on the device, which is fast; a GPU draws other"
                " values than a CPU",
            ),
            flag(
                "--step-on-cpu",
                "run the optimizer step of offloaded states on the host, instead of "
                "fetching the states",
            ),
            option(
                "--attention-kernel",
                "the kernel of fused attention: PyTorch's FlashAttention-2 (default), cuDNN, "
                "or the package flash-attn (cuda)",
                "flash",
                choices=KERNELS,
            ),
            option("--timeout", "seconds to wait for other ranks", 300.0),
            takes_line=True,
            ends="at once after a failure",
            examples={
                "20 steps on the CPU": "plan.yaml --steps 20 --device cpu --out runs/first",
                "go on where it stopped": "plan.yaml --steps 40 --out runs/first --resume latest",
            },
        ),
        "run_plans": command(
            "experiments.training.run_plans:run_plans",
            {**experiment("run_plans")},
            option("folders", default=[PLANS / "tiny"], **path("FOLDER"), nargs="*"),
            option("--steps", "steps of each plan", 5),
            option("--device", default="cpu", choices=DEVICES),
            option("--seconds", "time limit of each plan in seconds", 600.0),
            arguments=["folders"],
            examples={"every plan of a folder": "plans --steps 5 --device cpu"},
        ),
        "sanitize": command(
            "experiments.training.sanitize:sanitize",
            {"json": False},
            option("plan", **path("PLAN.yaml"), default=[TINY], nargs="*"),
            option("--clip-norm", "as for run_plan", type=float),
            option("--loss-scale", "as for run_plan", type=float),
            flag("--step-on-cpu", "as for run_plan"),
            flag("--serialise", "as for run_plan"),
            ends="at once",
            examples={"races and collectives of a plan": "plan.yaml"},
        ),
        "whole_loop": command(
            "experiments.speedup.whole_loop:whole_loop",
            {
                **experiment("whole_loop"),
                "model": None,
                "hardware": None,
                "gpus_per_node": None,
                "sequence_length": 128,
                "global_batch": 8,
                "attention": "flash",
                "precision": None,
            },
            option("--device", default="cpu", choices=DEVICES),
            option("--plans", "number of plans that run", 12),
            option(
                "--systems",
                "systems, separated by commas, with mistlab among them",
                "mistlab,megatron,deepspeed",
            ),
            option(
                "--trials",
                "plans that are run for each system: those predicted fastest; the best one counts",
                3,
            ),
            option("--repeats", "runs of each plan", 3),
            option("--steps", "steps per run", 6),
            examples={"on this machine's CPU": "--device cpu --quick"},
        ),
    },
}
