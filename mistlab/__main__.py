"""Runs a command by its name: ``python -m mistlab NAME`` is ``python -m experiments NAME``."""

from runpy import run_module

if __name__ == "__main__":
    # By its name, since this package imports no other of the project.
    run_module("experiments", run_name="__main__", alter_sys=True)
