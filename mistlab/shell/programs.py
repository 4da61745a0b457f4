"""Evaluates calls of programs, which are never run: the scripts that they start, launches of
training, and #SBATCH lines.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from posixpath import normpath

from mistlab.core.values import word_set
from mistlab.shell.expansion import known_path, text_of_file
from mistlab.shell.flows import apart, collected
from mistlab.shell.launchers import is_launcher, name_of
from mistlab.shell.loops import Call
from mistlab.shell.outside import READERS, output_of, run_sed
from mistlab.shell.parser import parsed, parsed_value
from mistlab.shell.session import (
    EXIT,
    FILE,
    NORMAL,
    RETURN,
    Guard,
    Session,
    Started,
    State,
    Variable,
)
from mistlab.shell.shell_text import LAUNCH_LINE_ALONE, LineError, Text, joined
from mistlab.shell.syntax import Script, assigned_names

_SBATCH = re.compile(r"[ \t]*#SBATCH[ \t]+(?P<words>.*?)[ \t]*(?:[ \t]#.*)?$")
# Matches the first command of a script or here-document; #SBATCH lines after it are ignored.
_COMMAND = re.compile(r"[ \t]*[^#\s]")
_BEGINNING = re.compile(r"#!|[^#]*<<")
# Matches an option of an ``#SBATCH`` line; a value after a space does not begin with a dash.
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
    """The options of an ``#SBATCH`` line; ``read`` is false if the line is behind the first
    command, where Slurm ignores it.
    """

    line: int
    words: str
    read: bool


def directives(text: str) -> Iterator[Directive]:
    """List all ``#SBATCH`` lines of a script."""
    read = True
    for number, line in enumerate(text.split("\n"), 1):
        if (match := _SBATCH.match(line.rstrip("\r"))) is not None:
            yield Directive(line=number, words=match["words"], read=read)
        elif _BEGINNING.match(line):
            read = True
        elif _COMMAND.match(line):
            read = False


def facts_of(text: str, session: Session, base: int) -> dict[str, Fact]:
    """Return the variables that Slurm sets because of a script's #SBATCH lines, each with a note
    for the user.
    """
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
                facts[variable] = (value, f"{note}: --set {variable}=VALUE gives another value")
    _multiply(facts)
    return facts


def _value(name: str, text: str) -> str:
    """Return the value of one of Slurm's variables; a variable that counts nodes or GPUs needs a
    number.
    """
    text = text.strip("\"'")
    if name in ("--job-name", "--partition"):
        return text
    match = re.search(r"(?:gpu(?::[\w.-]*?)?:)?(\d+)(?:\(\S*\))?$", text)
    if match is None or (name == "--gres" and "gpu" not in text) or "$" in text:
        return ""
    return match[1]


def _multiply(facts: dict[str, Fact]) -> None:
    """Set the number of all tasks of a Slurm job to its tasks per node times its nodes."""
    parts = [facts.get(name) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE")]
    if None in parts or "SLURM_NTASKS" in facts:
        return
    first, second = (part or ("0", "") for part in parts)
    note = f"{second[1].split(':')[0]}: SLURM_NTASKS is taken as nodes times tasks of a node"
    number = str(int(first[0]) * int(second[0]))
    facts["SLURM_NTASKS"] = facts["SLURM_NPROCS"] = (
        number,
        f"{note}: --set SLURM_NTASKS=VALUE gives another value",
    )


# Evaluates texts and files that a script hands to a shell: ``eval``, ``source``, ``bash -c``.


_MOST_FILES = 50


def parsed_file(session: Session, text: str, name: str) -> Script:
    """Parse a file; from now on the names that it assigns count as set by the script."""
    if len(session.files) >= _MOST_FILES:
        message = f"the script reads more than {_MOST_FILES} files: {LAUNCH_LINE_ALONE}"
        raise LineError(0, message)
    number = len(session.files)
    session.files.append(name)
    script = parsed(text, number * FILE)
    _know(session, script)
    for fact, value in facts_of(text, session, number * FILE).items():
        session.facts.setdefault(fact, value)
    return script


def _know(session: Session, script: Script) -> None:
    for assigned, line in assigned_names(script).items():
        session.assigned[assigned] = min(line, session.assigned.get(assigned, line))


def evaluated(call: Call, text: Text) -> None:
    """Evaluate ``eval``: run the commands in a text."""
    call.session.spend(call.line, len(text))
    script = parsed_value(text)
    _know(call.session, script)
    call.session.enter(call.line)
    call.session.conditions.append(_handed(call, text))
    call.runner.run(script, call.state)
    call.session.conditions.pop()
    call.session.callers.pop()


def sourced(call: Call) -> int | None:
    """Evaluate ``source file arguments``: run the commands of a file; returns None if the file is
    missing.
    """
    state, session, path = call.state, call.session, call.arguments[0]
    text = text_of_file(session, state, path)
    if text is None:
        return None
    script = _file(session, text, path)
    before = state.arguments
    if len(call.arguments) > 1:
        state.arguments = call.arguments[1:]
    session.enter(call.line)
    session.parked.append(("function", []))
    call.runner.run(script, state)
    collected(session, state, (RETURN,))
    session.parked.pop()
    session.callers.pop()
    if state.flow == RETURN:
        state.flow = NORMAL
    if len(call.arguments) > 1:
        state.arguments = before
    return 0


def _file(session: Session, text: Text, path: Text) -> Script:
    """Parse a file that the script wrote, or that is in the script's folder."""
    if text.is_known and len(text.marks) <= 1:
        return parsed_file(
            session, text.chars, normpath(known_path(path) or session.rendered(path))
        )
    script = parsed_value(text)
    _know(session, script)
    return script


def run_text(call: Call, text: Text, arguments: Sequence[Text], outer: Sequence[Text]) -> None:
    """Evaluate ``bash -c text name arguments``: run the commands in a text in a separate shell."""
    call.session.spend(call.line, len(text))
    script = parsed_value(text)
    _know(call.session, script)
    call.session.conditions.append(_handed(call, text))
    _run_child(call, script, arguments, outer)
    call.session.conditions.pop()


def _handed(call: Call, text: Text) -> Guard:
    """Make the condition under which the commands in a text run: the assumptions on which the text
    depends.
    """
    return Guard(line=call.line, source="", assumed=text.assumed)


def run_file(call: Call, text: Text, words: Sequence[Text], outer: Sequence[Text]) -> None:
    """Evaluate ``bash file arguments``: run the commands of a file in a separate shell.

    A script that starts itself with the arguments that it has, such as to submit itself to a queue,
    comes to the same place again: what it starts is taken as done.
    """
    session = call.session
    start = (text.chars, *(session.rendered(word) for word in words[1:]))
    itself = (session.source.text, *map(session.rendered, call.state.arguments))
    if start in session.running or (start == itself and not session.running):
        call.state.status = 0
        return
    session.running.append(start)
    _run_child(call, _file(session, text, words[0]), words, outer)
    session.running.pop()


def _run_child(call: Call, script: Script, words: Sequence[Text], outer: Sequence[Text]) -> None:
    session, state = call.session, call.state
    child = State(
        variables=exported(state.variables, session),
        name=words[0] if words else None,
        arguments=tuple(words[1:]),
        written=dict(state.written),
        output=state.output,
        input=state.input,
    )
    before, session.outer = session.outer, (*session.outer, *outer)
    session.enter(call.line)
    apart(session, child, lambda each: call.runner.run(script, each))
    session.callers.pop()
    session.outer = before
    state.written.update(child.written)
    state.output = child.output
    state.status = child.status


def exported(variables: Mapping[str, Variable], session: Session) -> dict[str, Variable]:
    """Return the variables that a started program sees: exported ones, and those that the user
    sets.
    """
    given = session.source.settings
    return {
        name: replace(variable, is_list=False)
        for name, variable in variables.items()
        if variable.exported or name in given
    }


# Evaluates calls of programs, which are never run: output that is known, scripts that they start,
# and launches of training.


_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
_QUEUES = frozenset(("sbatch", "qsub", "bsub"))
# Programs that scripts call only for their exit status.
_ASKED = word_set(
    """
    grep egrep fgrep cmp diff command which type pgrep ping nc test-path timeout curl
    """
)
_PREFIXES = frozenset(("env", "nohup", "exec", "sudo", "nice", "time", "stdbuf", "setsid"))
# Programs that have a script among their arguments but do not run it.
_FILERS = frozenset(
    [
        *("chgrp", "chmod", "chown", "cp", "dos2unix", "file", "grep", "head", "install", "less"),
        *("ln", "ls", "md5sum", "more", "mv", "rm", "rsync", "scp", "sed", "sha256sum", "stat"),
        *("tail", "tar", "touch", "vi", "vim", "wc", "zip"),
    ]
)
_MOST_PREFIXES = 10
_SCRIPT = re.compile(r".*\.(?:sh|bash|slurm|sbatch|job|pbs|sub)$")
_ENVIRONMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)


def run_program(call: Call) -> None:
    """Evaluate a command that is neither a shell function nor a builtin."""
    state, name = call.state, name_of(call.program)
    if name == "exec" and not call.arguments:
        state.status = 0
        return
    if name == "cat":
        _cat(call)
    elif name == "tee":
        _tee(call)
    elif name == "sed" and run_sed(call):
        pass
    elif not _known_output(call, name) and not _inner(call):
        _outside(call, name)
    if name == "exec":
        call.session.exits.append((call.line, tuple(call.session.conditions)))
        state.flow = EXIT


def _known_output(call: Call, name: str) -> bool:
    given = call.state.input if name in READERS else None
    if name in READERS and given is None:
        return False
    text = output_of(name, call.arguments, given)
    if text is None:
        return False
    call.state.print(text)
    call.state.status = 0
    return True


def _cat(call: Call) -> None:
    """Evaluate ``cat``: print the input, or files whose text is known."""
    state = call.state
    paths = [text for text in call.arguments if not text.chars.startswith("-")]
    if not paths:
        _print_input(call)
        return
    texts = [text_of_file(call.session, state, path) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if text is None:
            shown = call.session.rendered(path)
            state.print(call.session.unknown_at(call.line, f"$(cat {shown})", "was not found"))
        else:
            state.print(text)
    state.status = 0


def _print_input(call: Call) -> None:
    state = call.state
    if state.input is not None:
        state.print(state.input)
        state.input = Text()
    state.status = 0


def _tee(call: Call) -> None:
    """Evaluate ``tee``: write the input to files and to standard output."""
    state = call.state
    appends = any(text.chars in ("-a", "--append") for text in call.arguments)
    if state.input is not None and (len(state.input) > 1 or state.input.is_known):
        for path in call.arguments:
            if not path.chars.startswith("-"):
                shown = normpath(call.session.rendered(path))
                before = state.written.get(shown) if appends else None
                state.written[shown] = joined((before, state.input)) if before else state.input
    _print_input(call)


def _inner(call: Call) -> bool:
    """Evaluate the shell, script or function that a program starts; returns whether there is
    one.
    """
    words = call.fields
    if name_of(call.program) in _FILERS:
        return False
    for number, word in enumerate(words):
        if is_launcher(word.chars) or word.chars.endswith(".py"):
            return False
        if (follow := _starter(call, number)) is not None:
            return follow(call, number)
    if name_of(call.program) in _PREFIXES:
        return _prefixed(call)
    if name_of(call.program) in _QUEUES and call.state.input is not None:
        run_text(call, call.state.input, (), words)
        return True
    return False


def _starter(call: Call, number: int) -> Callable[[Call, int], bool] | None:
    """Return the function that evaluates the shell or script that a word starts, or None for
    another word.
    """
    chars = call.fields[number].chars
    if name_of(chars) in _SHELLS:
        return _shell
    if _SCRIPT.match(chars) and not _is_value(call.fields, number):
        return _named
    if name_of(chars) == "ssh":
        return _remote
    return _wrap if chars == "--wrap" or chars.startswith("--wrap=") else None


def _named(call: Call, number: int) -> bool:
    return _script(call, call.fields[number:], call.fields[:number])


def _is_value(words: Sequence[Text], number: int) -> bool:
    """Return whether a word can be the value of the option before it."""
    return (
        number > 1
        and words[number - 1].chars.startswith("--")
        and "=" not in words[number - 1].chars
    )


def _shell(call: Call, number: int) -> bool:
    words, at = call.fields, number + 1
    takes_text = False
    while at < len(words) and re.match(r"[-+][a-zA-Z]|--\w", words[at].chars):
        option = words[at].chars
        at += 2 if option.endswith(("-o", "+o")) or option in ("--rcfile", "--init-file") else 1
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", option):
            takes_text = True
            break
    if takes_text and at < len(words):
        run_text(call, words[at], words[at + 1 :], words[:number])
        return True
    if at < len(words) and not words[at].chars.startswith("-"):
        return _script(call, words[at:], words[:number])
    if call.state.input is not None:
        run_text(call, call.state.input, (), words[:number])
        return True
    return False


def _script(call: Call, words: Sequence[Text], outer: Sequence[Text]) -> bool:
    """Evaluate a script file that is started with these arguments."""
    session = call.session
    text = text_of_file(session, call.state, words[0])
    if text is None or session.captures:
        path = session.rendered(words[0])
        if any(word.chars.endswith(".py") for word in words[1:]):
            session.missing.append((call.line, path))
            before, session.outer = session.outer, (*session.outer, *outer)
            _outside(replace(call, fields=tuple(words)), "")
            session.outer = before
            return True
        session.started_scripts.append((call.line, path))
        call.state.print(_printed(call))
        call.state.status = 0
        return True
    run_file(call, text, words, outer)
    return True


def _wrap(call: Call, number: int) -> bool:
    words = call.fields
    word = words[number]
    if word.chars == "--wrap":
        text = words[number + 1] if number + 1 < len(words) else Text()
    else:
        text = word.part(len("--wrap="))
    run_text(call, text, (), words[:number])
    return True


def _remote(call: Call, number: int) -> bool:
    """Evaluate ``ssh host command`` as a remote shell would: its words are joined to one text."""
    words, at = call.fields, number + 1
    while at < len(words) and words[at].chars.startswith("-"):
        at += 2 if words[at].chars in ("-p", "-i", "-o", "-l", "-F", "-J") else 1
    at += 1
    if at < len(words):
        run_text(call, joined(words[at:], " "), (), words[:at])
        return True
    if call.state.input is not None:
        run_text(call, call.state.input, (), words[:at])
        return True
    return False


def _prefixed(call: Call) -> bool:
    """Evaluate the command behind ``env A=1`` or ``nohup``, with the variables set there."""
    rest, texts = list(call.arguments), dict(call.environment)
    while rest:
        match = _ENVIRONMENT.fullmatch(rest[0].chars)
        if match:
            texts[match[1]] = rest.pop(0).part(match.start(2))
        elif rest[0].chars.startswith("-"):
            rest.pop(0)
        else:
            break
    if not rest:
        return False
    if len(call.session.outer) > _MOST_PREFIXES:
        raise LineError(
            call.line, f"has more than {_MOST_PREFIXES} prefixes such as env: write fewer"
        )
    before, call.session.outer = call.session.outer, (*call.session.outer, call.fields[0])
    inner = replace(
        call,
        program=rest[0].chars,
        arguments=tuple(rest[1:]),
        fields=tuple(rest),
        environment=texts,
    )
    if name_of(inner.program) == "eval":
        evaluated(inner, joined(inner.arguments, " "))
    else:
        run_program(inner)
    call.session.outer = before
    return True


def _outside(call: Call, name: str) -> None:
    """Record a program whose effects are unknown, since it may be the one that trains."""
    session, state = call.session, call.state
    session.spend(call.line, 1024)
    variables = exported(state.variables, session)
    environment = {key: each.text for key, each in variables.items() if each.text is not None}
    words = tuple(word.assuming(call.expander.assumed) for word in call.fields)
    session.started.append(
        Started(
            words=words,
            outer=session.outer,
            simple=call.command,
            conditions=tuple(session.conditions),
            loops=tuple(session.loops),
            callers=tuple(session.callers),
            environment={**environment, **call.environment},
            written=dict(state.written),
            is_captured=session.captures > 0,
        )
    )
    text = _printed(call)
    state.print(text)
    # The status of a program is unknown if a condition asks for it; otherwise the program is
    # assumed to succeed.
    is_asked = session.asks > 0 or name in _ASKED
    state.status = (session.first_unknown(text) or 0) if is_asked else 0


def _printed(call: Call) -> Text:
    """Return the output of a program that is not run, as an unknown text."""
    source = " ".join(call.command.source.split())[:80]
    reason = "is not known, since nothing is run"
    return call.session.unknown_at(call.line, f"$({source})", reason)
