"""Commands that ask what would be if a problem were another one."""

from experiments.cli.command import Command, Group, experiment, option
from experiments.cli.commandline import PROBLEM

STUDY_COMMANDS: dict[str, Group] = {
    "What if": {
        "ladder": Command(
            "experiments.questions.ladder:climbed",
            {**PROBLEM, **experiment("ladder")},
        ),
        "partitions": Command(
            "experiments.questions.partitions:partitions",
            {
                **experiment("partitions"),
                "model": "gpt3-13b",
                "hardware": "a100-80gb",
                "sequence_length": 2048,
            },
            (option("--tensor-parallel", "ranks that share a layer, in one node", 8),),
        ),
        "space_size": Command(
            "experiments.questions.space_size:sizes",
            {
                **PROBLEM,
                **experiment("space_size"),
                "model": "gpt3-22b",
                "hardware": "a100-40gb",
                "nodes": 4,
                "gpus_per_node": 8,
                "global_batch": 512,
            },
        ),
        "spaces": Command(
            "experiments.questions.spaces:spaces",
            {**experiment("spaces"), "hardware": None},
            (
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
            ),
        ),
        "analysis_speed": Command(
            "experiments.questions.analysis_speed:speeds",
            {
                **PROBLEM,
                **experiment("analysis_speed"),
                "model": "gpt3-22b",
                "nodes": 4,
                "gpus_per_node": 8,
                "global_batch": 512,
            },
        ),
        "scaling": Command(
            "experiments.questions.scaling:scaling",
            {
                **experiment("scaling"),
                "model": "gpt3-13b",
                "hardware": "a100-80gb",
                "sequence_length": 2048,
            },
        ),
        "sensitivity": Command(
            "experiments.questions.sensitivity:sensitivity",
            {
                **PROBLEM,
                **experiment("sensitivity"),
                "model": "gpt3-22b",
                "nodes": 4,
                "gpus_per_node": 8,
                "sequence_length": 2048,
                "global_batch": 512,
            },
        ),
        "published_configurations": Command(
            "experiments.questions.published_configurations:published_configurations",
            {**experiment("published_configurations")},
        ),
    },
}
