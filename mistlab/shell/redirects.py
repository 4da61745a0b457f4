"""Follows redirections: here-documents and files that the script writes itself."""

from collections.abc import Callable, Sequence
from posixpath import dirname, normpath

from mistlab.shell.expansion import Words
from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, joined, plain
from mistlab.shell.state import State
from mistlab.shell.syntax import Redirect

_WRITES = (">", ">>", ">|", "&>", "&>>")


def redirected(
    session: Session,
    state: State,
    redirects: Sequence[Redirect],
    way: Callable[[State], None],
) -> None:
    """Follow a way with its input and output redirected."""
    if not redirects:
        way(state)
        return
    words = Words(session, state)
    before_input, before_output = state.input, state.output
    path: str | None = None
    appends = False
    for redirect in redirects:
        if redirect.operator in ("<", "<<", "<<-", "<<<"):
            state.input = _input(session, state, words, redirect)
        elif redirect.operator in _WRITES and redirect.descriptor in ("", "1"):
            path = session.rendered(words.text(redirect.target))
            appends = redirect.operator in (">>", "&>>")
            state.output = Text()
        elif _is_to_errors(redirect):
            path, state.output = "/dev/stderr", Text()
    way(state)
    printed = state.output
    state.input = before_input
    if path is None:
        return
    state.output = before_output
    if printed is not None and not path.startswith("/dev/"):
        _write(session, state, path, printed, appends=appends)


def _is_to_errors(redirect: Redirect) -> bool:
    is_output = redirect.operator == ">&" and redirect.descriptor in ("", "1")
    return is_output and redirect.target.bare == "2"


def _write(session: Session, state: State, path: str, text: Text, *, appends: bool) -> None:
    """Keep a written text; what a program prints that is not run is no text of the script's."""
    unknown = session.first_unknown(text)
    if unknown is not None and len(text) == 1:
        return
    path = normpath(path)
    before = state.written.get(path) if appends else None
    state.written[path] = joined((before, text)) if before else text


def _input(session: Session, state: State, words: Words, redirect: Redirect) -> Text:
    if redirect.operator == "<<<":
        return joined((words.text(redirect.target), plain("\n", redirect.line)))
    if redirect.operator != "<":
        return words.text(redirect.body[0]) if redirect.body else Text()
    target = words.text(redirect.target)
    text = text_of_file(session, state, target)
    if text is not None:
        return text
    shown = session.rendered(target)
    return session.unknown_at(redirect.line, shown, "is a file that is not at hand")


def text_of_file(session: Session, state: State, path: Text) -> Text | None:
    """The text of a file that the script wrote, or that is at hand beside it."""
    shown = normpath(session.rendered(path))
    if shown in state.written:
        return state.written[shown]
    text = beside(session, path)
    return None if text is None else plain(text, path.line)


def beside(session: Session, path: Text) -> str | None:
    """The text of a file beside the script; a folder that is not known is taken as the script's."""
    known = known_path(path)
    if not known:
        return None
    known = normpath(known)
    text = session.source.beside(known)
    own = f"{dirname(session.source.name)}/"
    if text is None and len(own) > 1 and known.startswith(own):
        return session.source.beside(known.removeprefix(own))
    return text


def known_path(path: Text) -> str:
    """A path without its folders that are not known, which are taken as the script's."""
    known = path.chars
    while known and not plain(known).is_known:
        known = known.partition("/")[2]
    return known
