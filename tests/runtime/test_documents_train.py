"""Documents that share sequences, trained by plans: they lose as a plain run of each document by
itself, and a stage keeps what is predicted for whole sequences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.lengths import DocumentLengths, lengths_from  # noqa: E402
from mistlab.plan.model_parts import Window  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.data import Synthetic, open_tokens  # noqa: E402
from runtime.document_batches import DocumentBatch  # noqa: E402
from runtime.documents import (  # noqa: E402
    Documented,
    DrawnDocuments,
    EndedDocuments,
    PackedSequences,
)
from runtime.engine.executor import Report  # noqa: E402
from runtime.models.config import NOT_HIDDEN  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from runtime.models.wide_attention import Documents, within_documents  # noqa: E402
from runtime.runnable import check_documents  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.plain_bits import kept_coarsely  # noqa: E402
from tests.runtime.plain_model import loss_of  # noqa: E402
from tests.runtime.test_lean_blocks import kept_bytes, predicted  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    STEPS,
    TRAINING,
    Trained,
    alone,
    assert_alike,
    by_plan,
    random_plan,
    ratios,
    run_step,
    stage,
    starting_tensor,
    workload,
)

LENGTHS = lengths_from("lognormal:6:0.8")
ONE = Plan(micro_batches=2, stages=(stage(4, micro_batch=4),))
PLANS = {
    "alone": ONE,
    "ranks": Plan(
        micro_batches=2,
        stages=(stage(tensor_parallel=2, data_parallel=2, zero=3, offload=ratios(0.5, 0, 1, 0.5)),),
    ),
    "split tokens": Plan(
        micro_batches=2, stages=(stage(tensor_parallel=2, micro_batch=4, sequence_parallel=1),)
    ),
    "stages": Plan(
        micro_batches=4,
        stages=(stage(2, offload=MIXED), stage(1, zero=0), stage(1, checkpointed_layers=1)),
    ),
    "unlike stages": Plan(
        micro_batches=2,
        stages=(stage(2, data_parallel=2), stage(2, micro_batch=4, checkpointed_layers=2)),
    ),
    "weights later": Plan(micro_batches=4, order="zb-h1", stages=(stage(2), stage(2))),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"biases": True, "tied_embeddings": True}),
    "llama": ("llama", {"kv_heads": 2, "vocab": 97}),
    "normalised heads": ("llama", {"qk_norm": True, "kv_heads": 2}),
    "windows": ("llama", {"window": Window(size=5), "sinks": True, "attention_gate": False}),
}


def packed_of(
    work: Workload, filling: Any = "packed", lengths: DocumentLengths = LENGTHS
) -> PackedSequences:
    length = work.sequence_length
    data = Synthetic(length=length, vocab=work.model.vocab, seed=3)
    return PackedSequences(
        source=DrawnDocuments(drawn=lengths.within(length, cuts=True), sequences=data),
        filling=filling,
        length=length,
        count=work.global_batch,
        seed=3,
    )


def each_apart(
    work: Workload,
    filling: Any = "packed",
    *,
    train: str = "",
    lengths: DocumentLengths = LENGTHS,
) -> Trained:
    """One process, the plain model on one document after another, and torch's own AdamW."""
    packed, tied = packed_of(work, filling, lengths), work.model.tied_embeddings
    weights = {
        name: kept_coarsely(work, name, starting_tensor(name, tuple(one.shape), tied=tied))
        for name, one in model_of(work).named_parameters()
    }
    trained = {name: one.requires_grad_() for name, one in weights.items() if train in name}
    optimizer = torch.optim.AdamW(
        trained.values(), betas=(TRAINING.beta1, TRAINING.beta2), eps=TRAINING.epsilon
    )
    optimizer.param_groups[0]["weight_decay"] = TRAINING.weight_decay
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = TRAINING.learning_rate_at(step)
        optimizer.zero_grad()
        total, count = torch.zeros(()), 0
        for row in packed.rows(step):
            for number, length in row.tolist():
                tokens = torch.from_numpy(packed.source.tokens(number, length))[None]
                if length > 1:
                    mean = loss_of(work.model, weights, tokens[:, :-1], tokens[:, 1:])
                    total, count = total + mean * (length - 1), count + length - 1
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    reports = [
        Report(loss=loss, gradient_norm=None, loss_scale=1.0, skipped=False) for loss in losses
    ]
    return Trained(reports=reports, weights={name: one.detach() for name, one in trained.items()})


@pytest.mark.parametrize(
    ("model", "plan", "attention"),
    [
        *(("gpt", plan, "math") for plan in ("alone", "split tokens", "weights later")),
        *(("gpt", plan, "flash") for plan in ("ranks", "unlike stages")),
        ("llama", "stages", "math"),
        ("llama", "ranks", "math"),
        *(("llama", plan, "flash") for plan in ("alone", "split tokens", "weights later")),
        ("normalised heads", "stages", "math"),
        ("normalised heads", "stages", "flash"),
        ("windows", "stages", "flash"),
    ],
)
def test_a_plan_loses_as_documents_each_by_itself(model: str, plan: str, attention: str) -> None:
    family, fields = MODELS[model]
    work = workload(family, sequence_length=24, attention=attention, **fields)
    found = by_plan(work, PLANS[plan], packed=lambda: packed_of(work))
    assert_alike(found, each_apart(work))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_plans_lose_as_documents_each_by_itself(seed: int) -> None:
    work, plan = random_plan(seed)
    apart = {"context_parallel": 1, "context_exchange": 0}
    plan = replace(plan, stages=tuple(replace(one, **apart) for one in plan.stages))
    assert_alike(by_plan(work, plan, seed=seed, packed=lambda: packed_of(work)), each_apart(work))


def test_padded_documents_lose_alike() -> None:
    work = workload("llama", sequence_length=24)
    found = by_plan(work, PLANS["stages"], packed=lambda: packed_of(work, "padded"))
    assert_alike(found, each_apart(work, "padded"))


@pytest.mark.parametrize("base", ["16bit", "4bit"])
def test_adapters_with_a_chunked_loss_lose_alike(base: Any) -> None:
    work = workload("llama", sequence_length=24, hidden=64, ffn=128)
    work = replace(work, train="adapters", adapter_rank=4, base=base, loss="chunked")
    found = by_plan(work, PLANS["unlike stages"], packed=lambda: packed_of(work))
    expected = each_apart(work, train=".adapter.")
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)


def test_dropout_drops_alike_by_any_plan() -> None:
    work = workload(sequence_length=24, attention="math", dropout=0.1)
    found, other = (
        by_plan(work, PLANS[plan], packed=lambda: packed_of(work)) for plan in ("alone", "ranks")
    )
    assert_alike(found, other)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("plan", ["alone", "recomputed"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_stage_keeps_what_is_predicted_to_the_byte(
    family: str, plan: str, attention: str
) -> None:
    work = workload(family, sequence_length=32, attention=attention)
    less = stage(4, micro_batch=4, checkpointed_layers=4)
    of_plan = {"alone": ONE, "recomputed": replace(ONE, stages=(less,))}[plan]
    executor, packed = alone(work, of_plan, "eager"), packed_of(work)
    for step in range(2):
        run_step(executor, work, executor.connections, step, packed)
        assert executor.passes.held_bytes == 0
    assert executor.passes.peak_bytes == kept_bytes(work, of_plan)
    blocks = replace(ONE, stages=(stage(4, micro_batch=4, checkpointed_layers=0),))
    apart = kept_bytes(work, blocks) - executor.passes.peak_bytes
    assert apart == predicted(work, blocks) - predicted(work, of_plan)


def test_every_document_occurs_once_and_none_reaches_over_an_end() -> None:
    work = workload(sequence_length=24, batch=4)
    packed, seen = packed_of(work), []
    for step in range(40):
        rows = packed.rows(step)
        assert len(rows) == 4
        assert all(row[:, 1].sum() <= 24 for row in rows)
        seen += [number for row in rows for number in row[:, 0].tolist()]
    waiting = packed._waiting[:, 0].tolist()
    assert sorted([*seen, *waiting]) == list(range(len(seen) + len(waiting)))
    filled = sum(row[:, 1].sum() for row in rows) / (4 * 24)
    assert filled > 0.85
    again = [row.tolist() for row in packed_of(work).rows(39)]
    assert again == [row.tolist() for row in rows]
    packed.rows(3)
    assert again == [row.tolist() for row in packed.rows(39)]


def test_targets_stay_in_their_document() -> None:
    packed = packed_of(workload(sequence_length=24))
    row = next(row for row in packed.rows(0) if len(row) > 1 and row[:, 1].sum() < 24)
    tokens, targets = packed.sequence(row, 24)
    (lengths,) = DocumentBatch(rows=[row], length=24).lengths
    assert sum(lengths) == 24
    ends = np.cumsum(lengths)
    last = [*(ends[:-1] - 1), *range(ends[-2], 24)]
    assert sorted(set(torch.nonzero(targets == NOT_HIDDEN).flatten().tolist())) == last
    kept = (targets != NOT_HIDDEN)[:-1]
    assert torch.equal(targets[:-1][kept], tokens[1:][kept])


def test_documents_of_a_file_end_with_their_token(tmp_path: Any) -> None:
    written = np.array([5, 6, 9, 7, 9, 1, 2, 3, 4, 9, 8], dtype="<u2")
    path = tmp_path / "tokens.bin"
    written.tofile(path)
    file = open_tokens(path, length=5, vocab=10, seed=1)
    documents = EndedDocuments.of(file, 9, cuts=False)
    lengths = documents.lengths(0, 4).tolist()
    found = [documents.tokens(number, size).tolist() for number, size in enumerate(lengths)]
    assert sorted(found) == [[1, 2, 3, 4, 9], [5, 6, 9], [7, 9], [8]]
    again = [documents.tokens(number, 1).tolist() for number in range(4, 8)]
    assert sorted(again) == [[1], [5], [7], [8]]
    short = open_tokens(path, length=4, vocab=10, seed=1)
    with pytest.raises(InputError, match=r"ends:9: a document .* has 5 tokens.*give --cut"):
        EndedDocuments.of(short, 9, cuts=False)
    assert EndedDocuments.of(short, 9, cuts=True).lengths(0, 4).max() == 4
    with pytest.raises(InputError, match=r"ends:0: no token of --data .* is 0: give the token"):
        EndedDocuments.of(open_tokens(path, length=5, vocab=10, seed=1), 0, cuts=False)
    with pytest.raises(
        InputError, match="synthetic data has no token that ends documents: give --data FILE"
    ):
        Documented(filling="packed", end=9).source(Synthetic(length=5, vocab=10, seed=1), 5)


def test_a_gpu_s_kernel_is_given_where_documents_begin() -> None:
    """Its stand-in, as torch declares it for tensors without values."""
    documents = replace(
        Documents.of([[7, 9], [16]]), begins=torch.empty(4, dtype=torch.int32, device="meta")
    )
    from runtime.models import wide_attention  # noqa: PLC0415

    def heads(count: int) -> Tensor:
        return torch.empty(32, count, 8, dtype=torch.bfloat16, device="meta")

    operands = heads(4), heads(2), heads(2)
    mixed, total, *random = wide_attention._varied(operands, documents)
    assert mixed.shape == (32, 4, 8)
    assert total.shape == (4, 32)
    assert total.dtype == torch.float32
    made = wide_attention._varied_gradients((heads(4), *operands), mixed, total, random, documents)
    assert [one.shape for one in made] == [one.shape for one in operands]
    assert wide_attention._bounds(Documents.of([[7, 9], [16]]))[0].tolist() == [0, 7, 16, 32]


def test_tokens_see_their_own_document_alone() -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 12, heads, 8, generator=draw) for heads in (4, 2, 2))
    documents = Documents.of([[5, 7], [12]])
    found = within_documents(query, key, value, documents)
    other = value.clone()
    other[0, :5] += 1
    changed = within_documents(query, key, other, documents) != found
    assert changed[0, :5].all()
    assert not changed[0, 5:].any()
    assert not changed[1].any()


@pytest.mark.parametrize(
    ("fields", "degrees", "options", "message"),
    [
        (
            {},
            {"context_parallel": 2},
            {},
            r"stages\[0\].context_parallel: .* among 2 ranks .*: give 1, or leave",
        ),
        (
            {"further_tokens": 1},
            {},
            {},
            "heads for further tokens cannot .* --lengths out",
        ),
        ({}, {}, {"captures": True}, "--cuda-graphs: documents have other lengths .*: leave out"),
        ({}, {}, {"device": "cuda"}, "precision: fp32, but on cuda .*: give bf16"),
        (
            {},
            {},
            {"device": "cuda", "kernel": "cudnn"},
            "--attention-kernel cudnn: attention within",
        ),
        (
            {"head_dim": 10, "precision": "bf16"},
            {},
            {"device": "cuda"},
            "head_dim: 10, but on cuda .*multiple of 8",
        ),
    ],
)
def test_what_cannot_keep_documents_apart_is_refused(
    fields: dict[str, Any], degrees: dict[str, int], options: dict[str, Any], message: str
) -> None:
    work = workload("llama", sequence_length=32, **fields)
    plan = Plan(micro_batches=4, stages=(stage(4, **degrees),))
    job = Job(workload=work, cluster=replace(CLUSTER, gpus_per_node=2), plan=plan)
    given = {"device": "cpu", "kernel": "flash", "captures": False, **options}
    with pytest.raises(InputError, match=message):
        check_documents(job, given.pop("device"), **given)
