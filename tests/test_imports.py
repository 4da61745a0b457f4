"""No module imports itself by way of others, imports for type checking and inside functions too."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PACKAGES = ("mistlab", "simulators", "searchers", "runtime", "experiments")


def test_no_modules_import_one_another() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")


def test_every_folder_with_code_is_a_package_whose_imports_are_seen() -> None:
    # A folder without __init__.py is left out of graphs of imports, circles and all.
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*.py")]
    assert files
    unseen = {file.parent for file in files if not (file.parent / "__init__.py").is_file()}
    assert unseen == set()
