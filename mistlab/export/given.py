"""The options that a user gives to import a file, and the remarks that the user gets in return.

A remark names a choice and says in words what became of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NoReturn

from mistlab import catalog
from mistlab.core.values import InputError, shown
from mistlab.engines.engine import Precision
from mistlab.job.job import Job
from mistlab.machine.hardware import Hardware
from mistlab.plan.dimensions import DIMENSIONS, amount_words
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Attention, ModelSpec, Workload
from mistlab.shell.shell_text import Unknown

# What a remark says of a choice: an export lost or approximated it, or notes a consequence; an
# import assumed it, ignored it, found it contradictory, or notes that it does not affect cost.
Kind = Literal["lost", "approximated", "noted", "assumed", "ignored", "contradicting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A remark for the user on one choice that an export or import changed, ignored or assumed."""

    kind: Kind
    choice: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.choice}: {self.text}"


def changes(before: Job, after: Job, because: str) -> Iterator[Remark]:
    """Yield a remark for each choice in which two jobs differ; each remark ends with ``because``,
    the reason.

    A choice is lost if no stage makes it any more, otherwise it is approximated.
    """
    if before.plan.num_stages == after.plan.num_stages:
        yield from _changes_of_stages(before.plan, after.plan, because)
    else:
        text = f"{before.plan.num_stages} -> {after.plan.num_stages}: {because}"
        yield Remark(kind="approximated", choice="stages", text=text)
    for field in fields(before.plan):
        if field.name not in ("stages", "engine"):
            pair = getattr(before.plan, field.name), getattr(after.plan, field.name)
            yield from _change(field.name, pair, because)
    yield from changes_of_workloads(before.workload, after.workload, because)
    for name in ("nodes", "gpus_per_node"):
        was, now = getattr(before.cluster, name), getattr(after.cluster, name)
        if was != now:
            yield Remark(kind="noted", choice=f"cluster.{name}", text=f"{was} -> {now}: {because}")


def changes_of_workloads(before: Workload, after: Workload, because: str) -> Iterator[Remark]:
    """Yield a remark for each field in which two workloads, or their models, differ."""
    for field in fields(before):
        # A workload without a rank of adapters uses the default rank, so compare the ranks that
        # result.
        is_same_rank = field.name == "adapter_rank" and before.rank == after.rank
        if field.name != "model" and not is_same_rank:
            pair = getattr(before, field.name), getattr(after, field.name)
            yield from _change(field.name, pair, because)
    for field in fields(before.model):
        pair = getattr(before.model, field.name), getattr(after.model, field.name)
        if field.name not in ("name", "trained"):
            yield from _change(f"model.{field.name}", pair, because)


def _change(choice: str, pair: tuple[object, object], because: str) -> Iterator[Remark]:
    was, now = pair
    if was != now:
        text = f"{_word_of(was)} -> {_word_of(now)}: {because}"
        yield Remark(kind="approximated", choice=choice, text=text)


def _word_of(value: object) -> object:
    """Return how a remark shows a value: true, false and null as in a plan file."""
    return shown(value) if value is None or isinstance(value, bool) else value


def _changes_of_stages(before: Plan, after: Plan, because: str) -> Iterator[Remark]:
    for name, row in DIMENSIONS.items():
        was = [stage.value(name) for stage in before.stages]
        now = [stage.value(name) for stage in after.stages]
        if was == now:
            continue
        is_lost = row.default is not None and all(value == row.default for value in now)
        change = f"{values_words(name, was)} -> {values_words(name, now)}: {because}"
        yield Remark(
            kind="lost" if is_lost else "approximated", choice=choice_of(name), text=change
        )


def choice_of(name: str) -> str:
    """The key of a plan dimension in a plan file, such as ``offload.weights``."""
    return DIMENSIONS[name].path or name


def values_words(name: str, values: Sequence[float]) -> str:
    """Describe the values that a plan dimension has on the stages: a single value if all are equal,
    otherwise one per stage.
    """
    amounts = [
        amount_words(name, DIMENSIONS[name].number(value)) or ("on" if value else "off")
        for value in values
    ]
    return amounts[0] if len(set(amounts)) == 1 else " ".join(amounts)


# What a user gives to import a file, the error that asks for more of it, and the job that results.


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The options that a user gives to import a file; an option that is None is taken from the
    file, or from a default.

    An option wins over the file, and a remark tells where the two differ.
    """

    hardware: Hardware
    model: ModelSpec | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    attention: Attention | None = None
    precision: Precision | None = None
    engine: str | None = None
    vocab_size: int | None = None


class MissingError(InputError):
    """The error that a file lacks a fact which the user can give: by the option for the field
    ``choice`` of ``Given``, or by ``--set`` for the ``variable`` of a script.
    """

    def __init__(self, message: str, *, choice: str = "", variable: str = "") -> None:
        super().__init__(message)
        self.choice = choice
        self.variable = variable


def ask_for(choice: str, message: str) -> NoReturn:
    """Raise a ``MissingError``; the message names the fact that the file lacks, and the option that
    gives it.
    """
    raise MissingError(message, choice=choice) from None


def ask_for_variable(where: str, unknown: Unknown) -> NoReturn:
    """Raise the error that a value in a file is known only when its script runs; ``where`` names
    the value.
    """
    message = f"{where}: {unknown}"
    raise MissingError(message, variable=unknown.variable) from None


def stand_in(choice: str, given: Given) -> Given:
    """The user's options with any value for one that is missing, so that a file can be read on to
    see what else it lacks.
    """
    values: Mapping[str, Any] = {
        "model": catalog.model("llama3-8b"),
        "gpus_per_node": given.hardware.node.gpus,
        "sequence_length": 2048,
        "precision": "fp16",
    }
    return replace(given, **{choice: values.get(choice, 1)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The job made from an imported file, with remarks on what was assumed, ignored or
    contradictory.
    """

    job: Job
    remarks: tuple[Remark, ...]
