"""Training in 32 bits: what torch's own operators hold and move, beside the engines' figures."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.engines.engine import ENGINES  # noqa: E402
from mistlab.graph.library import graph_of  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch, StageFigures  # noqa: E402
from runtime.profiling.environment import devices_of  # noqa: E402
from runtime.profiling.node_checks import check_devices, check_gpus  # noqa: E402
from runtime.tensor_cores import products_in  # noqa: E402
from tests.runtime.allocations import Allocations  # noqa: E402
from tests.runtime.test_kept_by_torch import Moved  # noqa: E402

LAYERS, B, S, H, N, F, V = 3, 4, 64, 128, 4, 512, 4096
D, DROPOUT = H // N, 0.1
SIZES = {"b": B, "s": S, "h": H, "n": N, "k": N, "d": D, "r": D, "f": F, "V": V, "tp": 1}


def work() -> Workload:
    sizes = {"hidden": H, "layers": LAYERS, "heads": N, "kv_heads": N, "head_dim": D, "ffn": F}
    model = replace(
        catalog.model("bert-large"), **sizes, vocab=V, context=S, dropout=DROPOUT, name=""
    )
    return Workload(
        model=model, sequence_length=S, global_batch=B, attention="math", precision="fp32"
    )


def dropped(x: Tensor) -> Tensor:
    """Dropout as on a GPU, where a mask has a byte."""
    return torch.native_dropout(x, DROPOUT, True)[0]


class Encoder(nn.Module):
    """A block of BERT in torch's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.output = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, F), nn.Linear(F, H)
        self.first, self.second = nn.LayerNorm(H), nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.view(B, S, N, D).transpose(1, 2) for one in self.queries(x).split(H, dim=-1))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(D)
        seen = dropped(scores.softmax(-1)) @ v
        x = self.first(x + dropped(self.output(seen.transpose(1, 2).reshape(B, S, H))))
        return self.second(x + dropped(self.down(functional.gelu(self.up(x)))))


class Bert(nn.Module):
    """An encoder and its loss; the table of the head is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(V, H), nn.Embedding(S, H)
        self.norm = nn.LayerNorm(H)
        self.blocks = nn.ModuleList(Encoder() for _ in range(LAYERS))
        self.transform, self.last = nn.Linear(H, H), nn.LayerNorm(H)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = dropped(self.norm(self.words(tokens) + self.places(torch.arange(S))))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.last(functional.gelu(self.transform(x))), self.words.weight)
        return functional.cross_entropy(logits.view(-1, V), targets.view(-1)), logits


def figures(engine: str, layers: int = LAYERS) -> StageFigures:
    job = replace(work(), model=replace(work().model, layers=layers))
    batch = StageBatch.of_plan(Plan.of_one_gpu(layers, B, engine, {}))
    return StageModel.of(job, engine).figures(batch)


def test_a_block_of_bert_keeps_what_its_graph_says() -> None:
    block, x = Encoder(), torch.randn(B, S, H, requires_grad=True)
    known = {one.untyped_storage().data_ptr() for one in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    saved = graph_of(work(), "eager").counts.block.saved_bytes
    assert sum(kept.values()) == eval(str(saved), {"__builtins__": {}}, SIZES)


@pytest.fixture(scope="module")
def training() -> tuple[Bert, torch.optim.Optimizer, int]:
    """A model after two steps, and the most bytes of tensors in the second."""
    with Allocations() as allocations:
        # Parameters are made while allocations are counted.
        model = Bert()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        tokens = torch.randint(V, (B, S))
        for _ in range(2):
            allocations.most_bytes = 0
            loss, logits = model(tokens, tokens)
            loss.backward()
            del loss, logits
            optimizer.step()
            # Gradients are views of buckets, which stay.
            optimizer.zero_grad(set_to_none=False)
    return model, optimizer, allocations.most_bytes


@pytest.mark.parametrize("engine", ["ddp", "trainer", "fsdp-eager"])
def test_states_are_16_bytes_a_parameter_to_the_byte(
    engine: str, training: tuple[Bert, torch.optim.Optimizer, int]
) -> None:
    model, optimizer, _ = training
    weights = [*model.parameters()]
    moments = [one for state in optimizer.state.values() for one in state.values() if one.ndim > 0]
    gradients = [one.grad for one in weights if one.grad is not None]
    held = figures(engine)
    for tensors, predicted in (
        (weights, held.weights_bytes),
        (gradients, held.gradients_bytes),
        (moments, held.optimizer_bytes),
    ):
        assert sum(one.untyped_storage().nbytes() for one in tensors) == predicted[0]


def test_a_step_s_peak_is_predicted(training: tuple[Bert, torch.optim.Optimizer, int]) -> None:
    """The peak is that of the loss. Predicted are also twice the three tensors that the head's
    dense layer keeps, as if they were logits."""
    *_, most = training
    workspaces = ENGINES["ddp"].memory["fp32"].fixed_mib * 2**20
    predicted = figures("ddp").peak_bytes[0] - workspaces - 2 * 3 * 4 * B * S * H
    assert most == pytest.approx(predicted, rel=0.002)


def test_a_loss_in_32_bits_holds_16_bytes_a_logit_and_moves_24() -> None:
    """By name the gather of log-probabilities and its gradient read all of them (8); they read one
    a row."""
    rows, vocab = 64, 4096
    for counter in (Allocations(), Moved()):
        with counter:
            logits = torch.randn(rows, vocab).requires_grad_()
            begun = getattr(counter, "size_bytes", 0)
            loss = functional.cross_entropy(logits, torch.randint(vocab, (rows,)))
            loss.backward()
        if isinstance(counter, Moved):
            assert (counter.size_bytes - begun) / (rows * vocab) == pytest.approx(24 + 8, rel=0.03)
        else:
            assert counter.most_bytes / (rows * vocab) == pytest.approx(16, rel=0.01)


def test_products_run_in_tf32_within_a_run_alone() -> None:
    before = torch.get_float32_matmul_precision()
    with products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        with products_in("fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_a_cpu_has_no_tf32() -> None:
    cpu, option = [torch.device("cpu")], "workload.precision"
    check_gpus(cpu, ranks=1, precision="fp32", option=option)
    refused = pytest.raises(InputError, match=r"precision: tf32, but a CPU .*: give fp32")
    with refused:
        check_gpus(cpu, ranks=1, precision="tf32", option=option)
    with refused:
        check_devices(devices_of("cpu", 1), precision="tf32", option=option)
