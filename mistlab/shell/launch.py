"""Selects the command that starts training among all commands of a script."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mistlab.core.values import InputError, near_matches, reject, word_set
from mistlab.shell.evaluator import Evaluator
from mistlab.shell.launchers import CommandParts, is_launcher, name_of, parts_of
from mistlab.shell.programs import parsed_file
from mistlab.shell.session import (
    Guard,
    LaunchFile,
    Session,
    Started,
    State,
    StepsError,
    Variable,
    scalar,
)
from mistlab.shell.shell_text import LAUNCH_LINE_ALONE, LineError, Text, Unknown, Word, plain
from mistlab.shell.syntax import Script

_HELPERS = re.compile(
    r"(?:^|[/_.-])(?:preprocess\w*|convert\w*|prepare\w*|tokeni[sz]e\w*|download\w*|merge\w*|eval\w*|"
    r"infer\w*|generate\w*|generation|serve\w*|tools|setup|build|install|export\w*|plot\w*|parse\w*|"
    r"upload\w*|check\w*|clean\w*|pip|venv|report\w*|analy[sz]e\w*|test|tests|get|find|http|json|ckpt\w*|"
    r"checkpoint\w*|hf2\w*|\w+2hf|monitor\w*|split\w*|sample\w*|inspect\w*|vllm|debug)(?:[/_.-]|$)"
)
_TRAINS = re.compile(r"train|finetun|fine_tun|fine-tun|sft|dpo|ppo|grpo|run_clm|run_mlm|lora", re.I)
_OPTION = re.compile(r"--?[A-Za-z]")
# Matches options, such as an output folder, that only name something and do not affect cost.
_NAMING_OPTIONS = re.compile(
    r"port|addr|rank|path|dir|name|save|load|log|data|seed|id$|wandb|project|host|file|output|run|rdzv|"
    r"prompt|tag|exp"
)
_OTHER_PROGRAMS = word_set(
    """
    git pip pip3 apt apt-get conda mamba wget curl tar unzip rsync scp cp mv rm ln ls mkdir chmod
    find sed awk grep sort uniq sleep date nvidia-smi hostname scontrol sinfo squeue scancel aws
    gsutil gcloud kubectl docker cmake make ninja npm yarn huggingface-cli hf wandb tensorboard ray
    which nsys ncu module ml kill pkill killall ps df du free lscpu numactl touch jq yq export df ip
    ifconfig modprobe ulimit sysctl mount umount chown tree less more tail head watch tmux screen
    ssh-keygen ssh-keyscan sshpass gcc g++ nvcc bash sh crontab uv poetry black isort ruff pytest
    """
)


class Candidate:
    """A command that may start training, divided into launcher and program."""

    def __init__(self, session: Session, started: Started, parts: CommandParts) -> None:
        self.started = started
        self.parts = parts
        self.line = started.simple.line
        self.words = [session.rendered(word) for word in started.words]
        self.program = self.words[parts.at] if parts.at >= 0 else ""
        self.arguments = self.words[parts.first :] if parts.at >= 0 else self.words

    @property
    def options(self) -> int:
        """The number of options that the command has."""
        return sum(bool(_OPTION.match(word)) for word in self.words)

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """How likely the command trains; the highest value is most likely."""
        trains = bool(_TRAINS.search(self.program))
        near = "/".join(self.program.split("/")[-2:])
        helps = bool(_HELPERS.search(near)) and not _TRAINS.search(name_of(self.program))
        return not helps, trains, bool(self.options)

    @property
    def signature(self) -> tuple[str, ...]:
        """What distinguishes commands that train differently: all words but names, paths and
        ports.
        """
        kept, is_name = list[str](), False
        for word in self.words[self.parts.start :]:
            option, equals, value = word.partition("=")
            if _OPTION.match(word):
                is_name = bool(_NAMING_OPTIONS.search(option.lower()))
                kept.append(option + ("" if is_name or not equals else f"={value}"))
                is_name = is_name and not equals
            elif not is_name and "/" not in word:
                kept.append(word)
        return tuple(kept)

    def stands_at(self, session: Session, line: int) -> bool:
        """Whether the command is on this line of the script, or in a file or function that the line
        calls.
        """
        simple = self.started.simple
        is_here = session.place(simple.line)[1] == ""
        return (is_here and simple.line <= line <= simple.last_line) or line in self.started.callers


def chosen(session: Session) -> Candidate | None:
    """Return the command that trains, or None if there is none; refuses a script in which several
    different commands may train.
    """
    candidates = list(_candidates(session))
    if session.source.line is not None:
        return _at_line(session, candidates, session.source.line)
    known = [each for each in candidates if not each.started.is_captured]
    if not known:
        return None
    best = max(each.rank for each in known)
    if not best[0]:
        each = known[0]
        reject(
            f"{session.at(each.line)}: {each.program} seems to prepare, convert or evaluate, and "
            f"no command trains: give the script that does, or --line {each.line} to import it"
        )
    kept = _distinct(each for each in known if each.rank == best)
    if len({each.signature for each in kept}) > 1:
        _refuse(session, kept)
    return kept[0]


def _candidates(session: Session) -> Iterable[Candidate]:
    fallback = list[Candidate]()
    taken = False
    for started in session.started:
        parts = parts_of(started.words)
        if parts is not None:
            taken = True
            yield Candidate(session, started, parts)
        elif _may_train(started):
            first = next(
                number for number, word in enumerate(started.words) if word.chars.startswith("--")
            )
            fallback.append(Candidate(session, started, CommandParts("", -1, first)))
    if not taken:
        yield from fallback


def _may_train(started: Started) -> bool:
    """Return whether a program has options, and is not known to do something other than
    training.
    """
    program = name_of(started.words[0].chars)
    options = sum(word.chars.startswith("--") for word in started.words)
    return options > 0 and program not in _OTHER_PROGRAMS


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    kept: dict[tuple[str, ...], Candidate] = {}
    for each in candidates:
        kept.setdefault(tuple(each.words), each)
    return list(kept.values())


def _at_line(session: Session, candidates: Sequence[Candidate], line: int) -> Candidate:
    here = _distinct(each for each in candidates if each.stands_at(session, line))
    if not here:
        lines = sorted({session.at(each.line) for each in candidates})
        if not lines:
            reject(f"--line {line}: no line of the script starts training: give another script")
        reject(
            f"--line {line}: no command on this line starts training: give one of "
            f"{', '.join(lines)}"
        )
    if len({each.signature for each in here}) > 1:
        _refuse(session, here)
    return here[0]


def _refuse(session: Session, candidates: Sequence[Candidate]) -> NoReturn:
    """Refuse a script with several training commands, with a message that says how to choose
    one.
    """
    if message := _by_loop(session, candidates) or _by_condition(session, candidates):
        raise InputError(message)
    lines = sorted({each.line for each in candidates})
    shown = [f"{session.at(line)} ({_shown(candidates, line)})" for line in lines[:8]]
    callers = sorted({line for each in candidates for line in each.started.callers[:1]})
    if len(lines) > 1:
        reject(
            f"{len(candidates)} commands start training, at {', '.join(shown)}: give --line N with "
            "the line of the one to import"
        )
    if len(callers) > 1:
        called = ", ".join(session.at(line) for line in callers[:8])
        reject(
            f"{len(candidates)} commands start training, at {', '.join(shown)}: called from "
            f"{called}: give --line N with the line of the call to import"
        )
    reject(
        f"{len(candidates)} commands start training, at {', '.join(shown)}: give --set NAME=VALUE "
        "for the variable in which they differ"
    )


def _shown(candidates: Sequence[Candidate], line: int) -> str:
    candidate = next(each for each in candidates if each.line == line)
    return name_of(candidate.program) or candidate.words[0]


def _by_loop(session: Session, candidates: Sequence[Candidate]) -> str | None:
    """Return the end of an error: if the commands differ by the variable of a loop, how to set that
    variable.
    """
    for name, line, _ in candidates[0].started.loops:
        values = list(
            dict.fromkeys(
                value
                for each in candidates
                for other, at, value in each.started.loops
                if (other, at) == (name, line)
            )
        )
        others = {each.started.loops == () for each in candidates}
        if len(values) > 1 and True not in others and _differ_by(candidates, name, line):
            listed = ", ".join(values[:8])
            return (
                f"{session.at(line)}: the script trains once for each {name} of {listed}: "
                f"give --set {name}={values[0]}"
            )
    return None


def _differ_by(candidates: Sequence[Candidate], name: str, line: int) -> bool:
    """Return whether commands differ by the variable of a loop, so that setting it selects some of
    them.
    """
    by_value: dict[str, set[tuple[str, ...]]] = {}
    for each in candidates:
        for other, at, value in each.started.loops:
            if (other, at) == (name, line):
                by_value.setdefault(value, set()).add(each.signature)
    everything = set().union(*by_value.values())
    return any(each != everything for each in by_value.values())


def _by_condition(session: Session, candidates: Sequence[Candidate]) -> str | None:
    """Return the end of an error: if an unknown condition selects the command, how to set its
    variable.
    """
    for each in candidates:
        for condition in each.started.conditions:
            if condition.cause is not None:
                return _asked(session, condition, candidates)
    return None


def _asked(session: Session, condition: Guard, candidates: Sequence[Candidate]) -> str:
    assert condition.cause is not None
    lines = ", ".join(session.at(line) for line in sorted({each.line for each in candidates})[:8])
    remedy = condition.cause.remedy or "give --line N with the line of the one to import"
    return (
        f"{session.at(condition.line)}: {condition.source} decides which command trains ({lines}), "
        f"but its result is not known: {remedy}"
    )


# Finds the command of a script that starts training, and the files that the script wrote before it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts training, divided into its parts, and the files that the script wrote.

    ``program`` is the training script or module (``pretrain_gpt.py``), empty if the line consists
    of options only. ``launcher`` is the innermost program that starts processes (``torchrun``,
    ``deepspeed``, ``accelerate``, ``python``), empty if there is none. ``started`` holds all words
    before the training program, those of outer launchers (``srun --nodes 4``) included;
    ``arguments`` holds all words after it. ``environment`` holds the variables that the script
    exports or sets for the command.

    ``written`` holds the texts of files that the script writes before the command (here-documents),
    by path; ``unknown_in`` holds, also by path, an unknown part of such a text. ``notes`` say what
    was assumed to find the command. ``line`` is the line of the command, and ``file`` its script,
    if that is not the script that the user gave.
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


def launch_of(source: LaunchFile) -> Launch:
    """Find the command that starts training in a launch line or a shell script."""
    session = Session(source=source, run=lambda *_: None)
    evaluator = Evaluator(session)
    try:
        script = parsed_file(session, source.text, source.name)
        state = State(variables=_given(source))
        if source.arguments is not None:
            state.arguments = tuple(plain(text) for text in source.arguments)
        _evaluate(evaluator, script, state)
    except LineError as error:
        reject(f"{session.at(error.line)}: {error}")
    except RecursionError:
        reject(f"the script is nested too deep to follow: {LAUNCH_LINE_ALONE}")
    candidate = chosen(session)
    if candidate is None:
        raise InputError(_nothing(session))
    _check_settings(session)
    return _launch(session, candidate)


def _evaluate(evaluator: Evaluator, script: Script, state: State) -> None:
    """Evaluate a script; stop early if it runs long after the command that trains."""
    session = evaluator.session
    try:
        evaluator.run(script, state)
    except StepsError:
        if not any(not started.is_captured for started in session.started):
            raise


def _given(source: LaunchFile) -> dict[str, Variable]:
    """Return the variables that the user sets (``--set NAME=VALUE``), by name."""
    for name in source.settings:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            reject(f"--set {name}: is not a variable's name: give NAME=VALUE")
    return {name: scalar(plain(text), exported=True) for name, text in source.settings.items()}


def _check_settings(session: Session) -> None:
    """Refuse a variable that the user sets but that the script never mentions."""
    for name in session.source.settings:
        if name not in session.mentioned:
            near = near_matches(name, sorted(session.mentioned)) if session.mentioned else ""
            reject(f"--set {name}: the script has no variable of this name{near}")


def _nothing(session: Session) -> str:
    """Return why a script starts no training, for the error that refuses the script."""
    for each in session.started:
        notes = sorted(frozenset().union(*(word.assumed for word in each.words)))
        if is_launcher(each.words[0].chars) and notes and not each.is_captured:
            return f"{notes[0]} (without it, {each.simple.source[:80]} starts no program)"
    if session.started_scripts:
        line, path = session.started_scripts[-1]
        return (
            f"{session.at(line)}: the script starts {path}, which was not found: "
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
    """Return the notes on assumptions made before a command was reached, in the order of lines."""
    started = candidate.started
    notes = {note for word in (*started.outer, *started.words) for note in word.assumed}
    notes |= {note for condition in started.conditions for note in condition.assumed}
    for line, path in session.missing:
        notes.add(f"{session.at(line)}: {path} was not found: what it sets is not known")
    return tuple(sorted(notes, key=_order))


def _order(note: str) -> tuple[int, str]:
    match = re.match(r"line (\d+)", note)
    return (int(match[1]) if match else 0, note)
