"""Studies: kept, shared, opened by Optuna itself; and what is said of those that are lost."""

import logging
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from mistlab.core.values import InputError
from mistlab.job.search import Budget, SearchResult
from mistlab.plan.named_spaces import space_of
from searchers.methods.optuna_search import optuna_strategy
from searchers.strategy import StrategySearcher
from tests.searchers.problems import SMALL, Counting, predictor_of
from tests.sweep import sweep

SPACE = space_of("mist")


def searched(
    storage: str | None,
    *,
    sampler: str = "random",
    evaluations: int = 20,
    seed: int = 0,
    counting: Counting | None = None,
) -> SearchResult:
    searcher = StrategySearcher(
        strategy=optuna_strategy(sampler, storage), predictor=counting or predictor_of(SMALL)
    )
    return searcher.search(SMALL, SPACE, Budget(evaluations=evaluations), seed)


def url_of(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder}/study.db?timeout=0.2" if kind == "sqlite" else f"{folder}/study.log"


def storage_of(kind: str, folder: Path) -> optuna.storages.BaseStorage:
    if kind == "sqlite":
        return optuna.storages.RDBStorage(url_of(kind, folder))
    backend = optuna.storages.journal.JournalFileBackend(url_of(kind, folder))
    return optuna.storages.JournalStorage(backend)


def only_study(kind: str, folder: Path) -> optuna.Study:
    storage = storage_of(kind, folder)
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage)


both_kinds = pytest.mark.parametrize("kind", ["sqlite", "journal"])


@both_kinds
def test_optuna_opens_the_study_and_sees_every_trial(kind: str, tmp_path: Path) -> None:
    result = searched(url_of(kind, tmp_path))
    study = only_study(kind, tmp_path)
    complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    assert len(study.trials) == len(complete) == result.plan_evaluations == 20
    assert result.prediction is not None
    fitting = [trial for trial in complete if trial.user_attrs["fits"]]
    assert 0 < len(fitting) < 20
    assert min(trial.value or 0 for trial in fitting) == result.prediction.iteration_s
    assert all((trial.constraints["memory"] > 0) != trial.user_attrs["fits"] for trial in complete)


@pytest.mark.parametrize("kind", sweep(["journal", "sqlite"], first=1))
def test_a_study_goes_on_from_its_best(kind: str, tmp_path: Path) -> None:
    first = searched(url_of(kind, tmp_path))
    again = searched(url_of(kind, tmp_path), evaluations=11)
    trials = only_study(kind, tmp_path).trials
    # One evaluation is the best plan's, predicted again.
    assert len(trials) == 30
    assert first.prediction is not None
    assert again.history[0].iteration_s == first.prediction.iteration_s
    # The same seed does not draw the same again.
    assert trials[0].params != trials[20].params


def test_problems_spaces_and_samplers_do_not_mix(tmp_path: Path) -> None:
    storage = url_of("journal", tmp_path)
    searched(storage, evaluations=3)
    searched(storage, evaluations=3, sampler="tpe")
    other = replace(SMALL, workload=replace(SMALL.workload, global_batch=8))
    searcher = StrategySearcher(
        strategy=optuna_strategy("random", storage), predictor=predictor_of(other)
    )
    searcher.search(other, SPACE, Budget(evaluations=3), 0)
    searcher.search(other, space_of("3d"), Budget(evaluations=3), 0)
    names = optuna.get_all_study_names(storage_of("journal", tmp_path))
    assert len(names) == 4


def test_an_interruption_leaves_no_trial_running(tmp_path: Path) -> None:
    counting = Counting(predictor_of(SMALL), interrupted_at=3)
    result = searched(url_of("journal", tmp_path), evaluations=99, counting=counting)
    states = [trial.state.name for trial in only_study("journal", tmp_path).trials]
    assert states.count("COMPLETE") == result.plan_evaluations > 0
    assert set(states) == {"COMPLETE", "FAIL"}


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_damaged_storage_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("study.db" if kind == "sqlite" else "study.log")
    path.write_text("no study\n" * 100, encoding="utf-8")
    with pytest.raises(InputError, match="if the file is damaged, move it away"):
        searched(url_of(kind, tmp_path))
    assert path.read_text(encoding="utf-8") == "no study\n" * 100


def test_a_locked_database_is_refused_and_keeps_its_trials(tmp_path: Path) -> None:
    searched(url_of("sqlite", tmp_path), evaluations=3)
    holder = sqlite3.connect(tmp_path / "study.db")
    holder.execute("begin exclusive")
    with pytest.raises(
        InputError, match="database is locked: if another process uses this study, wait"
    ):
        searched(url_of("sqlite", tmp_path), evaluations=3)
    holder.rollback()
    holder.close()
    assert len(only_study("sqlite", tmp_path).trials) == 3


def test_a_study_that_is_lost_on_the_way_leaves_the_best_plan(tmp_path: Path) -> None:
    class Locking(Counting):
        """Locks the database at its third call, as another process might."""

        def _count(self) -> None:
            Counting._count(self)
            if self.calls == 3:
                holder.execute("begin exclusive")

    holder = sqlite3.connect(tmp_path / "study.db")
    counting = Locking(predictor_of(SMALL))
    result = searched(url_of("sqlite", tmp_path), evaluations=99, counting=counting)
    holder.rollback()
    holder.close()
    assert result.prediction is not None
    assert result.prediction.iteration_s == counting.fastest_s
    assert "wait until that process ends" in result.reason


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(InputError, match="sampler 'tp' is unknown: did you mean 'tpe'"):
        searched(None, sampler="tp")


def test_a_space_that_is_used_up_ends_the_search() -> None:
    searcher = StrategySearcher(strategy=optuna_strategy("random"), predictor=predictor_of(SMALL))
    result = searcher.search(SMALL, space_of("3d"), Budget(evaluations=10_000), 0)
    assert result.status == "FEASIBLE"
    assert result.plan_evaluations < 100


def test_optuna_is_silent_and_its_logging_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    searched(None)
    assert optuna.logging.get_verbosity() == before == logging.INFO
    assert capfd.readouterr() == ("", "")


def test_no_budget_pays_for_the_import_of_optuna_and_no_other_searcher_waits_for_it() -> None:
    code = (
        "import sys\n"
        "from searchers.registry import SEARCHERS\n"
        "for name in ('mist', 'optuna'):\n"
        "    SEARCHERS[name]\n"
        "    print('optuna' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
