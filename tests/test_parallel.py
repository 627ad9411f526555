"""Claims about several processes, on one CPU with gloo."""
import os
import subprocess
import sys

import pytest
import torch

from tests.common import ROOT, arguments, checkpoints, last_checkpoint, losses, short_run

PROGRAM = """
import os
import torch
import train
from support.text import corpus

prepare, compiled = corpus.prepare, torch.nn.Module.compile

def note(name, result):
    with open(name, "a") as file:  # not print, whose pieces may mix with those of the other process
        file.write(os.environ["RANK"])
    return result

corpus.prepare = lambda *arguments: note("prepared-by", prepare(*arguments))
backend = lambda graph, inputs: note("graphs-of", graph)
torch.nn.Module.compile = lambda model, dynamic: compiled(model, dynamic=dynamic, backend=backend)
train.main()
"""


def test_two_processes_equal_one_that_accumulates(text, tmp_path):
    flags = ["--micro-batch-size", 2, "--eval-rows", 13, "--encoder-dim", 128]  # gradients of more than a megabyte
    whole = short_run(text, tmp_path / "whole", *flags)
    out = tmp_path / "run"
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "program.py",
               *arguments(text, out, *flags, "--compile", "on", "--stop-at", 4, "--cache", tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "prepared-by").read_text() in ("0", "1")  # one process prepares, the other waits
    # Graphs of evaluation, of its last sequence (first process only) and of a step: no graph breaks.
    assert sorted((tmp_path / "graphs-of").read_text()) == ["0", "0", "0", "1", "1"]
    assert done.stdout.count("2 x cpu in float32, from step 0") == 1  # only one process prints
    assert [path.name for path in checkpoints(out)] == ["step_0000003.pt", "step_0000004.pt"]

    short_run(text, out, *flags)  # one process continues
    assert losses(out) == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in losses(whole)]
    assert losses(out, "val_loss")[0][1] == pytest.approx(losses(whole, "val_loss")[0][1], abs=1e-6)
    found, expected = last_checkpoint(out), last_checkpoint(whole)
    for part in ("model", "optimizers"):
        torch.testing.assert_close(found[part], expected[part], atol=1e-5, rtol=0)
