"""Releases a failed rank's resources: connections, threads and pinned memory."""

from contextlib import suppress
from threading import Thread

import torch

from runtime.comm.processes import abandon
from runtime.devices.cuda import driver_of
from runtime.engine.storage.arena import release_all
from runtime.engine.streams.lanes import Streams

# The seconds after which releasing a failed rank gives up; a healthy device finishes its work
# sooner.
PARTING_S = 10.0


def let_go(device: torch.device, streams: Streams | None) -> None:
    """Release the resources of a rank after a failure; ``streams`` is None if the run failed before
    it had streams.

    A device may hang, and a call that waits for it hangs too. After ``PARTING_S`` this function
    gives up, and the rest is released when the process ends.
    """
    thread = Thread(target=_let_go, args=(device, streams), daemon=True)
    thread.start()
    thread.join(PARTING_S)


def _let_go(device: torch.device, streams: Streams | None) -> None:
    if streams is not None:
        streams.close()
    driver = driver_of(device)
    # If the device has failed, each of these calls raises an error as well, and no work is running.
    if driver is not None:
        with suppress(RuntimeError):
            driver.choose(device)
    with suppress(RuntimeError):
        abandon()
    if driver is not None:
        with suppress(RuntimeError):
            driver.synchronize(device)
    release_all()
