"""Registers a kind of device with torch, "sham", that exists in name only; needs no compiler.

A process cannot forget a kind of device. So the device says that it is not available, and code that
looks for an accelerator, such as torch's checkpoints, does not use it. Still, torch pins memory
by it from then on. So a process that trains on GPUs should not register it.
"""

from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from mistlab.values.errors import InputError

SHAM = "sham"


@cache
def register() -> None:
    """Register the kind of device with torch, once in a process."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        message = (
            f"torch {torch.__version__} cannot be told of a device without a compiler: install "
            "torch 2.11 to 2.13 for this check"
        )
        raise InputError(message)

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return False

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return False

        def has_primary_context(self, device_index: int) -> bool:
            return False

        def is_built(self) -> bool:
            return True

    try:
        setup(SHAM, backend_module=Module(), hook=Hook())
    except RuntimeError as error:
        message = (
            f"torch knows another maker's device already ({error}): run this check in a process "
            "that does not import its package"
        )
        raise InputError(message) from error


@cache
def has_own_thread() -> bool:
    """Whether autograd has a thread for the device.

    Autograd starts its threads at a process's first backward pass, for the devices known then.
    """
    with FakeTensorMode():
        x = torch.zeros((), device=SHAM, requires_grad=True)
        try:
            x.neg().backward()
        except RuntimeError:
            return False
    return True
