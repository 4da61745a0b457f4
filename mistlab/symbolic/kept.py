"""Keeps compiled expressions: in memory within a process, as source text between processes.

    @kept
    def layers(graph: StoredGraph) -> Compiled:
        ...

For a small question, most of the time goes to SymPy, which turns expressions into source text. If
the text is there already, SymPy is not even imported.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec

from mistlab.symbolic.compiled import Compiled
from mistlab.symbolic.grammar import RefusedError
from mistlab.symbolic.kept_folder import kept_folder
from mistlab.symbolic.recipe import NoRecipeError, recipe_of

P = ParamSpec("P")


def kept(make: Callable[P, Compiled]) -> Callable[P, Compiled]:
    """A decorator for a function that compiles expressions, which keeps the function's results.

    The function may depend only on its arguments and on the package's sources.
    """

    @cache
    def in_process(*arguments: P.args, **_: P.kwargs) -> Compiled:
        try:
            recipe = recipe_of(make, arguments)
        except NoRecipeError:
            return make(*arguments)  # type: ignore[call-arg]
        folder = kept_folder()
        if folder is None:
            return make(*arguments)  # type: ignore[call-arg]
        found = folder.read(recipe)
        if found is not None:
            try:
                return Compiled.from_mapping(found)
            except (RefusedError, KeyError, TypeError, ValueError):
                folder.say_damaged()
        compiled = make(*arguments)  # type: ignore[call-arg]
        folder.write(recipe, compiled.to_mapping())
        return compiled

    @wraps(make)
    def call(*arguments: P.args, **keywords: P.kwargs) -> Compiled:
        assert not keywords, "a kept function takes its arguments by position"
        return in_process(*arguments)

    return call
