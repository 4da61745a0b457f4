"""The command ``page``: starts the live page on this machine."""

import argparse
import socket
import sys
import webbrowser
from threading import Timer

from experiments.cli.commandline import DONE, progress
from mistlab.core.values import InputError, refuse

HOST = "127.0.0.1"
# The number of ports that are tried after the given one if it is in use.
NEXT_PORTS = 100


def page(options: argparse.Namespace) -> int:
    """Start a live page in your browser: choose or paste a model, GPUs and a batch, move sliders,
    and see the best plan, its bounds, memory, timeline and proof.

    A server on this machine sends the page, and only this machine can open it: nothing is fetched
    from elsewhere or sent there. Its answers are those of predict, tune, export and serve_plan.
    Ctrl-C ends it.
    """
    check_port(options.port)
    # Imported here, since uvicorn is an optional dependency.
    import uvicorn  # noqa: PLC0415

    from experiments.live_page.app import page_app  # noqa: PLC0415

    address = f"http://{HOST}:{options.port}/"
    progress(f"{address} (Ctrl-C ends it)")
    if not options.no_browser and sys.stdout.isatty():
        Timer(1.0, webbrowser.open, (address,)).start()
    uvicorn.run(
        page_app(options.port, options.seconds),
        host=HOST,
        port=options.port,
        log_level="error",
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=2,
    )
    return DONE


def check_port(port: int) -> None:
    """Refuse a port that is in use; the message names the next free one."""
    if not 1 <= port <= 65535:
        refuse("--port", f"{port} is not a port: give one from 1024 to 65535")
    if _is_free(port):
        return
    free = next((p for p in range(port + 1, min(port + NEXT_PORTS, 65536)) if _is_free(p)), None)
    remedy = f"{free} is free, give --port {free}" if free else "give another --port"
    message = f"--port: {port} is in use or not allowed: {remedy}"
    raise InputError(message)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except OSError:
            return False
    return True
