"""Launch commands for tests: lines taken apart by hand, with unknown words on line 40."""

import shlex
from typing import Any

from mistlab import catalog
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_read import read_launch
from mistlab.shell.launch import Launch
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Unknown, Word

H100 = catalog.hardware("h100-80gb")
SHAPE = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --vocab-size 32000 --make-vocab-size-divisible-by 1 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
RUN = "--micro-batch-size 1 --global-batch-size 16 --bf16 --use-flash-attn"
STARTED = "torchrun --nnodes 1 --nproc-per-node 8"
LINE = 40


def word(text: str) -> Word:
    """A word on line 40; a ``$NAME`` in it is unknown."""
    unknown = None
    if "$" in text:
        name = text[text.index("$") :]
        unknown = Unknown(
            expression=name,
            line=LINE,
            reason="is set nowhere",
            remedy=f"give --set {name.lstrip('$')}=VALUE",
        )
    return Word(text=text, line=LINE, unknown=unknown)


def words(text: str) -> tuple[Word, ...]:
    """The words of a line."""
    return tuple(map(word, shlex.split(text)))


def launch(
    options: str, started: str = STARTED, program: str = "pretrain_gpt.py", **others: Any
) -> Launch:
    """A launch command with these options."""
    return Launch(
        program=program,
        started=words(started),
        arguments=words(options),
        line=LINE,
        **others,
    )


def imported(
    more: str = "",
    *,
    shape: str = SHAPE,
    run: str = RUN,
    source: LaunchFile | None = None,
    started: str = STARTED,
    program: str = "pretrain_gpt.py",
    written: dict[str, str] | None = None,
    **given: Any,
) -> Imported:
    """The import of a whole launch line with more options at its end."""
    command = launch(f"{shape} {run} {more}", started, program, written=written or {})
    return read_launch(command, source or LaunchFile(text=""), Given(**{"hardware": H100, **given}))


def texts(found: Imported, kind: str = "") -> dict[str, str]:
    """The remarks of a kind, or of all kinds, by their choices."""
    return {one.choice: one.text for one in found.remarks if not kind or one.kind == kind}
