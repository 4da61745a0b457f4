"""From a table of measurements to a hardware file that a plan may name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import calibrate
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.calibration import operators
from mistlab.core.files import read_yaml
from mistlab.core.values import from_mapping
from mistlab.cost.kernels import slowdowns_of_group
from mistlab.cost.side_by_side import factors_of, overlapped
from mistlab.machine.hardware import Hardware, OperatorClass, Rate
from mistlab.machine.slowdowns import SHARED_SETS, GroupSlowdowns, Slowdown

HEADER = (
    "generation,intra_group,inter_group,latency_ms,iso_compute_ms,iso_g2g_ms,iso_c2g_ms,iso_g2c_ms"
)


def slowdowns(gpus_in_node: int, factor: float) -> GroupSlowdowns:
    return GroupSlowdowns(
        gpus_in_node=gpus_in_node,
        nodes=1,
        slowdowns=tuple(Slowdown(streams=s, factors=(factor,) * len(s)) for s in SHARED_SETS),
    )


def written_table(path: Path, groups: list[GroupSlowdowns]) -> Path:
    draw = np.random.default_rng(0)
    lines = [HEADER]
    for group in groups:
        alone = draw.choice([0.0, 1.0, 2.0, 4.0], (400, 4))
        alone = alone[(alone > 0).sum(axis=1) > 1]
        together = overlapped(alone, factors_of(group)) * draw.uniform(0.99, 1.01, len(alone))
        for row, time in zip(alone, together, strict=True):
            parts = ",".join(f"{part:g}" for part in row)
            lines.append(f"a,{group.gpus_in_node},1,{time:.6f},{parts}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_becomes_a_hardware_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_table(tmp_path / "table.csv", [slowdowns(2, 1.2), slowdowns(4, 1.8)])
    out = tmp_path / "machine.yaml"

    arguments = ["--interference", str(table), "--out", str(out), "--json"]
    assert run(calibrate.main, arguments) == 0

    summary = json.loads(capsys.readouterr().out)
    assert summary["interference"]["held_out_error"] < 0.006  # noise of one percent, half in mean
    for group in summary["interference"]["fits"]:
        assert group["held_out_error"] < group["shape_left_out_error"]
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.interference is not None
    assert hardware.provenance.interference is not None
    assert summary["interference"]["sha256"][:16] in hardware.provenance.interference.source
    for gpus, factor in ((2, 1.2), (4, 1.8)):
        found = slowdowns_of_group(hardware.interference, gpus_in_node=gpus, nodes=1)
        alone = np.array([[1.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
        true = overlapped(alone, factors_of(slowdowns(gpus, factor)))
        assert overlapped(alone, factors_of(found)) == pytest.approx(true, rel=0.02)


def written_bandwidth(path: Path, latency_ms: float, sizes: int = 8) -> Path:
    lines = ["generation,intra_group,inter_group,kind,bytes,latency_ms"]
    for kind, gbytes_per_s in (("all_gather", 20.0), ("pinned_h2d", 5.0), ("pinned_d2h", 6.0)):
        for power in range(sizes):
            size = 2 ** (20 + power)
            time_ms = latency_ms + size / gbytes_per_s / 1e6
            lines.append(f"a,4,1,{kind},{size},{time_ms:.9f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_transfers_become_lines_beside_what_the_hardware_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_bandwidth(tmp_path / "table.csv", latency_ms=0.25)
    out = tmp_path / "machine.yaml"

    arguments = ["--bandwidth", str(table), "--out", str(out), "--hardware", "a100-40gb", "--json"]
    assert run(calibrate.main, arguments) == 0

    summary = json.loads(capsys.readouterr().out)
    assert summary["transfers"]["held_out_error"] < 1e-4
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.interference == catalog.hardware("a100-40gb").interference
    assert hardware.transfers is not None
    (group,) = hardware.transfers.groups
    for line, gbytes_per_s in (
        (group.all_gather, 20.0),
        (group.host_to_device, 5.0),
        (group.device_to_host, 6.0),
    ):
        assert line is not None
        assert line.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-4)
        assert line.latency_us == pytest.approx(250.0, rel=1e-3)
        assert (line.smallest_mib, line.largest_mib) == (1, 128)


def test_the_error_of_a_line_is_that_of_rows_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second size lies on the line; the others take half as long again, and are left out."""
    table = written_bandwidth(tmp_path / "table.csv", latency_ms=0.25)
    header, *rows = table.read_text(encoding="utf-8").splitlines()
    for number in range(1, len(rows), 2):
        *words, time_ms = rows[number].split(",")
        rows[number] = ",".join([*words, f"{float(time_ms) * 1.5:.9f}"])
    table.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    arguments = ["--bandwidth", str(table), "--out", str(tmp_path / "machine.yaml"), "--json"]
    assert run(calibrate.main, arguments) == 0
    fits = json.loads(capsys.readouterr().out)["transfers"]["fits"]
    assert [fit["held_out_error"] for fit in fits] == pytest.approx([1 / 3] * 3, rel=1e-4)


def test_the_error_of_slowdowns_is_that_of_rows_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The half of the rows that is drawn for the fit takes 1.2 s each, the others 1.6 s."""
    order = np.random.default_rng(3).permutation(20)
    seconds = np.full(20, 1.6)
    seconds[order[::2]] = 1.2
    table = tmp_path / "table.csv"
    rows = [f"a,2,1,{time},1,1,0,0" for time in seconds]
    table.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
    arguments = ["--interference", str(table), "--out", str(tmp_path / "machine.yaml")]
    assert run(calibrate.main, [*arguments, "--seed", "3", "--json"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["interference"]["fits"]
    assert fit["held_out_error"] == pytest.approx(1 - 1.2 / 1.6, rel=1e-3)


def test_too_few_sizes_make_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = written_bandwidth(tmp_path / "table.csv", latency_ms=0.25, sizes=3)
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--bandwidth", str(table), "--out", out]) == 2
    assert "3 rows of all_gather for 4 GPUs in each of 1 nodes: measure at least 4 sizes" in (
        capsys.readouterr().err
    )


def test_times_that_do_not_grow_make_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    rows = [f"a,2,1,all_gather,{2**power},{20 - power / 2}" for power in range(20, 26)]
    header = "generation,intra_group,inter_group,kind,bytes,latency_ms"
    table.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--bandwidth", str(table), "--out", out]) == 2
    assert "table.csv: all_gather: transfers of 32 MiB took no longer" in capsys.readouterr().err


def test_no_table_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(calibrate.main, ["--out", str(tmp_path / "m.yaml")]) == 2
    assert "nothing to fit: give --interference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--campaign", "b"], "--campaign 'b' is unknown: give one of a"),
        (["--hardware", "l5"], "'l5' is unknown"),
        (["--interference", "missing.csv"], "missing.csv: cannot be read"),
    ],
)
def test_wrong_usage_says_what_to_do(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_table(tmp_path / "table.csv", [slowdowns(2, 1.2)])
    arguments = ["--interference", str(table), "--out", str(tmp_path / "m.yaml"), *options]
    assert run(calibrate.main, arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m.yaml").exists()


def test_a_table_of_single_streams_cannot_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"{HEADER}\na,2,1,1,1,0,0,0\n", encoding="utf-8")
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--interference", str(table), "--out", out]) == 2
    assert "each row has at most one busy stream: add rows" in capsys.readouterr().err


OPERATORS = (
    *("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2"),
    *("enc-attention-score", "enc-attention-context", "enc-1st-layernorm"),
    *("enc-attention-softmax", "enc-attention-dropout", "enc-post-attention-dropout"),
    *("enc-2nd-layernorm", "enc-MLP-gelu", "enc-post-MLP-dropout"),
)
TRUE_RATES: dict[OperatorClass, Rate] = {
    "matmul": Rate(operators="matmul", tflops=50.0, gbytes_per_s=800.0),
    "batched_matmul": Rate(operators="batched_matmul", gbytes_per_s=200.0),
    "memory": Rate(operators="memory", gbytes_per_s=240.0),
}


def written_operators(path: Path, *, weight_gradients: bool = True) -> Path:
    """A profile of blocks whose classes take what ``TRUE_RATES`` say."""
    lines = ["hardware,hidden,ffn,heads,seq,vocab,mbs,tp,op,fwd_us,bwd_us,failed"]
    for hidden, micro_batch in ((1024, 1), (2048, 2), (2048, 4), (4096, 1)):
        sizes = (hidden, 4 * hidden, 16, 1024, 50304, micro_batch)
        work = operators._work_of_graph(operators.Block(*sizes), drops=True)
        for name in OPERATORS:
            operators_ = operators.CLASS_OF_OPERATOR[name]
            rate = TRUE_RATES[operators_]
            alike = sum(c == operators_ for c in operators.CLASS_OF_OPERATOR.values())
            seconds = (
                work[f"{operators_} flop"] * rate.s_per_flop
                + work[f"{operators_} bytes"] * rate.s_per_byte
            ) / alike
            # A third forward; without the weights' gradients another third backward.
            backward = 2 if weight_gradients or operators_ != "matmul" else 1
            forward_us = seconds / 3 * 1e6
            row = (*sizes, 1, name, forward_us, backward * forward_us)
            lines.append(f"a-machine,{','.join(map(str, row))},0")
    lines.append(f"a-machine,{','.join(map(str, (*sizes, 1, OPERATORS[0], 0, 0)))},1")
    lines.append(f"another,{','.join(map(str, (*sizes, 1, OPERATORS[0], 1, 1)))},0")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("weight_gradients", [True, False])
def test_rates_are_those_that_made_the_profile(
    weight_gradients: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_operators(tmp_path / "table.csv", weight_gradients=weight_gradients)
    out = tmp_path / "machine.yaml"
    arguments = ["--operators", str(table), "--table-hardware", "a-machine", "--out", str(out)]
    arguments += ["--attention-tflops", "40", "30", "--json"]
    if not weight_gradients:
        arguments.append("--without-weight-gradients")
    assert run(calibrate.main, arguments) == 0
    summary = json.loads(capsys.readouterr().out)["compute"]
    assert summary["held_out_error"] < 1e-4
    compute = from_mapping(Hardware, read_yaml(out)).compute
    assert compute is not None
    for operators_, rate in TRUE_RATES.items():
        found = compute.rate(operators_)
        assert found.s_per_byte == pytest.approx(rate.s_per_byte, rel=1e-3)
        assert found.s_per_flop == pytest.approx(rate.s_per_flop, rel=1e-3)
    assert compute.rate("attention_backward").tflops == 30


def test_a_profile_of_several_machines_needs_one_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_operators(tmp_path / "table.csv")
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--operators", str(table), "--out", out]) == 2
    assert "column hardware holds a-machine, another" in capsys.readouterr().err


def test_attention_has_its_own_table(tmp_path: Path) -> None:
    attention = tmp_path / "attention.csv"
    square = 2 * 16 * 2048**2
    fused_ms = [products * square * 128 / 40e12 * 1e3 for products in (2, 5)]
    product_ms = 2 * (square + 2 * 32 * 2048 * 128) / 250e9 * 1e3
    attention.write_text(
        "db,op,batch,seq,heads,head_dim,shapes,fwd_median_ms,bwd_median_ms\n"
        f"a,x.flash_attn_func,2,2048,16,128,{{}},{fused_ms[0]},{fused_ms[1]}\n"
        'a,torch.bmm,,,,,"{""input"": [32, 2048, 2048], ""mat2"": [32, 2048, 128]}",'
        f"{product_ms},{2 * product_ms}\n",
        encoding="utf-8",
    )
    table = written_operators(tmp_path / "table.csv")
    out = tmp_path / "machine.yaml"
    arguments = ["--operators", str(table), "--table-hardware", "a-machine", "--out", str(out)]
    assert run(calibrate.main, [*arguments, "--attention", str(attention)]) == 0
    compute = from_mapping(Hardware, read_yaml(out)).compute
    assert compute is not None
    assert compute.rate("attention_forward").tflops == pytest.approx(40)
    assert compute.rate("attention_backward").tflops == pytest.approx(40)
    assert compute.rate("batched_matmul").gbytes_per_s == pytest.approx(250, rel=1e-4)
    assert compute.rate("matmul").tflops == pytest.approx(50, rel=1e-3)


def test_rows_may_count_their_own_work_in_their_own_precision(tmp_path: Path) -> None:
    lines = ["hardware,hidden,ffn,heads,seq,vocab,mbs,tp,op,fwd_us,bwd_us,precision,flop,bytes"]
    for hidden in (256, 512, 1024):
        for name in OPERATORS:
            operators_ = operators.CLASS_OF_OPERATOR[name]
            flop, moved = 1e6 * hidden, 1e9 / hidden
            # A class of products takes its operations' time alone, the others their bytes'.
            seconds = flop / 2e12 if operators_ != "memory" else moved / 50e9
            times = f"{seconds / 4 * 1e6},{seconds * 3 / 4 * 1e6}"
            lines.append(f"a,{hidden},1024,4,64,1024,1,1,{name},{times},fp32,{flop},{moved}")
    table, attention = tmp_path / "operators.csv", tmp_path / "attention.csv"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    square = 2 * 4 * 64**2 * 32
    fused_ms = [products * square / 1e12 * 1e3 for products in (2, 5)]
    attention.write_text(
        "db,op,batch,seq,heads,head_dim,shapes,fwd_median_ms,bwd_median_ms,precision\n"
        f"a,flash_attn,2,64,4,32,{{}},{fused_ms[0]},{fused_ms[1]},fp32\n",
        encoding="utf-8",
    )
    out = tmp_path / "machine.yaml"
    arguments = ["--operators", str(table), "--attention", str(attention), "--out", str(out)]
    assert run(calibrate.main, arguments) == 0
    hardware = from_mapping(Hardware, read_yaml(out))
    peaks, compute = hardware.gpu.peak_tflops, hardware.compute
    assert compute is not None
    # Rates are of 16 bits, which are faster than 32 as the peaks are.
    faster = peaks.fp16 / peaks.fp32
    for operators_, in_32_bits in (("matmul", 2), ("batched_matmul", 2), ("attention_forward", 1)):
        assert compute.rate(operators_).tflops == pytest.approx(in_32_bits * faster, rel=0.01)
    assert compute.rate("memory").gbytes_per_s == pytest.approx(50, rel=1e-3)


def test_launches_are_the_median_of_kernels_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "launches.csv", tmp_path / "machine.yaml"
    table.write_text("hardware,kernels,time_us\na,10,60\na,20,100\na,30,210\n", encoding="utf-8")
    before = catalog.hardware("l4-24gb").compute
    assert run(calibrate.main, ["--launches", str(table), "--out", str(out), "--json"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["compute"]["fits"]
    # Kernels of 6, 5 and 7 us, each predicted by the median of the two others: 6, 6.5 and 5.5 us.
    assert fit["held_out_error"] == pytest.approx((0 + 1.5 / 5 + 1.5 / 7) / 3, rel=1e-3)
    found = from_mapping(Hardware, read_yaml(out)).compute
    assert before is not None
    assert found == replace(before, launch_us=6.0)


def test_collectives_and_sends_join_what_a_file_has(tmp_path: Path) -> None:
    sizes = [2.0**power for power in range(1, 9)]
    together = tmp_path / "collectives.csv"
    rows = [
        f"a,{gpus},{kind},{size},{0.05 + size * 2**20 / rate / 1e6}"
        for gpus in (2, 16)
        for kind, rate in (("all_reduce", 3.0), ("all_gather", 6.0), ("all_to_all", 1.0))
        for size in sizes
    ]
    header = "hardware,gpus,collective,full_mib,time_ms\n"
    together.write_text(header + "\n".join(rows) + "\n", encoding="utf-8")
    sends = tmp_path / "sends.csv"
    rows = [f"a,{link},{size},{size * 2**20 / 8e6}" for link in ("intra_node",) for size in sizes]
    sends.write_text("hardware,link,mib,time_ms\n" + "\n".join(rows) + "\n", encoding="utf-8")
    out = tmp_path / "machine.yaml"
    arguments = ["--collectives", str(together), "--point-to-point", str(sends)]
    assert run(calibrate.main, [*arguments, "--hardware", "l4-24gb", "--out", str(out)]) == 0

    before = catalog.hardware("l4-24gb").transfers
    found = from_mapping(Hardware, read_yaml(out)).transfers
    assert before is not None
    assert found is not None
    old, new = (
        {(group.gpus_in_node, group.nodes): group for group in transfers.groups}
        for transfers in (before, found)
    )
    assert set(new) == {*old, (16, 1)}
    assert new[2, 1].all_gather == old[2, 1].all_gather
    for shape in ((2, 1), (16, 1)):
        line = new[shape].all_reduce
        assert line is not None
        assert line.gbytes_per_s == pytest.approx(3.0, rel=1e-3)
    assert found.in_node is not None
    assert found.in_node.gbytes_per_s == pytest.approx(8.0, rel=1e-3)
    assert found.across_nodes is None
