"""The commands that vary a problem: sweeps, sensitivities and other studies."""

from experiments.cli.command import Group, command, experiment, flag, option, path
from experiments.cli.commandline import PROBLEM

STUDY_COMMANDS: dict[str, Group] = {
    "What if": {
        "ladder": command(
            "experiments.studies.ladder:climbed",
            {**PROBLEM, **experiment("ladder")},
            examples={"of one model": "--model llama3-8b --hardware a100-80gb"},
        ),
        "partitions": command(
            "experiments.studies.partitions:partitions",
            {
                **experiment("partitions"),
                "model": "gpt3-13b",
                "hardware": "a100-80gb",
                "sequence_length": 2048,
            },
            option("--tensor-parallel", "GPUs of a node that share each layer", 8),
            examples={"over four ranks": "--tensor-parallel 4"},
        ),
        "tempo": command(
            "experiments.studies.tempo:tempo",
            {**experiment("tempo")},
            examples={"a first look": "--quick"},
        ),
        "document_lengths": command(
            "experiments.studies.document_lengths:document_lengths",
            {**experiment("document_lengths")},
            option("plan", **path("PLAN.yaml"), nargs="?"),
            option(
                "--lengths",
                "lengths of documents: a file with one a line, or with tokens,documents; or "
                "lognormal:MEDIAN:SIGMA, pareto:LEAST:EXPONENT, uniform:LEAST:MOST",
                "lognormal:600:1.2",
            ),
            flag("--cut", "cut documents that are longer than sequences"),
            option("--samples", "simulated steps of each arrangement", 50),
            flag("--replay", "measure packed documents on this CPU, and play them"),
            examples={
                "documents of a file, in sequences of a plan": "plan.yaml --lengths lengths.csv",
                "steps of measured passes beside played ones": "--replay",
            },
        ),
        "communication": command(
            "experiments.reductions.communication:communication",
            {**experiment("communication")},
            option("--values", "number of values in a gradient", 25_500_000),
            option("--ranks", "number of data-parallel ranks", 256),
            option("--gbytes-per-s", "rate of a rank's link in GB/s, in each direction", 0.731),
            option("--latency-us", "latency of a message in microseconds", 20.0),
            option("--compute-ms", "milliseconds of computation per step", 100.0),
            option("--goal", "mean squared gradient to reach", 0.01),
            option("--noise", "standard deviation of a rank's gradients", 1.0),
            option("--unlike", "how much ranks' data differ", 0.0),
            flag("--costs-alone", "compute costs only, and train nothing"),
            examples={
                "of a gradient of 1.5 billion values on 64 ranks": "--values 1500000000 --ranks 64",
                "costs, without training": "--costs-alone",
            },
        ),
        "space_size": command(
            "experiments.studies.space_size:sizes",
            {
                **PROBLEM,
                **experiment("space_size"),
                "model": "gpt3-22b",
                "hardware": "a100-40gb",
                "nodes": 4,
                "gpus_per_node": 8,
                "global_batch": 512,
            },
            examples={"of one model": "--model llama3-70b --nodes 8 --gpus-per-node 4"},
        ),
        "spaces": command(
            "experiments.studies.spaces:spaces",
            {**experiment("spaces"), "hardware": None},
            option(
                "--evaluations",
                "budgets, each as plans or thousands of stage candidates (default: 1000)",
                (1000,),
                type=int,
                metavar="N",
                nargs="+",
            ),
            option(
                "--families",
                "models of the evaluation (default: all; with --quick gpt3)",
                choices=("gpt3", "llama", "falcon"),
                nargs="+",
            ),
            examples={"a first look": "--quick"},
        ),
        "analysis_speed": command(
            "experiments.studies.analysis_speed:speeds",
            {
                **PROBLEM,
                **experiment("analysis_speed"),
                "model": "gpt3-22b",
                "nodes": 4,
                "gpus_per_node": 8,
                "global_batch": 512,
            },
            examples={"on one problem": "--model gpt3-7b --quick"},
        ),
        "scaling": command(
            "experiments.studies.scaling:scaling",
            {
                **experiment("scaling"),
                "model": "gpt3-13b",
                "hardware": "a100-80gb",
                "sequence_length": 2048,
            },
            examples={"of one model": "--model gpt3-13b --hardware a100-80gb"},
        ),
        "sensitivity": command(
            "experiments.studies.sensitivity:sensitivity",
            {
                **PROBLEM,
                **experiment("sensitivity"),
                "model": "gpt3-22b",
                "nodes": 4,
                "gpus_per_node": 8,
                "sequence_length": 2048,
                "global_batch": 512,
            },
            examples={"of one problem": "--model gpt3-2.7b --global-batch 16"},
        ),
        "published_configurations": command(
            "experiments.studies.published_configurations:published_configurations",
            {**experiment("published_configurations")},
            examples={"beside what we would run": "--quick"},
        ),
    }
}
