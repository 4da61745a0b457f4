"""The table of all commands: groups of commands, each with the commands' options.

A new command is a function, and a row in the file of its group.
"""

from collections.abc import Mapping

from experiments.cli.command import Command, Group
from experiments.commands.machine_commands import MACHINE_COMMANDS
from experiments.commands.plan_commands import PLAN_COMMANDS
from experiments.commands.search_commands import SEARCH_COMMANDS
from experiments.commands.serving_commands import SERVING_COMMANDS
from experiments.commands.study_commands import STUDY_COMMANDS
from experiments.commands.training_commands import TRAINING_COMMANDS

# The groups of commands, in the order in which the help lists them.
GROUPS: Mapping[str, Group] = {
    **PLAN_COMMANDS,
    **SEARCH_COMMANDS,
    **STUDY_COMMANDS,
    **SERVING_COMMANDS,
    **TRAINING_COMMANDS,
    **MACHINE_COMMANDS,
}
COMMANDS: Mapping[str, Command] = {
    name: command for group in GROUPS.values() for name, command in group.items()
}
