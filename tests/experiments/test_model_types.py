"""Model types of Hugging Face beside transformers' own, and the pages that tell of them."""

import csv
import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments import check_models
from experiments.cli.commandline import run
from experiments.models.check_models import COMPLETED, TOLERANCE, row_of, types_page
from mistlab.huggingface.type_keys import TypeRow, model_types, refused_types

DOCS = Path(__file__).parents[2] / "docs"
# Rows of types that the library does not have.
OF_OTHERS = {"kimi_k2", "qwen"}
# Keys of files that are no fields of the library's classes: they are read for older files' sake.
OF_FILES = {
    *("rope_theta", "partial_rotary_factor", "sliding_window_pattern", "rotary_dim"),
    "position_embedding_type",
}


def library() -> Any:
    pytest.importorskip("transformers", reason="transformers is not installed: make extras")
    return import_module("runtime.tracing.huggingface")


def _class_defaults(kind: str) -> dict[str, Any]:
    """The defaults of a configuration class's own fields, and its ``attribute_map``: other names of
    fields."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 (an extra)

    fields = dataclasses.fields(CONFIG_MAPPING[kind])
    own = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    return {**own, "attribute_map": dict(CONFIG_MAPPING[kind].attribute_map)}


def test_the_reference_is_the_table_s() -> None:
    page = (DOCS / "reference" / "model-types.md").read_text(encoding="utf-8")
    assert page == types_page(), "python -m experiments.check_models --types PAGE writes it again"
    assert f"[{len(model_types())} types of the table]" in (
        DOCS / "reference" / "plan-file.md"
    ).read_text(encoding="utf-8")


def test_the_page_of_results_is_of_the_table_as_it_is() -> None:
    with (DOCS / "results" / "model-configs-1.csv").open(encoding="utf-8", newline="") as file:
        kinds = {row["type"] for row in csv.DictReader(file)}
    expected = set(model_types()) - OF_OTHERS
    assert kinds == expected, "python -m experiments.check_models --page PAGE writes it again"


def test_every_type_of_the_library_is_read_or_refused_by_name() -> None:
    kinds = library().causal_types()
    unnamed = set(kinds) - set(model_types()) - set(refused_types())
    assert not unnamed
    assert set(model_types()) - set(kinds) <= OF_OTHERS
    assert sum(kind in model_types() for kind in kinds[:100]) >= 40


def test_every_type_that_is_read_has_the_library_s_parameters_and_defaults() -> None:
    """Files with all keys, as the library writes them, equal those without any."""
    made = library()
    wrong = []
    for kind in sorted(set(model_types()) - OF_OTHERS):
        row = row_of(made, kind)
        assert row["status"] == "read", row
        if abs(row["off"]) > TOLERANCE or not row["written_is_equal"]:
            wrong.append(row)
    assert not wrong


def test_defaults_are_those_of_the_library_s_classes() -> None:
    library()
    wrong = []
    for kind in sorted(set(model_types()) - OF_OTHERS):
        row, fields = model_types()[kind], _class_defaults(kind)
        wrong += [
            (kind, key, value, fields[key])
            for key, value in row.defaults.items()
            if key in fields and (value != fields[key] or type(value) is not type(fields[key]))
        ]
        unknown = row.defaults.keys() - fields.keys() - OF_FILES - _renamed(row, fields)
        wrong += [(kind, key, row.defaults[key], None) for key in unknown]
    assert not wrong


def _renamed(row: TypeRow, fields: dict[str, Any]) -> set[str]:
    """Keys that the library's class has under another name of the row's."""
    names = fields["attribute_map"]
    return {key for key in row.defaults if key in names or key in names.values()}


def test_the_command_counts_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library()
    arguments = ["--quick", "--out", str(tmp_path / "out"), "--json"]
    assert run(check_models.main, arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["read"] == sum(row["status"] == "read" for row in answer["rows"]) > 0
    assert answer["not_equal_when_written"] == 0
    refused = [row for row in answer["rows"] if row["status"] == "refused"]
    assert all(row["reason"].startswith("model_type: ") for row in refused)
    with (tmp_path / "out" / "rows.csv").open(encoding="utf-8", newline="") as file:
        assert [row["type"] for row in csv.DictReader(file)] == [
            row["type"] for row in answer["rows"]
        ]


def test_completed_types_are_types_that_are_read() -> None:
    assert set(COMPLETED) <= set(model_types())
