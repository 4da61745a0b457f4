"""Evaluates alternative control flows of a script, such as both branches of an unknown condition,
and merges the states that they reach.
"""

from collections.abc import Callable, Sequence

from mistlab.shell.launchers import parts_of
from mistlab.shell.session import EXIT, NORMAL, RETURN, Guard, Key, Session, State, Variable, scalar
from mistlab.shell.shell_text import Text, Unknown, joined
from mistlab.shell.syntax import Script

_MOST = 16
_BLANKS = " \t\n"


def merge(session: Session, state: State, other: State, cause: Unknown) -> None:
    """Merge the states that two control flows reach into ``state``: a value that differs becomes
    unknown.

    ``cause`` is why it is not known which way is taken.
    """
    for name in {*state.variables, *other.variables}:
        first, second = state.variables.get(name), other.variables.get(name)
        if first != second:
            state.variables[name] = _variable(session, name, (first, second), cause)
    for frame, hidden in zip(state.frames, other.frames, strict=False):
        for name, variable in hidden.items():
            frame.setdefault(name, variable)
    state.functions = {**other.functions, **state.functions}
    if state.folder != other.folder:
        state.folder = None
    _merge_streams(session, state, other, cause)
    for path, text in other.written.items():
        state.written[path] = _text(session, path, (state.written.get(path), text), cause)
    if state.arguments != other.arguments:
        state.arguments = _sequence(session, "$@", state.arguments, other.arguments, cause)
    if state.status != other.status:
        state.status = cause


def _merge_streams(session: Session, state: State, other: State, cause: Unknown) -> None:
    """Merge what two control flows have printed, and the input that they have not read."""
    if state.output != other.output and state.output is not None and other.output is not None:
        state.output = _text(session, "the output", (state.output, other.output), cause)
    if state.input != other.input and state.input is not None:
        state.input = _text(session, "the input", (state.input, other.input), cause)


def _variable(
    session: Session, name: str, pair: tuple[Variable | None, Variable | None], cause: Unknown
) -> Variable:
    first, second = pair
    sample = first or second
    assert sample is not None
    exported = any(each and each.exported for each in pair)
    if any(each and (each.is_list or each.is_map) for each in pair):
        if sample.is_map:
            return _map(session, name, pair, cause)
        lists = [each.values if each else [] for each in pair]
        merged = _sequence(session, f"${{{name}[@]}}", lists[0], lists[1], cause)
        items: dict[Key, Text] = dict(enumerate(merged))
        return Variable(items=items, is_list=True, exported=exported)
    texts = first.text if first else None, second.text if second else None
    return scalar(_text(session, f"${name}", texts, cause), exported=exported)


def _map(
    session: Session, name: str, pair: tuple[Variable | None, Variable | None], cause: Unknown
) -> Variable:
    tables = [dict(each.items) if each else {} for each in pair]
    items = {
        key: _text(session, f"${{{name}[{key}]}}", (tables[0].get(key), tables[1].get(key)), cause)
        for key in {**tables[0], **tables[1]}
    }
    return Variable(items=items, is_map=True)


def _text(
    session: Session, expression: str, pair: tuple[Text | None, Text | None], cause: Unknown
) -> Text:
    """Merge two texts: the common prefix and suffix stay, and what is between them becomes one
    unknown part.
    """
    first, second = (each or Text() for each in pair)
    if first == second and None not in pair:
        return first
    if first.chars == second.chars:
        return first.assuming(second.assumed)
    head = _alike(first.chars, second.chars, min(len(first), len(second)))
    rest = min(len(first), len(second)) - head
    tail = _alike(first.chars[::-1], second.chars[::-1], rest)
    # Extend the unknown part to whole words.
    while head and not _parts_at(first.chars, second.chars, head):
        head -= 1
    while tail and not _parts_at(first.chars[::-1], second.chars[::-1], tail):
        tail -= 1
    middles = [each.part(head, len(each) - tail) for each in (first, second)]
    unknown = _either(session, expression, [[each] if each else [] for each in middles], cause)
    pieces = [first.part(0, head), unknown, first.part(len(first) - tail)]
    return joined(_spaced(pieces, middles))


def _alike(first: str, second: str, most: int) -> int:
    """Return the length of the common prefix of two texts."""
    return next((at for at in range(most) if first[at] != second[at]), most)


def _parts_at(first: str, second: str, offset: int) -> bool:
    """Return whether an offset is a word boundary in two texts that are equal up to it."""
    if first[offset - 1] in _BLANKS:
        return True
    return all(text[offset : offset + 1] in ("", *_BLANKS) for text in (first, second))


def _spaced(pieces: list[Text], middles: list[Text]) -> list[Text]:
    """Join prefix, unknown part and suffix of a text; blanks separate an unknown part that contains
    blanks.
    """
    blank = Text(" ")
    starts = any(middle.chars[:1] in tuple(_BLANKS) for middle in middles)
    stops = any(middle.chars[-1:] in tuple(_BLANKS) for middle in middles)
    head, middle, tail = pieces
    return [head, *([blank] if starts else []), middle, *([blank] if stops else []), tail]


def _sequence(
    session: Session, expression: str, first: Sequence[Text], second: Sequence[Text], cause: Unknown
) -> tuple[Text, ...]:
    """Merge two lists of words: the common prefix and suffix stay, and what is between them becomes
    one unknown word.
    """
    shorter = min(len(first), len(second))
    head = next((at for at in range(shorter) if first[at].chars != second[at].chars), shorter)
    rest = shorter - head
    tail = next((at for at in range(rest) if first[-1 - at].chars != second[-1 - at].chars), rest)
    middles = [list(each[head : len(each) - tail]) for each in (first, second)]
    middle = [_either(session, expression, middles, cause)] if any(middles) else []
    return (*first[:head], *middle, *first[len(first) - tail :])


def _either(
    session: Session, expression: str, middles: Sequence[Sequence[Text]], cause: Unknown
) -> Text:
    """Make an unknown part that stands for one of two lists of words."""
    choices = [_choices(session, words) for words in middles]
    known = [choice for each in choices if each is not None for choice in each]
    either = tuple(dict.fromkeys(known)) if None not in choices and len(known) <= _MOST else ()
    line = max((word.line for words in middles for word in words), default=0)
    text = session.unknown_at(line, expression, depends(cause), cause.remedy, either)
    assumed = frozenset().union(*(word.assumed for words in middles for word in words))
    return text.assuming(assumed)


def depends(cause: Unknown) -> str:
    """Explain an unknown part whose value was assigned under an unknown condition."""
    line = f"line {cause.line} of {cause.file}" if cause.file else f"line {cause.line}"
    return f"depends on {line}: {cause.expression}, which is not known"


def _choices(session: Session, words: Sequence[Text]) -> list[str] | None:
    """Return the texts that some words may stand for."""
    if len(words) == 1 and len(words[0]) == 1 and (unknown := session.first_unknown(*words)):
        return list(unknown.either) or None
    return [" ".join(session.rendered(word) for word in words).strip(_BLANKS)]


# Evaluates subshells, and the alternative control flows of a script.


Way = Callable[[State], None]


def run_apart(session: Session, script: Script, child: State) -> None:
    """Run a part of a script as in a subshell, so that its ``exit`` does not end the script."""
    apart(session, child, lambda state: session.run(script, state))


def apart(session: Session, child: State, way: Way) -> None:
    """Call a function on a copy of the state, as in a subshell."""
    parked, session.parked = session.parked, []
    loops, session.loops = session.loops, list(session.loops)
    way(child)
    session.parked, session.loops = parked, loops
    child.flow = NORMAL


def divided(
    session: Session, state: State, cause: Unknown, ways: Sequence[Way], condition: Guard
) -> None:
    """Run alternative control flows from the same state, and continue with the merged results.

    A way that ends the script is left out: the user wants the training that the others start.
    """
    ends: list[State] = []
    for way in ways:
        end = state.copy()
        session.conditions.append(condition)
        way(end)
        session.conditions.pop()
        if end.flow != EXIT:
            ends.append(end)
    if not ends:
        state.flow = EXIT
        return
    flows = {end.flow for end in ends}
    kept = NORMAL if NORMAL in flows else ends[0].flow
    first, *others = [end for end in ends if end.flow == kept]
    for end in ends:
        if end.flow != kept:
            park(session, end, cause)
    state.take(first)
    for end in others:
        merge(session, state, end, cause)


def guarded(session: Session, state: State, ways: Sequence[Way], condition: Guard) -> None:
    """Run the first of two control flows. If it ends the script only because of an assumption, undo
    it and run the second.

    Where the condition rests on what is taken for granted and the script would end, as a guard
    against a variable that is not set ends it, what was taken for granted does not hold.
    """
    before = state.copy() if condition.assumed else None
    started = len(session.started)
    session.conditions.append(condition)
    ways[0](state)
    session.conditions.pop()
    if before is not None and state.flow == EXIT and not _launches(session, started):
        state.take(before)
        ways[1](state)


def _launches(session: Session, started: int) -> bool:
    """Return whether a control flow started a command that may train."""
    later = session.started[started:]
    return any(parts_of(each.words) is not None for each in later if not each.is_captured)


def park(session: Session, state: State, cause: Unknown) -> None:
    """Keep the state of a control flow that leaves a function or loop early, until that function or
    loop ends.
    """
    kind = "function" if state.flow == RETURN else "loop"
    for name, states in reversed(session.parked):
        if name != kind:
            continue
        for kept, why in states:
            if kept.flow == state.flow:
                merge(session, kept, state, why)
                return
        states.append((state, cause))
        return


def collected(session: Session, state: State, flows: Sequence[str]) -> None:
    """Merge into the current state those of control flows that left a function or loop early in one
    of these ways.
    """
    _, states = session.parked[-1]
    for parked in [each for each in states if each[0].flow in flows]:
        states.remove(parked)
        kept, cause = parked
        kept.flow = NORMAL
        if state.flow == EXIT:
            state.take(kept)
        else:
            merge(session, state, kept, cause)
