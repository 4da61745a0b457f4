"""Megatron-LM's options as a launch line gives them: each with its words, its line and what is
unknown of it.

Names are read as Megatron-LM's ``argparse`` reads them: dashes for underscores, a beginning that
only one option has, ``--no-X`` for a switch X; the last of several counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.core.values import InputError, near_matches
from mistlab.export.found import checked_whole
from mistlab.export.megatron_tables.harmless import FAMILIES, HARMLESS, HARMLESS_SWITCHES
from mistlab.export.megatron_tables.telling import MANY, RENAMED, SWITCHES, TELLING
from mistlab.export.megatron_tables.unsaid import REFUSED, UNSAID
from mistlab.shell.word import Unknown, Word

KNOWN = HARMLESS | TELLING | UNSAID.keys() | REFUSED.keys()
_SPELT = KNOWN | RENAMED.keys()
# Values of switches, as other files write them.
_ON, _OFF = frozenset(("true", "1", "yes", "on")), frozenset(("false", "0", "no", "off"))
# A value that stands for none.
_NONE = frozenset(("None", "null", "~"))
_SHORTEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a launch line: its words, its line, and the first part that is unknown."""

    words: tuple[str, ...]
    line: int = 0
    unknown: Unknown | None = None


@dataclass(slots=True, kw_only=True)
class Options:
    """The options of a launch line by name; the last of several counts.

    ``repeated`` holds the words of those before the last. ``strays`` are unknown words where an
    option could stand, such as ``$EXTRA_ARGS``. ``shortened`` are abbreviations with the names that
    they stand for, ``spelt`` the spellings of names that relatives spell otherwise. What is unknown
    of an ``excused`` option counts as not given. ``taken`` grows with every option asked for.
    """

    given: Mapping[str, Option]
    repeated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strays: Sequence[Word] = ()
    shortened: Mapping[str, str] = field(default_factory=dict)
    spelt: Mapping[str, str] = field(default_factory=dict)
    excused: frozenset[str] = frozenset()
    taken: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, arguments: Iterable[Word | str], excused: Iterable[str] = ()) -> "Options":
        """Options of the words of a launch line."""
        reader = _Reader()
        for argument in arguments:
            reader.take(argument if isinstance(argument, Word) else Word(text=argument))
        return cls(
            given=reader.given,
            repeated=reader.repeated,
            strays=tuple(reader.strays),
            shortened=reader.shortened,
            spelt=reader.spelt,
            excused=frozenset(excused),
        )

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """The words of every option, by its name."""
        return {name: option.words for name, option in self.given.items()}

    def where(self, name: str) -> str:
        """An option's name with its line."""
        line = self.given[name].line if name in self.given else 0
        return f"{name}: line {line}" if line else name

    def __contains__(self, name: object) -> bool:
        return name in self.given

    def has(self, name: str) -> bool:
        """Whether a switch is on."""
        option = self._asked(name)
        if option is None:
            return False
        return not option.words or option.words[0].lower() not in _OFF

    def text(self, name: str) -> str | None:
        """The first word of an option, if it is given."""
        option = self._asked(name)
        if option is None:
            return None
        if not option.words or not option.words[0]:
            message = f"{self.where(name)}: its value is missing: give one"
            raise InputError(message)
        return None if option.words[0] in _NONE else option.words[0]

    def all_words(self, name: str) -> tuple[str, ...]:
        """All words of an option; none where it is not given."""
        option = self._asked(name)
        return () if option is None else option.words

    def whole(self, name: str, *, minimum: int = 1) -> int | None:
        """A whole number, if the option is given."""
        text = self.text(name)
        return None if text is None else checked_whole(self.where(name), text, minimum=minimum)

    def number(self, name: str, default: float, *, maximum: float | None = None) -> float:
        """A number that is not negative, or a default."""
        text = self.text(name)
        try:
            number = default if text is None else float(text)
        except ValueError:
            message = f"{self.where(name)}: {text!r} is not a number: give one"
            raise InputError(message) from None
        if not 0 <= number <= (float("inf") if maximum is None else maximum):
            top = "" if maximum is None else f" to {maximum:g}"
            message = f"{self.where(name)}: {number:g} is out of range: give one from 0{top}"
            raise InputError(message)
        return number

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """One of some words, in small letters or as they are, if the option is given."""
        text = self.text(name)
        if text is None or text in known:
            return text
        same = [word for word in known if word.lower() == text.lower()]
        if not same:
            message = f"{self.where(name)}: {text!r} is unknown{near_matches(text, known)}"
            raise InputError(message)
        return same[0]

    @property
    def harmless(self) -> list[str]:
        """Options that say nothing about cost."""
        return [name for name in self.given if _is_harmless(name)]

    @property
    def unknown(self) -> list[str]:
        """Options that no relative of Megatron-LM has, as far as is known here."""
        return [name for name in self.given if name not in KNOWN and not _is_harmless(name)]

    def _asked(self, name: str) -> Option | None:
        self.taken.add(name)
        option = self.given.get(name)
        if option is None or option.unknown is None:
            return option
        if name in self.excused:
            return None
        message = f"{name}: {option.unknown}"
        raise InputError(message)


def _is_harmless(name: str) -> bool:
    return name in HARMLESS or (name not in KNOWN and name.startswith(FAMILIES))


class _Reader:
    """Takes the words of a launch line one by one."""

    def __init__(self) -> None:
        self.given: dict[str, Option] = {}
        self.repeated: dict[str, list[str]] = {}
        self.strays: list[Word] = []
        self.shortened: dict[str, str] = {}
        self.spelt: dict[str, str] = {}
        self._name = ""

    def take(self, word: Word) -> None:
        """Take the next word: an option, or a value of the last one."""
        name, equals, value = word.text.partition("=")
        if name.startswith("--") and len(name) > len("--") and "$" not in name:
            self._begin(name, word)
            if equals:
                self._add(value, word.unknown)
        elif word.unknown is not None and self._has_enough():
            self.strays.append(word)
        elif self._name:
            self._add(word.text, word.unknown)

    def _begin(self, spelt: str, word: Word) -> None:
        name, value = self._canonical(spelt)
        if name in self.given:
            before = " ".join(self.given[name].words) or "on"
            self.repeated.setdefault(name, []).append(before)
        self.given[name] = Option(words=value, line=word.line)
        self._name = name

    def _canonical(self, spelt: str) -> tuple[str, tuple[str, ...]]:
        """An option's usual name, and the value that its spelling implies."""
        name = spelt.replace("_", "-")
        for beginning in ("--no-", "--disable-"):
            positive = "--" + name.removeprefix(beginning)
            if (
                name.startswith(beginning)
                and positive in SWITCHES
                and name not in _SPELT - HARMLESS
            ):
                return positive, ("false",)
        if name not in _SPELT and not name.startswith(FAMILIES) and len(name) >= _SHORTEST:
            longer = [known for known in _SPELT if known.startswith(name)]
            if len(longer) == 1:
                self.shortened[name] = longer[0]
                name = longer[0]
        if name in RENAMED:
            self.spelt[RENAMED[name]] = name
        return RENAMED.get(name, name), ()

    def _add(self, text: str, unknown: Unknown | None) -> None:
        option = self.given[self._name]
        # A switch may be told off and then be given a value: the value counts.
        kept = () if option.words == ("false",) and text.lower() in _ON | _OFF else option.words
        if kept is not option.words:
            text = "true" if text.lower() in _OFF else "false"
        self.given[self._name] = Option(
            words=(*kept, text), line=option.line, unknown=option.unknown or unknown
        )

    def _has_enough(self) -> bool:
        """Whether the last option has all the words that it takes."""
        if not self._name or self._name in SWITCHES | HARMLESS_SWITCHES:
            return True
        if self._name in MANY:
            return False
        return bool(self.given[self._name].words)


# Options that Megatron-DeepSpeed alone has.
_OF_DEEPSPEED = (
    *("--deepspeed", "--deepspeed-config", "--zero-stage", "--ds-sequence-parallel-size"),
    *("--no-pipeline-parallel", "--create-moe-param-group", "--deepspeed-activation-checkpointing"),
)


def is_of_deepspeed(options: Options) -> bool:
    """Whether a line is Megatron-DeepSpeed's, which has defaults of its own."""
    return any(name in options for name in _OF_DEEPSPEED)


def is_of_epfl(options: Options) -> bool:
    """Whether a line is that of EPFL's Megatron-LLM, which has no biases unless it is told to."""
    return "--model-name" in options or "--use-bias" in options
