"""The operations of a training step, against the formula of Narayanan et al. (SC 2021)."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.cost.kernels import megatron_flop, model_flop
from mistlab.plan.model_parts import Window
from mistlab.plan.workload import Attention, Workload
from tests.workloads import workload_of

# Of attention's products, forward and backward: all six of them, whole; and fused, half of each
# (the future is left out), with one of them done again in the backward pass.
SHARE_OF_ATTENTION: dict[Attention, float] = {"math": 1.0, "flash": 7 / 12}


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-13b"])
@pytest.mark.parametrize("attention", SHARE_OF_ATTENTION)
def test_a_step_of_gpt_takes_the_published_operations(name: str, attention: Attention) -> None:
    work = workload_of(name, 2048, 8, attention=attention)
    tokens, model = work.tokens, work.model
    hidden = model.hidden
    products = 72 * tokens * model.layers * hidden**2
    scores = products * work.sequence_length / (6 * hidden) * SHARE_OF_ATTENTION[attention]
    head = 6 * tokens * hidden * model.padded_vocab(1)
    assert model_flop(work) == pytest.approx(products + scores + head)


def test_megatron_counts_a_further_forward_pass_of_blocks() -> None:
    batch, sequence, layers, hidden, vocab = 8, 2048, 24, 2048, 50304
    counted = megatron_flop(
        batch=batch, sequence_length=sequence, layers=layers, hidden=hidden, vocab=vocab
    )
    blocks = 72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden))
    head = 6 * batch * sequence * hidden * vocab
    assert counted == pytest.approx(blocks * 4 / 3 + head)


def test_a_window_longer_than_the_sequence_hides_nothing() -> None:
    flop = {}
    for size in (512, 1024, 2048, 4096):
        model = replace(catalog.model("gpt-oss-20b"), window=Window(size=size))
        work = Workload(
            model=model, sequence_length=2048, global_batch=8, attention="flash", precision="bf16"
        )
        flop[size] = model_flop(work)
    assert flop[4096] == flop[2048]
    # With s tokens and a window of w there are w s - w^2 / 2 pairs.
    assert flop[512] < flop[1024] < flop[2048]
    assert flop[2048] - flop[1024] < flop[1024] - flop[512]
