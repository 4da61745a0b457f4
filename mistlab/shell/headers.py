"""What the header of a script for a queue says: ``#SBATCH`` lines become Slurm's variables."""

import re
from collections.abc import Mapping

from mistlab.shell.session import Session

_SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+(.*)$", re.MULTILINE)
_OPTION = re.compile(r"(--[\w-]+|-[A-Za-z])(?:[= \t]*)([^\s#]*)")
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


def header_of(text: str) -> str:
    """The comments before a script's first command, where a queue reads its options."""
    lines = text.splitlines(keepends=True)
    empty = (
        number for number, line in enumerate(lines) if line.strip() and line.lstrip()[0] != "#"
    )
    return "".join(lines[: next(empty, len(lines))])


def facts_of(text: str, session: Session, base: int) -> dict[str, Fact]:
    """Values of Slurm's variables by a script's header, each with a note."""
    text = header_of(text)
    facts: dict[str, Fact] = {}
    for match in _SBATCH.finditer(text):
        line = session.at(base + text.count("\n", 0, match.start()) + 1)
        facts.setdefault("SLURM_JOB_ID", ("", f"{line}: the script is a job of Slurm"))
        for option in _OPTION.finditer(match[1]):
            name = _SHORT.get(option[1], option[1])
            value = _value(name, option[2])
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
