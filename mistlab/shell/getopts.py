"""``getopts``: a script's short options, one at a time."""

from mistlab.shell.call import Call
from mistlab.shell.shell_text import Text, plain
from mistlab.shell.state import Status, scalar
from mistlab.shell.variables import assign


def run_getopts(call: Call) -> Status:
    """Read the next option into a variable; ``OPTIND`` and ``OPTARG`` tell how it goes on."""
    if len(call.arguments) < 2:
        return 2
    letters, name = call.arguments[0].chars, call.arguments[1].chars
    arguments = call.arguments[2:] or call.state.arguments
    if unknown := call.session.first_unknown(*arguments):
        return unknown
    index, inner = _position(call)
    current = arguments[index - 1] if 0 < index <= len(arguments) else Text()
    is_option = len(current) > 1 and current.chars[0] == "-"
    if not is_option or current.chars == "--":
        _assign(call, name, plain("?"))
        _place(call, index + (current.chars == "--"), 1)
        return 1
    letter = current.chars[inner]
    after = letters.partition(letter)[2] if letter != ":" and letter in letters else None
    rest = current.part(inner + 1)
    if after is None or not after.startswith(":"):
        _place(call, index if rest else index + 1, inner + 1 if rest else 1)
        return _take(call, name, letter if after is not None else "?", None)
    if rest:
        _place(call, index + 1, 1)
        return _take(call, name, letter, rest)
    _place(call, index + 2, 1)
    if index >= len(arguments):
        return _take(call, name, ":" if letters.startswith(":") else "?", plain(letter))
    return _take(call, name, letter, arguments[index])


def _position(call: Call) -> tuple[int, int]:
    variables = call.state.variables
    texts = [variables[each].text if each in variables else None for each in ("OPTIND", " OPTAT")]
    numbers = [int(text.chars) if text and text.chars.isdecimal() else 1 for text in texts]
    return numbers[0], numbers[1]


def _place(call: Call, index: int, inner: int) -> None:
    call.state.variables["OPTIND"] = scalar(plain(str(index)))
    call.state.variables[" OPTAT"] = scalar(plain(str(inner)))


def _assign(call: Call, name: str, text: Text) -> None:
    assign(call.session, call.state, name, text)


def _take(call: Call, name: str, letter: str, value: Text | None) -> Status:
    _assign(call, name, plain(letter, call.line))
    if value is None:
        call.state.variables.pop("OPTARG", None)
        call.session.assigned.setdefault("OPTARG", 0)
    else:
        _assign(call, "OPTARG", value)
    return 0
