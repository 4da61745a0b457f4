"""Generates the fields of stages and of search spaces from the table of dimensions
(``DIMENSIONS``): one field for each dimension.

``mistlab.plan.dimension_fields`` has the classes; type checkers read its stub, which
``python -m benchmarks.stubs`` writes from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from mistlab.core.values import bounded, check_fields, name_in, refuse
from mistlab.engines.engine import names_for_plans
from mistlab.plan.dimension import Dimension
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.schedule.orders import DEFAULT_ORDER

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DEFAULT_ENGINE = "mistlab"
# How many blocks of a stage the plans of a search space may recompute: all, none or all, or any
# number.
Recomputation = Literal["all", "none_or_all", "any"]
# A generated dataclass field: its name, its type, and ``dataclasses.field`` with its default.
MadeField = tuple[str, Any, Any]


def made(
    module: str,
    name: str,
    doc: str,
    entries: Iterable[MadeField],
    check: Callable[[Any], None] = check_fields,
    *,
    is_base: bool = False,
) -> Any:
    """A new frozen dataclass with these fields, which belongs to the module named ``module`` and
    checks its field values.

    The base of a class that has methods of its own gets none: a dataclass writes them again.
    """
    namespace = {"__doc__": doc, "__post_init__": check}
    kind = make_dataclass(
        name,
        entries,
        frozen=True,
        slots=True,
        kw_only=True,
        init=not is_base,
        repr=not is_base,
        eq=not is_base,
        namespace=namespace,
    )
    kind.__module__ = module
    return kind


def check_lists(value: "DataclassInstance") -> None:
    """Refuse empty lists of choices in a search space."""
    check_fields(value)
    for entry in fields(value):
        if getattr(value, entry.name) == () and entry.default != ():
            refuse(entry.name, "is empty: give at least one choice")


def held_fields(holder: str) -> Iterator[MadeField]:
    """The fields of a stage's part (such as ``offload``) that groups several dimensions."""
    return (_chosen(row.label, row) for row in DIMENSIONS.values() if row.holder == holder)


def stage_fields(holders: Mapping[str, type]) -> Iterator[MadeField]:
    """The fields of a stage of a plan, in the order of ``DIMENSIONS``; those without a default come
    first.
    """
    stage_rows = [(name, row) for name, row in DIMENSIONS.items() if not row.holder]
    for name, row in sorted(stage_rows, key=lambda entry: entry[1].default is not None):
        yield _chosen(name, row)
    for name, kind in holders.items():
        yield name, kind, field(default=kind())


def listed_held_fields(holder: str) -> Iterator[MadeField]:
    """The fields of a search space's part (such as ``offload``) that groups the lists of choices
    for several dimensions.
    """
    return (_listed(row.label, row) for row in DIMENSIONS.values() if row.holder == holder)


def space_fields(holders: Mapping[str, type]) -> Iterator[MadeField]:
    """The fields of a search space: a list of allowed values for each dimension, and between these
    fields the choices about whole plans.
    """
    listed = {name: row for name, row in DIMENSIONS.items() if row.is_listed and not row.holder}
    mesh = {name: row for name, row in listed.items() if row.part == "mesh"}
    free = [name for name, row in mesh.items() if row.default is None]
    *degrees, micro_batch = free
    counts = bounded(minimum=1)
    yield "name", str, field()
    yield "engine", str, field(default=DEFAULT_ENGINE, metadata=name_in(names_for_plans))
    yield from (_listed(name, mesh[name]) for name in degrees)
    yield "tensor_parallel_in_node", bool, field(default=True)
    for name in ("pipeline", "micro_batches"):
        yield name, tuple[int, ...] | None, field(default=None, metadata=counts)
    yield _listed(micro_batch, mesh[micro_batch])
    yield from (_listed(name, row) for name, row in mesh.items() if name not in free)
    yield from (_listed(name, row) for name, row in listed.items() if row.part == "savings")
    for name, kind in holders.items():
        yield name, kind, field(default_factory=kind)
    yield "orders", tuple[str, ...], field(default=(DEFAULT_ORDER,))
    yield "recomputation", Recomputation, field(default="none_or_all")
    yield from (_listed(name, row) for name, row in listed.items() if row.part == "layers")
    yield "unequal_stages", bool, field(default=False)
    yield "layers_off_balance", int | None, field(default=0, metadata=bounded(minimum=0))
    yield "unequal_meshes", bool, field(default=False)
    yield "other_engines", tuple[str, ...], field(default=())


def _chosen(name: str, row: Dimension) -> MadeField:
    """The dataclass field in which a stage has its value of a dimension."""
    default = MISSING if row.default is None else row.default
    content: Any = field(default=default, metadata=row.numbers)
    return name, float if row.is_ratio else int, content


def _listed(name: str, row: Dimension) -> MadeField:
    """The field of a search space that lists a dimension's allowed values. Where the dimension
    counts blocks or has no default, None allows every value.
    """
    items: Any = tuple[float, ...] if row.is_ratio else tuple[int, ...]
    is_free = row.default is None or row.part == "layers"
    default = None if row.default is None else (row.default,)
    return name, items | None if is_free else items, field(default=default, metadata=row.numbers)
