"""Programs that are not run: what they print if it is known, scripts that they start, launches."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from posixpath import normpath

from mistlab.shell.call import Call
from mistlab.shell.launchers import is_launcher, name_of
from mistlab.shell.outside import READERS, output_of
from mistlab.shell.redirects import text_of_file
from mistlab.shell.scripts import evaluated, exported, run_file, run_text
from mistlab.shell.sed import run_sed
from mistlab.shell.session import Started
from mistlab.shell.shell_text import LineError, Text, joined
from mistlab.shell.state import EXIT

_SHELLS = frozenset(("bash", "sh", "zsh", "dash", "ksh"))
_QUEUES = frozenset(("sbatch", "qsub", "bsub"))
# Their status is what a script wants to know from them.
_ASKED = frozenset(
    [
        "grep",
        "egrep",
        "fgrep",
        "cmp",
        "diff",
        "command",
        "which",
        "type",
        "pgrep",
        "ping",
        "nc",
        "test-path",
        "timeout",
        "curl",
    ]
)
_PREFIXES = frozenset(("env", "nohup", "exec", "sudo", "nice", "time", "stdbuf", "setsid"))
# They take a script as a file, and do not start it.
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
    """Evaluate a command that is no function and no builtin."""
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
    """``cat``: its input, or files at hand."""
    state = call.state
    paths = [text for text in call.arguments if not text.chars.startswith("-")]
    if not paths:
        _print_input(call)
        return
    texts = [text_of_file(call.session, state, path) for path in paths]
    for path, text in zip(paths, texts, strict=True):
        if text is None:
            shown = call.session.rendered(path)
            state.print(call.session.unknown_at(call.line, f"$(cat {shown})", "is not at hand"))
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
    """``tee``: its input, written to files, too."""
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
    """Follow the shell, the script or the function that a program starts; whether it starts one."""
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
    """How to follow a word that starts a shell or a script; None for another word."""
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
    """Whether a word seems to be an option's value."""
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
    """Follow a script file with its arguments."""
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
    """``ssh host command``: the command's words are one text for a shell there."""
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
    """``env A=1 command``, ``nohup command``: the command itself, with more variables."""
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
        raise LineError(call.line, f"starts with more than {_MOST_PREFIXES} prefixes: write fewer")
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
    """A program of which nothing is known but its words."""
    session, state = call.session, call.state
    session.spend(call.line, 1024)
    variables = exported(state.variables, session)
    environment = {key: each.text for key, each in variables.items() if each.text is not None}
    words = tuple(word.assuming(call.words.assumed) for word in call.fields)
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
    # Alone or before && and ||, a program is taken to do its work; conditions ask whether it does.
    is_asked = session.asks > 0 or name in _ASKED
    state.status = (session.first_unknown(text) or 0) if is_asked else 0


def _printed(call: Call) -> Text:
    """What a program prints that is not run."""
    source = " ".join(call.command.source.split())[:80]
    reason = "is not known, since nothing is run"
    return call.session.unknown_at(call.line, f"$({source})", reason)
