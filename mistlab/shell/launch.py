"""The one command of a script that starts training, and the files that the script wrote before."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mistlab.core.values import InputError, near_matches
from mistlab.shell.choice import Candidate, chosen
from mistlab.shell.evaluator import Evaluator
from mistlab.shell.launchers import is_launcher
from mistlab.shell.scripts import parsed_file
from mistlab.shell.session import Session, StepsError
from mistlab.shell.shell_text import LineError, Text, plain
from mistlab.shell.source import Source
from mistlab.shell.state import State, Variable, scalar
from mistlab.shell.syntax import Script
from mistlab.shell.word import Unknown, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts training, taken apart.

    ``program`` is the training script or module (``pretrain_gpt.py``), empty for a line that has
    options alone. ``launcher`` is the innermost program that starts processes (``torchrun``,
    ``deepspeed``, ``accelerate``, ``python``), empty for none. ``started`` are all words before the
    training program, with those of outer launchers (``srun --nodes 4``); ``arguments`` all words
    after it. ``environment`` are variables that the script exports or sets for the command.
    ``written`` are texts of files that the script writes before (here-documents), by path, and
    ``unknown_in`` why a part of such a text is not known. ``notes`` tell what was assumed on the
    way to the command. ``file`` is the script with the command where ``line`` is of another one
    than the one given.
    """

    program: str = ""
    launcher: str = ""
    started: tuple[Word, ...] = ()
    arguments: tuple[Word, ...] = ()
    line: int = 0
    environment: Mapping[str, Word] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unknown_in: Mapping[str, Unknown] = field(default_factory=dict)
    file: str = ""


_NAMES = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)


def launch_of(source: Source) -> Launch:
    """The command of a launch line or a shell script that starts training."""
    session = Session(source=source, run=lambda *_: None)
    evaluator = Evaluator(session)
    try:
        script = parsed_file(session, source.text, source.name)
        state = State(variables=_given(source))
        if source.arguments is not None:
            state.arguments = tuple(plain(text) for text in source.arguments)
        _evaluate(evaluator, script, state)
    except LineError as error:
        message = f"{session.at(error.line)}: {error}"
        raise InputError(message) from None
    except RecursionError:
        message = "the script is nested too deep to follow: give the launch line alone"
        raise InputError(message) from None
    candidate = chosen(session)
    if candidate is None:
        raise InputError(_nothing(session))
    _check_settings(session)
    return _launch(session, candidate)


def _evaluate(evaluator: Evaluator, script: Script, state: State) -> None:
    """Evaluate a script; one that goes on for long behind its launch is followed to there."""
    session = evaluator.session
    try:
        evaluator.run(script, state)
    except StepsError:
        if not any(not started.is_captured for started in session.started):
            raise


def _given(source: Source) -> dict[str, Variable]:
    """The variables that the user gives."""
    for name in source.settings:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            message = f"--set {name}: is no name of a variable: give NAME=VALUE"
            raise InputError(message)
    return {name: scalar(plain(text), exported=True) for name, text in source.settings.items()}


def _check_settings(session: Session) -> None:
    """Refuse settings of variables that the script never mentions."""
    for name in session.source.settings:
        if name not in session.mentioned:
            near = near_matches(name, sorted(session.mentioned)) if session.mentioned else ""
            message = f"--set {name}: the script has no variable of this name{near}"
            raise InputError(message)


def _nothing(session: Session) -> str:
    """Why a script starts no training."""
    for each in session.started:
        notes = sorted(frozenset().union(*(word.assumed for word in each.words)))
        if is_launcher(each.words[0].chars) and notes and not each.is_captured:
            return f"{notes[0]}: {each.simple.source[:80]} names no program without it"
    if session.started_scripts:
        line, path = session.started_scripts[-1]
        return (
            f"{session.at(line)}: the script starts {path}, which is not at hand: "
            "give that file, or put it beside this one"
        )
    if session.exits:
        line, conditions = session.exits[0]
        why = ", ".join(
            f"{session.at(each.line)}: {each.source}" for each in conditions if each.source
        )
        notes = sorted({note for each in conditions for note in each.assumed})
        names = sorted({name for each in conditions for name in _NAMES.findall(each.source)})
        given = " or ".join(f"--set {name}=VALUE" for name in names)
        remedy = "; ".join(notes) or f"give {given or 'what it asks for by --set or after --'}"
        because = f" (by {why})" if why else ""
        return f"{session.at(line)}: the script ends here{because} before it trains: {remedy}"
    return (
        "holds no command that starts training, such as torchrun or python with a program: "
        "give the file with the line that does"
    )


def _launch(session: Session, candidate: Candidate) -> Launch:
    started, parts = candidate.started, candidate.parts
    split = parts.at if parts.at >= 0 else parts.first
    words = [session.word(word) for word in started.words]
    outer = [session.word(word) for word in started.outer]
    line, file = session.place(started.simple.line)
    written = dict(started.written)
    return Launch(
        program=words[parts.at].text if parts.at >= 0 else "",
        launcher=parts.launcher,
        started=(*outer, *words[:split]),
        arguments=tuple(words[parts.first :]),
        line=line,
        file=file,
        environment={name: session.word(text) for name, text in started.environment.items()},
        written={path: session.rendered_in_file(text) for path, text in written.items()},
        unknown_in=_unknown_in(session, written),
        notes=_notes(session, candidate),
    )


def _unknown_in(session: Session, written: Mapping[str, Text]) -> dict[str, Unknown]:
    unknown = {path: session.first_unknown(text) for path, text in written.items()}
    return {path: each for path, each in unknown.items() if each is not None}


def _notes(session: Session, candidate: Candidate) -> tuple[str, ...]:
    """What was taken for granted on the way to a command, in the order of lines."""
    started = candidate.started
    notes = {note for word in (*started.outer, *started.words) for note in word.assumed}
    notes |= {note for condition in started.conditions for note in condition.assumed}
    for line, path in session.missing:
        notes.add(f"{session.at(line)}: {path} is not at hand: what it sets is not known")
    return tuple(sorted(notes, key=_order))


def _order(note: str) -> tuple[int, str]:
    match = re.match(r"line (\d+)", note)
    return (int(match[1]) if match else 0, note)
