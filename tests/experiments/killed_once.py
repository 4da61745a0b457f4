"""A call that kills its worker once: apart from the tests, so that workers import little for it."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class KilledOnce:
    """Makes a call; kills its process at one item instead, the first time that it is asked."""

    marker: Path
    at: Any
    call: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        if item == self.at and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.call(item)
