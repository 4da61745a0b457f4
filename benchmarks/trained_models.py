"""Writes the page that says which of the catalogue's models the runtime can train: ``python -m
benchmarks.trained_models``.
"""

from pathlib import Path

from experiments.pages.tables import item
from mistlab import catalog
from runtime.runnable import trains_here

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "trained-models.md"


def page() -> str:
    """The text of the page."""
    refused: dict[str, list[str]] = {}
    names = catalog.model_names()
    for name in names:
        if why := trains_here(catalog.model(name)):
            refused.setdefault(why, []).append(f"`{name}`")
    trained = len(names) - sum(map(len, refused.values()))
    return "\n".join(
        [
            "# Models that the runtime trains",
            "",
            "Made by `python -m benchmarks.trained_models` from the checks of `run_plan`, which",
            "refuses a model before anything runs. Of the catalogue's",
            f"[{len(names)} models](plan-file.md#models-of-the-catalogue) {trained} are trained,",
            "in fp32, fp16 and bf16, by plans of engine `mistlab` ([running](running.md)). All are",
            "predicted and searched. Predicted alone:",
            "",
            *(item(f"{', '.join(models)}: {why}") for why, models in refused.items()),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
