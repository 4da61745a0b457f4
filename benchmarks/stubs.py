"""Writes the stub of classes that are made from tables, for type checkers: ``make stubs``."""

from pathlib import Path

from mistlab.values import dimension_fields
from mistlab.values.made_fields import stub_of

STUB = Path(dimension_fields.__file__).with_suffix(".pyi")


def stub() -> str:
    """The text of the stub."""
    kinds = (
        dimension_fields.Offload,
        dimension_fields.StageFields,
        dimension_fields.OffloadRatios,
        dimension_fields.SpaceFields,
    )
    return stub_of("Written by ``make stubs`` from the table of dimensions.", kinds)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
