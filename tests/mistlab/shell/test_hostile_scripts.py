"""Hostile scripts are refused with a line, in bounded time and memory, and never run."""

import resource
import time

import pytest

from mistlab.core.values import InputError
from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile

MANY = 30_000
SCRIPTS = {
    "ten megabytes of substitutions": "$(" * 5_000_000,
    "substitutions": "$(" * (MANY // 2),
    "parentheses": "(" * MANY,
    "quoted substitutions": '"$(' * (MANY // 3),
    "sums of parentheses": "$((" + "(" * MANY,
    "sums of signs": "x=$((" + "-" * MANY + "1))",
    "long sums": "x=$((" + "1+" * (MANY // 2) + "1))",
    "ifs": "if true; then " * (MANY // 14),
    "an endless loop": "while :; do :; done",
    "a loop that counts for ever": "while true; do x=$((x+1)); done",
    "a count for ever": "for ((;;)); do :; done",
    "a long count": "for ((i=0;i<100000000;i++)); do x=$i; done",
    "growth": "a=x\n" + "a=$a$a\n" * 60,
    "growth of an array": "A=(x); while :; do A+=(${A[@]}); done",
    "a fork bomb": ":(){ :|:& };:",
    "recursion": "f(){ f; f; }; f",
    "a script that starts itself": "bash run.sh",
    "a script that reads itself": "source run.sh",
    "an eval of itself": 'x="eval \\"\\$x\\""; eval "$x"',
    "braces of braces": "echo " + "{1..9}" * 12,
    "a long brace": "echo {1..99999999}",
    "open braces": "echo " + "{" * MANY,
    "stars": "x=" + "a" * 3000 + "; case $x in " + "*a" * 400 + "*b) ;; esac",
    "suffixes": "x=" + "a" * MANY + "; y=${x%%*b*}; z=${x//a*b/}",
    "variables that name one another": "a=b; b=a; echo $((a))",
    "negated tests": "[ " + "! " * (MANY // 2) + " ]",
    "quotes": "'" * (MANY + 1),
    "dollars": "$" * MANY,
    "nothing but ends": "a;" * (MANY // 2),
    "pipes": "a|" * (MANY // 2) + "a",
    "prefixes": "env " * (MANY // 4),
    "zeros": "\0\0",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_script_is_refused_soon(name: str) -> None:
    text = SCRIPTS[name]
    begun = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError) as refused:
        launch_of(LaunchFile(text=text, name="run.sh", beside={"run.sh": text}.get))
    assert time.process_time() - begun < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "printf '%999999999d' 1; printf %.999999f 1; torchrun x.py",
        "echo $((1<<99999999999)) $((2**9999999999)); torchrun x.py",
        "x=" + "a" * 200 + "; [[ $x =~ ^(a+)+$ ]]; [[ $x =~ a*a*a*a*a*a*b ]]; torchrun x.py",
        "A[99999999999]=1; A[1<<40]=3; torchrun x.py ${#A[@]}",
        "\n".join(f"[ $A{i} ] && X=$X{i}" for i in range(2000)) + "\ntorchrun x.py $X",
        "torchrun x.py " + "${a:-" * 30 + "}" * 30,
    ],
)
def test_a_large_script_is_read_soon(text: str) -> None:
    begun = time.process_time()
    assert launch_of(LaunchFile(text=text)).program == "x.py"
    assert time.process_time() - begun < 10
