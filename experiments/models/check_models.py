"""Checks Hugging Face's model types: whether each can be read, and whether parameter counts agree
with those of transformers.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.cli.commandline import DONE, NO_ANSWER, writable
from experiments.pages.charts import Lines
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import Row, item, table, table_of
from mistlab.core.values import InputError
from mistlab.economy.bill import model_parameters
from mistlab.huggingface.configurations import KIND, model_of_config
from mistlab.huggingface.type_keys import TypeRow, model_types, refused_types
from mistlab.plan.workload import ModelSpec, Workload

# The settings that transformers needs to build certain model types, which it cannot build with
# default settings.
COMPLETED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "head_dim": 128,
    },
    "glm4_moe": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
}
FIRST = 100
# How many model types a quick check looks at.
QUICK_TYPES = 20
TOLERANCE = 1e-3


def check(options: argparse.Namespace) -> int:
    """Check which Hugging Face model types this package reads, and whether its parameter counts
    agree with transformers.

    For every causal language model of transformers, the default configuration is read and its
    parameters are counted; the count stands beside that of the model which transformers builds on
    torch's meta device. Refused types are listed with the reason. Each configuration is read twice:
    as transformers writes it, and without all keys that have default values.
    """
    if options.types is not None:
        return write_types(options.types)
    library = import_module("runtime.tracing.huggingface")
    study = Study.begin("check_models", options)
    kinds = library.causal_types()
    every = max(1, len(kinds) // QUICK_TYPES) if options.quick else 1
    for kind in study.counted(kinds[::every], "types"):
        study.add(row_of(library, kind))
    wrong = [row for row in study.rows if row["status"] == "read" and not _is_right(row)]
    return study.end(_report(study.rows), NO_ANSWER if wrong else DONE)


def row_of(library: Any, kind: str) -> Row:
    """The row of one model type: whether it can be read, and its parameter count beside that of
    transformers.
    """
    given = COMPLETED.get(kind, {})
    row: Row = {"type": kind, "status": "read", "completed": ", ".join(given)}
    try:
        model = model_of_config({KIND: kind, **given}, kind)
    except InputError as error:
        return {**row, "status": "refused", "reason": str(error)}
    written = library.configuration(kind, given)
    theirs = library.parameters(kind, given)
    ours = model_parameters(_workload(model, written))
    return {
        **row,
        "parameters": ours,
        "of_library": theirs,
        "off": ours / theirs - 1,
        "written_is_equal": model_of_config({**written, KIND: kind}, kind) == model,
        "remarks": "; ".join(model.remarks),
    }


def _workload(model: ModelSpec, written: Mapping[str, Any]) -> Workload:
    """A workload for the model, whose sequences are as long as the model's learned positions."""
    row = model_types()[model.name]
    positions = written.get(row.positions) if row.positions else None
    return Workload(
        model=model,
        sequence_length=positions or 2048,
        global_batch=1,
        attention="flash",
        precision="bf16",
    )


def _is_right(row: Row) -> bool:
    return abs(row["off"]) <= TOLERANCE and bool(row["written_is_equal"])


def _report(rows: Sequence[Row]) -> Report:
    read = [row for row in rows if row["status"] == "read"]
    refused = [row for row in rows if row["status"] == "refused"]
    worst = max((abs(row["off"]) for row in read), default=0.0)
    exact = sum(row["parameters"] == row["of_library"] for row in read)
    of_first = sum(row["status"] == "read" for row in rows[:FIRST])
    summary = {
        "types": len(rows),
        "read": len(read),
        "read_of_first_100": of_first,
        "exact": exact,
        "worst_percent": round(100 * worst, 4),
        "not_equal_when_written": sum(not row["written_is_equal"] for row in read),
    }
    sentence = (
        f"Of {len(rows)} types {len(read)} are read ({of_first} of the first {FIRST}): the "
        f"parameters of {exact} are the library's own, and those of the others differ by at most "
        f"{100 * worst:.3f} %. A file that writes the defaults is read as one that leaves them out."
    )
    return Report(
        title="Model types of Hugging Face",
        words=[sentence, _read_table(read)],
        summary=summary,
        pictures=[_picture(read)],
        beside=["## Refused by name", IN_A_FILE, _refused_table(refused), _COMPLETED_WORDS],
    )


def _picture(rows: Sequence[Row]) -> Lines:
    """A picture of this package's parameter counts over those of transformers, by model type."""
    ratios = [(float(number), 1 + row["off"]) for number, row in enumerate(rows)]
    return Lines(
        name="model-types",
        caption="Parameters as read, over those of the library's model, type by type.",
        curves={"": ratios},
        x="types that are read, in alphabetical order",
        y="parameters here / of the library",
    )


_COMPLETED_WORDS = (
    "Some default configurations build no model, or none whose heads' channels pair up; the keys "
    "under `completed` are then given to both sides."
)


def _read_table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("type", "{type}"),
        ("transformers", "{of_library:,}"),
        ("here", "{parameters:,}"),
        ("off %", lambda row: f"{100 * row['off']:.4f}"),
        ("completed", lambda row: row["completed"]),
        ("remarks", lambda row: row["remarks"]),
    )


def _refused_table(rows: Sequence[Row]) -> str:
    reasons = refused_types()
    grouped: dict[str, list[str]] = {}
    for row in rows:
        grouped.setdefault(reasons.get(row["type"], row["reason"]), []).append(row["type"])
    return table(("reason", "types"), ((why, ", ".join(kinds)) for why, kinds in grouped.items()))


def write_types(page: Path) -> int:
    """Write the table of model types as a page of the reference documentation."""
    writable(page, "page", "--types").write_text(types_page(), encoding="utf-8")
    print(f"{len(model_types())} types in {page}")
    return DONE


def types_page() -> str:
    """The page that lists all model types, made from data of the package."""
    alike: dict[str, list[str]] = {}
    for kind, row in model_types().items():
        alike.setdefault(_description(row), []).append(f"`{kind}`")
    read = "\n".join(
        item(f"{', '.join(kinds)}: {description}") for description, kinds in alike.items()
    )
    refused: dict[str, list[str]] = {}
    for kind, reason in refused_types().items():
        refused.setdefault(reason, []).append(kind)
    named = "\n".join(item(f"{reason}: {', '.join(kinds)}") for reason, kinds in refused.items())
    head, of_refused = beside("model_types"), beside("model_types-refused")
    return "\n\n".join([*head, read, *of_refused, named]) + "\n"


def _description(row: TypeRow) -> str:
    """The sizes and features of models of a type as text, with remarks in parentheses."""
    fields = (
        key if value is True else f"{key} {_plain(value)}"
        for key, value in row.model.items()
        if key != "family"
    )
    built = ", ".join([row.model["family"], *fields, *_parts(row)])
    return f"{built} ({'; '.join(row.remarks)})" if row.remarks else built


def _parts(row: TypeRow) -> Iterator[str]:
    """The parts of a model that some key of its configuration turns on or sets the size of."""
    if row.latent:
        yield "latent attention"
    if row.experts:
        yield "experts"
    if row.window:
        yield "windows"
    if row.turns:
        yield f"blocks in turns ({row.turns})"
    yield from (f"{own['family']} with {key}" for key, own in row.when.items() if "family" in own)
    by_key = {"biases": ", ".join(row.biases), "qk_norm": row.qk_norm, "post_norms": row.post_norms}
    yield from (f"{part} by {key}" for part, key in by_key.items() if key)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
