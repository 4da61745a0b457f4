import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab.core.files import (
    format_yaml,
    parse_settings,
    parse_yaml,
    read_json,
    read_yaml,
    write_yaml,
)
from mistlab.core.values import InputError

BAD_YAML = {
    "empty": (b"", "is empty: write at least one key"),
    "comments only": (b"# nothing\n", "is empty: write at least one key"),
    "null": (b"~\n", "is empty: write at least one key"),
    "binary": (bytes(range(256)), "is not text in UTF-8 (byte 128): give a text file"),
    "zero bytes": (b"a: 1\x00\x00", "character 4 is not printable: give a text file"),
    "latin-1": ("name: café".encode("latin-1"), "is not text in UTF-8 (byte 9)"),
    "syntax": (b"plan:\n  stages: [1, 2\n", "line 3, column 1: a list in [ ] or a mapping in { }"),
    "tab": (b"plan:\n\tstages: 1\n", "line 2, column 1: the line is indented by a tab"),
    "colon": (b"a: b: c\n", "line 1, column 5: a key with a colon cannot stand here: quote"),
    "at": (b"a: @x\n", "line 1, column 4: a value cannot begin with @: write the value in"),
    "open quote": (b"a: 'x\n", "line 2, column 1: a text in quotes is not closed"),
    "unknown alias": (b"a: *x\n", "line 1, column 4: alias *x names no value above it"),
    "duplicate key": (b"a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' stands twice"),
    "deep duplicate key": (b"a:\n  - {b: 1, b: 2}\n", "line 2, column 12: key 'b' stands twice"),
    "list": (b"- 1\n- 2\n", "holds [1, 2], not a mapping: write 'key: value' lines"),
    "text": (b"plan\n", "holds 'plan', not a mapping: write 'key: value' lines"),
    "list in lists": (b"- " * 50 + b"1\n", "holds [[[...]]], not a mapping: write"),
    "deep list": (b"- " * 200 + b"1\n", "line 1, column 201: nested more than 100 levels deep"),
    "brackets": (b"[" * 30_000, "line 1, column 101: nested more than 100 levels deep"),
    "braces": (b"a: " + b"{a: " * 30_000, "line 1, column 400: nested more than 100 levels deep"),
    "indicators": (b"- " * 30_000, "line 1, column 201: nested more than 100 levels deep"),
    "keys": (b"? " * 30_000, "line 1, column 201: nested more than 100 levels deep"),
    "far indented": (
        b"".join(b" " * depth + b"a:\n" for depth in range(300)),
        "line 101, column 101: nested more than 100 levels deep",
    ),
    "growing aliases": (
        b"a0: &a0 [1, 1]\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
        "line 18, column 22: more than 1,000,000 entries once aliases (*NAME) are",
    ),
    "growing merges": (
        b"a0: &a0 {x: 1}\n"
        + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n, n, n - 1, n - 1) for n in range(1, 40)),
        "line 18, column 28: more than 1,000,000 entries once aliases (*NAME) are",
    ),
    "alias of itself": (b"a: &a [*a]\n", "line 1, column 8: alias *a is inside the value it names"),
    "list as key": (b"? [1]\n: 2\n", "line 1, column 3: a key is a list or a mapping"),
    "tag": (b"a: !!python/name:os.system\n", "line 1, column 4: tag !!python/name:os.system is"),
    "two documents": (b"a: 1\n---\nb: 2\n", "line 2, column 1: a second document begins"),
    "impossible date": (b"a: 2020-13-45\n", "line 1, column 4: '2020-13-45' cannot be read as a"),
}


@pytest.mark.parametrize(("content", "message"), BAD_YAML.values(), ids=BAD_YAML.keys())
def test_bad_yaml_is_refused_with_file_and_remedy(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.yaml", "there is no such file: check the path"), ("", "is a folder: give a file")],
    ids=["missing", "folder"],
)
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_yaml(tmp_path / name)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1, column 2: "),
        ("", "is empty"),
        ("[1]", "holds [1], not a mapping"),
        ("[" * 30_000, "is nested too deeply"),
        ('{"a": {"b": 1, "b": 2}}', "key 'b' stands twice in one object: remove one"),
    ],
    ids=["syntax", "empty", "list", "brackets", "duplicate key"],
)
def test_bad_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_merged_key_may_be_overridden() -> None:
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n"
    assert parse_yaml(text, "text")["other"] == {"a": 1, "b": 3}


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path) == {"a": 1}


PRINTABLE = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]))
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | PRINTABLE,
    lambda inner: st.lists(inner) | st.dictionaries(PRINTABLE, inner),
    max_leaves=8,
)


@given(mapping=st.dictionaries(PRINTABLE, PLAIN, min_size=1))
def test_a_mapping_comes_back_from_yaml(mapping: dict[str, Any]) -> None:
    assert parse_yaml(format_yaml(mapping), "text") == mapping


def test_writing_keeps_the_order_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_yaml({"b": 1, "a": math.pi}, path)
    assert path.read_text() == "b: 1\na: 3.141592653589793\n"


def test_aliases_that_stay_small_are_filled_in() -> None:
    text = "stage: &s {layers: 2}\nstages: [*s, *s]\n"
    assert parse_yaml(text, "plan")["stages"] == [{"layers": 2}, {"layers": 2}]


def test_an_object_with_equal_keys_of_equal_values_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1], "a": [1]}')
    assert read_json(tmp_path / "config.json") == {"a": [1]}


@pytest.mark.parametrize("read", [read_yaml, read_json])
def test_a_file_without_end_is_refused(read: Any) -> None:
    with pytest.raises(InputError, match=r"^/dev/zero: has more than \d+ MiB: give a smaller file"):
        read(Path("/dev/zero"))


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000])
def test_what_no_path_can_be_is_refused(path: str) -> None:
    with pytest.raises(InputError, match=r"is not a path|cannot be read .File name too long"):
        read_yaml(Path(path))


def test_an_error_of_a_full_disk_names_the_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_yaml({"a": 1}, Path("/dev/full"))


def test_numbers_may_be_written_as_json_and_python_write_them() -> None:
    text = "a: 1e-05\nb: 5e8\nc: -1.5E3\nd: 12e\ne: '1e5'\n"
    content = parse_yaml(text, "file")
    assert content == {"a": 1e-05, "b": 5e8, "c": -1500.0, "d": "12e", "e": "1e5"}
    assert parse_yaml(format_yaml(content), "file") == content


def test_settings_are_read_as_json_or_as_yaml() -> None:
    assert parse_settings('{\n\t"eps": 1e-05,\n\t"name": "a\\/b"\n}', "file") == {
        "eps": 1e-05,
        "name": "a/b",
    }
    assert parse_settings("{eps: 1e-05}", "file") == parse_settings("eps: 1e-05", "file")
    with pytest.raises(InputError, match="file: line 2"):
        parse_settings('{"eps": 1,\n', "file")
