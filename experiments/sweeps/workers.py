"""The worker processes of a sweep, on this machine or on a Ray cluster, and the check that their
versions are equal.
"""

import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from joblib import Parallel, delayed, effective_n_jobs, parallel_config

from experiments.cli.commandline import progress
from mistlab.core.values import InputError, reject

# The version of this project in a process; it is checked, since answers of different versions must
# not be mixed.
# ``versions_here`` may be sent by value to a machine that has another version of this project, or
# none. So it imports only the standard library, and returns plain texts.


# The properties, by name, that must be equal in all processes of a sweep.
Version = Mapping[str, str]


class OtherVersionError(InputError):
    """Raised if a worker process has another version than the process that gives it work."""


def versions_here() -> dict[str, str]:
    """The versions of mistlab, Python and NumPy in this process, and a hash of the sources on which
    the answers of searches depend.
    """
    import hashlib  # noqa: PLC0415 (sent by value, with its imports)
    import importlib.metadata  # noqa: PLC0415
    import importlib.util  # noqa: PLC0415
    import pathlib  # noqa: PLC0415
    import platform  # noqa: PLC0415

    versions = {"python": platform.python_version()}
    for package in ("mistlab", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    digest = hashlib.sha256()
    for package in ("mistlab", "simulators", "searchers", "experiments"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(pathlib.Path(folder).rglob("*")):
                if path.suffix in (".py", ".yaml", ".json"):
                    digest.update(f"{package}/{path.relative_to(folder)}".encode())
                    digest.update(path.read_bytes())
    return {**versions, "sources": digest.hexdigest()[:12]}


@cache
def here() -> Version:
    """The versions in this process, which must be equal in all processes of a sweep."""
    return versions_here()


def check_equal(worker: str, theirs: Version, ours: Version) -> None:
    """Refuse a worker process whose versions differ from this one's."""
    other = [
        f"{name} {theirs.get(name)} instead of {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    ]
    if other:
        message = (
            f"worker {worker} has other versions: {', '.join(other)}: install the same versions "
            "there, since answers of two versions do not belong in one table"
        )
        raise OtherVersionError(message)


# Calls a function for many items in worker processes: those of joblib, or those of a Ray cluster.
#
# Answers arrive in any order. The items of a killed worker are repeated.


Item = TypeVar("Item")
Answer = TypeVar("Answer")
Call = Callable[[Item], Answer]

# After this many rounds in a row in which workers are killed and no item is finished, the remaining
# items are given up.
VAIN_ROUNDS = 3
# How many items each worker gets in one call, with a joblib backend that returns only after all
# items are done.
AT_ONCE = 4
RAY = "ray"
# The head of a Ray cluster must answer a call within this many seconds.
LISTENS_S = 10.0


@dataclass(frozen=True, slots=True)
class _Lost:
    """Takes the place of an answer if the worker was killed."""

    why: str


@dataclass(frozen=True, slots=True)
class _OnRay(Generic[Item, Answer]):
    """A call that runs in a process of a Ray cluster, while a thread in this process waits for
    it.
    """

    call: Call[Item, Answer]
    remote: Any

    def __call__(self, item: Item) -> Answer | _Lost:
        import ray  # noqa: PLC0415 (an extra)

        try:
            answer: Answer = ray.get(self.remote.remote(self.call, item))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            return _Lost(type(error).__name__)
        return answer


@dataclass(frozen=True, slots=True)
class _Checked(Generic[Item, Answer]):
    """A call that a worker process refuses if its version differs from the caller's."""

    call: Call[Item, Answer]
    version: Version

    def __call__(self, item: Item) -> Answer:
        check_equal(platform.node(), here(), self.version)
        return self.call(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The worker processes of a sweep: those of joblib or, with ``remote``, those of a Ray
    cluster.
    """

    remote: Any = None

    def answers(
        self, call: Call[Item, Answer], items: Sequence[Item]
    ) -> Iterator[tuple[int, Answer]]:
        """Yields the index of each item with its answer, as answers arrive. If an item's worker is
        killed again and again, the item gets no answer.
        """
        checked: Call[Item, Answer | _Lost] = _Checked(call, here())
        if self.remote is not None:
            checked = _OnRay(checked, self.remote)
        left, vain = [*range(len(items))], 0
        while left and vain < VAIN_ROUNDS:
            before, lost = len(left), ""
            try:
                for number, answer in _round(checked, items, left):
                    if isinstance(answer, _Lost):
                        lost = answer.why
                    else:
                        left.remove(number)
                        yield number, answer
            except BrokenExecutor as error:
                lost = type(error).__name__
            vain = 0 if len(left) < before else vain + 1
            if left:
                progress(
                    f"a worker process was lost ({lost}): the {len(left)} problems without an "
                    "answer are solved again"
                )
                # One of the first items without an answer, as many as there are workers, has killed
                # its worker: these items go to the end of the queue.
                first = effective_n_jobs(None)
                left = left[first:] + left[:first]


def _round(
    call: Call[Item, Answer], items: Sequence[Item], places: Sequence[int]
) -> Iterator[tuple[int, Answer]]:
    """Call the function once for each of the items with these indices, in joblib's workers."""
    tasks = [delayed(_with_place)(call, place, items[place]) for place in places]
    try:
        parallel = Parallel(return_as="generator_unordered", batch_size=1)
    except ValueError:
        # Several items per call, for a backend (such as Ray's own) that returns all answers at
        # once.
        several = AT_ONCE * effective_n_jobs(None)
        for start in range(0, len(tasks), several):
            yield from Parallel(batch_size=1)(tasks[start : start + several])
        return
    yield from parallel(tasks)


def _with_place(call: Call[Item, Answer], number: int, item: Item) -> tuple[int, Answer]:
    return number, call(item)


def _called(call: Call[Item, Answer], item: Item) -> Answer:
    return call(item)


@contextmanager
def workers(jobs: int | None, cluster: str | None) -> Iterator[Workers]:
    """In the ``with`` block, the workers that ``--jobs`` and ``--cluster`` ask for."""
    if cluster is None:
        # With a single job, the work is done in this process.
        backend = "sequential" if jobs in (None, 1) else "loky"
        with parallel_config(backend=backend, n_jobs=jobs or 1):
            yield Workers()
        return
    name, _, address = cluster.partition(":")
    if name != RAY:
        reject(f"--cluster {cluster}: is unknown: give ray, or ray:ADDRESS")
    with _ray(jobs, address) as (remote, cpus), parallel_config(backend="threading", n_jobs=cpus):
        yield Workers(remote=remote)


@contextmanager
def _ray(jobs: int | None, address: str) -> Iterator[tuple[Any, int]]:
    """A function that makes a call on the Ray cluster, and how many calls it can run at once;
    refuses a cluster whose workers have another version.
    """
    options: dict[str, Any] = {"log_to_driver": False}
    if address:
        options["address"] = address
        _check_answers(address)
    else:
        options |= {"num_cpus": jobs, "include_dashboard": False}
    import ray  # noqa: PLC0415 (an extra)

    try:
        began = nullcontext() if ray.is_initialized() else ray.init(**options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # Ray raises many kinds of errors if a daemon does not start, memory is short or an address
        # cannot be reached.
        raise _no_cluster(address, error) if address else _not_started(error) from None
    with began:
        _check_nodes(ray)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        remote = ray.remote(num_cpus=1, max_retries=0)(_called)
        yield remote, min(cpus, jobs or cpus)


def _check_answers(address: str) -> None:
    """Refuse HOST:PORT at once if no process listens there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host, int(port)), timeout=LISTENS_S).close()
        except OSError as error:
            raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> InputError:
    return InputError(
        f"--cluster ray:{address}: no Ray cluster answers there ({_first_line(error)}): start one "
        "with ray start --head, or give --cluster ray for one on this machine"
    )


def _not_started(error: Exception) -> InputError:
    return InputError(
        f"--cluster ray: Ray does not start on this machine ({_first_line(error)}): give --jobs N "
        "instead for processes without Ray, or read its logs in /tmp/ray/session_latest/logs"
    )


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def _check_nodes(ray: Any) -> None:
    """Ask every node of the cluster for its version before it gets any work."""
    from ray.util.scheduling_strategies import (  # noqa: PLC0415 (an extra)
        NodeAffinitySchedulingStrategy,
    )

    module = sys.modules[versions_here.__module__]
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        asked = {}
        for node in ray.nodes():
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                remote = ray.remote(num_cpus=0, scheduling_strategy=strategy)(versions_here)
                asked[node["NodeID"]] = node["NodeManagerHostname"], remote.remote()
        for name, version in asked.values():
            check_equal(name, ray.get(version), here())
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
