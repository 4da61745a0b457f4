"""The command ``run_serving``: serves requests with different parallel degrees for prefill and
decoding; reports the bytes moved, the phases, and whether the tokens equal those of a single
process.
"""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from experiments.cli.commandline import DONE, NO_ANSWER, print_json
from experiments.pages.tables import table
from mistlab.core.units import MIB_BYTES
from mistlab.serving.changing_run import ChangingRun, load_changing_run
from mistlab.serving.phase_bytes import PhaseBytes, phase_bytes

if TYPE_CHECKING:
    from runtime.serving.phased_rank import ServedRun


def run_serving(options: argparse.Namespace) -> int:
    """Serve requests on CPU processes as Seesaw does on GPUs: prefill with some parallel degrees,
    decode with others.

    Start as many processes as the layouts (parallel degrees) have ranks, with torchrun; a layout of
    one rank needs no torchrun. The seed determines weights and prompts. With --check, the first
    process also serves all requests by itself; exit status 1 means that the tokens differ.
    """
    from runtime.serving.phased_session import job_of, serve  # noqa: PLC0415 (needs torch)
    from runtime.serving.whole_model import tokens_of_whole  # noqa: PLC0415 (needs torch)

    run = load_changing_run(options.plan)
    load = run.load(options.seed, options.plan.parent)
    job = job_of(run, load, options.seed)
    world, runs = serve(run, job, options.timeout)
    if world.rank:
        return DONE
    layouts = run.prefill.layout, run.decode.layout
    predicted = phase_bytes(runs[0].actions, layouts, run.workload)
    answer = answer_of(run, runs, predicted)
    if options.check:
        answer["tokens_equal_one_process"] = tokens_of_whole(job) == runs[0].tokens
    if options.json:
        print_json(answer)
    else:
        print("\n".join(printed_lines(answer)))
    return DONE if answer.get("tokens_equal_one_process", True) else NO_ANSWER


def answer_of(
    run: ChangingRun, runs: "list[ServedRun]", predicted: list[PhaseBytes]
) -> dict[str, Any]:
    """The results of all ranks as plain data for JSON; bytes are added over ranks."""
    first = runs[0]
    moved = {
        "weights": sum(sum(one.weight_bytes) for one in runs),
        "keys and values between ranks": sum(sum(one.cache_bytes) for one in runs),
        "keys and values to the host": sum(one.stored_bytes for one in runs),
        "keys and values from the host": sum(one.fetched_bytes for one in runs),
    }
    foretold = (
        sum(sum(one.weights) for one in predicted),
        sum(sum(one.cache) for one in predicted),
        sum(one.stored for one in predicted),
        sum(one.fetched for one in predicted),
    )
    return {
        "ranks": len(runs),
        "prefill": run.prefill.layout.text,
        "decode": run.decode.layout.text,
        "requests": len(first.tokens),
        "tokens": sum(map(len, first.tokens)),
        "actions": dict(Counter(type(one).__name__ for one in first.actions)),
        "seconds": {name: max(one.seconds[name] for one in runs) for name in first.seconds},
        "bytes": moved,
        "predicted_bytes": dict(zip(moved, foretold, strict=True)),
        "outputs": first.tokens,
    }


ACTIONS = {
    "ReadPrompts": "passes over prompts",
    "Change": "changes of layouts",
    "DecodeSteps": "runs of decoding steps",
    "Store": "requests copied to the host",
    "Fetch": "requests copied back",
    "Drop": "requests dropped and read again",
}


def printed_lines(answer: dict[str, Any]) -> list[str]:
    """The results as lines of text."""
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in answer["seconds"].items())
    counts = [f"{count} {ACTIONS[name]}" for name, count in answer["actions"].items()]
    rows = [
        [name, f"{count / MIB_BYTES:.3f}", f"{answer['predicted_bytes'][name] / MIB_BYTES:.3f}"]
        for name, count in answer["bytes"].items()
    ]
    under = f"prompts under {answer['prefill']}, answers under {answer['decode']}"
    lines = [
        f"{answer['ranks']} rank{'s' * (answer['ranks'] > 1)}, {under}",
        f"{answer['requests']} requests, {answer['tokens']} tokens: {'; '.join(counts)}",
        f"longest of all ranks: {seconds}",
        "",
        table(["moved", "MiB", "predicted"], rows),
    ]
    if "tokens_equal_one_process" in answer:
        equal = "the same as" if answer["tokens_equal_one_process"] else "NOT those of"
        lines.append(f"Tokens are {equal} one process computes from the whole model.")
    return lines
