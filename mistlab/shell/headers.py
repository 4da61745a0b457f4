"""What the header of a script for a queue says: ``#SBATCH`` lines become Slurm's variables."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mistlab.shell.session import Session

_SBATCH = re.compile(r"[ \t]*#SBATCH[ \t]+(?P<words>.*?)[ \t]*(?:[ \t]#.*)?$")
# A header ends with the first command; a text inside a script (a here-document) has one of its own.
_COMMAND = re.compile(r"[ \t]*[^#\s]")
_BEGINNING = re.compile(r"#!|[^#]*<<")
# A value that stands behind a space begins with no dash.
_OPTION = re.compile(r"(?<!\S)(?:(--[\w-]+)(?:=|[ \t]+(?!-)|(?!\S))|(-[A-Za-z])[= \t]*)([^\s#]*)")
_NAMES: Mapping[str, tuple[str, ...]] = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--gres": ("SLURM_GPUS_ON_NODE",),
    "--job-name": ("SLURM_JOB_NAME",),
    "--partition": ("SLURM_JOB_PARTITION",),
}
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-J": "--job-name"}
_SHORT |= {"-p": "--partition"}
Fact = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """The options of an ``#SBATCH`` line. Slurm passes over a line behind the first command, which
    is not ``read``."""

    line: int
    words: str
    read: bool


def directives(text: str) -> Iterator[Directive]:
    """All ``#SBATCH`` lines of a script, in order."""
    read = True
    for number, line in enumerate(text.split("\n"), 1):
        if (match := _SBATCH.match(line.rstrip("\r"))) is not None:
            yield Directive(line=number, words=match["words"], read=read)
        elif _BEGINNING.match(line):
            read = True
        elif _COMMAND.match(line):
            read = False


def facts_of(text: str, session: Session, base: int) -> dict[str, Fact]:
    """Values of Slurm's variables by a script's header, each with a note."""
    facts: dict[str, Fact] = {}
    for directive in directives(text):
        if not directive.read:
            continue
        line = session.at(base + directive.line)
        facts.setdefault("SLURM_JOB_ID", ("", f"{line}: the script is a job of Slurm"))
        for option in _OPTION.finditer(directive.words):
            spelt = option[1] or option[2]
            name = _SHORT.get(spelt, spelt)
            value = _value(name, option[3])
            for variable in _NAMES.get(name, ()) if value else ():
                note = f"{line}: {variable} is taken as {value}, by #SBATCH {option[0].strip()}"
                facts[variable] = (value, f"{note}: --set {variable}=VALUE")
    _multiply(facts)
    return facts


def _value(name: str, text: str) -> str:
    """The value that a variable has: a number for nodes and GPUs."""
    text = text.strip("\"'")
    if name in ("--job-name", "--partition"):
        return text
    match = re.search(r"(?:gpu(?::[\w.-]*?)?:)?(\d+)(?:\(\S*\))?$", text)
    if match is None or (name == "--gres" and "gpu" not in text) or "$" in text:
        return ""
    return match[1]


def _multiply(facts: dict[str, Fact]) -> None:
    """All tasks, where those of a node and the nodes are given."""
    parts = [facts.get(name) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE")]
    if None in parts or "SLURM_NTASKS" in facts:
        return
    first, second = (part or ("0", "") for part in parts)
    note = f"{second[1].split(':')[0]}: SLURM_NTASKS is taken as nodes times tasks of a node"
    number = str(int(first[0]) * int(second[0]))
    facts["SLURM_NTASKS"] = facts["SLURM_NPROCS"] = (number, f"{note}: --set SLURM_NTASKS=VALUE")
