"""What every command shares: how its options are parsed, its exit status, and error messages
without tracebacks.

Exit status 0 means done, 1 no answer, 2 wrong usage; the command ``export`` also has 3.
"""

import argparse
import atexit
import errno
import gc
import io
import json
import math
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_args

from experiments.cli.other_programs import option_here, value_here
from mistlab.core.values import FieldError, InputError, reject
from mistlab.engines.engine import Precision, names_for_plans

DONE, NO_ANSWER, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130

# For each package that a command may need beyond the base install, the extra (as in ``pip install
# '.[NAME]'``) that installs it.
EXTRAS: Mapping[str, str] = {
    "accelerate": "baselines",
    "anyio": "agents",
    "cbcbox": "cbc",
    "deepspeed": "baselines",
    "markdown": "page",
    "mcp": "agents",
    "megatron": "baselines",
    "pydantic": "agents",
    "ray": "cluster",
    "sklearn": "images",
    "starlette": "page",
    "torch": "runtime",
    "torchtitan": "baselines",
    "transformers": "huggingface",
    "uvicorn": "page",
}
# Packages of the base install that a machine used only for training may lack.
BASE = frozenset(
    ("cmaes", "highspy", "joblib", "matplotlib", "optuna", "pulp", "scipy", "simpy", "sqlalchemy")
)

# How many new objects trigger a garbage collection. Imports make many permanent objects, and
# Python's default of a thousand would take a tenth of a short command's time.
OBJECTS_A_SEARCH = 20_000
# The environment variable for NumPy's threads, which only help with large matrices. There are none
# here, and idle threads would take a third of a prediction's CPU time. PyTorch has a variable too.
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--model": {
        "help": "model: catalogue name, or path of a Hugging Face config.json, of a "
        "model's YAML or of a traced model's JSON"
    },
    "--hardware": {
        "help": "hardware: catalogue name, or path of a hardware file; for a search also "
        "several, each with its number of nodes, such as l4-24gb:1,a100-40gb:2"
    },
    "--nodes": {"type": int, "help": "number of nodes"},
    "--gpus-per-node": {"type": int, "help": "number of GPUs to use in each node"},
    "--sequence-length": {"type": int, "help": "tokens per sequence"},
    "--global-batch": {"type": int, "help": "sequences per training step"},
    "--attention": {
        "choices": ("flash", "math"),
        "help": "flash: fused attention; math: separate GEMMs and a softmax",
    },
    "--precision": {"choices": get_args(Precision), "help": "precision of the training"},
    "--train": {
        "choices": ("all", "adapters", "lora"),
        "help": "train all weights, or adapters beside frozen weights (lora means adapters)",
    },
    "--loss": {
        "choices": ("whole", "chunked"),
        "help": "compute the logits of all tokens at once, or of 4,096 tokens at a time "
        "(default: whole)",
    },
    "--states": {
        "choices": ("mixed", "16bit"),
        "help": "keep weights, gradients and optimizer moments in the engine's mix of "
        "precisions, or all in 16 bits (default: mixed)",
    },
    "--gradients": {
        "choices": ("usual", "32bit", "16bit"),
        "help": "bits in which gradients are summed; usual: as the engine does in this "
        "precision (default: usual)",
    },
    "--reduction": {
        "metavar": "KIND[:KEY=VALUE,...]",
        "help": "how data-parallel ranks communicate less than a sum of gradients in "
        "every step, which changes the training: server, gossip:topology=ring, "
        "local:every=8, outer:every=100,replicas=4, or "
        "all_reduce:compressor=top_k,share=0.05,feedback=memory (default: sums in"
        " every step)",
    },
    "--rank": {"type": int, "help": "rank of the low-rank adapters (default: 16)"},
    "--adapter-targets": {
        "choices": ("all", "attention"),
        "help": "products that have adapters (default: all)",
    },
    "--optimizer": {
        "choices": ("adamw", "adamw-bf16", "adamw-8bit"),
        "help": "AdamW with moments of 32, 16 or 8 bits (default: adamw)",
    },
    "--base": {
        "choices": ("16bit", "8bit", "4bit"),
        "help": "bits of each frozen weight of a block (default: 16bit)",
    },
    "--keep-free-gib": {
        "type": float,
        "metavar": "GIB",
        "help": "GiB that a plan must leave free on every GPU to count as one that fits: "
        "a margin, since 90 %% of measured peaks are 0.7 to 1.7 times the predicted "
        "ones (tune says which margin makes a fit 90 %% sure); the run may still use "
        "this memory, so the probability of fitting counts it as "
        "available (default: none)",
    },
    "--intra-node-gbytes-per-s": {
        "type": float,
        "metavar": "GB/S",
        "help": "GB/s from a GPU to the others of its node, in place of the hardware's "
        "figure: without NVLink those of PCIe, 63 (5.0) or 31.5 (4.0) (default: "
        "the hardware's)",
    },
    "--inter-node-gbytes-per-s": {
        "type": float,
        "metavar": "GB/S",
        "help": "GB/s from a node to others, of all its network cards together, in place "
        "of the hardware's figure: 8 cards of 400 Gb/s are 400 (default: the "
        "hardware's)",
    },
    "--network": {
        "metavar": "FILE.yaml",
        "help": "file with the tiers of links above nodes (leaves, spines, sites): their "
        "rates, oversubscription and latencies (default: all nodes reach one "
        "another at the hardware's rate)",
    },
    "--space": {
        "help": "search space, which says which plans may be chosen: 3d, mist, wide, ..., or a file"
    },
    "--engine": {
        "choices": names_for_plans(),
        "help": "engine that runs the plans, in place of the space's own; mistlab alone offloads",
    },
    "--seed": {"type": "seed", "help": "seed of all random draws"},
    "--out": {"type": Path, "metavar": "DIR", "help": "folder for results"},
    "--json": {
        "action": "store_true",
        "help": "print one JSON object on standard output, and nothing else",
    },
    "--quick": {"action": "store_true", "help": "run a small version, for a first look"},
    "--page": {
        "type": Path,
        "metavar": "PAGE.md",
        "help": "also write the page to this path, with its pictures beside it",
    },
}


# The folder of the plan files that come with the package, as a path relative to the working
# directory.
PLANS = Path(os.path.relpath(Path(__file__).parents[1] / "plans"))

# The model, cluster and batch that commands use by default, by option.
PROBLEM: Mapping[str, Any] = {
    "model": "gpt3-2.7b",
    "hardware": "l4-24gb",
    "nodes": 1,
    "gpus_per_node": 4,
    "sequence_length": 4096,
    "global_batch": 8,
    "attention": "flash",
    "precision": "fp16",
}
# The default problem of commands whose options name the engines that train: without a precision,
# since its default depends on these engines.
PROBLEM_OF_ENGINES: Mapping[str, Any] = {
    name: value for name, value in PROBLEM.items() if name != "precision"
}
# For commands with options that say which weights are trained, the defaults of these options.
TRAINED: Mapping[str, Any] = {
    "train": "all",
    **dict.fromkeys(("rank", "adapter_targets", "optimizer")),
    "base": None,
    "loss": None,
    "states": None,
    "gradients": None,
    "reduction": None,
}
# The options that replace figures of a cluster: hardware rates and the network file.
OF_CLUSTER = (
    *("keep_free_gib", "intra_node_gbytes_per_s", "inter_node_gbytes_per_s"),
    "network",
)


# An error message longer than this does not list the valid values if it says which is meant.
MOST_CHOICES = 200
_WRONG_CHOICE = re.compile(r"argument (?P<option>--\S+): invalid choice: '(?P<value>[^']*)'")


class NoAnswerError(InputError):
    """Raised if a valid question has no answer: no plan fits, or a plan is refused."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an invalid option in one line, as all other errors are
    reported.
    """

    def error(self, message: str) -> NoReturn:
        problem = message.removeprefix("argument ").replace(": expected", " expects")
        meant = self._meant(message)
        if meant and len(problem) > MOST_CHOICES:
            problem = problem.partition(" (choose from")[0]
        problem += meant
        text = f"{shortened(problem)} ({self.prog} --help explains the options)"
        self.exit(WRONG_USAGE, f"error: {text}\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The value of an option. ``--option=--`` counts as a missing value; argparse alone would
        read it as an empty list.
        """
        if action.option_strings and "--" in arg_strings:
            raise argparse.ArgumentError(action, "-- is not a value: give one")
        return super()._get_values(action, arg_strings)

    def _meant(self, message: str) -> str:
        """A hint about what the user may have meant: the options here that match a value of other
        programs, or the known options that resemble an unknown option in an error message.
        """
        if wrong := _WRONG_CHOICE.search(message):
            meant = value_here(wrong["option"], wrong["value"])
        else:
            _, _, unknown = message.partition("unrecognized arguments: ")
            known = [name for name in self._option_string_actions if name.startswith("--")]
            meant = option_here(unknown, known)
        return meant and f": {meant}"


def _seed(text: str) -> int:
    seed = _whole_number(text)
    if seed < 0:
        message = f"{seed} is too small: give a whole number of at least 0"
        raise argparse.ArgumentTypeError(message)
    return seed


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is not a whole number: write its digits, such as 1000"
        raise argparse.ArgumentTypeError(message) from None


def _blocks(text: str) -> int | str:
    return text if text == "all" else _whole_number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{text!r} is not a number: write it such as 0.5"
        raise argparse.ArgumentTypeError(message) from None


def parser_of(program: str, description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """An argument parser with those common options that ``defaults`` names, each with its
    default.
    """
    parser = _Parser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # argparse looks up the parser of values by type, so this function parses all options of type
    # int.
    parser.register("type", int, _whole_number)
    parser.register("type", float, _number)
    parser.register("type", "seed", _seed)
    parser.register("type", "blocks", _blocks)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        about = dict(OPTIONS[option])
        if default is not None and "action" not in about:
            about["help"] = f"{about['help']} (default: {default})"
        parser.add_argument(option, default=default, **about)
    return parser


def run(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; errors are printed on standard error."""
    gc.set_threshold(OBJECTS_A_SEARCH)
    # At exit, Python would collect garbage once more, which takes time and has no effect.
    atexit.register(gc.freeze)
    os.environ.setdefault(NUMPY_THREADS, "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain bytes that are not valid text, so output must accept them. This may
        # fail for a stream that leads to a pipe.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_in_lines():
            status = main(arguments)
        sys.stdout.flush()
    except InputError as error:
        return _complain(error, NO_ANSWER if isinstance(error, NoAnswerError) else WRONG_USAGE)
    except ModuleNotFoundError as error:
        return _complain(_missing(error), WRONG_USAGE)
    except BrokenPipeError:
        # The reader has closed the output, so nothing more may be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_ANSWER
    except OSError as error:
        # The disk is full, or a file may not be written.
        remedy = f": {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
        return _complain(f"{_file_of(error)}{error.strerror or error}{remedy}", NO_ANSWER)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


# What a user can do about an error of the operating system.
_REMEDIES = {
    errno.ENOSPC: "free space on this disk, or write to another one",
    errno.EACCES: "give a file that you may read and write, or change its permissions",
}


def _file_of(error: OSError) -> str:
    """The name of the file that an error is about, as the beginning of a message; empty if it is
    not known.
    """
    if error.filename:
        return f"{error.filename}: "
    if error.errno != errno.ENOSPC or not _output_is_full():
        return ""
    # Python would try to write the rest of the output again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return "standard output: "


def _output_is_full() -> bool:
    """Whether standard output is a file on a full disk, or a device without space."""
    try:
        file = sys.stdout.fileno()
        is_device = stat.S_ISCHR(os.fstat(file).st_mode)
        return is_device or os.fstatvfs(file).f_bavail == 0
    except OSError:
        return False


@contextmanager
def _warnings_in_lines() -> Iterator[None]:
    """Print warnings as single lines on standard error, without source code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        progress(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# Options of the command line whose names differ from those of the fields that they set.
OPTION_OF = {"adapter-rank": "rank"}


@contextmanager
def as_options(prefix: str = "") -> Iterator[None]:
    """In the ``with`` block, an error about a field names the command-line option that sets it."""
    try:
        yield
    except FieldError as error:
        field = error.path.rpartition(".")[2].replace("_", "-")
        problem = error.problem.replace("train: adapters", "--train adapters")
        problem = re.sub(r"\bor (give )?engine: ", r"or \1--engine ", problem)
        reject(f"--{prefix}{OPTION_OF.get(field, field)}: {problem}")


def batch_status(files: int, unreadable: int, *, all_answered: bool) -> int:
    """The exit status of a command that has read several files: wrong usage if its only file is
    malformed, done if all files were answered, otherwise no answer.
    """
    if files == unreadable == 1:
        return WRONG_USAGE
    return DONE if all_answered else NO_ANSWER


def print_json(value: Mapping[str, Any]) -> None:
    """Print an object as JSON on one line of standard output."""
    print(as_json(value))


def as_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """A result as JSON; refuses numbers that overflowed because an option or a file has too large
    values.
    """
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        reject(
            f"the answer's {_overflowed(value)} is too large for a number: some size, price or "
            "time that was given is extreme: give one that is not so large, or not so near to 0"
        )


def _overflowed(value: object, name: str = "") -> str:
    """The name of the first number within ``value`` that JSON cannot hold; "" if it holds all."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else name
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    names = (_overflowed(item, f"{name}.{key}" if name else str(key)) for key, item in items)
    return next(filter(None, names), "")


def progress(text: str) -> None:
    """Print a line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def writable(path: Path, what: str, option: str = "--out") -> Path:
    """The path of a file for results, whose folder is created; refuses a path that cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = "it is a folder" if path.is_dir() else None
        if not os.access(path.parent, os.W_OK):
            problem = "its folder may not be changed"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        shown = path.parent if what == "folder" else path
        reject(f"{option} {shown}: cannot be written: {problem}: give another {what}")
    return path


def missing(package: str) -> InputError:
    """The error that a package is missing; its message says how to install it."""
    what = f"'.[{EXTRAS[package]}]'" if package in EXTRAS else package
    return InputError(f"{package} is not installed, and this command needs it: pip install {what}")


def check_torch() -> None:
    """Refuse to go on without torch, before anything is prepared."""
    if find_spec("torch") is None:
        error = missing("torch")
        raise error


def _missing(error: ModuleNotFoundError) -> InputError:
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS and package not in BASE:
        raise error
    return missing(package)


def _complain(error: Exception | str, status: int) -> int:
    print(f"error: {shortened(str(error))}", file=sys.stderr)
    return status


def shortened(message: str) -> str:
    """A message in which very long words are cut, such as the contents of a file given in place of
    its name.
    """
    return _LONG_WORD.sub(r"\1...\2", message)


# Matches a word of more than 450 characters, whose middle is cut out of messages. No file name is
# so long, but a path may be.
_LONG_WORD = re.compile(r"(\S{100})\S{300,}(\S{50})")


# Reports the progress of long work on standard error, with the estimated time left.


QUIET_S = 2.0


@dataclass(slots=True, kw_only=True)
class Countdown:
    """Counts the finished parts of long work; reports progress now and then, and at the end.

    The time left is estimated without the first part, since this may have to prepare what the
    others use.
    """

    what: str
    total: int
    clock: Callable[[], float] = time.perf_counter
    _done: int = field(default=0, init=False)
    _first_s: float = field(default=0.0, init=False)
    _said_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._said_s = self.clock()

    def step(self) -> None:
        """Count one more part of the work as finished."""
        self._done += 1
        now_s = self.clock()
        if self._done == 1:
            self._first_s = now_s
        left = self.total - self._done
        if left and (self._done == 1 or now_s - self._said_s < QUIET_S):
            return
        self._said_s = now_s
        text = f"{self.what}: {self._done} of {self.total}"
        if left:
            left_s = (now_s - self._first_s) / (self._done - 1) * left
            text = f"{text}, about {left_s:.0f} s left"
        progress(text)
