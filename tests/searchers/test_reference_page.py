"""The page of the searchers names all of them, and its example is a strategy."""

import re
from pathlib import Path
from typing import Any

from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from tests.searchers.problems import SMALL, predictor_of

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "searchers.md").read_text("utf-8")


def test_every_searcher_is_described() -> None:
    section = PAGE.partition("## The searchers")[2].partition("Every searcher works")[0]
    heads = re.findall(r"^- ((?:`[a-z:]+`(?:, )?)+): ", section, re.MULTILINE)
    assert set(re.findall(r"`([a-z:]+)`", " ".join(heads))) == set(SEARCHERS)


def test_the_example_finds_a_plan() -> None:
    (program,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def " in block
    ]
    names: dict[str, Any] = {}
    exec(compile(program, "searchers.md", "exec"), names)
    searcher = StrategySearcher(strategy=names["climb"], predictor=predictor_of(SMALL))
    result = searcher.search(SMALL, space_of("mist"), Budget(evaluations=100), 0)
    assert result.plan_evaluations == 100
    assert result.plan is not None
    assert contains(SMALL, space_of("mist"), result.plan)
