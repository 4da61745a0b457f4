"""What the README promises: its code prints what it says, its commands are there."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.bench.problem import problem_of
from experiments.cli.command import main_of, parser_for
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.studies.survey import EIGHTHS, candidates_of, meshes
from mistlab.job.job import job_from_mapping
from simulators.symbolic import SymbolicPredictor

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GRAPHS = (ROOT / "docs" / "reference" / "layer-graphs.md").read_text(encoding="utf-8")
QUESTIONS = (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = "\n".join(
    [README, CONTRIBUTING, *(p.read_text("utf-8") for p in (ROOT / "docs").rglob("*.md"))]
)
BLOCKS = re.findall(r"```python\n(.*?)```", GRAPHS, re.DOTALL)
PROGRAMS = [
    block.replace("\\\n", " ").replace("#", "\n#").splitlines()
    for block in re.findall(r"```\n(.*?)```", README, re.DOTALL)
]


def test_the_first_program_prints_what_stands_under_it() -> None:
    program = BLOCKS[0]
    expected = program.rstrip().splitlines()[-1].removeprefix("# ")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {})
    assert printed.getvalue().strip() == expected


def test_the_second_program_is_the_tested_example() -> None:
    example = (ROOT / "examples" / "symbolic_gpt.py").read_text(encoding="utf-8")
    for line in BLOCKS[1].splitlines()[:-1]:
        assert line in example
    golden = (ROOT / "examples" / "symbolic_gpt.out").read_text(encoding="utf-8")
    assert BLOCKS[1].splitlines()[-1].split(": ", 1)[1] in golden


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"(?:`|^)make ([a-z-]+)(?:`|$)", PAGES, re.MULTILINE)))
)
def test_every_target_is_in_the_makefile(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize(
    "command",
    # ``squares`` is the command that a page writes as an example.
    sorted(
        set(re.findall(r"python -m ((?:experiments|benchmarks|tests)\.[a-z_]+)", PAGES))
        - {"experiments.squares"}
    ),
)
def test_every_command_exists(command: str) -> None:
    assert importlib.util.find_spec(command) is not None


def test_the_first_answer_is_what_its_plan_is_predicted_to_take() -> None:
    """To 2 %: a predictor that changes more changes the page."""
    promised = re.search(r"([\d.]+) s an iteration .* ([\d,]+) a GPU, MFU (\d+)%\n", README)
    assert promised
    assert "20 blocks each, 2 data x 2 context x 4 tensor parallel, micro-batch 1" in README
    degrees = {"data_parallel": 2, "tensor_parallel": 4, "context_parallel": 2}
    stage = {"layers": 20, "micro_batch": 1, "sequence_parallel": 1, "zero": 1, **degrees}
    job = job_from_mapping(
        {
            "workload": {
                "model": "llama3-70b",
                "sequence_length": 8192,
                "global_batch": 512,
                "attention": "flash",
                "precision": "bf16",
            },
            "cluster": {"hardware": "h100-80gb", "nodes": 8, "gpus_per_node": 8},
            "plan": {"engine": "megatron-core", "micro_batches": 256, "stages": [stage] * 4},
        }
    )
    found = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    assert float(promised[1]) == pytest.approx(found.iteration_s, rel=0.02)
    tokens = float(promised[2].replace(",", ""))
    assert tokens == pytest.approx(found.tokens_per_s / job.cluster.num_gpus, rel=0.02)
    assert float(promised[3]) == pytest.approx(100 * found.mfu, abs=1.5)


def shown(name: str) -> list[str]:
    """The lines of the first block of text that follows a command's name in README."""
    after = README[README.index(name) :]
    match = re.search(r"```text\n(.*?)```", after, re.DOTALL)
    assert match
    return match[1].splitlines()


def squeezed(text: str) -> str:
    """A text with one blank where it has several, and without the ends of a shell's lines."""
    return " ".join(text.replace("\\\n", " ").split())


def test_the_questions_are_answered_as_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of README runs, and prints every line that stands there, some of them cut."""
    (install, search), *_ = (
        [line for line in program if not line.startswith("#")] for program in PROGRAMS
    )
    assert install.strip() == "pip install ."
    commands = [search, *re.findall(r"`(mistlab (?:export|predict|will_it_fit) [^`]*)`", README)]
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 4
    for command in commands:
        _, name, *line = command.split()
        assert run(main_of(name, COMMANDS[name]), line) == 0
        answer = squeezed(capsys.readouterr().out)
        for expected in shown(command.strip().partition("\n")[0].split("  ")[0]):
            assert squeezed(expected) in answer, f"{command}: {expected}"
    # README's picture is the one that its command draws.
    drawn, kept = (tmp_path / "plan.svg", ROOT / "docs" / "plan.svg")
    words = re.compile(r"<text[^>]*>([^<]*)</text>")
    assert words.findall(drawn.read_text("utf-8")) == words.findall(kept.read_text("utf-8"))


def test_the_default_survey_has_the_candidates_that_are_promised() -> None:
    options = parser_for(COMMANDS["survey"], "survey").parse_args([])
    workload, cluster = problem_of(options)
    counts = [
        candidates_of(workload.model, mesh, EIGHTHS).shape for mesh in meshes(workload, cluster)
    ]
    promised = re.search(r"([\d.]+) million candidates", QUESTIONS)
    assert promised
    assert f"{np.array(counts)[:, 0].sum() / 1e6:.1f}" == promised[1]
