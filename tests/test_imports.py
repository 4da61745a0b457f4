"""No module imports itself by way of others, imports for type checking and inside functions too."""

from graphlib import CycleError, TopologicalSorter

import pytest

PACKAGES = ("mistlab", "simulators", "searchers", "runtime", "experiments")


def test_no_modules_import_one_another() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' <- '.join(error.args[1])}")
