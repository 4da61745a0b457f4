"""Predicted beside measured on one GPU: profile it, calibrate, run plans that were never fitted.

Works in calls of a few minutes that go on where the last one ended, in the same folder: profile
(tables/, profile.yaml), the few plans that are fitted to (runs.csv, hardware.yaml), then the
others and single stages of pipelines, a process for each model (runs.jsonl). README.md and the
pictures show what there is. Exit status 1: not done yet, run the same command again.
"""

import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.commandline import DONE, NO_ANSWER, parser_of, print_json, progress, run, writable
from experiments.fit_runs import FEWEST_RUNS, whole_runs
from experiments.plan_runs import ModelRunner, PlanRun, PlanRunner, RunRows, ended_within
from experiments.published import END_TO_END
from experiments.report_page import draw, page_of
from experiments.report_plans import PLANS, ReportPlan
from experiments.report_rows import (
    TIMED,
    WARM_UPS,
    Checks,
    ReportRow,
    overlaps_of,
    row_of,
    summary_of,
    table_row,
    unequal_twins,
)
from experiments.run_results import prediction_of
from mistlab.datafile import read_yaml, write_yaml
from mistlab.errors import InputError
from mistlab.hardware import Hardware
from mistlab.job import dump_job
from mistlab.value import from_mapping, to_mapping

MINUTES = 9.0
# A run that fails to end by then is not started: the last seconds are for the page.
RESERVE_S = 20.0

Profiler = Callable[[Path, float], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A folder, what fills it, and until when: ``profiler`` says whether its file is done."""

    folder: Path
    plans: Sequence[ReportPlan]
    runner: PlanRunner
    profiler: Profiler
    seconds: float
    clock: Callable[[], float] = time.monotonic

    def work(self) -> ReportRow | None:
        """Go on until the time is over or nothing is left; the summary once all is there."""
        ends = self.clock() + self.seconds - RESERVE_S

        def left() -> float:
            return ends - self.clock()

        profile = self.folder / "profile.yaml"
        if not profile.exists() and not self.profiler(profile, left()):
            progress("the profile is not done: run the same command again")
            return None
        profiled = from_mapping(Hardware, read_yaml(profile))
        runs = RunRows(path=self.folder / "runs.jsonl")
        fitted = [plan for plan in self.plans if plan.is_fitted]
        serialised = [plan for plan in self.plans if plan.is_serialised]
        stages = [plan for plan in self.plans if plan.stage is not None]
        unseen = [plan for plan in self.plans if plan not in (*fitted, *serialised, *stages)]
        if not self._run(fitted, profiled, runs, left):
            return None
        hardware = self._calibrated(fitted, profiled, runs)
        done = self._run([*unseen, *serialised, *stages], profiled, runs, left)
        rows, of_stages = (_rows(plans, hardware, runs) for plans in (unseen, stages))
        checks = Checks(
            unequal_losses=unequal_twins(self.plans, runs.said),
            overlaps=overlaps_of(rows, serialised, runs.said),
        )
        page = page_of(rows, of_stages, checks, hardware)
        (self.folder / "README.md").write_text(page, encoding="utf-8")
        draw(rows, self.folder)
        if not done:
            return None
        alone = {**summary_of(of_stages), "rows": of_stages}
        return {**summary_of(rows), **to_mapping(checks), "rows": rows, "stages": alone}

    def _run(
        self,
        plans: Sequence[ReportPlan],
        hardware: Hardware,
        runs: RunRows,
        left: Callable[[], float],
    ) -> bool:
        """Run what did not run yet; whether all did."""
        missing = [plan for plan in plans if plan.name not in runs.said]
        for number, plan in enumerate(missing):
            path = writable(self.folder / "plans" / f"{plan.name}.yaml", "folder")
            dump_job(plan.job(hardware), path)
            said = None
            if left() > 0:
                run = PlanRun(
                    plan=path,
                    model=plan.model,
                    steps=WARM_UPS + TIMED,
                    serialises=plan.is_serialised,
                    stage=plan.stage,
                )
                said = self.runner(run, left())
            if said is None:
                progress(f"{len(missing) - number} plans are left: run the same command again")
                return False
            runs.add(plan.name, said)
            progress(f"{plan.name}: {said.get('error', 'done')}")
        return True

    def _calibrated(
        self, plans: Sequence[ReportPlan], profiled: Hardware, runs: RunRows
    ) -> Hardware:
        """The profile with what the fitted runs say; the profile itself if too few of them ran."""
        path = self.folder / "runs.csv"
        ran = [plan for plan in plans if "error" not in runs.said[plan.name]]
        if len(ran) < FEWEST_RUNS:
            progress(f"{len(ran)} of the plans to fit ran: predictions are the profile's alone")
            return profiled
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, END_TO_END, lineterminator="\n")
            writer.writeheader()
            for plan, measured in zip(ran, _rows(ran, profiled, runs), strict=True):
                writer.writerow(table_row(plan.job(profiled), measured, plan.model))
        hardware, _ = whole_runs(path)(profiled)
        write_yaml(to_mapping(hardware, omit_defaults=True), self.folder / "hardware.yaml")
        return hardware


def _rows(plans: Sequence[ReportPlan], hardware: Hardware, runs: RunRows) -> list[ReportRow]:
    """Rows of those that ran."""
    return [
        row_of(plan, prediction_of(plan.job(hardware), plan.stage), runs.said[plan.name])
        for plan in plans
        if plan.name in runs.said
    ]


def profiled_in_process(device: str, *, quick: bool) -> Profiler:
    """The profiler of one device; its tables go on where they were."""

    def profiler(out: Path, seconds: float) -> bool:
        command = [sys.executable, "-m", "experiments.profile_hardware", "--out", str(out)]
        command += ["--device", device, "--gpus-per-node", "1"]
        command += ["--tables", str(out.parent / "tables"), *(["--quick"] if quick else [])]
        progress("profiling; what was measured is kept when the time is over")
        done = ended_within(command, seconds)
        if done is not None and done.returncode:
            message = f"the profile ended with status {done.returncode}: {done.stderr.strip()}"
            raise InputError(message)
        return done is not None

    return profiler


def main(arguments: Sequence[str]) -> int:
    """Work for some minutes; print the summary once all is there."""
    parser = parser_of("gpu_report", __doc__, quick=False, json=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"of this call (default: {MINUTES:g})"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what runs")
    options = parser.parse_args(arguments)
    runner = ModelRunner(options.device)
    report = Report(
        folder=writable(options.out / "x", "folder").parent,
        plans=PLANS,
        runner=runner,
        profiler=profiled_in_process(options.device, quick=options.quick),
        seconds=60 * options.minutes,
    )
    try:
        summary = report.work()
    finally:
        runner.close()
    if summary is None:
        return NO_ANSWER
    if options.json:
        print_json(summary)
    else:
        print(f"written: {options.out / 'README.md'}")
    return DONE


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
