"""Drawn arithmetic, expansions and words have the values that a real bash gives them."""

import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile

BASH = shutil.which("bash") or "bash"
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash as the oracle")
FEW = settings(
    max_examples=12,
    phases=(Phase.generate,),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
_LAUNCHER = "torchrun() { printf '%s\\0' \"$@\"; }\n"


def words_by_bash(script: str) -> list[str]:
    done = subprocess.run(
        [BASH, "-c", _LAUNCHER + script],
        env={"LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
        timeout=20,
        cwd="/",
    )
    return done.stdout.decode().split("\0")[:-1]


def words_here(script: str) -> list[str]:
    launch = launch_of(LaunchFile(text=script))
    assert launch.program == "train.py"
    return ["train.py", *(word.text for word in launch.arguments)]


numbers = st.one_of(
    st.integers(-9, 99).map(str),
    st.sampled_from(["A", "B", "$A", "${B}", "0x1f", "017", "2#101", "A", "Z"]),
)


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = ["+", "-", "*", "&", "|", "^", "==", "!=", "<", ">", "<=", ">=", "&&", "||"]
    return st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(binary), inner),
        st.builds("({})".format, inner),
        st.builds("{} {} ((({})&7)|1)".format, inner, st.sampled_from(["/", "%", "<<"]), inner),
        st.builds("({}) ** (({})&7)".format, inner, inner),
        st.builds("{} ? {} : {}".format, inner, inner, inner),
        st.builds("{}{}".format, st.sampled_from(["~", "!", "+"]), inner),
        st.builds(
            "({} {} {})".format,
            st.sampled_from(["A", "B"]),
            st.sampled_from(["=", "+=", "*="]),
            inner,
        ),
        st.sampled_from(["A++", "B--", "++A", "(A, B)"]),
    )


expressions = st.recursive(numbers, larger, max_leaves=8)


@FEW
@given(st.lists(expressions, min_size=30, max_size=30))
def test_arithmetic(drawn: list[str]) -> None:
    lines = [f"A=3 B=-5 Z=; X+=($(( {each} )) $A $B)" for each in drawn]
    script = "\n".join(lines) + '\ntorchrun train.py "${X[@]}"\n'
    assert words_here(script) == words_by_bash(script)


letters = st.text("ab/.-_ x", min_size=0, max_size=10)
patterns = st.lists(
    st.sampled_from(["*", "?", "a", "b", "/", ".", "[ab]", "[!a]", "-", '"*"', "x", "\\*"]),
    min_size=1,
    max_size=4,
).map("".join)
operators = st.sampled_from(["#", "##", "%", "%%"])
replacing = st.sampled_from(["/", "//", "/#", "/%"])


@st.composite
def expansions(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["cut", "replace", "slice", "default", "case"]))
    if kind == "cut":
        return draw(operators) + draw(patterns)
    if kind == "replace":
        pattern = draw(patterns.filter(lambda each: "/" not in each))
        return f"{draw(replacing)}{pattern}/{draw(st.sampled_from(['', 'Q', 'a b']))}"
    if kind == "slice":
        start, size = draw(st.integers(0, 6)), draw(st.integers(0, 6))
        return draw(st.sampled_from([f":{start}", f":{start}:{size}", f": -{size}"]))
    if kind == "default":
        return draw(st.sampled_from([":-", "-", ":+", "+"])) + draw(st.sampled_from(["d", "'d e'"]))
    return draw(st.sampled_from(["^", "^^", ",", ",,"]))


@FEW
@given(st.lists(st.tuples(letters, expansions(), st.booleans()), min_size=25, max_size=25))
def test_expansions(drawn: list[tuple[str, str, bool]]) -> None:
    lines = []
    for value, expansion, is_quoted in drawn:
        quote = '"' if is_quoted else ""
        lines.append(f"V='{value}'; X+=({quote}${{V{expansion}}}{quote} ,)")
    script = "set -f\n" + "\n".join(lines) + '\ntorchrun train.py "${X[@]}"\n'
    assert words_here(script) == words_by_bash(script)


pieces = st.sampled_from(
    [
        "a",
        "'b c'",
        '"d  e"',
        "${V}",
        '"$V"',
        "${A[@]}",
        '"${A[@]}"',
        '"${A[*]}"',
        "${E}",
        '"$E"',
        "\\ ",
        "{1,2}",
        "{a..c}",
        '"$(echo x  y)"',
        "$(echo x  y)",
        "''",
        '"${E:-z z}"',
        "${E:-z z}",
        "$((1+1))",
    ]
)
separators = st.sampled_from(["", ",", ": ", " \t\n"])


@FEW
@given(
    st.lists(st.lists(pieces, min_size=1, max_size=4).map("".join), min_size=20, max_size=20),
    separators,
    st.sampled_from(["1 2", " 1  2 ", "1,2", "a:b: c", ",x,", ""]),
)
def test_splitting(drawn: list[str], ends: str, value: str) -> None:
    script = f"set -f; E=; V='{value}'; A=(p 'q r' '{value}'); IFS='{ends}'\n"
    script += "\n".join(f"X+=({word} .)" for word in drawn)
    script += '\ntorchrun train.py "${X[@]}"\n'
    assert words_here(script) == words_by_bash(script)
