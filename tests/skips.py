"""Which tests may be skipped, and why.

``make test`` skips what a machine has nothing for, and its summary says what to install. With
``--only-named-skips``, as ``.ci/run`` has it, a skip that ``SKIPS`` does not name fails the run;
``--may-lack WORD`` allows those whose reason has a word.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

OPTION, LACKING = "--only-named-skips", "--may-lack"


@dataclass(frozen=True, kw_only=True)
class Skip:
    """Tests that a machine with all packages may skip: their start, the skip's reason, and why."""

    tests: str
    reason: str
    why: str

    def names(self, test: str, reason: str) -> bool:
        """Whether this row allows a test to be skipped for a reason."""
        return test.startswith(self.tests) and re.search(self.reason, reason) is not None


SKIPS = (
    Skip(
        tests="tests/mistlab/test_kept.py::test_a_folder_that_may_not_be_written_to_is_read",
        reason="this user may write everywhere",
        why="root writes everywhere; .ci/run runs the file again without that right",
    ),
    Skip(
        tests="tests/test_warm_python.py::test_a_signal_ends_it",
        reason="started in the background",
        why="a shell that starts a job in the background lets it ignore Ctrl-C",
    ),
    Skip(
        tests="tests/runtime/test_accepted_exports.py::",
        reason=r"pip install '\.\[baselines\]'",
        why="slow tests with the baselines' code, which has no pins: some of it compiles for CUDA",
    ),
    Skip(
        tests="tests/experiments/test_experiments.py::test_an_experiment_leaves_what_makes_it_again",
        reason=r"could not import 'megatron\.core'",
        why="slow tests with the baselines' code",
    ),
)
# What to install, by a word of a skip's reason.
REMEDIES: Mapping[str, str] = {
    r"\btriton\b": "make extras",
    r"\b[Rr]ay\b": "make extras",
    r"\btransformers\b": "make extras",
    r"\bsafetensors\b": "make extras",
    r"\bChromium\b": "the Debian package chromium, or Google Chrome",
    r"\btorch\b": "pip install '.[runtime]'",
    r"\bmegatron": "make extras",
    r"baselines": "pip install '.[baselines]'",
}


class Skips:
    """Collects the skips of a run; tells them, and fails the run for those that no row names."""

    def __init__(self, *, only_named: bool, may_lack: Sequence[str]) -> None:
        self.only_named = only_named
        self.may_lack = may_lack
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was skipped. One that failed as was expected has no reason."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that was skipped; each worker has collected it."""
        if report.skipped:
            self._note(report.nodeid, report.longrepr)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run for a skip that is not named."""
        if self.only_named and self.unnamed() and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which tests were left out, and what to install."""
        if self.reasons:
            terminalreporter.section("left out")
        for line in self.lines():
            terminalreporter.line(line)

    def unnamed(self) -> list[str]:
        """Tests that were skipped for a reason that no row of the list has."""
        return [
            test
            for test, reason in self.reasons.items()
            if not any(skip.names(test, reason) for skip in SKIPS)
            and not any(word in reason for word in self.may_lack)
        ]

    def lines(self) -> Iterator[str]:
        """What was left out: tests by reason, with why the reason is named or what to install."""
        for reason in sorted(set(self.reasons.values())):
            tests = [test for test, its in self.reasons.items() if its == reason]
            files = sorted({test.partition("::")[0] for test in tests})
            yield f"{len(tests)} of {', '.join(files)}: {reason}"
            rows = [skip for test in tests for skip in SKIPS if skip.names(test, reason)]
            remedies = [text for word, text in REMEDIES.items() if re.search(word, reason)]
            yield from (f"    {row.why}" for row in dict.fromkeys(rows))
            yield from (f"    to run: {remedy}" for remedy in remedies[:1])
        for test in self.unnamed() if self.only_named else ():
            yield f"FAILED: {test} was skipped for a reason that tests/skips.py does not name"

    def _note(self, test: str, where: object) -> None:
        reason = where[2] if isinstance(where, tuple) else str(where)
        self.reasons[test] = reason.removeprefix("Skipped: ").partition("\n")[0]
