"""Asks an agent fifty questions with the tools of ``mistlab mcp`` and without, and grades answers.

    python -m benchmarks.agent_questions draw --seed 0      # questions, with their right answers
    python -m benchmarks.agent_questions ask FOLDER         # prompts: with.md, without.md
    python -m benchmarks.agent_questions call TOOL JSON     # what an agent with tools calls
    python -m benchmarks.agent_questions grade ANSWERS.json
    python -m benchmarks.agent_questions page               # docs/results/agent-questions.md

A seed decides which questions are drawn (`question_makers`). They are stored beside this file with
the agent's answers, and the page is made of these files alone. An answer is right if it is within
the question's tolerance; to a tenth of the questions the right answer is *unanswerable*.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import yaml
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from benchmarks.question_draw import drawn
from benchmarks.question_makers import UNANSWERABLE
from experiments.agents.mcp_command import SKILL
from experiments.pages.page_tables import IN_A_FILE, write_page
from experiments.pages.tables import table

ROOT = Path(__file__).parents[1]
ASKED = Path(__file__).parent / "asked"
QUESTIONS = ASKED / "questions.yaml"
PAGE = ROOT / "docs" / "results" / "agent-questions.md"
# The relative difference up to which two numbers count as equal: facts have only a few digits.
EQUAL = 1e-3
WANTED = 45
# The files of answers, by the names under which the page shows them.
RUNS = {
    "with the tools": "answers-with.json",
    "with the tools, mended": "answers-with-mended.json",
    "without": "answers-without.json",
}

RULES = """\
Answer all {count} questions below. Write your answers as one JSON object to `{answers}`: keys are
the numbers of the questions as strings, "1" to "{count}", values are a number (in the unit that is
asked for, without the unit), a word or phrase as the question offers it, or the word
"{unanswerable}".

- Some questions cannot be answered: a fact is missing that nobody gave, a thing does not exist, or
  what is asked makes no sense. Answer "{unanswerable}" to those, and to no other.
- Give your best estimate of a number. It is right within a few percent, unless a question says
  otherwise.
- Plans are YAML files of the testbed mistlab: `workload` (model, batch in sequences a step),
  `cluster`, and `plan`: stages of a pipeline, each with its blocks (`layers`), degrees of data and
  tensor parallelism, micro-batch, ZeRO stage and blocks recomputed whole (`checkpointed_layers`).
"""
WITH = """\
You have the tools of mistlab, which predicts and tunes the distributed training of language models.
Call a tool by

    {python} -m benchmarks.agent_questions call TOOL '{{"argument": "value"}}'

in the folder {root}; `-` in place of the JSON reads it from standard input, and
`@NAME.json` from a file. Without TOOL it lists the tools with their arguments. Texts of plans and
launch lines may be given as text in the JSON, or as the path of a file that you wrote. A call takes
a second to a minute. Use nothing else of that folder: do not read its files, run no other command
of it, and do not search the web. A scratch folder of your own and small programs that call the
tools are fine.

The skill file of the tools says:

----
{skill}----
"""
WITHOUT = """\
You have no tool but the one that writes the file of your answers. Answer from your own knowledge
and by reckoning alone: read no other file, run no program, search nothing.
"""

HEAD = """\
# Questions to an agent, with the tools and without

Drawn by `python -m benchmarks.agent_questions draw --seed 0`, asked of two agents with the prompts
that `ask FOLDER` writes. Made by

```
python -m benchmarks.agent_questions page
```"""
MEANING = """\
The agents are of one model. One calls the tools of `mistlab mcp` and may use nothing else of this
project; the other answers from its own knowledge. Right answers come from commands, from steps that
Megatron-Bridge measured (*measured*) and from lines of pages here (*page*); a tenth of the
questions has none, and the right answer is to say so. Most right answers are this package's
predictions: there, a right answer says that an agent finds the tool and uses it well, not that
the figure is true. Only the measured ones say that."""
COMPUTED = """\
An answer is right within the share in *off by*, ✗ marks those that are not; plans, and how each
right answer is computed, are in `benchmarks/asked/questions.yaml`."""


def main(line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("draw").add_argument("--seed", type=int, default=0)
    parts.add_parser("ask").add_argument("folder", type=Path)
    call = parts.add_parser("call")
    call.add_argument("tool", nargs="?")
    call.add_argument("arguments", nargs="?", default="{}")
    parts.add_parser("grade").add_argument("answers", type=Path)
    parts.add_parser("page")
    options = parser.parse_args(line)
    if options.part == "draw":
        content = {
            "seed": options.seed,
            "questions": [one.as_plain() for one in drawn(options.seed)],
        }
        ASKED.mkdir(exist_ok=True)
        QUESTIONS.write_text(yaml.safe_dump(content, sort_keys=False, width=100), encoding="utf-8")
    elif options.part == "ask":
        ask(options.folder.resolve())
    elif options.part == "call":
        told(anyio.run(called, options.tool, arguments_of(options.arguments)))
    elif options.part == "grade":
        marks = graded(questions(), answers_in(options.answers))
        for mark in marks:
            said = "right" if mark["right"] else "WRONG"
            told(f"{mark['number']:2} {said} {mark['kind']}: {mark['given']} ({mark['answer']})")
        told(f"{sum(mark['right'] for mark in marks)} of {len(marks)} right")
    else:
        write_page(PAGE, page())
    return 0


def told(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def questions() -> list[dict[str, Any]]:
    content = yaml.safe_load(QUESTIONS.read_text(encoding="utf-8"))
    return list(content["questions"])


def ask(folder: Path) -> None:
    """Writes the two prompts, which ask the same questions: one for an agent with tools, one
    without.
    """
    skill = SKILL.read_text(encoding="utf-8")
    heads = {"with": WITH.format(python=sys.executable, root=ROOT, skill=skill), "without": WITHOUT}
    asked = questions()
    for name, head in heads.items():
        rules = RULES.format(
            count=len(asked), answers=folder / f"answers-{name}.json", unanswerable=UNANSWERABLE
        )
        text = "\n".join(["# Questions\n", rules, head, *_listed(asked)])
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def _listed(asked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for number, question in enumerate(asked, 1):
        yield f"## Question {number}\n\n{question['text']}\n"
        if "plan" in question:
            yield f"```\n{question['plan'].rstrip()}\n```\n"


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments for a tool, from JSON text, from a file (@NAME) or from standard input (-)."""
    if text == "-":
        text = sys.stdin.read()
    elif text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


async def called(tool: str | None, arguments: Mapping[str, Any]) -> str:
    """The server's answer to a call over standard input and output, which is how agents call it."""
    server = StdioServerParameters(
        command=sys.executable, args=["-m", "experiments", "mcp"], cwd=ROOT
    )
    async with Client(stdio_client(server)) as client:
        if tool is None:
            told = (await client.list_tools()).tools
            return "\n\n".join(
                f"{one.name}: {one.description}\n{json.dumps(one.input_schema)}" for one in told
            )
        result = await client.call_tool(tool, dict(arguments))
        return "\n".join(part.text for part in result.content if part.type == "text")


def answers_in(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, Any] = content.get("answers", content)
    return found


def graded(asked: Sequence[Mapping[str, Any]], answers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each question with the answer that was given, and whether it is right."""
    return [
        {
            **question,
            "number": number,
            "given": answers.get(str(number)),
            "right": is_right(question, answers.get(str(number))),
        }
        for number, question in enumerate(asked, 1)
    ]


def is_right(question: Mapping[str, Any], given: object) -> bool:
    """Whether an answer is the right one, a number within its tolerance."""
    right = question["answer"]
    if isinstance(right, str):
        return isinstance(given, str) and _plain(given) == _plain(right)
    try:
        value = float(str(given).replace(",", ""))
    except ValueError:
        return False
    return abs(value - right) <= (question.get("tolerance", 0.0) + EQUAL) * abs(right)


def _plain(text: str) -> str:
    return " ".join(text.lower().replace("'", "").split())


def page() -> str:
    """The page of results, made from the stored questions and answers."""
    asked = questions()
    runs = {
        words: graded(asked, answers_in(ASKED / name))
        for words, name in RUNS.items()
        if (ASKED / name).exists()
    }
    rights = {words: sum(mark["right"] for mark in marks) for words, marks in runs.items()}
    said = "; ".join(f"{words} {right} of {len(asked)}" for words, right in rights.items())
    notes = ASKED / "notes.md"
    told_apart = [notes.read_text(encoding="utf-8").strip()] if notes.exists() else []
    parts = [
        HEAD,
        f"Right: {said}. Asked for: at least {WANTED} with the tools.",
        MEANING,
        _by_kind(runs),
        *told_apart,
        "## Every question",
        IN_A_FILE,
        _answers(asked, runs),
        COMPUTED,
    ]
    return "\n\n".join(parts) + "\n"


def _by_kind(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A table of right answers of each kind of question."""
    kinds = sorted({mark["kind"] for marks in runs.values() for mark in marks})
    rows = []
    for kind in kinds:
        own = [[mark["right"] for mark in marks if mark["kind"] == kind] for marks in runs.values()]
        rows.append([kind, str(len(own[0])), *(str(sum(rights)) for rights in own)])
    return table(["kind", "questions", *runs], rows)


def _answers(
    asked: Sequence[Mapping[str, Any]], runs: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """A table of all questions, each with the right answer and the answers that were given."""
    rows = []
    for place, question in enumerate(asked):
        marks = [marks[place] for marks in runs.values()]
        text = question["text"] + (" (plan)" if "plan" in question else "")
        off_by = f"{question['tolerance']:.0%}" if "tolerance" in question else ""
        given = [_shown(mark["given"]) + ("" if mark["right"] else " ✗") for mark in marks]
        rows.append([str(place + 1), text, _shown(question["answer"]), off_by, *given])
    return table(["", "question", "right", "off by", *runs], rows)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
