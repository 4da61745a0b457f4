"""Searches parts of a cluster as well as all of it, since the best plan may leave GPUs idle."""

from collections.abc import Iterator
from dataclasses import replace

from mistlab.job.search import Problem

# Prime factors of the numbers of GPUs that most models and batches can be divided among.
SMALL_PRIMES = (2, 3)
# If the number of GPUs has prime factors other than 2 and 3, this many smaller parts of the cluster
# are searched as well.
MOST_PARTS = 2


def parts_of(problem: Problem, *, has_plans: bool) -> tuple[Problem, ...]:
    """The same problem on smaller parts of its cluster; the GPUs outside a part stay idle.

    Only numbers of GPUs without prime factors above 3 are tried. If the whole cluster has such a
    number of GPUs there are no parts, otherwise the few largest. If the whole cluster has no plan,
    all such parts are tried.
    """
    if has_plans and divides_well(problem.cluster.num_gpus):
        return ()
    parts = sorted(set(_smaller(problem)), key=lambda size: -size[0] * size[1])
    sizes = {nodes * gpus: (nodes, gpus) for nodes, gpus in reversed(parts)}
    chosen = [sizes[count] for count in sorted(sizes, reverse=True)]
    return tuple(
        replace(problem, cluster=replace(problem.cluster, nodes=nodes, gpus_per_node=gpus))
        for nodes, gpus in (chosen[:MOST_PARTS] if has_plans else chosen)
    )


def divides_well(count: int) -> bool:
    """Whether a number of GPUs has no prime factors besides 2 and 3."""
    for prime in SMALL_PRIMES:
        while count % prime == 0:
            count //= prime
    return count == 1


def _smaller(problem: Problem) -> Iterator[tuple[int, int]]:
    """Parts of a cluster of equal nodes: the number of nodes, and how many GPUs of each are used. A
    part is some whole nodes, or some GPUs of one node.

    Ranks fill nodes in order, so a plan never uses only a part of several nodes.
    """
    cluster = problem.cluster
    if cluster.others:
        return
    sizes = [(1, gpus) for gpus in range(1, cluster.gpus_per_node)]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in range(1, cluster.nodes)]
    yield from (size for size in sizes if divides_well(size[0] * size[1]))
