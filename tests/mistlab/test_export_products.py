"""Every second product recomputed, in torchtitan's words and back."""

from dataclasses import replace

import pytest

from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from tests.mistlab.test_export import PLAIN
from tests.mistlab.test_import_plans import TOML


def recomputing(*counts: int) -> Job:
    """The plain job with stages that recompute every second product of so many blocks."""
    (stage,) = PLAIN.plan.stages
    own = replace(stage, layers=32 // len(counts), data_parallel=8 // len(counts))
    stages = tuple(replace(own, products_recomputed_layers=count) for count in counts)
    return replace(PLAIN, plan=replace(PLAIN.plan, micro_batches=2 * len(counts), stages=stages))


@pytest.mark.parametrize(("counts", "is_lost"), [((32,), False), ((5,), True), ((16, 0), True)])
def test_torchtitan_does_so_in_all_blocks_or_none(counts: tuple[int, ...], is_lost: bool) -> None:
    target = TARGETS["torchtitan-toml"]
    found = nearest(recomputing(*counts), target)
    assert all(one.products_recomputed_layers == one.layers for one in found.job.plan.stages)
    choices = [one.choice for one in found.remarks if one.kind == "approximated"]
    assert ("products_recomputed_layers" in choices) == is_lost
    text = target.write(found.job)
    assert 'mode = "selective"' in text
    assert 'selective_ac_option = "op"' in text


def test_a_configuration_s_op_is_read() -> None:
    cluster = PLAIN.cluster
    given = Given(hardware=cluster.hardware, nodes=2, gpus_per_node=8)
    found = TARGETS["torchtitan-toml"].read(TOML.replace('"4"', '"op"'), given)
    assert [one.products_recomputed_layers for one in found.job.plan.stages] == [16, 16]
    assert [one.checkpointed_layers for one in found.job.plan.stages] == [0, 0]
