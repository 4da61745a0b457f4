"""The options of a run of a plan, and checks that they go together."""

import argparse
import math
from pathlib import Path

from experiments.cli.commandline import parser_of, writable
from mistlab.values.errors import InputError

# In place of a folder: the newest checkpoint of the run itself.
LATEST = "latest"
MOST_SEED = 2**31
MOST_TIMEOUT_S = 1e6


def run_parser(description: str | None, example: Path) -> argparse.ArgumentParser:
    """The options of ``run_plan``, whose plan is ``example`` where none is given."""
    parser = parser_of("run_plan", description, seed=0, out=None, json=False)
    parser.add_argument("plan", metavar="PLAN.yaml", nargs="?", type=Path, default=example)
    parser.add_argument("--steps", type=int, default=5, help="steps to train (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--data", default="synthetic", metavar="FILE", help="tokens, or synthetic (default)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="default: 3e-4")
    parser.add_argument(
        "--decay",
        choices=("constant", "linear", "cosine"),
        default="constant",
        help="how the learning rate falls",
    )
    parser.add_argument(
        "--warmup-steps", type=int, default=0, help="steps in which the learning rate rises"
    )
    parser.add_argument(
        "--total-steps", type=int, help="the step at which the rate has fallen (default: --steps)"
    )
    parser.add_argument(
        "--clip-norm", type=float, help="gradients are scaled down to at most this norm"
    )
    parser.add_argument("--epsilon", type=float, default=1e-8, help="AdamW's (default: 1e-8)")
    parser.add_argument(
        "--loss-scale", type=float, help="the first loss scale (default: 65536 in fp16, else none)"
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from a checkpoint, for --steps more; latest: from the newest in --out, if any, "
        "until the run has --steps",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="begin again from the newest checkpoint after a crash, so often at most",
    )
    parser.add_argument("--save-every", type=int, default=0, help="checkpoint so often, in --out")
    parser.add_argument(
        "--export", type=Path, metavar="FILE.safetensors", help="weights at the end"
    )
    parser.add_argument(
        "--stage", type=int, metavar="N", help="run stage N by itself, from 0, on one device"
    )
    parser.add_argument(
        "--serialise", action="store_true", help="one task after another, to compare (cuda)"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="the same bits whenever the same is computed, to compare; takes longer",
    )
    parser.add_argument(
        "--draw-on-device",
        action="store_true",
        help="draw first weights on the device: fast; a GPU draws other values than a CPU",
    )
    parser.add_argument(
        "--step-on-cpu",
        action="store_true",
        help="step offloaded optimizer state where it is, instead of fetching it",
    )
    parser.add_argument(
        "--attention-kernel",
        choices=("flash", "cudnn", "flash-attn"),
        default="flash",
        help="the kernel of fused attention: PyTorch's FlashAttention-2 (default), cuDNN, "
        "or the package flash-attn (cuda)",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for other ranks"
    )
    return parser


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options, if their numbers are in range and those that need a folder have one."""
    bounds = {
        "steps": (1, math.inf),
        "save-every": (0, math.inf),
        "restarts": (0, math.inf),
        "seed": (0, MOST_SEED - 1),
        "timeout": (1, MOST_TIMEOUT_S),
    }
    for name, (least, most) in bounds.items():
        given = getattr(options, name.replace("-", "_"))
        if not least <= given <= most:
            allowed = f"of at least {least}" if most == math.inf else f"from {least} to {most:.0f}"
            message = f"--{name} {given}: give a number {allowed}"
            raise InputError(message)
    needing = [("--save-every", options.save_every), (f"--resume {LATEST}", goes_on(options))]
    for option, is_given in needing:
        if is_given and options.out is None:
            message = f"{option} needs a folder: give --out DIR too"
            raise InputError(message)
    return options


def check_places(options: argparse.Namespace) -> None:
    """Find out before training, not after, that nothing can be written."""
    if options.out is not None:
        writable(options.out / "measurement.yaml", "folder")
    if options.export is not None:
        writable(options.export, "file", "--export")


def check_stage(options: argparse.Namespace) -> None:
    """Refuse what needs the whole model beside a stage by itself."""
    for name in ("--save-every", "--resume", "--export"):
        given = getattr(options, name[2:].replace("-", "_"))
        if options.stage is not None and given:
            message = f"{name} needs the whole model: leave it out, or --stage {options.stage}"
            raise InputError(message)


def goes_on(options: argparse.Namespace) -> bool:
    """Whether the run is the one that has its results in the folder already, if any has."""
    return bool(options.resume == LATEST)


def checkpoints_of(options: argparse.Namespace) -> Path:
    """Where a run has its own checkpoints."""
    folder: Path = options.out / "checkpoints"
    return folder
