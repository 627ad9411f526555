"""Claims about several processes, on one CPU by gloo, and about runs that end early and start again."""
import importlib
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import maelm
import run
import train
from conftest import HERE, QUICK, catches, last_checkpoint, let_use, run_with_wrong_version, short_run, wrong_versions

STEPS = 6  # of a short run


# ---- Processes ------------------------------------------------------------------------------------------------------
def as_one_of(rank, world, port, program, machine, stand_in, arguments):
    """Be a process of torchrun's: put a stand-in in place, then run the module `program`, with `machine` as its run."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
    program = importlib.import_module(program)
    machine = importlib.import_module(machine)
    let_use(program, machine, pytest.MonkeyPatch())  # until this process ends
    stand_in(program, machine, rank)
    program.main(arguments)


def nothing(program, machine, rank):
    """No stand-in."""


def new_store():
    """What torchrun has for its processes to meet in, and keeps when it starts them again."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def processes(world, arguments, stand_in=nothing, store=None):
    """Run train.py in so many processes at once; returns their exit codes. Forks of a server that has imported all that
    they need: they start at once, and know nothing of what this process did to its modules but their names."""
    store = store or new_store()
    os.environ["PYTHONPATH"] = str(HERE)  # where the server finds them
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    started = []
    for rank in range(world):
        process = context.Process(target=as_one_of, args=(
            rank, world, store.port, train.__name__, run.__name__, stand_in, list(map(str, arguments))))
        process.start()
        started.append(process)
    end = time.monotonic() + 120
    while any(process.exitcode is None for process in started):
        multiprocessing.connection.wait([process.sentinel for process in started if process.is_alive()], 1)
        if any(process.exitcode for process in started) or time.monotonic() > end:
            for process in started:
                process.kill()  # as torchrun does when one has failed
    return [process.exitcode for process in started]


def flags(corpus, out, *others):
    return ["--data", corpus[1], "--out", out, *QUICK, *others]


def losses(out):
    """The training loss of each step."""
    return [line["loss"] for line in run.read_log(out) if "loss" in line]


def check_equal(out, other):
    """Two runs have the same losses, weights and moments, up to the order of sums."""
    assert len(losses(out)) == STEPS
    np.testing.assert_allclose(losses(out), losses(other), atol=1e-6, rtol=0)
    a, b = last_checkpoint(out), last_checkpoint(other)
    assert a["step"] == b["step"] == STEPS
    torch.testing.assert_close((a["model"], a["optimizers"]), (b["model"], b["optimizers"]), atol=1e-6, rtol=0)


# ---- What several processes compute ---------------------------------------------------------------------------------
@catches("train.train_step", "number = i * place.world + place.rank", "number = i", before=2, after=1)
@catches("train.train_step", "wait = place.world > 1 and i < count - 1", "wait = place.world > 1", before=2, after=1)
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_a_run_resumed_with_another_number_of_processes_equals_one_that_was_not(corpus, finished, tmp_path, before, after):
    """With dropout: batch_size / processes is not below micro_batch_size."""
    out = tmp_path / "run"
    for world, stop in ((before, 3), (after, STEPS)):
        if world == 1:
            short_run(corpus, out, "--stop-at", str(stop))
        else:
            assert processes(world, flags(corpus, out, "--stop-at", stop)) == [0] * world
    check_equal(out, finished[0])


def compiled_quickly(program, machine, rank):
    """torch.compile without the compiler at its end."""
    maelm.MAELM.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")


def test_a_compiled_run_of_processes_that_accumulate_equals_an_eager_one_of_one_process(corpus, tmp_path):
    """DDP averages gradients after the last of two micro-batches only: no_sync around a compiled model."""
    plain = ["--dropout", "0", "--micro-batch-size", "2", "--encoder-layers", "1"]
    short_run(corpus, tmp_path / "eager", *plain)
    compiled = flags(corpus, tmp_path / "compiled", *plain, "--compile", "on")
    assert processes(2, compiled, compiled_quickly) == [0, 0]
    check_equal(tmp_path / "compiled", tmp_path / "eager")


def no_buffers(program, machine, rank):
    """A step that is not made if buffers, which never change, would be sent in it."""
    train_step = program.train_step

    def step(network, *others):
        assert not network.broadcast_buffers
        return train_step(network, *others)

    program.train_step = step


@catches("train.loop", "broadcast_buffers = False", "broadcast_buffers = True")
def test_buffers_are_not_sent_from_process_to_process(corpus, tmp_path):
    assert processes(2, flags(corpus, tmp_path / "run", "--stop-at", "1"), no_buffers) == [0, 0]


# ---- What several processes wait for --------------------------------------------------------------------------------
def slow_preparation(program, machine, rank):
    """A corpus that the first process is longer at work on than any process waits for another."""
    patience = timedelta(seconds=3)
    machine.dist.rendezvous = partial(machine.dist.rendezvous, timeout=patience)
    machine.dist.init_process_group = partial(machine.dist.init_process_group, timeout=patience)
    open_corpus = program.open_corpus

    def slow(*arguments):
        if rank == 0:
            time.sleep(5)
        return open_corpus(*arguments)

    program.open_corpus = slow


@catches("run.first_alone", "while not store.check([name])", "while store.wait([name])")
def test_a_process_may_wait_for_the_preparation_longer_than_for_anything_else(corpus, tmp_path):
    assert processes(2, flags(corpus, tmp_path / "run", "--stop-at", "1"), slow_preparation) == [0, 0]
    assert len(losses(tmp_path / "run")) == 1


def meeting(program, machine, rank):
    """Instead of training: write down who comes, the first one late, and count all."""
    def main(arguments):
        who = Path(arguments[0])
        before = who.read_text()
        with machine.first_alone():
            if rank == 0:
                time.sleep(0.5)
            who.write_text(who.read_text() + str(rank))
            assert who.read_text() == before + "01"[:rank + 1], "they did not wait for each other"
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2

    program.main = main


@catches("run.first_alone", "name = uuid.uuid4().hex", "name = str(rank)")
def test_processes_that_are_started_again_do_not_meet_those_before_them(tmp_path):
    """torchrun keeps its store, with all that is in it, when it starts processes again."""
    store, who = new_store(), tmp_path / "who"
    who.touch()
    for _ in range(3):
        assert processes(2, [who], meeting, store) == [0, 0]
    assert who.read_text() == "01" * 3


# ---- Processes that die ---------------------------------------------------------------------------------------------
def test_a_run_is_whole_although_a_process_of_it_dies(corpus, finished, tmp_path):
    """torchrun --max-restarts starts all of them again, and they continue from the last checkpoint."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, pathlib, sys
sys.path.insert(0, {str(HERE)!r})
import train
died = pathlib.Path({str(tmp_path / "died")!r})
train_step = train.train_step

def dies_once(model, optimizers, batch, step, *others):
    if os.environ["RANK"] == "1" and step == 4 and not died.exists():
        died.touch()
        os._exit(1)
    return train_step(model, optimizers, batch, step, *others)

train.train_step = dies_once
train.main()
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
               "--max-restarts", "1", program, *flags(corpus, tmp_path / "run")]
    done = subprocess.run(list(map(str, command)), cwd=HERE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and (tmp_path / "died").exists(), done.stderr
    assert "continuing at step 3" in done.stdout
    check_equal(tmp_path / "run", finished[0])


@catches("run.Interrupt.note", "if number == signal.SIGINT:", "if True:")
@catches("run.Interrupt.note", "if number == signal.SIGINT:", "if False:")
def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_acts_at_once():
    """When time is up, Slurm tells all processes of a step, and torchrun, which is one of them, tells its own again."""
    def act(number, frame):
        raise AssertionError("acts at once")

    before = {number: signal.signal(number, act) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with run.Interrupt() as interrupt:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            assert interrupt.signal == signal.SIGTERM
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(AssertionError, match="acts at once"):
                signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
