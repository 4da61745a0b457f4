"""The command ``gpu_report``: fills the folder of a report on a GPU or a node, in calls of a few
minutes each, and packs the folder into one file.
"""

import argparse
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.calibration.noted_machine import noted_machine
from experiments.cli.commandline import DONE, NO_ANSWER, check_torch, print_json, progress, writable
from experiments.gpu_reports.node_plans import names_of, plans_of
from experiments.gpu_reports.report_checks import checks_of, machine_of
from experiments.gpu_reports.report_page import Figures, figures_of, is_profiled
from experiments.gpu_reports.report_plans import PlanOfReport
from experiments.gpu_reports.report_rows import steps_of
from experiments.training.plan_runs import (
    NodeRunner,
    PlanRun,
    PlanRunner,
    RunRows,
    Said,
    ended_within,
)
from experiments.training.run_options import check_node
from experiments.training.run_results import prediction_of
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import reject, to_mapping
from mistlab.job.job import dump_job
from mistlab.machine.hardware import Hardware, Line

# Estimates how long a training run on one H100 takes besides its iterations.
# None of the constants was measured on a GPU. They are deliberately high, since a report must be
# finished before the rental of the machine ends.


# Factors of an iteration's time: how much longer than predicted it may take, and how much longer it
# takes in strict mode than in normal mode.
SLOWER, STRICT = 1.2, 2.0
# How much longer an iteration takes if its tasks run one after another instead of overlapping.
SERIALISED = 1.5
# The seconds to start a process: interpreter, torch, the GPU's context, libraries. The second
# figure is for several processes, one per GPU, which also have to connect.
PROCESS_S, PROCESSES_S = 20.0, 35.0
# The seconds that a run takes besides its iterations: to build the model and its buffers, to open
# streams and groups, to draw and copy weights, to read the clocks twice, and to report.
RUN_S = 4.0
# Seconds per GiB of host memory: to pin it (its pages are touched and registered), and to zero
# pages that are already pinned.
PIN_S_A_GIB, ZERO_S_A_GIB = 0.4, 0.1


def run_seconds(
    iterations_s: float, pinning_s: float, *, is_strict: bool, is_serialised: bool
) -> float:
    """The seconds that a run takes, from its predicted iterations and the time to pin its host
    memory.
    """
    slower = SLOWER * (STRICT if is_strict else 1) * (SERIALISED if is_serialised else 1)
    return RUN_S + pinning_s + slower * iterations_s


class PinnedMemory:
    """The host memory that this process has pinned so far; runs in strict mode take place in a
    separate process, which pins memory of its own.
    """

    def __init__(self) -> None:
        self._gib = 0.0
        self._is_strict: bool | None = None

    def seconds(self, gib: float, *, is_strict: bool) -> float:
        """The seconds to start a process if this run is the first in its mode (strict or not), and
        to pin the host memory that the run still needs.
        """
        seconds = 0.0
        if is_strict != self._is_strict:
            self._is_strict, self._gib, seconds = is_strict, 0.0, PROCESS_S
        if gib > self._gib:
            self._gib = gib
            return seconds + PIN_S_A_GIB * gib
        return seconds + ZERO_S_A_GIB * gib


# Estimates how long a report on one H100 takes, before and during a rental.
# Iterations take as long as predicted for the catalogue's `h100-80gb`; but its rate of host copies
# was measured on a machine with a slower bus, so half of the datasheet's rate is used for copies.
# The other constants were not measured on a GPU and are deliberately high, since a report must be
# finished before the rental ends.


REFERENCE = "h100-80gb"
LINK_SHARE, LINK_LATENCY_US = 0.5, 20.0
# The seconds to profile a machine: all tables, with two to three thousand short measurements, and
# processes for copies and streams. The second figure is added for each further size of groups of
# GPUs, with its collectives, and the streams that overlap with them.
PROFILE_S, GROUPS_S = 240.0, 120.0
# The seconds that the last steps of a call take: fits, predictions, and the page.
CALL_S = 20.0
# The seconds before the deadline that are reserved for the page; a run that would end later than
# that is not started.
RESERVE_S = 20.0

PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated seconds of one step of a report: either the run of a plan, with the plan's
    name, or the profile of the machine.
    """

    name: str
    seconds: float


def estimates(plans: Sequence[PlanOfReport], *, profiles: bool = True) -> list[Estimate]:
    """The estimated seconds of each step of the report, in the order in which the steps run."""
    first = [plan for plan in plans if plan.comes_first]
    others = [plan for plan in plans if not plan.comes_first]
    hardware = reference_hardware()
    pinned = PinnedMemory()
    steps = [_run(plan, hardware, pinned) for plan in first]
    gpus = max((plan.gpus for plan in plans), default=1)
    steps += [Estimate(name=PROFILE, seconds=profile_s(gpus))] if profiles else []
    return steps + [_run(plan, hardware, pinned) for plan in others]


def profile_s(gpus: int) -> float:
    """The estimated seconds to profile a node with this many GPUs."""
    sizes = sum(gpus % size == 0 for size in range(2, gpus + 1))
    return PROFILE_S + max(0, sizes - 1) * GROUPS_S


def calls_of(steps: Iterable[Estimate], minutes: float) -> int:
    """The number of calls, each of this many minutes, that all steps of the report need."""
    seconds = sum(step.seconds for step in steps)
    return max(1, ceil(seconds / (60 * minutes - CALL_S)))


def total_s(steps: Sequence[Estimate], minutes: float) -> float:
    """The seconds that the report takes: all its steps, and what each call adds to them."""
    return sum(step.seconds for step in steps) + calls_of(steps, minutes) * CALL_S


def check_minutes(minutes: float, steps: Iterable[Estimate]) -> None:
    """Refuse calls that are shorter than the longest run, since this run would never be finished.
    The profile may take several calls.
    """
    longest_s = max((step.seconds for step in steps if step.name != PROFILE), default=0.0)
    least = ceil((longest_s + RESERVE_S) / 60)
    if not minutes >= least:
        reject(
            f"--minutes {minutes:g}: is too short for the longest run, which would start again in "
            f"each call: give {least} or more"
        )


def reference_hardware() -> Hardware:
    """The catalogue's H100 80 GB, with the rate of host copies that its datasheet gives."""
    hardware = catalog.hardware(REFERENCE)
    assert hardware.transfers is not None
    rate = LINK_SHARE * hardware.node.host_link_gbytes_per_s
    line = Line(latency_us=LINK_LATENCY_US, gbytes_per_s=rate, smallest_mib=1.0, largest_mib=1024.0)
    groups = tuple(
        replace(group, host_to_device=line, device_to_host=line)
        for group in hardware.transfers.groups
    )
    return replace(hardware, transfers=replace(hardware.transfers, groups=groups))


def _run(plan: PlanOfReport, hardware: Hardware, pinned: PinnedMemory) -> Estimate:
    job = plan.job(hardware)
    prediction = prediction_of(job, plan.stage)
    gib = sum(stage.host_bytes for stage in prediction.stages) / GIB_BYTES
    starting_s = (
        pinned.seconds(gib, is_strict=plan.is_check)
        if plan.gpus == 1
        else PROCESSES_S + PIN_S_A_GIB * gib
    )
    seconds = run_seconds(
        steps_of(plan) * prediction.iteration_s,
        starting_s,
        is_strict=plan.is_check,
        is_serialised=plan.is_serialised,
    )
    return Estimate(name=plan.name, seconds=seconds)


# Packs a report's folder into one file after each call, so that it can be moved, and continued on
# another machine.


NAME = "report.zip"
# The measured files of a report's folder; everything else in it can be computed again.
MEASURED = ("runs.jsonl", "tables/*.csv", "tables/*.yaml")
MADE = ("plans/*.yaml", "*.yaml", "runs.csv", "README.md", "*.svg")


def pack(folder: Path) -> Path:
    """Pack a report's folder into one file; if writing is interrupted, no partial file is left."""
    path = folder / NAME
    unfinished = path.with_suffix(".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as file:
        for member in _files(folder):
            file.write(member, member.relative_to(folder).as_posix())
    unfinished.replace(path)
    return path


def begin(folder: Path, path: Path | None) -> None:
    """Begin a report's folder with the contents of a packed report, which is given or lies in the
    folder; if the folder has begun already, continue it.
    """
    packed = packed_of(folder, path)
    if packed is not None:
        _unpack(packed, folder)
        progress(f"{folder}: going on from {packed}")
    elif path is not None:
        progress(f"{folder}: has begun already: {path} is not read")


def packed_of(folder: Path, path: Path | None) -> Path | None:
    """The packed report with which a folder begins: the given one, or the one in the folder; None
    if the folder has begun already, or there is no packed report.
    """
    if has_begun(folder):
        return None
    return path or (folder / NAME if (folder / NAME).exists() else None)


def has_begun(folder: Path) -> bool:
    """Whether a folder contains any measured file of a report."""
    return any(True for pattern in MEASURED for _ in folder.glob(pattern))


_GIVE_PACKED = f"give as --from the {NAME} in an --out folder of gpu_report"


def _unpack(path: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(path) as file:
            known = {name: file.read(name) for name in file.namelist() if _is_known(name)}
    except (zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        reject(f"{path}: is not a packed report ({error}): {_GIVE_PACKED}")
    except OSError as error:
        reject(f"{path}: {error.strerror}: {_GIVE_PACKED}")
    if not known:
        reject(f"{path}: holds no file that gpu_report writes: {_GIVE_PACKED}")
    for name, content in known.items():
        writable(folder / name, "folder").write_bytes(content)


def _files(folder: Path) -> Iterator[Path]:
    for pattern in (*MEASURED, *MADE):
        yield from sorted(one for one in folder.glob(pattern) if one.is_file())


def _is_known(name: str) -> bool:
    """Whether a report has a file of this name; files of other names are not unpacked."""
    path = Path(name)
    parts = len(path.parts)
    return ".." not in path.parts and any(
        path.match(pattern) and parts == pattern.count("/") + 1 for pattern in (*MEASURED, *MADE)
    )


# Fills a report's folder in calls of a few minutes: runs plans, profiles the machine, and makes the
# page and pictures.


Profiler = Callable[[Path, float], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFolder:
    """The folder of a report with its contents, and the deadline of the call; ``profiler`` measures
    the machine, and tells whether all tables are complete.

    A plan whose time in ``expected_s`` is longer than what is left of a call is not begun, unless
    the call has done nothing else yet.
    """

    folder: Path
    plans: Sequence[PlanOfReport]
    runner: PlanRunner
    profiler: Profiler
    seconds: float
    expected_s: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def work(self) -> bool:
        """Run plans and measure the machine until the deadline, or until nothing is left to do;
        returns whether the report is complete.
        """
        call = _Call(clock=self.clock, ends_s=self.clock() + self.seconds - RESERVE_S)
        runs = RunRows(path=self.folder / "runs.jsonl")
        first = [plan for plan in self.plans if plan.comes_first]
        others = [plan for plan in self.plans if not plan.comes_first]
        return (
            self._run(first, runs, call, others=len(others))
            and self._profile(call)
            and self._run(others, runs, call, others=0)
        )

    def _profile(self, call: "_Call") -> bool:
        """Measure the machine if that has not been done; returns whether all tables are
        complete.
        """
        if is_profiled(self.folder):
            return True
        if self.profiler(self.folder / "profile.yaml", call.left_s()):
            call.has_done = True
            return True
        progress("the profile is not done: run the same command again")
        return False

    def _run(
        self, plans: Sequence[PlanOfReport], runs: RunRows, call: "_Call", *, others: int
    ) -> bool:
        """Run the plans that are left; returns whether all of them have run."""
        missing = [plan for plan in plans if plan.name not in runs.said]
        for number, plan in enumerate(missing):
            left_s, outcome = call.left_s(), None
            if left_s > (self.expected_s.get(plan.name, 0.0) if call.has_done else 0.0):
                outcome = self.runner(self._prepared(plan), left_s)
            if outcome is None:
                count = len(missing) - number + others
                progress(f"{count} plans are left: run the same command again")
                return False
            self._check_machine(outcome, runs.said)
            runs.add(plan.name, outcome)
            call.has_done = True
            progress(
                f"{plan.name}: {outcome.get('error', 'done')} ({left_s - call.left_s():.0f} s)"
            )
            if plan.is_check:
                self._tell_checks(runs)
        return True

    def _tell_checks(self, runs: RunRows) -> None:
        """Report at once how the runs in strict mode compare, before the call ends."""
        strict = [plan for plan in self.plans if plan.is_check]
        checks = checks_of(strict, runs.said)
        for difference in checks.differences:
            progress(f"warning: {difference.words}: {', '.join(difference.plans)}")
        if not checks.differences and all(plan.name in runs.said for plan in strict):
            progress(f"{checks.strict} groups of strict runs: equal to the bit")
            if checks.layouts:
                progress(f"{checks.layouts} strict runs in unlike layouts: losses agree")

    def _prepared(self, plan: PlanOfReport) -> PlanRun:
        """The file of a plan, and the settings of its run. A run needs nothing of the hardware but
        the memory limit.
        """
        path = writable(self.folder / "plans" / f"{plan.name}.yaml", "folder")
        dump_job(plan.job(catalog.hardware(REFERENCE)), path)
        return PlanRun(
            plan=path,
            steps=steps_of(plan),
            gpus=plan.gpus,
            serialises=plan.is_serialised,
            stage=plan.stage,
            strict=plan.is_check,
            with_norms=plan.is_check and plan.stage is not None,
        )

    def _check_machine(self, outcome: Said, before: Mapping[str, Said]) -> None:
        """Refuse to add measurements of this machine to a folder with those of another kind of
        machine.
        """
        here, known = machine_of(outcome), [*before.values()]
        tables = self.folder / "tables"
        if (tables / "machine.yaml").exists() and noted_machine(tables).is_gpu:
            known.append({"environment": to_mapping(noted_machine(tables).environment)})
        others = {words for one in known if (words := machine_of(one))} - {here}
        if here and others:
            reject(
                f"--out {self.folder}: was measured on {', '.join(sorted(others))}, this machine "
                f"is {here}: a report has measurements of one machine only: give another folder"
            )


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call of the command: its deadline, and whether it has done any work yet."""

    clock: Callable[[], float]
    ends_s: float
    has_done: bool = False

    def left_s(self) -> float:
        """The seconds until the deadline."""
        return self.ends_s - self.clock()


def work(options: argparse.Namespace) -> int:
    """Compare measurements with predictions on a GPU or a node: profile it, fit its hardware file,
    and run plans that were not used in the fit.

    A report is made in calls of a few minutes; each continues where the last one ended, in the same
    folder. First come short runs in strict mode, whose losses must not depend on what is offloaded;
    then timed plans that offload activations, the profile (tables/), and the other plans
    (runs.jsonl). README.md and the pictures show what has been measured so far, report.zip holds
    everything. Exit status 1 means that the report is not complete: run the command again.

    With --gpus-per-node 8 (or 2, or 4), plans run on all of these GPUs, each plan under a torchrun
    of its own: strict runs of one workload with different parallel layouts, whose losses must
    agree; then NCCL's collectives and messages; then timed runs with tensor parallelism, pipelines,
    ZeRO levels and combinations of them.

    --dry-run prints the steps in order with their estimated times, and runs nothing. --draw makes
    the page and pictures from what has been measured; it works on any machine, without GPU or
    torch.
    """
    plans = plans_of(options.gpus_per_node)
    if options.dry_run:
        return _tell_estimates(plans, options)
    if options.draw:
        _check_drawn(options)
    else:
        check_minutes(options.minutes, estimates(plans))
        check_torch()
        check_node(options.device, options.gpus_per_node, "bf16", "precision of all plans")
    folder = writable(options.out / "x", "folder").parent
    begin(folder, options.packed)
    done = True if options.draw else _work(folder, plans, options)
    figures = figures_of(folder, plans, RunRows(path=folder / "runs.jsonl").said)
    progress(f"packed: {pack(folder)}")
    return _tell(figures, options) if done else NO_ANSWER


def profiled_in_process(device: str, gpus: int, out: Path, seconds: float, *, quick: bool) -> bool:
    """Profile this many devices in a separate process, which continues incomplete tables; returns
    whether it ended in time.
    """
    command = [sys.executable, "-m", "experiments.profile_hardware", "--out", str(out)]
    command += ["--only", "measure", "--device", device, "--gpus-per-node", str(gpus)]
    command += ["--tables", str(out.parent / "tables"), *(["--quick"] if quick else [])]
    progress("profiling; what was measured is kept when the time is over")
    done = ended_within(command, seconds)
    if done is not None and done.returncode:
        reject(
            f"profile_hardware, which gpu_report starts, ended with status {done.returncode}: "
            f"{done.stderr.strip()}: correct this error and start gpu_report again; rows that were "
            "measured are kept"
        )
    return done is not None


def _check_drawn(options: argparse.Namespace) -> None:
    """Refuse to make a page for a folder in which nothing was measured."""
    out = options.out
    if options.packed is None and not has_begun(out) and packed_of(out, None) is None:
        reject(
            f"--out {out}: holds no measurements to --draw: give the --out folder of a gpu_report "
            "that has measured some, or --from report.zip"
        )


def _work(folder: Path, plans: Sequence[PlanOfReport], options: argparse.Namespace) -> bool:
    """Run plans and measure the machine for some minutes; returns whether the report is complete.
    The folder is packed even if an error ends the work.
    """
    gpus = options.gpus_per_node
    runner = NodeRunner(options.device)
    report = ReportFolder(
        folder=folder,
        plans=plans,
        runner=runner,
        profiler=partial(profiled_in_process, options.device, gpus, quick=options.quick),
        seconds=60 * options.minutes,
        expected_s={one.name: one.seconds for one in estimates(plans)},
    )
    try:
        return report.work()
    finally:
        runner.close()
        pack(folder)


def _tell(figures: Figures, options: argparse.Namespace) -> int:
    if options.json:
        print_json(dict(figures.summary))
    else:
        print(f"written: {options.out / 'README.md'}")
    return DONE


def _tell_estimates(plans: Sequence[PlanOfReport], options: argparse.Namespace) -> int:
    """Print the steps that are left, with their estimated times, in order."""
    if options.out.exists() and not options.out.is_dir():
        reject(f"--out {options.out}: is a file: give another folder")
    with TemporaryDirectory() as spare:
        folder, packed = options.out, packed_of(options.out, options.packed)
        if packed is not None:
            folder = Path(spare)
            _unpack(packed, folder)
        outcomes = RunRows(path=folder / "runs.jsonl").said
        left = [plan for plan in plans if plan.name not in outcomes]
        steps = estimates(left, profiles=not is_profiled(folder))
    check_minutes(options.minutes, steps)
    seconds = total_s(steps, options.minutes)
    if options.json:
        rows = [{"name": step.name, "seconds": step.seconds} for step in steps]
        print_json({"steps": rows, "total_s": seconds})
        return DONE
    if steps:
        print("\n".join((*_table(steps), *names_of(left))))
    else:
        print("every plan has run, and the profile is done: the page is left")
    calls, gpus = calls_of(steps, options.minutes), options.gpus_per_node
    print(
        f"{seconds / 60:.1f} minutes in {calls} call{'s' * (calls > 1)} of at most "
        f"{options.minutes:g} (--minutes), {CALL_S:.0f} s for the page of each, by estimate for "
        f"{'one H100' if gpus == 1 else f'{gpus} H100'}; nothing was run"
    )
    return DONE


def _table(steps: Sequence[Estimate]) -> list[str]:
    lines, sum_s = [f"{'seconds':>8}  {'sum':>6}  step"], 0.0
    for step in steps:
        sum_s += step.seconds
        lines.append(f"{step.seconds:8.1f}  {sum_s:6.0f}  {step.name}")
    return lines
