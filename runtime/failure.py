"""What a rank lets go of when its run fails: other ranks, threads and pinned memory."""

from contextlib import suppress
from threading import Thread

import torch

from runtime.comm.processes import abandon
from runtime.devices.table import driver_of
from runtime.engine.storage.arena import release_all
from runtime.engine.streams.lanes import Streams

# A device that is in order is done with what was issued by then.
PARTING_S = 10.0


def let_go(device: torch.device, streams: Streams | None) -> None:
    """After any failure, with ``streams`` if there were any yet.

    A device may hang, and whoever waits for it too: after ``PARTING_S`` the rest is left to the end
    of the process.
    """
    thread = Thread(target=_let_go, args=(device, streams), daemon=True)
    thread.start()
    thread.join(PARTING_S)


def _let_go(device: torch.device, streams: Streams | None) -> None:
    if streams is not None:
        streams.close()
    driver = driver_of(device)
    # A device in error refuses each of these; nothing runs on it any more.
    if driver is not None:
        with suppress(RuntimeError):
            driver.choose(device)
    with suppress(RuntimeError):
        abandon()
    if driver is not None:
        with suppress(RuntimeError):
            driver.synchronize(device)
    release_all()
