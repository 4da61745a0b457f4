"""Documents packed into a sequence: each loses, and teaches, as a sequence of its own."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from runtime.models.families import confine, model_of  # noqa: E402
from runtime.models.wide_attention import CurrentDocuments, Documents  # noqa: E402
from tests.runtime.plain_model import loss_of  # noqa: E402
from tests.runtime.worlds import starting_tensor, workload  # noqa: E402

LENGTHS = (7, 1, 16, 8)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize(
    ("family", "fields"),
    [("gpt", {}), ("llama", {"kv_heads": 2}), ("falcon", {}), ("llama", {"qk_norm": True})],
)
def test_packed_documents_equal_a_plain_run_of_each(
    family: str, fields: dict[str, Any], attention: str
) -> None:
    work = workload(family, attention=attention, sequence_length=32, **fields)
    model = model_of(work)
    weights = {}
    for name, one in model.named_parameters():
        weights[name] = starting_tensor(name, tuple(one.shape), tied=False).requires_grad_()
        one.data = weights[name].detach().clone()
    packed = CurrentDocuments([Documents.of([LENGTHS] * 2)])
    confine(model, packed)
    packed.select(0)
    rows = torch.randint(work.model.vocab, (2, 33), generator=torch.Generator().manual_seed(3))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    found = model(tokens, targets)
    found.backward()
    begins = np.cumsum((0, *LENGTHS))
    plain = sum(
        length
        * loss_of(work.model, weights, *(one[:, at : at + length] for one in (tokens, targets)))
        for at, length in zip(begins, LENGTHS, strict=False)
    ) / sum(LENGTHS)
    plain.backward()
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, weights[name].grad, rtol=1e-4, atol=1e-7)
