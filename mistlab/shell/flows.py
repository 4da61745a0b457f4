"""Runs parts of a script apart from the rest, and ways that it may take beside one another."""

from collections.abc import Callable, Sequence

from mistlab.shell.launchers import parts_of
from mistlab.shell.merge import merge
from mistlab.shell.session import Condition, Session
from mistlab.shell.state import EXIT, NORMAL, RETURN, State
from mistlab.shell.syntax import Script
from mistlab.shell.word import Unknown

Way = Callable[[State], None]


def run_apart(session: Session, script: Script, child: State) -> None:
    """Run a script in a subshell's state; what leaves it leaves no more than the subshell."""
    apart(session, child, lambda state: session.run(script, state))


def apart(session: Session, child: State, way: Way) -> None:
    """Follow a way in a subshell's state."""
    parked, session.parked = session.parked, []
    loops, session.loops = session.loops, list(session.loops)
    way(child)
    session.parked, session.loops = parked, loops
    child.flow = NORMAL


def divided(
    session: Session, state: State, cause: Unknown, ways: Sequence[Way], condition: Condition
) -> None:
    """Follow several ways from one state, and go on with all that they agree on.

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


def guarded(session: Session, state: State, ways: Sequence[Way], condition: Condition) -> None:
    """Follow the first of two ways, which a condition asks for.

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
    """Whether a command after the first ``started`` ones may train."""
    later = session.started[started:]
    return any(parts_of(each.words) is not None for each in later if not each.is_captured)


def park(session: Session, state: State, cause: Unknown) -> None:
    """Keep a state that leaves a function or a loop early until its end is reached."""
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
    """Join the states that were parked with one of some flows to the state at hand."""
    _, states = session.parked[-1]
    for parked in [each for each in states if each[0].flow in flows]:
        states.remove(parked)
        kept, cause = parked
        kept.flow = NORMAL
        if state.flow == EXIT:
            state.take(kept)
        else:
            merge(session, state, kept, cause)
