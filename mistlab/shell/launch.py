"""The one command of a script that starts training, and the files that the script wrote before."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mistlab.shell import crude
from mistlab.shell.source import Source
from mistlab.shell.word import Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts training, taken apart.

    ``program`` is the training script or module (``pretrain_gpt.py``), empty for a line that has
    options alone. ``launcher`` is the innermost program that starts processes (``torchrun``,
    ``deepspeed``, ``accelerate``, ``python``), empty for none. ``started`` are all words before the
    training program, with those of outer launchers (``srun --nodes 4``); ``arguments`` all words
    after it. ``environment`` are variables that the script exports or sets for the command.
    ``written`` are texts of files that the script writes before (here-documents), by path.
    ``notes`` tell what was assumed on the way to the command.
    """

    program: str = ""
    launcher: str = ""
    started: tuple[Word, ...] = ()
    arguments: tuple[Word, ...] = ()
    line: int = 0
    environment: Mapping[str, Word] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def launch_of(source: Source) -> Launch:
    """The command of a launch line or a shell script that starts training."""
    launch = crude.launch_of(source.text)
    started = tuple(Word(text=text) for text in launch.started)
    program = started[-1].text if started and started[-1].text.endswith(".py") else ""
    arguments = tuple(Word(text=text) for text in launch.arguments)
    return Launch(program=program, started=started, arguments=arguments)
