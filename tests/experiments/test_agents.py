"""Tools of the Model Context Protocol: answers equal the commands', wrong input is told, and limits
hold."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from benchmarks import agent_questions
from experiments.agents import asking, tools
from experiments.agents.asking import Asking, folder_of
from experiments.agents.mcp_command import SKILL
from experiments.agents.mcp_server import server
from experiments.cli.command import main_of
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError
from tests.hostile.sources import config

ROOT = Path(__file__).parents[2]
PLAN = ROOT / "experiments" / "plans" / "gpt3-2.7b-4xl4.yaml"
SCRIPT = ROOT / "experiments" / "plans" / "pretrain-gpt3-2.7b.sh"
TEXT = PLAN.read_text(encoding="utf-8")


def called(name: str, /, **arguments: Any) -> Any:
    """The result of a tool, as a client in this process has it."""

    async def call() -> Any:
        async with Client(server()) as client:
            return await client.call_tool(name, arguments)

    return anyio.run(call)


def answered(name: str, /, **arguments: Any) -> dict[str, Any]:
    result = called(name, **arguments)
    assert not result.is_error, result.content
    found: dict[str, Any] = result.structured_content
    return found


def test_every_tool_says_what_it_is_for_and_has_typed_arguments() -> None:
    async def tell() -> Any:
        async with Client(server()) as client:
            return (await client.list_tools()).tools

    told = anyio.run(tell)
    assert [tool.name for tool in told] == [tool.__name__ for tool in tools.TOOLS]
    for tool in told:
        assert len(tool.description) > 60
        assert all("type" in it or "anyOf" in it for it in tool.input_schema["properties"].values())
        assert tool.output_schema
    assert all(f"`{tool.name}`" in SKILL.read_text(encoding="utf-8") for tool in told)


def test_a_prediction_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered("predict_plan", plan=TEXT)
    assert run(main_of("predict", COMMANDS["predict"]), [str(PLAN), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    for name in ("iteration_s", "iteration_s_low", "iteration_s_high", "tokens_per_s", "fits"):
        assert found[name] == row[name]
    assert found["assumptions"] == row["notes"]
    assert f"{row['iteration_s_low']:.3f} to {row['iteration_s_high']:.3f}" in found["answer"]
    assert answered("predict_plan", plan=str(PLAN)) == found
    assert answered("predict_plan", plan=TEXT, played=True)["iteration_s"] != row["iteration_s"]


def test_a_search_s_plan_goes_on_to_the_other_tools() -> None:
    sizes = {"model": "gpt3-2.7b", "hardware": "l4-24gb", "global_batch": 8, "gpus_per_node": 4}
    found = answered("tune_training", **sizes, space="+checkpointing")
    assert found["status"] == "OPTIMAL"
    assert "proven" in found["answer"]
    again = answered("predict_plan", plan=found["plan"])
    assert again["iteration_s"] == found["predicted_s"]
    parts = answered("explain_plan", plan=found["plan"])
    assert parts["iteration_s"] == pytest.approx(sum(parts["parts_s"].values()), rel=0.1)
    made = answered("export_plan", plan=found["plan"], framework="megatron")
    assert "torchrun" in made["text"]
    fitting = answered("will_plan_fit", plan=found["plan"])
    assert fitting["fits"]
    assert fitting["cheapest_change"] is None
    assert not answered("will_plan_fit", plan=found["plan"], keep_free_gib=4.0)["fits"]


def test_a_launch_file_and_a_load_are_answered() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    read = answered("import_launch_file", file=text, hardware="l4-24gb")
    assert answered("predict_plan", plan=read["plan"])["fits"]
    served = answered("serve_load", model="llama3-8b", gpu="H100", gpus=2)
    assert served["command_lines"]
    assert "requests/s" in served["answer"]
    assert "gpt3-2.7b" in answered("list_names", kind="models")["result"]


def test_facts_of_the_catalogue_are_told() -> None:
    model = answered("describe_name", name="gpt3-2.7b")["facts"]
    assert (model["layers"], model["hidden"]) == (32, 2560)
    assert model["parameters"] == pytest.approx(12 * 32 * 2560**2 + 2 * 50304 * 2560, rel=5e-3)
    gpu = answered("describe_name", name="l4-24gb")
    assert gpu["facts"]["gpu"]["peak_tflops"]["bf16"] == 121.0
    assert "121.0 TFLOP/s in bf16" in gpu["answer"]
    assert "'l4' is unknown" in called("describe_name", name="l4").content[0].text


def test_fine_tuning_is_searched_for() -> None:
    sizes = {"model": "llama3.2-1b", "hardware": "l4-24gb", "global_batch": 8, "gpus_per_node": 1}
    found = answered("tune_training", **sizes, train="adapters", base="4bit", loss="chunked")
    workload = parse_yaml(found["plan"], "plan")["workload"]
    assert (workload["train"], workload["base"], workload["loss"]) == (
        "adapters",
        "4bit",
        "chunked",
    )


@pytest.mark.parametrize(
    ("right", "tolerance", "given", "is_right"),
    [
        (100.0, 0.03, 102.9, True),
        (100.0, 0.03, 104.0, False),
        (1000.0, 0.03, "1,020 s", False),
        (4.0, 0.0, 4, True),
        (4.0, 0.0, 8, False),
        (4.0, 0.05, "unanswerable", False),
        (4.0, 0.05, None, False),
        ("the pipeline's bubble", 0.0, "The pipelines  bubble", True),
        ("yes", 0.0, "no", False),
        ("unanswerable", 0.0, 3.0, False),
        ("unanswerable", 0.0, "unanswerable", True),
    ],
)
def test_answers_are_graded_within_their_tolerance(
    right: float | str, tolerance: float, given: object, is_right: bool
) -> None:
    question = {"answer": right, "tolerance": tolerance}
    assert agent_questions.is_right(question, given) is is_right


def test_fifty_questions_a_tenth_of_which_have_no_answer() -> None:
    asked = agent_questions.questions()
    assert len(asked) == 50
    assert sum(one["answer"] == "unanswerable" for one in asked) == 5
    assert all(one["computed"] for one in asked)


def test_a_configuration_may_be_the_model() -> None:
    text = json.dumps(config())
    found = answered("tune_training", model=text, hardware="h100-80gb", global_batch=8)
    assert answered("predict_plan", plan=found["plan"])["fits"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("predict_plan", {"plan": "nowhere.yaml"}, "there is no such file"),
        ("predict_plan", {"plan": "a: 1\nb: 2\n"}, "is no plan, which has workload, cluster"),
        ("predict_plan", {"plan": "plan: {}\nb: 2\n"}, "unknown key"),
        ("predict_plan", {"plan": "--help"}, "begins with a hyphen"),
        ("predict_plan", {"plan": "x" * (1 << 19)}, "give at most"),
        ("predict_plan", {}, "Field required"),
        ("export_plan", {"plan": TEXT, "framework": "keras"}, "Input should be"),
        ("tune_training", {"model": "gpt9", "hardware": "l4-24gb", "global_batch": 8}, "gpt9"),
        (
            "tune_training",
            {
                "model": "gpt3-175b",
                "hardware": "l4-24gb",
                "gpus_per_node": 1,
                "global_batch": 8,
                "space": "3d",
            },
            "What would make a plan fit",
        ),
    ],
)
def test_wrong_input_is_told(name: str, arguments: dict[str, Any], told: str) -> None:
    result = called(name, **arguments)
    assert result.is_error
    assert told in result.content[0].text
    assert "mistlab-" not in result.content[0].text


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    "plan", [BOMB, "[" * 100_000 + "\n", "plan: !!python/object:os.system x\n"]
)
def test_hostile_texts_are_refused(plan: str) -> None:
    result = called("predict_plan", plan=plan)
    assert result.is_error
    assert "Traceback" not in result.content[0].text


def test_what_takes_too_long_is_ended() -> None:
    with pytest.raises(InputError, match=r"took longer than the 0\.05 s that"):
        Asking().answer("predict", str(PLAN), seconds=0.05)


def test_more_questions_than_may_wait_are_told_so() -> None:
    few = Asking(at_once=1, most_waiting=2)
    ask: Callable[..., Any] = partial(few.answer, "predict")
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, str(PLAN)) for _ in range(6)]
    refused = [str(each.exception()) for each in answers if each.exception()]
    assert 1 <= len(refused) <= 4
    assert all("ask again in a minute" in text for text in refused)
    done = [each.result().objects for each in answers if not each.exception()]
    assert all(objects == done[0] for objects in done)


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = asking._PROGRAM.replace("from experiments", "bytearray(1 << 30)\nfrom experiments")
    monkeypatch.setattr(asking, "_PROGRAM", greedy)
    assert Asking().answer("predict", str(PLAN)).objects
    monkeypatch.setattr(asking, "MOST_BYTES", 600 << 20)
    with pytest.raises(InputError, match="ask about fewer GPUs"):
        Asking().answer("predict", str(PLAN))


def test_texts_become_files_for_as_long_as_they_are_asked_about() -> None:
    with folder_of(plan=TEXT, model="llama3-8b") as words:
        assert Path(words["plan"]).read_text(encoding="utf-8") == TEXT
        assert words["model"] == "llama3-8b"
    assert not Path(words["plan"]).exists()


def test_an_agent_starts_the_server_as_a_process(tmp_path: Path) -> None:
    line = ["-c", "from experiments.__main__ import console; console()", "mcp"]
    parameters = StdioServerParameters(
        command=sys.executable, args=line, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    )

    async def ask() -> Any:
        async with Client(stdio_client(parameters)) as client:
            return await client.call_tool("list_names", {"kind": "spaces"})

    assert "mist" in anyio.run(ask).structured_content["result"]


def test_the_skill_is_printed() -> None:
    line = [sys.executable, "-m", "experiments", "mcp", "--skill"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("---\nname: mistlab\n")


def test_what_is_not_installed_is_told() -> None:
    code = (
        "import sys; sys.modules['anyio'] = None; sys.argv[1:] = ['mcp']\n"
        "from experiments.__main__ import console; sys.exit(console())"
    )
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.endswith("needs it: pip install '.[agents]'\n")
    assert "Traceback" not in done.stderr
