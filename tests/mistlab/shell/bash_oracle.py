"""Runs scripts by a real bash whose launchers only tell their words: the oracle of the evaluator."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CASES = Path(__file__).parent / "cases"
_LAUNCHER = """#!/bin/bash
printf '%s\\0' torchrun "$@" >> "$ORACLE_OUT"; printf '\\1' >> "$ORACLE_OUT"
"""
# Starts what stands behind its options.
_WRAPPER = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == *=* ]] || shift; shift; done
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script to run, with what is given to it."""

    name: str
    text: str
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def scripts_of(file: Path) -> list[Script]:
    """The scripts of a file of cases: ``#### name | A=1 | -- x y``, then the script."""
    scripts = []
    for part in file.read_text().split("#### ")[1:]:
        head, _, text = part.partition("\n")
        name, *given = (item.strip() for item in head.split("|"))
        settings: dict[str, str] = {}
        arguments: tuple[str, ...] = ()
        for item in given:
            if item.startswith("-- "):
                # Arguments are words of a shell.
                arguments = tuple(_words(item[3:]))
            else:
                key, _, value = item.partition("=")
                settings[key] = value
        scripts.append(Script(name=name, text=text, settings=settings, arguments=arguments))
    return scripts


def _words(text: str) -> list[str]:
    import shlex

    return shlex.split(text)


def launches_by_bash(scripts: Sequence[Script], folder: Path) -> list[list[list[str]]]:
    """The words of every launch of each script, run by one bash after another."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name, text in (("torchrun", _LAUNCHER), ("srun", _WRAPPER)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    outs = []
    for number, script in enumerate(scripts):
        place, out = folder / f"{number}", folder / f"{number}.out"
        place.mkdir()
        (place / "script.sh").write_text(script.text)
        environment = {
            "PATH": f"{stubs}:{os.defpath}:/usr/bin:/bin",
            "ORACLE_OUT": str(out),
            "LC_ALL": "C.UTF-8",
            **script.settings,
        }
        subprocess.run(
            [bash, "script.sh", *script.arguments],
            cwd=place,
            env=environment,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
        outs.append(out.read_bytes().decode() if out.exists() else "")
    return [[each.split("\0")[:-1] for each in out.split("\1")[:-1]] for out in outs]
