"""Claims about runs that end early or find another run in their folder, and about commands, devices and processes."""
import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

import finetune
import rank
import train
from support import corpus, worker
from support.program import lock_folder
from tests.common import ROOT, arguments, contents, fails, last_checkpoint, losses, read_log, same, short_run
from tests.common import write_corpus


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished, tmp_path / "run")


# ---- Runs that end early --------------------------------------------------------------------------------------------
DIES = """
import os, signal, sys
import torch
import support.run, train

torch.set_num_threads(1)
support.run.draw_loss = lambda out: None
for module, name, call in [(train.Trainer, "step", 2), (torch, "save", 1), (train.Trainer, "step", 5),
                           (os, "replace", 4)]:
    function, calls = getattr(module, name), []
    def dying(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    child = os.fork()  # does not start Python and import PyTorch again
    if child == 0:
        setattr(module, name, dying)
        train.main(sys.argv[1:])
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), name
"""


def test_a_killed_run_continues_bit_identically(text, tmp_path):
    flags = ["--log-interval", 2]
    whole = short_run(text, tmp_path / "whole", *flags)
    command = [sys.executable, "-c", DIES, *arguments(text, tmp_path / "run", *flags)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert last_checkpoint(tmp_path / "run")["step"] == 3
    out = short_run(text, tmp_path / "run", *flags)
    assert same(out, whole) and losses(out) == losses(whole)
    assert [step for step, _ in losses(out)] == [2, 3, 4, 6]


def change_step(monkeypatch, changed, change):
    """Apply `change` to the loss of step `changed`."""
    def step(trainer, batches, step):
        means = usual(trainer, batches, step)
        return means | {"loss": change(means["loss"])} if step == changed else means

    usual = train.Trainer.step
    monkeypatch.setattr(train.Trainer, "step", step)


SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP


@pytest.fixture
def heard():
    """No signal is ignored, as a shell may do for programs in the background."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_interrupt_ends_at_once_and_an_ignored_signal_stays_ignored(heard):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with worker.Worker.make("fp32", "cpu", 32).noted_signals() as noted, pytest.raises(KeyboardInterrupt):
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert noted == [signal.SIGINT, signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_a_checkpoint(number, heard, text, finished, tmp_path, monkeypatch, capsys):
    change_step(monkeypatch, 3, lambda loss: signal.raise_signal(number) or loss)
    with pytest.raises(SystemExit) as end:
        short_run(text, tmp_path / "run")
    assert end.value.code == 128 + number
    assert "repeat the command to continue" in capsys.readouterr().out
    assert signal.getsignal(number) == signal.default_int_handler
    assert last_checkpoint(tmp_path / "run")["step"] == 4
    monkeypatch.undo()
    assert same(short_run(text, tmp_path / "run"), finished)


def test_a_full_disk_destroys_nothing(text, finished, tmp_path, monkeypatch, capsys):
    out = short_run(text, tmp_path / "run", "--stop-at", 3)
    before = contents(out)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(torch, "save", Mock(side_effect=full))
    assert "No space left on device" in fails(lambda: short_run(text, out), capsys)
    monkeypatch.undo()
    assert contents(out)["step_0000003.pt"] == before["step_0000003.pt"]
    assert not list(out.glob(".*.tmp"))
    assert same(short_run(text, out), finished)


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch, capsys):
    change_step(monkeypatch, 4, lambda loss: loss * math.nan)
    line = fails(lambda: short_run(text, tmp_path / "run", "--log-interval", 6), capsys)
    assert re.search("steps 4 to 6: a loss or a gradient's norm is not finite; .* --learning-rate", line)
    assert last_checkpoint(tmp_path / "run")["step"] == 3


def test_a_run_continues_where_its_folder_and_its_text_have_moved(finished, tmp_path):
    text = write_corpus(tmp_path / "text.txt")
    short_run(text, tmp_path / "run", "--stop-at", 3)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    for name in ("run", "text.txt"):
        (tmp_path / name).rename(tmp_path / f"elsewhere/my-{name}")
    assert same(short_run(tmp_path / "elsewhere/my-text.txt", tmp_path / "elsewhere/my-run"), finished)


def test_a_run_keeps_its_corpus_and_reads_no_text(tmp_path, finished, monkeypatch, capsys):
    text = write_corpus(tmp_path / "text.txt")
    out = short_run(text, tmp_path / "run", "--stop-at", 3)
    write_corpus(text, 399)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "content_hash", None)
        assert same(short_run(text, out), finished)
    other = write_corpus(tmp_path / "other.txt", 398)
    for change in (lambda: other, lambda: shutil.rmtree(tmp_path / "cache") or text):
        line = fails(lambda: short_run(change(), out, "--cache", tmp_path / "cache", "--max-steps", 9), capsys)
        assert "this is another text, or it has changed; restore it" in line


# ---- Checkpoints ----------------------------------------------------------------------------------------------------
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(text, finished, copy, capsys):
    newest = copy / "step_0000006.pt"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1000])
    assert "step_0000006.pt: damaged" in fails(lambda: short_run(text, copy), capsys)
    newest.unlink()
    assert same(short_run(text, copy), finished)


def test_settings_that_decide_neither_model_nor_data_may_change(text, finished, tmp_path, capsys):
    out = short_run(text, tmp_path / "run", "--stop-at", 3)
    short_run(text, out, "--learning-rate", "1e-3", "--weight-decay", 0.5, "--max-steps", 7)
    changed, = [line["start"]["changed"] for line in read_log(out) if "start" in line and line["step"] == 3]
    assert changed == {"learning_rate": [6e-3, 1e-3], "weight_decay": [0.1, 0.5], "stop_at": [3, 0],
                       "max_steps": [6, 7]}
    assert "changed: weight_decay=0.5, before 0.1" in capsys.readouterr().out
    state = last_checkpoint(out)
    assert state["step"] == 7 and state["settings"]["weight_decay"] == 0.5
    assert state["optimizers"][0]["param_groups"][0]["weight_decay"] == 0.5 and read_log(out)[-2]["lr"] < 1e-3


def test_the_checkpoint_is_the_run(text, finished, tmp_path, capsys):
    """config.json and tokenizer.json are copies for people, and a field that a checkpoint lacks has its default."""
    out = short_run(text, tmp_path / "run", "--stop-at", 3)
    state = last_checkpoint(out)
    del state["config"]["decoder"], state["settings"]["compile"]
    state["seconds"] = 1000.0
    torch.save(state, out / "step_0000003.pt")
    for name in ("config.json", "tokenizer.json"):
        (out / name).unlink()
    assert same(short_run(text, out), finished) and last_checkpoint(out)["seconds"] > 1000
    assert contents(out)["tokenizer.json"] == contents(finished)["tokenizer.json"]
    torch.save(state | dict(model=Mock), out / "step_0000006.pt")  # would run code
    assert "damaged, or not of this version of train.py" in fails(lambda: short_run(text, out), capsys)


def test_only_old_checkpoints_are_removed(text, tmp_path, capsys):
    once = short_run(text, tmp_path / "once", *"--log-interval 0 --eval-interval 0 --checkpoint-interval 0".split())
    assert len(read_log(once)) == 4 and {path.name for path in once.glob("*.pt")} == {"step_0000006.pt"}
    keep_all = short_run(text, tmp_path / "all", "--stop-at", 2)
    assert "keep_checkpoints=0 there" in fails(lambda: short_run(text, keep_all, "--keep-checkpoints", 2), capsys)
    out = short_run(text, tmp_path / "run", "--stop-at", 2, "--keep-checkpoints", 2)
    (out / "step_0000003_copy.pt").touch()
    short_run(text, out, "--keep-checkpoints", 2, "--checkpoint-interval", 1)
    assert {path.name for path in out.glob("*.pt")} == {"step_0000003_copy.pt", "step_0000005.pt", "step_0000006.pt"}


# ---- One folder, one run --------------------------------------------------------------------------------------------
def test_a_folder_in_use_and_another_run_are_refused_and_the_differences_are_named(text, copy, capsys):
    with lock_folder(copy):
        assert "another process is working there" in fails(lambda: short_run(text, copy), capsys)
    before = contents(copy)
    line = fails(lambda: short_run(text, copy, *"--mask-rate 0.3 --batch-size 4 --seed 2".split()), capsys)
    message = "mask_rate=0.15 there, 0.3 here; batch_size=8 there, 4 here; seed=0 there, 2 here; choose"
    assert re.search(f"{copy} was made with other settings: {message}", line)
    for name in ("config.json", "model.safetensors"):  # of an export
        (copy.parent / name).mkdir()
        (copy.parent / name / name).touch()
        line = fails(lambda: short_run(text, copy.parent / name), capsys)
        assert f"has {name}, which is not of a run" in line
    short_run(text, copy)
    assert re.search("finished at step 6; .* a larger --max-steps", capsys.readouterr().out)
    assert contents(copy) == before


# ---- Command lines and machines -------------------------------------------------------------------------------------
@pytest.mark.parametrize("program, flags, message", [
    (train, "--ablation bert", "invalid choice: 'bert' .*mae-lm.*dec-1024"),
    (train, "--ablation mlm --decoder-layers 1", "decoder_layers=1: --ablation mlm sets it to 0; leave out one"),
    (train, "--init RUN --encoder-layers 1", "--init: its weights have another shape"),
    (train, "--init RUN --no-uncased", "uncased=False: the tokenizer is that of --init"),
    (train, "--init RUN --ablation mlm", "leave out --preset and --ablation"),
    (train, "--norm Pre", "argument --norm: invalid choice: 'Pre' .*post"),
    (train, "--device cuda", "--device cuda: this machine, or this PyTorch, has none"),
    *[(train, f"--{field.replace('_', '-')}={value}", f"{field}={value!r}: use ") for field, value in (
        ("rel_pos_buckets", 7), ("decoder", "foo"), ("mask_rate", 0.0), ("decoder_dim", 100), ("decoder_layers", 0),
        ("encoder_heads", 7), ("mask_in_encoder", 25.0), ("vocab_size", 256))],
    (finetune, "--init RUN --task docs,modules --data .", "--data: docs,modules reads the documentation"),
    (finetune, "--init RUN --frozen --epochs 2", "no settings but l2, seq_len"),
    (finetune, "--init RUN --shots 4", "--shots 4: use 5 or more, or a probe"),
    (finetune, "--init bow:RUN --frozen", "--frozen mean: bow: has no encoder"),
    (finetune, "--task custom", "--task custom: needs --data"),
    (finetune, "--init RUN --regression", "regression: only for --task custom"),
    (finetune, "--init RUN --task rte,cols", "--task rte,cols: use mnli, .*squad2.*glue"),
    (finetune, "--init RUN --task glue --data .", "has no training file of mnli, .*stsb"),
    (rank, "RUN --tokens 1000", "fewer than 10 d = 320"), (rank, "RUN --tau 90", "--tau 90.0: use 0 < tau < 1"),
    (rank, "RUN RUN/step_0000003.pt --steps", "--steps: needs the folder of one run"),
    (rank, "hf:a/b --probe docs", "--probe docs: only for runs")])
def test_a_bad_command_gets_a_one_line_error(program, flags, message, text, finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "new"
    command = arguments(text, out) if program is train else ["--out", str(out)]
    command += flags.replace("RUN", str(finished)).split()
    assert re.search(message, fails(lambda: program.main(command), capsys))
    assert not [*out.glob("[!.]*")]


def test_auto_takes_the_best_device(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    table = ((True, False, True, "cuda:3"), (False, True, False, "mps"), (False, True, True, "cpu"),
             (False, False, False, "cpu"))
    for cuda, mps, small, expected in table:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        assert str(worker.best_device("auto", 128 if small else 768)) == expected


@pytest.mark.parametrize("units, auto", [({"amx_bf16": True}, torch.bfloat16), ({"avx512_bf16": True}, torch.bfloat16),
                                         ({"avx512_f": True}, torch.float32)])
def test_auto_multiplies_in_bf16_where_this_is_fast(units, auto, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    found = [worker.Worker.make(precision, "cpu", 32).dtype for precision in ("auto", "fp32", "bf16")]
    assert found == [auto, torch.float32, torch.bfloat16]


# ---- Several processes, on one CPU with gloo ------------------------------------------------------------------------
PROGRAM = """
import os
import signal
import torch
import train
from support import corpus, run

prepare, compiled, usual = corpus.prepare, torch.nn.Module.compile, train.Trainer.step

def note(name, result):
    with open(name, "a") as file:  # not print, whose pieces may mix with those of the other process
        file.write(os.environ["RANK"])
    return result

def step_with_signal(trainer, batches, step):
    if step == 1 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return usual(trainer, batches, step)

train.Trainer.step = step_with_signal
run.draw_loss = lambda out: None
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
               *arguments(text, out, *flags, "--compile", "on", "--cache", tmp_path / "cache")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "prepared-by").read_text() in ("0", "1")  # one process prepares, the other waits
    assert sorted((tmp_path / "graphs-of").read_text()) == ["0", "1"]  # a step is one graph: no graph breaks
    assert done.stdout.count("2 x cpu in float32, 2 sequences at a time, from step 0") == 1  # only one process prints
    assert last_checkpoint(out)["step"] == 4  # where processes compare signals

    short_run(text, out, *flags)  # one process continues
    assert losses(out) == [(step, pytest.approx(loss, abs=1e-6)) for step, loss in losses(whole)]
    assert losses(out, "val_loss")[0][1] == pytest.approx(losses(whole, "val_loss")[0][1], abs=1e-6)
    found, expected = last_checkpoint(out), last_checkpoint(whole)
    for part in ("model", "optimizers"):
        torch.testing.assert_close(found[part], expected[part], atol=1e-5, rtol=0)
