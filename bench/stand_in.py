"""Runs a program of this repository with one thing about it or its machine changed; faults.py starts it.

    python bench/stand_in.py CHANGE PLACE PROGRAM ARGUMENTS

PLACE is `start`, before main(), or the first call of a function such as `train.evaluate`. What happens there:

    go     "ready" and the process id are printed
    slow   the same, and from the start on the disk is slow: each fsync and each rename takes a while
    wait   the same as go, then a line on stdin is waited for
    2, 15  the process sends itself this signal
"""
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

SMALL = {"SHARD_TOKENS": 1 << 12, "BLOCK_CHARACTERS": 1 << 11}  # of data.py: a tiny corpus has several shards
SLOW = 0.03  # seconds


def slowly(function: Callable) -> Callable:
    """The same function, a while before and after."""
    def slow(*arguments):
        time.sleep(SLOW)
        result = function(*arguments)
        time.sleep(SLOW)
        return result
    return slow


def happen(change: str) -> None:
    """Do what is to be done at the place."""
    if change.isdecimal():
        os.kill(os.getpid(), int(change))
        return
    print("ready", os.getpid(), flush=True)
    if change == "wait":
        sys.stdin.readline()


def attach(change: str, place: str) -> None:
    """Let it happen before the first call of a function, FILE.FUNCTION."""
    module_name, name = place.split(".")
    module = importlib.import_module(module_name)
    function = getattr(module, name)

    def changed(*arguments, **named):
        setattr(module, name, function)  # once
        happen(change)
        return function(*arguments, **named)

    setattr(module, name, changed)


def main() -> None:
    change, place, program, *arguments = sys.argv[1:]
    import data
    vars(data).update(SMALL)
    if change == "slow":
        os.fsync, os.replace = slowly(os.fsync), slowly(os.replace)
    module = importlib.import_module(program)
    if place == "start":
        happen(change)
    else:
        attach(change, place)
    module.main(arguments)


if __name__ == "__main__":
    main()
