"""The command ``mcp``: starts the server for coding agents, or prints the skill."""

import argparse
from pathlib import Path

from experiments.cli.commandline import DONE

SKILL = Path(__file__).with_name("SKILL.md")


def mcp(options: argparse.Namespace) -> int:
    """Serve tools for coding agents by the Model Context Protocol: predict, tune, fit, import,
    export, explain, serve.

    An agent starts the server with the command `mistlab mcp`, and talks to it over standard input
    and output. Every question runs in a process of its own, with limits on time and memory. --skill
    prints a file that tells an agent when to ask.
    """
    if options.skill:
        print(SKILL.read_text(encoding="utf-8"), end="")
        return DONE
    from experiments.agents.mcp_server import server  # noqa: PLC0415 (an extra)
    from experiments.agents.tools import ASKING  # noqa: PLC0415 (an extra)

    ASKING.seconds = options.seconds
    server().run("stdio")
    return DONE
