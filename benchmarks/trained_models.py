"""Writes the page that says which of the catalogue's models the runtime trains:
``python -m benchmarks.trained_models``."""

from pathlib import Path

from mistlab import catalog
from runtime.runnable import trains_here

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "trained-models.md"


def page() -> str:
    """The page's text."""
    rows = [(name, trains_here(catalog.model(name))) for name in catalog.model_names()]
    trained = [name for name, why in rows if not why]
    refused = [f"| `{name}` | {why} |" for name, why in rows if why]
    return "\n".join(
        [
            "# Models that the runtime trains",
            "",
            "Made by `python -m benchmarks.trained_models` from the checks of `run_plan`, which",
            f"refuses a model before anything runs. Of the catalogue's {len(rows)} models",
            f"{len(trained)} are trained, in fp32, fp16 and bf16, by plans of engine `mistlab`",
            "([running](running.md)). All are predicted and searched.",
            "",
            "## Trained",
            "",
            ", ".join(f"`{name}`" for name in trained) + ".",
            "",
            "## Predicted alone",
            "",
            "| model | why |",
            "|---|---|",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
