"""The Model Context Protocol server, which offers this project's commands as tools."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from experiments.agents import tools
from experiments.cli.installed import version
from mistlab.core.values import InputError

INSTRUCTIONS = (
    "Predicts and tunes the distributed training of language models without a GPU, and finds "
    "layouts for serving. Times and memory peaks come with bounds that hold 90 % of "
    "measurements. Nothing is measured here: tell users that answers are predictions."
)


def server() -> MCPServer:
    """The Model Context Protocol server with all tools of ``experiments.agents.tools``."""
    made = MCPServer("mistlab", instructions=INSTRUCTIONS, version=version(), log_level="WARNING")
    for tool in tools.TOOLS:
        made.tool()(_in_thread(tool))
    return made


def _in_thread(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a tool run in a thread, so that the server can answer other calls meanwhile; a refusal
    of invalid input becomes the tool's error.
    """

    @wraps(tool)
    async def asked(**values: Any) -> Any:
        def call() -> Any:
            return tool(**values)

        try:
            return await anyio.to_thread.run_sync(call)
        except InputError as error:
            raise ToolError(str(error)) from None

    return asked
