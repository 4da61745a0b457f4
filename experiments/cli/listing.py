"""All commands in groups, each with the first line of its docstring; commands are not imported."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1]

# A new command is a file, and its name in one of these.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Plans": (
        *("predict", "analyse", "survey", "export", "import_plan"),
        *("check_exports", "check_imports"),
    ),
    "Searches": ("tune", "sweep", "compare_searchers", "speedups", "search_growth"),
    "Figures of the evaluation": (
        *("end_to_end", "speedup_breakdown", "overlap", "tuning_time", "motivation"),
    ),
    "What if": (
        *("ladder", "partitions", "space_size", "spaces", "analysis_speed", "scaling"),
        *("sensitivity", "published_configurations"),
    ),
    "What a run takes in all": ("will_it_fit", "estimate", "reliability"),
    "Training": ("measure_speedup", "run_plan", "run_plans", "sanitize", "whole_loop"),
    "Machines": ("profile_hardware", "calibrate", "calibrate_runs", "gpu_report"),
    "Models": ("trace", "build_graphs", "check_models"),
    "How good predictions are": ("predictor_error", "predict_runs", "report_runs", "cross_check"),
}


def listing() -> Iterator[str]:
    """The lines that tell of every command."""
    width = max(len(name) for names in GROUPS.values() for name in names)
    yield "mistlab NAME ..., the same as python -m experiments.NAME ...; --help explains each."
    for group, names in GROUPS.items():
        yield f"\n{group}"
        for name in names:
            yield f"  {name:{width}}  {_first_line(FOLDER / f'{name}.py')}"


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]
