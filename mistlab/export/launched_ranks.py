"""Nodes and GPUs a node of a launch command, from the words of its launchers.

The innermost launcher that says a number counts: ``torchrun`` before ``srun``, and that before the
lines with which a script asks its batch system for nodes.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from mistlab.core.values import InputError
from mistlab.export.found import Found, checked_whole
from mistlab.export.given import Given
from mistlab.shell.headers import directives
from mistlab.shell.launch import Launch
from mistlab.shell.word import Word

# Options of launchers by what they count: nodes, processes on a node, processes of all nodes, or
# ranks by the places where they run.
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
# Options of one letter, with their value attached.
_ATTACHED = re.compile(r"(-[A-Za-z])([\d$].*)", re.DOTALL)
_DIRECT = ("nodes", "gpus_per_node")


@dataclass(frozen=True, slots=True)
class _Said:
    """A number that a launcher says: the word, and the option before it; Slurm's if it is
    ``by_slurm``."""

    option: str
    word: Word
    by_slurm: bool = False


def read_ranks(
    launch: Launch, text: str, found: Found, given: Given, beside: Callable[[str], str | None]
) -> None:
    """Set the nodes and the GPUs of a node, as far as launchers say them."""
    _tell_of_unread(text, found)
    counts = _counts(launch, text)
    _places(counts, found, beside)
    is_placed = found.gpus_per_node is not None or given.gpus_per_node is not None
    for name in _DIRECT:
        if name in counts:
            _settle(name, counts[name], found, getattr(given, name))
    if found.gpus_per_node is None and "gpus" in counts:
        _settle("gpus_per_node", counts["gpus"], found, given.gpus_per_node)
    divides = _ALL in counts and found.gpus_per_node is None
    if _ALL in counts:
        _divide(counts[_ALL], found, given)
    if not is_placed:
        _tell_of_tasks(counts, found, _ALL if divides else _IN_NODE)
    if found.nodes is None and not counts.keys() & {_NODES, _ALL} and _by_torch(launch.started):
        # torchrun's default.
        found.nodes = 1


def _tell_of_unread(text: str, found: Found) -> None:
    """Tell of numbers on lines of a batch system that stand where it does not read them."""
    for directive in directives(text):
        words = [Word(text=part) for part in directive.words.split()]
        if not directive.read and _options_of(words, _OPTIONS["srun"]):
            reason = "stands behind the first command, where Slurm does not read it"
            where = f"#SBATCH {directive.words} (line {directive.line})"
            found.remark("contradicting", "nodes", f"{where}: {reason}")


def _tell_of_tasks(counts: Mapping[str, _Said], found: Found, kind: str) -> None:
    """Tell where a batch system's tasks are taken as GPUs, unless it says as many GPUs."""
    said, gpus = counts.get(kind), counts.get("gpus")
    if said is None or not said.by_slurm:
        return
    number = str(found.gpus_per_node)
    if gpus is None:
        text = f"{number}, one for each task of {_where(said)}: Slurm is asked for no GPUs"
        found.remark("assumed", "gpus_per_node", text)
    elif gpus.word.text.isdecimal() and gpus.word.text != number:
        text = f"{number} tasks a node by {_where(said)}, but {_where(gpus)} {gpus.word.text}"
        found.remark("contradicting", "gpus_per_node", f"{text}: took the tasks, one for each GPU")


def _by_torch(started: Iterable[Word]) -> bool:
    return any(_OPTIONS.get(PurePath(word.text).name) is _TORCHRUN for word in started)


def _counts(launch: Launch, text: str) -> dict[str, _Said]:
    """What launchers count, the innermost first; a batch system fills what they leave unknown."""
    counts: dict[str, _Said] = {}
    for name, words in reversed(_launchers(launch.started)):
        for kind, said in _options_of(words, _OPTIONS[name]):
            if not _starts_starters(name, kind, said):
                counts.setdefault(kind, said)
    for kind, said in _options_of(_batch_words(text), _OPTIONS["srun"]):
        known = counts.setdefault(kind, said)
        if known.word.unknown is not None and said.word.unknown is None:
            counts[kind] = said
    return {kind: said for kind, said in counts.items() if not _starts_starters("srun", kind, said)}


def _starts_starters(name: str, kind: str, said: _Said) -> bool:
    """Whether a batch system starts one task on a node, which starts the processes of its GPUs."""
    is_batch = name == "srun" and said.option in _OPTIONS["srun"]
    return is_batch and kind in (_IN_NODE, _ALL) and said.word.text == "1"


def _launchers(started: Iterable[Word]) -> list[tuple[str, list[Word]]]:
    """The launchers of a command in order, each with its own words."""
    parts: list[tuple[str, list[Word]]] = []
    for word in started:
        name = PurePath(word.text).name
        name = _ALIASES.get(name, name)
        if name in _OPTIONS:
            parts.append((name, []))
        elif parts:
            parts[-1][1].append(word)
    # A line of options alone is read as torchrun's.
    return parts or [("torchrun", list(started))]


def _batch_words(text: str) -> list[Word]:
    return [
        Word(text=part, line=directive.line)
        for directive in directives(text)
        if directive.read
        for part in directive.words.split()
    ]


def _options_of(words: Iterable[Word], known: Mapping[str, str]) -> list[tuple[str, _Said]]:
    """What a launcher's options count, with their words."""
    counted: list[tuple[str, _Said]] = []
    waiting, by_slurm = "", known is _OPTIONS["srun"]
    for word in words:
        if waiting:
            counted.append((known[waiting], _Said(waiting, word, by_slurm)))
            waiting = ""
            continue
        name, value = _parts_of(word.text)
        if name in known and value is not None:
            number = Word(text=value, line=word.line, unknown=word.unknown)
            counted.append((known[name], _Said(name, number, by_slurm)))
        elif name in known:
            waiting = name
    return counted


def _parts_of(text: str) -> tuple[str, str | None]:
    """An option's name, and the value that stands in the same word; None for none."""
    if (attached := _ATTACHED.fullmatch(text)) is not None:
        return attached[1], attached[2]
    name, equals, value = text.partition("=")
    return name.replace("_", "-") if name.startswith("--") else name, value if equals else None


def _places(counts: dict[str, _Said], found: Found, beside: Callable[[str], str | None]) -> None:
    """Numbers of ranks by the hosts, slots and generic resources that launchers name."""
    if (said := counts.get(_HOSTS)) is not None and said.word.unknown is None:
        hosts = said.word.text.split("@")
        found.nodes = len(hosts)
        places = [host.partition(":")[2] for host in hosts]
        if all(places):
            found.gpus_per_node = max(len(place.split(",")) for place in places)
    elif (said := counts.get("hostfile")) is not None and (text := beside(said.word.text)):
        slots = re.findall(r"^[^#\s]\S*\s+slots\s*=\s*(\d+)", text, re.MULTILINE)
        if slots and _NODES not in counts:
            found.nodes = len(slots)
        if slots and _IN_NODE not in counts:
            found.gpus_per_node = max(map(int, slots))
    if (said := counts.get("gpus")) is not None and said.word.unknown is None:
        number = said.word.text.rpartition(":")[2]
        counts["gpus"] = _Said(said.option, Word(text=number, line=said.word.line))
        if not number.isdecimal():
            del counts["gpus"]
    if (said := counts.get("ppr")) is not None:
        match = re.fullmatch(r"ppr:(\d+):node.*", said.word.text)
        if match:
            counts.setdefault(_IN_NODE, _Said(said.option, Word(text=match[1])))


def _settle(name: str, said: _Said, found: Found, given: int | None) -> None:
    """A number that a launcher says; refuses an unknown one unless it is given."""
    word = said.word
    if getattr(found, name) is not None:
        return
    if word.unknown is None and word.text.isdecimal():
        setattr(found, name, checked_whole(_where(said), word.text))
    elif given is None:
        option = f"--{name.replace('_', '-')}"
        reason = word.unknown or f"{word.text} is no number: give one"
        message = f"{said.option}: {reason}, or {option} N"
        raise InputError(message)


def _divide(said: _Said, found: Found, given: Given) -> None:
    """Processes of all nodes, divided among the nodes."""
    word, nodes = said.word, given.nodes or found.nodes
    in_node = given.gpus_per_node or found.gpus_per_node
    if nodes is not None and in_node is not None:
        return
    if word.unknown is not None or not word.text.isdecimal():
        reason = word.unknown or f"{word.text} is no number: give one"
        message = f"{said.option}: {reason}, or --nodes N --gpus-per-node N"
        raise InputError(message)
    ranks = checked_whole(_where(said), word.text)
    if nodes is None:
        size = in_node or given.hardware.node.gpus
        nodes = found.nodes = max(ranks // size, 1)
        if in_node is None:
            text = f"{nodes}, for {said.option} {ranks} starts processes on nodes of {size} GPUs"
            found.remark("assumed", "nodes", text)
    if ranks % nodes:
        message = (
            f"{_where(said)}: {ranks} processes do not divide over {nodes} nodes: give others by "
            "--nodes and --gpus-per-node"
        )
        raise InputError(message)
    found.gpus_per_node = ranks // nodes


def _where(said: _Said) -> str:
    return f"{said.option}: line {said.word.line}" if said.word.line else said.option
