"""Stand-ins of baselines are held against archives of the packages' sources."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.baseline_arguments import STAND_INS, main


def archives(folder: Path, *, lr: str) -> None:
    """A wheel and a source distribution with the signatures of the stand-ins."""
    text = (STAND_INS / "deepspeed_adam.py").read_text(encoding="utf-8")
    adams = (
        text.replace("def fused_adam(", "class FusedAdam:\n  def __init__(self,")
        .replace("def adam_of_host(", "class DeepSpeedCPUAdam:\n  def __init__(self,")
        .replace("lr: float = 1e-3", f"lr: float = {lr}", 1)
    ).encode()
    with tarfile.open(folder / "deepspeed-1.tar.gz", "w:gz") as file:
        member = tarfile.TarInfo("deepspeed-1/deepspeed/ops/adam/both.py")
        member.size = len(adams)
        file.addfile(member, io.BytesIO(adams))
    engine = (STAND_INS / "transformer_engine.py").read_text(encoding="utf-8")
    with zipfile.ZipFile(folder / "transformer_engine-1.whl", "w") as wheel:
        wheel.writestr("transformer_engine/pytorch/module/all.py", engine)
        # Other classes of the same names are not what is stood in for.
        wheel.writestr(
            "transformer_engine/pytorch/ops/linear.py", "class Linear:\n  def __init__(self): ..."
        )


def test_another_default_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives(tmp_path, lr="0.001")
    assert main([str(tmp_path)]) == 0
    assert "whl: Linear: the same arguments" in capsys.readouterr().out
    archives(tmp_path, lr="0.002")
    assert main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "FusedAdam: ('lr', '0.001'), ('lr', '0.002')" in told
    assert "DeepSpeedCPUAdam: the same arguments" in told
