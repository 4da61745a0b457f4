"""Reads the numbers of nodes and GPUs from a launch command; also tells whether the program trains
a decoder, and adds hints to errors about scripts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from mistlab.core.values import InputError, reject
from mistlab.export.found import Found, checked_whole
from mistlab.export.given import Given, MissingError, ask_for
from mistlab.shell.launch import Launch
from mistlab.shell.programs import directives
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

# Parts of program paths, such as ``pretrain_bert``, that tell that a program trains no decoder,
# each with what it does instead.
_OTHERS: Mapping[str, str] = {
    r"bert|biencoder|realm|\bict\b": "trains an encoder",
    r"\bt5\b|ul2": "trains an encoder beside a decoder",
    r"retro": "trains with retrieved text",
    r"vlm|llava|\bvl\b|\d+vl\b|vision|\bvit\b|clip|dino|multimodal|mimo|omni|videochat|internvl": (
        "trains an encoder of images beside a decoder"
    ),
    r"whisper|audio|speech|\btts\b": "trains on sound",
    r"diffusion|\bdit\b|sora|\bwan\b|opensora": "trains a model of images",
    r"\bdpo\b|\bppo\b|grpo|rlhf|\brl\b|reward|\borm\b|\bprm\b|simpo": "trains by preferences",
    r"distill|\bkd\b|teacher": "trains beside a teacher",
    r"generat|inference|\binfer\b|serve|server|deploy|quantiz|\bptq\b|prune": "trains nothing",
    r"\beval\w*|benchmark_tasks|tasks\b|mmlu|harness": "evaluates, and trains nothing",
    r"convert\w*|checkpoint|preprocess|merge|\butil": "prepares files, and trains nothing",
    r"classif": "trains a classifier",
}
_DECODERS = re.compile(
    r"gpt|llama|mamba|hybrid|mistral|mixtral|qwen|deepseek|bloom|falcon|baichuan|starcoder|galactica"
    r"|chatglm|glm|\byi\b|yuan|moonlight|gemma|phi|olmo|opt|internlm|nemotron|codellama|moe|\blm\b"
    r"|grok|granite|gpt2"
)
_PLAIN = frozenset(("finetune", "sft", "posttrain", "pretrain"))
# Matches the names of programs that train BERT on masked tokens.
_BERT = re.compile(r"(pre ?train(ing)?|train) (megatron )?bert( m?core)?")


def refusal_of(program: str) -> str | None:
    """Return why a program is known to train neither a decoder nor BERT, or None if it may train
    one of them.
    """
    if trains_bert(program):
        return None
    for part in _names_in_program(program):
        for pattern, reason in _OTHERS.items():
            if re.search(pattern, part):
                return reason
    return None


def is_decoder(program: str) -> bool:
    """Whether a program is known to train a decoder."""
    name = _names_in_program(program)[0]
    return bool(_DECODERS.search(name)) or name in _PLAIN


def trains_bert(program: str) -> bool:
    """Whether a program is known to train BERT, an encoder, on masked tokens."""
    return _BERT.fullmatch(_names_in_program(program)[0]) is not None


def _names_in_program(program: str) -> list[str]:
    """Split the name of a program, and that of its folder or package, into words."""
    path = PurePath(program)
    parts = [*path.parts[:-1], path.stem] if path.suffix == ".py" else program.split(".")
    return [re.sub(r"[_\-.]", " ", part.lower()) for part in reversed(parts[-2:])]


# Adds hints to an error about a launch script, where a value that was assumed for a script variable
# may be the cause.


# Matches the note that a script variable has its default value.
_DEFAULT = re.compile(r"^(line \d+[^:]*): (\w+) is taken as (.+), its default: ")
_WITHOUT_ARGUMENTS = "the script is taken as started without arguments"
# Matches names of variables that count nodes. The patterns below match names of variables that
# count processes, and errors about the number of nodes or GPUs.
_COUNTS_NODES = re.compile(r"NODE|HOST|WORKER", re.IGNORECASE)
_COUNTS_RANKS = re.compile(r"GPU|NPU|DEVICE|PROC|TASK|RANK|WORLD", re.IGNORECASE)
_OF_RANKS = re.compile(r"\bGPUs\b|\bnodes\b|\bdata_parallel\b")
_OF_NO_VALUE = re.compile(r": 0 is too small|: its value is missing")
_READS_ARGUMENTS = re.compile(r"^(?!\s*#).*(?:\bgetopts\s|\$#|\$\{#\}|\bshift\b)", re.MULTILINE)


def with_hints(error: InputError, launch: Launch, source: LaunchFile, given: Given) -> InputError:
    """Return an error about a script with hints on the assumed values that led to it."""
    message = str(error)
    hints: list[str] = []
    if _OF_RANKS.search(message):
        hints += _of_ranks(launch, given)
    if _OF_NO_VALUE.search(message) and source.arguments is None:
        hints += _of_arguments(launch, source)
    if not hints:
        return error
    message = "; ".join((message, *hints))
    if isinstance(error, MissingError):
        return MissingError(message, choice=error.choice, variable=error.variable)
    return InputError(message)


def _of_ranks(launch: Launch, given: Given) -> Iterator[str]:
    """Yield a hint for each number of nodes or GPUs that is only the default of a script variable,
    and how to set it.
    """
    for note in launch.notes:
        if (match := _DEFAULT.match(note)) is None:
            continue
        line, name, value = match.groups()
        taken = f"{name} is taken as {value}, its default ({line}): give"
        if _COUNTS_NODES.search(name) and not re.search("PER_?NODE", name, re.IGNORECASE):
            if given.nodes is None:
                yield f"{taken} --nodes N or --set {name}=VALUE"
        elif _COUNTS_RANKS.search(name) and given.gpus_per_node is None:
            yield f"{taken} --gpus-per-node N or --set {name}=VALUE"


def _of_arguments(launch: Launch, source: LaunchFile) -> Iterator[str]:
    """Yield a hint if a script reads arguments but the user gave none."""
    match = _READS_ARGUMENTS.search(source.text)
    if match is not None:
        line = source.text.count("\n", 0, match.end()) + 1
        yield f"the script reads arguments (line {line}), but has none: give them by -- ARG ..."
        return
    yield from (note for note in launch.notes if _WITHOUT_ARGUMENTS in note)


# Reads the numbers of nodes and of GPUs per node from the options of launchers.
#
# Launchers may be nested: the innermost one that gives a number counts, so ``torchrun`` before
# ``srun``, and ``srun`` before the #SBATCH lines of a script.


# What an option of a launcher states: the number of nodes, of processes per node, of processes in
# total, or the host names.
_NODES, _IN_NODE, _ALL, _HOSTS = "nodes", "gpus_per_node", "processes", "hosts"
_TORCHRUN = {"--nnodes": _NODES, "--nproc-per-node": _IN_NODE}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "msrun": {"--worker-num": _ALL, "--local-worker-num": _IN_NODE},
    "deepspeed": {
        "--num-nodes": _NODES,
        "--num-gpus": _IN_NODE,
        "--include": _HOSTS,
        "-i": _HOSTS,
        "--hostfile": "hostfile",
        "-H": "hostfile",
    },
    "accelerate": {"--num-machines": _NODES, "--num-processes": _ALL},
    "srun": {
        "--nodes": _NODES,
        "-N": _NODES,
        "--ntasks-per-node": _IN_NODE,
        "--gpus-per-node": "gpus",
        "--gres": "gpus",
        "--ntasks": _ALL,
        "-n": _ALL,
    },
    "mpirun": {
        "-np": _ALL,
        "-n": _ALL,
        "--np": _ALL,
        "-npernode": _IN_NODE,
        "--npernode": _IN_NODE,
        "-ppn": _IN_NODE,
        "-N": _IN_NODE,
        "--map-by": "ppr",
    },
}
_ALIASES = {"mpiexec": "mpirun", "mpirun_rsh": "mpirun", "sbatch": "srun", "salloc": "srun"}
# Matches a one-letter option that is written together with its value, such as ``-N2``.
_ATTACHED = re.compile(r"(-[A-Za-z])([\d$].*)", re.DOTALL)
_DIRECT = ("nodes", "gpus_per_node")


@dataclass(frozen=True, slots=True)
class _LauncherNumber:
    """A number that an option of a launcher states; ``by_slurm`` marks options of Slurm."""

    option: str
    word: Word
    by_slurm: bool = False


def read_ranks(
    launch: Launch, text: str, draft: Found, given: Given, beside: Callable[[str], str | None]
) -> None:
    """Read the numbers of nodes and of GPUs per node from the options of launchers, where they
    state them.
    """
    _tell_of_unread(text, draft)
    counts = _counts(launch, text)
    _places(counts, draft, beside)
    is_placed = draft.gpus_per_node is not None or given.gpus_per_node is not None
    for name in _DIRECT:
        if name in counts:
            _settle(name, counts[name], draft, getattr(given, name))
    if draft.gpus_per_node is None and "gpus" in counts:
        _settle("gpus_per_node", counts["gpus"], draft, given.gpus_per_node)
    divides = _ALL in counts and draft.gpus_per_node is None
    if _ALL in counts:
        _divide(counts[_ALL], draft, given)
    if not is_placed:
        _tell_of_tasks(counts, draft, _ALL if divides else _IN_NODE)
    if draft.nodes is None and not counts.keys() & {_NODES, _ALL} and _by_torch(launch.started):
        # Torchrun starts a single node unless an option says otherwise.
        draft.nodes = 1


def _tell_of_unread(text: str, draft: Found) -> None:
    """Add a remark on #SBATCH lines behind the first command of a script, which Slurm ignores."""
    for directive in directives(text):
        directive_words = [Word(text=part) for part in directive.words.split()]
        if not directive.read and _options_of(directive_words, _OPTIONS["srun"]):
            reason = "comes after the first command, where Slurm ignores it"
            where = f"#SBATCH {directive.words} (line {directive.line})"
            draft.remark("contradicting", "nodes", f"{where}: {reason}")


def _tell_of_tasks(counts: Mapping[str, _LauncherNumber], draft: Found, kind: str) -> None:
    """Add a remark that each Slurm task of a node is assumed to have one GPU, unless Slurm is asked
    for equally many GPUs.
    """
    tasks, gpus = counts.get(kind), counts.get("gpus")
    if tasks is None or not tasks.by_slurm:
        return
    number = str(draft.gpus_per_node)
    if gpus is None:
        text = (
            f"{number}, one for each task of {_named(tasks)}, because the script asks Slurm for no "
            "GPUs"
        )
        draft.remark("assumed", "gpus_per_node", text)
    elif gpus.word.text.isdecimal() and gpus.word.text != number:
        text = (
            f"{_named(tasks)} gives {number} tasks a node, but {_named(gpus)} asks for "
            f"{gpus.word.text} GPUs: predicted with {number} GPUs, one for each task"
        )
        draft.remark("contradicting", "gpus_per_node", text)


def _by_torch(started: Iterable[Word]) -> bool:
    return any(_OPTIONS.get(PurePath(word.text).name) is _TORCHRUN for word in started)


def _counts(launch: Launch, text: str) -> dict[str, _LauncherNumber]:
    """Collect what launchers state, the innermost launcher first; a number in the #SBATCH lines
    replaces one whose value is unknown.
    """
    counts: dict[str, _LauncherNumber] = {}
    for name, launcher_words in reversed(_launchers(launch.started)):
        for kind, stated in _options_of(launcher_words, _OPTIONS[name]):
            if not _starts_starters(name, kind, stated):
                counts.setdefault(kind, stated)
    for kind, stated in _options_of(_batch_words(text), _OPTIONS["srun"]):
        known = counts.setdefault(kind, stated)
        if known.word.unknown is not None and stated.word.unknown is None:
            counts[kind] = stated
    return {kind: said for kind, said in counts.items() if not _starts_starters("srun", kind, said)}


def _starts_starters(name: str, kind: str, stated: _LauncherNumber) -> bool:
    """Whether the batch system starts one task per node that in turn starts the node's
    processes.
    """
    is_batch = name == "srun" and stated.option in _OPTIONS["srun"]
    return is_batch and kind in (_IN_NODE, _ALL) and stated.word.text == "1"


def _launchers(started: Iterable[Word]) -> list[tuple[str, list[Word]]]:
    """List the launchers of a command from outermost to innermost, each with its own options."""
    parts: list[tuple[str, list[Word]]] = []
    for word in started:
        name = PurePath(word.text).name
        name = _ALIASES.get(name, name)
        if name in _OPTIONS:
            parts.append((name, []))
        elif parts:
            parts[-1][1].append(word)
    # A line that holds options but no program is read as options of torchrun.
    return parts or [("torchrun", list(started))]


def _batch_words(text: str) -> list[Word]:
    return [
        Word(text=part, line=directive.line)
        for directive in directives(text)
        if directive.read
        for part in directive.words.split()
    ]


def _options_of(
    words: Iterable[Word], known: Mapping[str, str]
) -> list[tuple[str, _LauncherNumber]]:
    """Yield the options of a launcher that state nodes, processes or hosts, each with the word that
    holds the value.
    """
    counted: list[tuple[str, _LauncherNumber]] = []
    waiting, by_slurm = "", known is _OPTIONS["srun"]
    for word in words:
        if waiting:
            counted.append((known[waiting], _LauncherNumber(waiting, word, by_slurm)))
            waiting = ""
            continue
        name, value = _parts_of(word.text)
        if name in known and value is not None:
            number = Word(text=value, line=word.line, unknown=word.unknown)
            counted.append((known[name], _LauncherNumber(name, number, by_slurm)))
        elif name in known:
            waiting = name
    return counted


def _parts_of(text: str) -> tuple[str, str | None]:
    """Split an option like ``--nnodes=2`` into its name and its value; the value is None if it is
    the next word.
    """
    if (attached := _ATTACHED.fullmatch(text)) is not None:
        return attached[1], attached[2]
    name, equals, value = text.partition("=")
    return name.replace("_", "-") if name.startswith("--") else name, value if equals else None


def _places(
    counts: dict[str, _LauncherNumber], draft: Found, beside: Callable[[str], str | None]
) -> None:
    """Read numbers of nodes and GPUs from lists of hosts, from the slots in a host file, or from
    Slurm's generic resources.
    """
    if (stated := counts.get(_HOSTS)) is not None and stated.word.unknown is None:
        hosts = stated.word.text.split("@")
        draft.nodes = len(hosts)
        places = [host.partition(":")[2] for host in hosts]
        if all(places):
            draft.gpus_per_node = max(len(place.split(",")) for place in places)
    elif (stated := counts.get("hostfile")) is not None and (text := beside(stated.word.text)):
        slots = re.findall(r"^[^#\s]\S*\s+slots\s*=\s*(\d+)", text, re.MULTILINE)
        if slots and _NODES not in counts:
            draft.nodes = len(slots)
        if slots and _IN_NODE not in counts:
            draft.gpus_per_node = max(map(int, slots))
    if (stated := counts.get("gpus")) is not None and stated.word.unknown is None:
        number = stated.word.text.rpartition(":")[2]
        counts["gpus"] = _LauncherNumber(stated.option, Word(text=number, line=stated.word.line))
        if not number.isdecimal():
            del counts["gpus"]
    if (stated := counts.get("ppr")) is not None:
        match = re.fullmatch(r"ppr:(\d+):node.*", stated.word.text)
        if match:
            counts.setdefault(_IN_NODE, _LauncherNumber(stated.option, Word(text=match[1])))


def _settle(name: str, stated: _LauncherNumber, draft: Found, given: int | None) -> None:
    """Set the number of nodes or GPUs from a launcher's option; refuses a number that is unknown,
    unless the user gives it.
    """
    word = stated.word
    if getattr(draft, name) is not None:
        return
    if word.unknown is None and word.text.isdecimal():
        setattr(draft, name, checked_whole(_where(stated), word.text))
    elif given is None:
        reason = word.unknown or f"{word.text} is not a number: give a number"
        ask_for(name, f"{stated.option}: {reason}, or --{name.replace('_', '-')} N")


def _divide(stated: _LauncherNumber, draft: Found, given: Given) -> None:
    """Set the GPUs per node to the number of all processes divided by the number of nodes."""
    word, nodes = stated.word, given.nodes or draft.nodes
    in_node = given.gpus_per_node or draft.gpus_per_node
    if nodes is not None and in_node is not None:
        return
    if word.unknown is not None or not word.text.isdecimal():
        reason = word.unknown or f"{word.text} is not a number: give a number"
        reject(f"{stated.option}: {reason}, or --nodes N --gpus-per-node N")
    ranks = checked_whole(_where(stated), word.text)
    if nodes is None:
        size = in_node or given.hardware.node.gpus
        nodes = draft.nodes = max(ranks // size, 1)
        if in_node is None:
            text = (
                f"{nodes}, because {stated.option} starts {ranks} processes and a node has {size} "
                "GPUs: --nodes gives another number"
            )
            draft.remark("assumed", "nodes", text)
    if ranks % nodes:
        reject(
            f"{_where(stated)}: {ranks} processes do not divide evenly over {nodes} nodes: give "
            "other numbers by --nodes and --gpus-per-node"
        )
    draft.gpus_per_node = ranks // nodes


def _named(stated: _LauncherNumber) -> str:
    return f"{stated.option} (line {stated.word.line})" if stated.word.line else stated.option


def _where(stated: _LauncherNumber) -> str:
    return f"{stated.option}: line {stated.word.line}" if stated.word.line else stated.option
