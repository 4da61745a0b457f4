"""Token files: nanoGPT's and Megatron's, each sequence once, and what is wrong is said."""

import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from mistlab.core.values import InputError
from runtime.data import Synthetic, batch_of, open_tokens

LENGTH = 8


def tokens_file(folder: Path, count: int = 81, kind: str = "<u2") -> Path:
    path = folder / "tokens.bin"
    np.arange(count, dtype=kind).tofile(path)
    return path


def test_a_file_gives_every_sequence_once_an_epoch(tmp_path: Path) -> None:
    tokens = open_tokens(tokens_file(tmp_path), length=LENGTH, vocab=100, seed=3)
    assert tokens.count == 10
    firsts = [int(tokens(number)[0]) for number in range(20)]
    assert sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(0, 80, LENGTH))
    assert firsts[:10] != firsts[10:]


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    sequences = open_tokens(tokens_file(tmp_path), length=LENGTH, vocab=100, seed=3)
    tokens, targets = batch_of(sequences, 4, 2)
    assert tokens.shape == (2, LENGTH)
    assert (targets == tokens + 1).all()


def test_synthetic_sequences_depend_on_seed_and_number_alone() -> None:
    first, second = (Synthetic(length=LENGTH, vocab=50, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(first(5), Synthetic(length=LENGTH, vocab=50, seed=0)(5))
    assert (first(5) != first(6)).any()
    assert (first(5) != second(5)).any()


def megatron(folder: Path, lengths: list[int], *, code: int = 4) -> Path:
    path = tokens_file(folder, sum(lengths), {4: "<i4", 5: "<i8", 8: "<u2"}[code])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), 0)
    sizes = np.array(lengths, dtype="<i4").tobytes()
    path.with_suffix(".idx").write_bytes(header + sizes)
    return path


@pytest.mark.parametrize("code", [4, 5, 8])
def test_megatrons_index_says_the_type(tmp_path: Path, code: int) -> None:
    path = megatron(tmp_path, [40, 41], code=code)
    tokens = open_tokens(path, length=LENGTH, vocab=100, seed=0)
    assert sorted(int(tokens(number)[0]) for number in range(10)) == list(range(0, 80, LENGTH))


def test_a_truncated_megatron_file_is_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path, [40, 41])
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="truncated"):
        open_tokens(path, length=LENGTH, vocab=100, seed=0)


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    path = tokens_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="truncated"):
        open_tokens(path, length=LENGTH, vocab=100, seed=0)


def test_too_few_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few"):
        open_tokens(tokens_file(tmp_path, 8), length=LENGTH, vocab=100, seed=0)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        open_tokens(tmp_path / "none.bin", length=LENGTH, vocab=100, seed=0)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    sequences = open_tokens(tokens_file(tmp_path), length=LENGTH, vocab=20, seed=0)
    with pytest.raises(InputError, match=r"token \d+ at \d+ is outside the vocabulary of 20"):
        batch_of(sequences, 0, 10)


def test_a_token_below_zero_is_named_at_its_place(tmp_path: Path) -> None:
    path = megatron(tmp_path, [9])
    np.array([3, 1, 2, -7, 5, 1, 1, 1, 1], dtype="<i4").tofile(path)
    with pytest.raises(InputError, match="token -7 at 3 is outside"):
        open_tokens(path, length=LENGTH, vocab=20, seed=0)(0)
