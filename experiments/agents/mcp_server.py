"""The command ``mcp``: the questions as tools of the Model Context Protocol, over standard input
and output."""

import argparse
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from experiments.agents import tools
from experiments.cli.commandline import DONE
from experiments.cli.installed import version
from mistlab.core.values import InputError

SKILL = Path(__file__).with_name("SKILL.md")
INSTRUCTIONS = (
    "Predicts and tunes the distributed training of language models without a GPU, and finds "
    "layouts for serving. Times come with bounds that hold 90 % of measurements; memory peaks are "
    "wrong by up to a tenth. Nothing is measured here: tell users that answers are predictions."
)


def mcp(options: argparse.Namespace) -> int:
    """Tools of the Model Context Protocol for coding agents: predict, tune, fit, import, export,
    explain, serve.

    The server talks over standard input and output, as an agent starts it: give it the command
    `mistlab mcp`. Every question runs in a process of its own, with limits on time and memory.
    --skill prints a file that tells an agent when to ask.
    """
    if options.skill:
        print(SKILL.read_text(encoding="utf-8"), end="")
        return DONE
    tools.ASKING.seconds = options.seconds
    server().run("stdio")
    return DONE


def server() -> MCPServer:
    """The server with all tools."""
    made = MCPServer("mistlab", instructions=INSTRUCTIONS, version=version(), log_level="WARNING")
    for tool in tools.TOOLS:
        made.tool()(_in_thread(tool))
    return made


def _in_thread(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool that does not keep the server from other questions; wrong input is told as such."""

    @wraps(tool)
    async def asked(**values: Any) -> Any:
        def call() -> Any:
            return tool(**values)

        try:
            return await anyio.to_thread.run_sync(call)
        except InputError as error:
            raise ToolError(str(error)) from None

    return asked
