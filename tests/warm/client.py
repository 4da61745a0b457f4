"""A command line like ``python``'s, whose process comes from ``tests.warm.server`` by forking.

This is the text of a script, made for one server (``SOCKET``). It gives its standard streams, its
environment and its folder to the fork, passes signals on, and ends as the fork ends. If it is
killed, so is the fork.
"""

import json
import os
import signal
import socket
import sys

SOCKET = "@SOCKET@"
PASSED_ON = signal.SIGINT, signal.SIGTERM


def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    asker = socket.socket(socket.AF_UNIX)
    asker.connect(SOCKET)
    folder = os.getcwd()  # noqa: PTH109 (the quickest to start with)
    said = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": folder}
    content = json.dumps(said).encode()
    first = b"%d\n" % len(content)
    socket.send_fds(asker, [first], [0, 1, 2])
    asker.sendall(content)
    lines = asker.makefile()
    pid = int(lines.readline())
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = int(lines.readline() or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
