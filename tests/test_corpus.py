"""Claims about the folders that data.py prepare makes: what is in them, and that they are whole, whatever happens."""
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data
import files
from conftest import (HERE, catches, fails, flipped, run_with_wrong_version, sentence, write_corpus, wrong_versions)


# ---- Large corpora --------------------------------------------------------------------------------------------------
SMALL = dict(BLOCK_CHARACTERS=2000, SHARD_TOKENS=2400, PROCESS_BYTES=1)  # a small text has many blocks and shards
OPTIONS = ["--vocab-size", "320", "--seq-len", "24", "--val-share", "0.1"]


def prepare_small(monkeypatch, source, out, processes=1):
    for name, value in SMALL.items():
        monkeypatch.setattr(data, name, value)
    return contents(data.prepare(str(source), out, 320, 24, True, 0.1, processes=processes))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@catches("data.in_order", "yield waiting.popleft().result()\n        while",
         "yield waiting.pop().result()\n        while")
@catches("data.ShardWriter.flush", "self.rows, self.tokens = [], 0",
         "self.rows, self.tokens, self.rest = [], 0, self.rest[:0]")
def test_shards_do_not_depend_on_processes_nor_rows_on_shards(corpus, tmp_path, monkeypatch):
    source = f"{corpus[0]}+{write_corpus(tmp_path / 'other.txt', 100)}"
    large = data.prepare(source, tmp_path / "large", 320, 24, True, 0.1)
    one, three = (prepare_small(monkeypatch, source, tmp_path / str(n), n) for n in (1, 3))
    assert one == three and {"train-00003.npy", "val-00003.npy", "meta.json", "tokenizer.json"} < set(one)
    for part in ("train", "val"):
        whole, many = (data.Rows(folder, part, 320, 24) for folder in (large, tmp_path / "1"))
        assert len(whole.shards) == 1 < len(many.shards) and len(whole) == len(many)
        assert np.array_equal(*(rows[np.arange(len(whole))] for rows in (whole, many)))


class End(BaseException):
    """The end of a process."""


def end_after(monkeypatch, writes):
    """Let the process end before the next file after so many were written."""
    left, rename = iter(range(writes)), os.replace

    def replace(source, target):
        if next(left, None) is None:
            raise End
        rename(source, target)
    monkeypatch.setattr(os, "replace", replace)


@catches("data.write_shards", "writer.rest.tolist()", "[]")
@catches("data.write_shards", '"place": place, "bytes"', '"place": (0, 0), "bytes"')
@catches("data.blocks_from", "            number += len(block)\n", "")
def test_preparing_continues_wherever_it_ended(corpus, tmp_path, monkeypatch):
    whole, out, ends = prepare_small(monkeypatch, corpus[0], tmp_path / "whole"), tmp_path / "out", 0
    while not (out / "meta.json").is_file():
        done = json.loads((out / "progress.json").read_text()) if (out / "progress.json").is_file() else {}
        files = {name: (out / name).stat().st_ino for part in ("train", "val") for name, *_ in done.get(part, ())}
        with monkeypatch.context() as patch, contextlib.suppress(End):
            end_after(patch, 3 + ends % 2)  # the shards of both parts and progress.json; or one file of the next, too
            ends += 1
            assert ends < 50
            prepare_small(patch, corpus[0], out)
        assert files == {name: (out / name).stat().st_ino for name in files}, "a finished shard was written again"
    assert ends > 5 and contents(out) == whole


@catches("data.prepare", "remove_temporaries(out)", "pass")
def test_a_killed_command_leaves_no_process_and_continues(corpus, tmp_path, monkeypatch):
    whole, out = prepare_small(monkeypatch, corpus[0], tmp_path / "whole"), tmp_path / "out"
    code = ("import data, time\n"
            f"data.__dict__.update({SMALL})\n"
            "rename = data.os.replace\n"
            "data.os.replace = lambda a, b: time.sleep(1000 * ('train-00001' in str(b))) or rename(a, b)\n"
            "data.main()")
    command = [sys.executable, "-c", code, "prepare", "--data", str(corpus[0]), "--out", str(out), *OPTIONS]
    process = subprocess.Popen([*command, "--processes", "2"], cwd=HERE, stdout=subprocess.PIPE)
    while not list(out.glob(".train-00001.npy.*.tmp")):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)  # the pipe is closed when the workers, which have it too, have ended
    assert not (out / "meta.json").is_file() and (out / "train-00000.npy").is_file()
    assert prepare_small(monkeypatch, corpus[0], out) == whole


def test_a_folder_of_another_corpus_is_refused_and_a_finished_one_left_alone(corpus, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_bytes(corpus[0].read_bytes())
    command = ["prepare", "--data", str(text), "--out", str(out), *OPTIONS]
    data.main(command)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    data.main([*command, "--processes", "2"])
    capsys.readouterr()
    error = fails(lambda: data.main([*command, "--seq-len", "32"]), capsys)
    assert f"{out} was made with other settings: seq_len=24 there, 32 here; choose another --out" in error
    (out / "meta.json").rename(out / "progress.json")  # an unfinished one, too
    assert "uncased=True there, False here" in fails(lambda: data.main([*command, "--no-uncased"]), capsys)
    (out / "progress.json").rename(out / "meta.json")
    text.write_text(text.read_text() + "\n\nOne more document.")
    assert "other settings: content_hash=" in fails(lambda: data.main(command), capsys)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}


@catches("data.sample", "elif", "if")
def test_the_tokenizer_learns_from_training_documents_all_over_the_corpus():
    texts = [sentence(i) + " é" for i in range(4000)]
    size = sum(len(text.encode()) for text in texts)
    whole, facts = data.sample(texts, 0.1, size)
    assert [text.decode() for text in whole] == [text for text in texts if not data.in_validation(text, 0.1)]
    assert facts["bytes"] == size
    for val_share in (0.1, 0.9):
        some, facts = data.sample(texts, val_share, size // 10)
        assert size / 30 < facts["sample"]["bytes"] == sum(map(len, some)) <= size / 10
        places = [texts.index(text.decode()) for text in some]
        assert places == sorted(places) and abs(np.mean(places) / 4000 - 0.5) < 0.1
        assert sorted(some) == sorted(data.sample(reversed(texts), val_share, size // 10)[0])
        assert not any(data.in_validation(text.decode(), val_share) for text in some)


@catches("data.in_order", "> 2 * processes", "> 20 * processes")
def test_text_is_read_only_a_little_ahead_of_what_is_written():
    read = []
    for written, text in enumerate(data.in_order(str.upper, (read.append(i) or f"a{i}" for i in range(40)), 2)):
        assert text == f"A{written}" and len(read) <= written + 5
    assert written == 39


def test_a_huge_document_is_cut_and_a_huge_line_of_json_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "LONGEST", 100)
    monkeypatch.setattr(files, "LONGEST_LINE", 150)
    text = "é🙂 wörds " * 100
    (tmp_path / "a.txt").write_text(text + "\n\nshort")
    (tmp_path / "b.txt").write_text(text.replace(" ", "\n"))
    pieces = list(data.documents((".txt", str(tmp_path / "a.txt"))))
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "") + "short" and max(map(len, pieces)) <= 100
    assert pieces[-1] == "short" and len(pieces) < 25
    assert max(len(piece) for piece in data.documents((".txt", str(tmp_path / "b.txt")))) <= 100
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "fine \ud800"}) + "\n" + json.dumps({"text": text}) + "\n")
    documents = data.documents((".jsonl", str(tmp_path / "c.jsonl")))
    assert next(documents) == "fine ?"
    with pytest.raises(data.UserError, match="c.jsonl, line 2: not JSON, or longer than 150"):
        next(documents)


def test_a_hundred_gigabytes_of_shards_are_read_by_the_row(tmp_path):
    count, rows, n = 25, 1 << 22, 512  # 10^11 bytes and 5 * 10^10 tokens, in sparse files
    for i in range(count):
        shard = np.lib.format.open_memmap(tmp_path / f"train-{i:05d}.npy", "w+", np.uint16, (rows, n))
        shard[0], shard[-1] = 4 + 2 * i, 5 + 2 * i
    meta = {"seq_len": n, "vocab_size": 100, "min_real": n, "dtype": "uint16",
            "train": [[f"train-{i:05d}.npy", rows] for i in range(count)], "val": []}  # an earlier version's, without checksums
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = data.Rows(tmp_path, "train", 100, n)
    assert len(found) * n > 5 * 10 ** 10
    ends = np.arange(count)[:, None] * rows + [0, rows - 1]
    assert np.array_equal(found[ends.flatten()], np.arange(4, 4 + 2 * count)[:, None].repeat(n, 1))
    for step in (0, 51_199, 10 ** 7):
        assert found[data.rows_of_step(1, step, 2048, len(found))].shape == (2048, n)


# ---- What is damaged, or another's ----------------------------------------------------------------------------------
def test_damaged_or_foreign_shards_are_refused(corpus, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(corpus[1], folder)
    shard = folder / "train-00000.npy"
    whole = shard.read_bytes()
    with pytest.raises(data.UserError, match="prepared with seq_len=24, this run has 32: pass --seq-len 24"):
        data.Rows(folder, "train", 320, 32)
    for damage in (b"XX" + whole[2:], whole[:-7], b""):
        shard.write_bytes(damage)
        with pytest.raises(data.UserError, match="train-00000.npy is damaged: .*to mend it: python data.py prepare --data "):
            data.Rows(folder, "train", 320, 24)
    np.save(shard, np.load(corpus[1] / "train-00000.npy").astype(np.int64))
    meta = files.read_json(folder / "meta.json")
    meta["train"][0][2] = files.file_hash(shard)
    files.write_json(folder / "meta.json", meta)
    with pytest.raises(data.UserError, match="bad header: int64"):
        data.Rows(folder, "train", 320, 24)
    rows = np.load(corpus[1] / "train-00000.npy")
    rows[3, 5] = 320
    np.save(shard, rows)
    meta["train"][0][2] = files.file_hash(shard)
    files.write_json(folder / "meta.json", meta)
    with pytest.raises(data.UserError, match="row 3 holds token id 320, but vocab_size=320"):
        data.Rows(folder, "train", 320, 24)[np.array([1, 3])]


def copied(corpus, tmp_path):
    """A copy of the prepared corpus."""
    return Path(shutil.copytree(corpus[1], tmp_path / "copy"))


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train-00000.npy", "val-00000.npy"])
def test_every_flipped_bit_and_cut_is_noticed_or_harmless(name, corpus, tmp_path, capsys):
    folder = copied(corpus, tmp_path)
    raw, random = (folder / name).read_bytes(), np.random.default_rng(0)
    meta = files.read_json(folder / "meta.json")
    whole = {part: data.Rows(corpus[1], part, 320, 24) for part in ("train", "val")}
    bits = [*range(0, 1024, 9), *random.integers(0, 8 * len(raw), 60)]
    noticed = 0
    for damaged in [flipped(raw, int(bit)) for bit in bits] + [raw[:-1], raw[:100], b""]:
        (folder / name).write_bytes(damaged)
        try:
            data.verify(folder)
            data.Tokenizer.load(folder)
            for part, rows in whole.items():
                here = data.Rows(folder, part, 320, 24)
                assert len(here) == len(rows) and np.array_equal(here[np.arange(len(here))], rows[np.arange(len(rows))])
            assert files.read_json(folder / "meta.json") == meta
        except (data.UserError, SystemExit):
            noticed += 1
    assert noticed > 0.9 * len(bits)


@catches("data.damages", "elif path.stat().st_size < least:", "elif False:")
@catches("data.damages", "elif checksum not in (None, file_hash(path)):", "elif False:")
def test_verify_names_each_damaged_file_and_the_command_that_mends_it(corpus, tmp_path, capsys):
    folder = copied(corpus, tmp_path)
    command = ["verify", "--out", str(folder)]
    data.main(command)
    assert f"{folder}: 3 files are whole" in capsys.readouterr().out
    shard = folder / "train-00000.npy"
    shard.write_bytes(flipped(shard.read_bytes(), 5000))
    (folder / "val-00000.npy").write_bytes(b"short")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as exit:
        data.main(command)
    said = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(said) == 3
    for line, name, what in zip(said, ("tokenizer.json", "train-00000.npy", "val-00000.npy"), ("missing", "damaged: its checksum", "cut off")):
        assert f"{folder / name} is {what}" in line and "to mend it: python data.py prepare --data " in line
    mend = shlex.split(said[0].partition("python data.py ")[2])
    data.main(mend)
    assert contents(folder) == contents(corpus[1])
    data.main(command)
    meta = files.read_json(folder / "meta.json")  # as an earlier version wrote it
    old = {name: value for name, value in meta.items() if name not in ("tokenizer", "apart", "left_out")}
    files.write_json(folder / "meta.json", old | {part: [shard[:2] for shard in meta[part]] for part in ("train", "val")}, checked=False)
    capsys.readouterr()
    data.main(command)
    assert "an earlier version" in capsys.readouterr().out and len(data.Rows(folder, "val", 320, 24))
    data.main(mend)
    (folder / "val-00000.npy").write_bytes(b"short")
    capsys.readouterr()
    assert "is cut off" in fails(lambda: data.main(command), capsys)
    data.main(mend)
    data.main(command)
    assert "earlier version" not in capsys.readouterr().out and contents(folder).keys() == contents(corpus[1]).keys()


@catches("data.begun", "damaged = damages(out, meta)", "damaged = {}")
def test_a_cut_shard_is_written_again_and_said_so(corpus, tmp_path, monkeypatch, capsys):
    whole = prepare_small(monkeypatch, corpus[0], tmp_path / "out")
    for name in ("train-00002.npy", "val-00001.npy", "tokenizer.json"):
        (tmp_path / "out" / name).write_bytes(whole[name][:-5])
        assert prepare_small(monkeypatch, corpus[0], tmp_path / "out") == whole
        assert f"{name} is" in capsys.readouterr().err
    with contextlib.suppress(End), monkeypatch.context() as patch:  # in what is not finished, too
        (tmp_path / "out" / "val-00001.npy").unlink()
        end_after(patch, 12)
        prepare_small(patch, corpus[0], tmp_path / "out")
    done = files.read_json(tmp_path / "out" / "progress.json")
    (tmp_path / "out" / done["train"][0][0]).write_bytes(b"")
    assert prepare_small(monkeypatch, corpus[0], tmp_path / "out") == whole


@catches("data.Rows.__init__", "meta[part][rank::world]", "meta[part][rank:]")
@catches("data.Rows.__init__", "if left > 0 and", "if")
def test_of_several_processes_each_verifies_its_share_of_the_shards(corpus, tmp_path, monkeypatch):
    prepare_small(monkeypatch, corpus[0], tmp_path)
    shard = tmp_path / "train-00001.npy"
    shard.write_bytes(flipped(shard.read_bytes(), 5000))
    for rank, world, noticed in ((0, 1, True), (0, 2, False), (1, 2, True), (2, 3, False)):
        with pytest.raises(data.UserError) if noticed else contextlib.nullcontext():
            data.Rows(tmp_path, "train", 320, 24, rank, world)
    monkeypatch.setattr(data, "VERIFIED_BYTES", shard.stat().st_size)  # enough for the first one
    data.Rows(tmp_path, "train", 320, 24)


@catches("data.Tokenizer.load", "!= file_hash(path)", "is None")
def test_a_tokenizer_of_another_corpus_is_refused(corpus, tmp_path):
    folder = copied(corpus, tmp_path)
    data.Tokenizer.load(folder)
    data.Tokenizer.train([sentence(1)], 300, True).save(folder)
    with pytest.raises(data.UserError, match="tokenizer.json: damaged or replaced: meta.json was written with another"):
        data.Tokenizer.load(folder)
    (folder / "meta.json").unlink()
    files.write_json(folder / "config.json", {"tokenizer": "0"})  # of a run
    with pytest.raises(data.UserError, match="config.json was written with another"):
        data.Tokenizer.load(folder)


@catches("data.compare_made", "if meta.get(name, value) != value:", "if False:")
def test_a_prepared_folder_must_have_what_a_run_is_given(corpus):
    data.check_prepared(str(corpus[1]), {"uncased": True, "val_share": 0.1})
    data.check_prepared(str(corpus[0]), {"uncased": False})  # a text can have any
    for given_options, message in (({"uncased": False}, "uncased=True, this run has False: pass --uncased or prepare"),
                                   ({"val_share": 0.2}, "val_share=0.1, this run has 0.2: pass --val-share 0.1 or")):
        with pytest.raises(data.UserError, match=message):
            data.check_prepared(str(corpus[1]), given_options)


def test_the_identity_of_a_corpus_is_that_of_its_rows(corpus, tmp_path):
    same = data.prepare(str(corpus[0]), tmp_path / "same", 320, 24, True, 0.1)
    other = data.prepare(str(corpus[0]), tmp_path / "other", 320, 24, True, 0.2)
    assert data.corpus_identity(same) == data.corpus_identity(corpus[1])
    assert set(data.corpus_identity(same)) == {"corpus", "tokenizer"}
    assert data.corpus_identity(same)["corpus"] != data.corpus_identity(other)["corpus"]


@catches("data.write_shards", "            discard(out, meta)\n", "", val_share=0.004)
@pytest.mark.parametrize("val_share", [0.000001, 0.004])  # no document, and one that is too small for a row
def test_what_a_failed_command_leaves_does_not_block_the_next(val_share, tmp_path):
    text = write_corpus(tmp_path / "text.txt", 300)
    documents = text.read_text().split("\n\n")
    assert len([d for d in documents if data.in_validation(d, 0.004)]) == 1
    with pytest.raises(data.UserError, match="its val part is too small for one row"):
        data.prepare(str(text), tmp_path / "a" / "out", 320, 200, True, val_share)
    assert not (tmp_path / "a").exists()
    data.prepare(str(text), tmp_path / "a" / "out", 320, 24, True, 0.1)


@catches("data.begun", "        discard(out, meta)\n        return None\n    if unfinished", "        raise\n    if unfinished", writes=2)
@catches("data.begun", 'if not unfinished or meta["train"] or meta["val"]:', "if not unfinished:", writes=5)
@pytest.mark.parametrize("writes", [2, 5])  # the tokenizer and progress.json; a shard of each part, too
def test_other_options_may_follow_a_command_that_was_killed_before_its_first_shard(writes, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, contextlib.suppress(End):
        end_after(patch, writes + 1)  # and who is at work
        prepare_small(patch, corpus[0], tmp_path / "out")
    assert (tmp_path / "out" / "progress.json").is_file()
    with pytest.raises(data.UserError, match="other settings") if writes == 5 else contextlib.nullcontext():
        data.prepare(str(corpus[0]), tmp_path / "out", 320, 24, True, 0.2)


def started(code, *arguments):
    """A process group that runs this code with `data` as this test has it."""
    first = f"import sys\nsys.path.insert(0, {str(Path(data.__file__).parent)!r})\nimport {data.__name__} as data\n"
    return subprocess.Popen([sys.executable, "-c", first + code, *map(str, arguments)], cwd=HERE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True)


@catches("data.prepare", 'claim_folder(out, "corpus", wait=True)', 'claim_folder(out, "corpus")')
def test_three_processes_that_make_one_cold_cache_at_once_all_get_it(corpus, tmp_path):
    code = ("import pathlib, time\nwrite = data.write_shards\n"
            "data.write_shards = lambda *arguments: print('made', flush=True) or time.sleep(2) or write(*arguments)\n"
            "print(data.corpus(sys.argv[1], pathlib.Path(sys.argv[2]), 320, 24, True, 0.1))")
    three = [started(code, corpus[0], tmp_path) for _ in range(3)]
    said = [process.communicate(timeout=120) for process in three]
    assert [process.returncode for process in three] == [0, 0, 0], said
    assert len({out.splitlines()[-1] for out, _ in said}) == 1 and "".join(out for out, _ in said).count("made") == 1
    assert all(error.count("\n") <= 1 for _, error in said)


def test_a_folder_of_a_run_is_not_prepared(corpus, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"train": {}}')
    (tmp_path / "tokenizer.json").write_text("mine")
    error = fails(lambda: data.main(["prepare", "--data", str(corpus[0]), "--out", str(tmp_path)]), capsys)
    assert "was made by train.py, and data.py prepare would overwrite its files" in error
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


# ---- Processes and signals ------------------------------------------------------------------------------------------
@catches("data.starting", 'sys.modules["__main__"] = types.ModuleType("__main__")', "pass")
def test_a_script_without_a_guard_may_use_processes(tmp_path):
    script = tmp_path / "script.py"
    first = f"import sys\nsys.path[:0] = {[str(Path(data.__file__).parent), str(HERE)]}\nimport {data.__name__} as data\n"
    script.write_text(first + "print(list(data.in_order(str.upper, ['a', 'b'], 2)))")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "['A', 'B']\n" and done.stderr == ""


@catches("data.starting", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})", "set()", number=signal.SIGINT, stage="starting")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["content_hash", "first_pass", "starting", "file_hash"])
def test_a_signal_ends_prepare_with_one_line_and_the_same_command_continues(number, stage, corpus, tmp_path, monkeypatch):
    whole, out = prepare_small(monkeypatch, corpus[0], tmp_path / "whole"), tmp_path / "out"
    code = ("import time\n"
            f"data.__dict__.update({SMALL})\n"
            f"function, done = data.{stage}, []\n"
            "def call(*arguments):\n"
            f"    if len(done) == {2 if stage in ('file_hash', 'starting') else 0}:\n"
            "        time.sleep(0.3)\n"  # the processes are about to begin
            "        print('now', flush=True)\n"
            "        time.sleep(1000)\n"
            "    done.append(1)\n"
            "    return function(*arguments)\n"
            f"data.{stage} = call\n"
            f"data.main(['prepare', '--data', {str(corpus[0])!r}, '--out', {str(out)!r}, '--processes', '2', *{OPTIONS}])")
    process = started(code)
    while "now" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, number)
    said, error = process.communicate(timeout=100)
    assert error == "data.py: interrupted; the same command continues\n" and process.returncode == 128 + number
    assert stage in ("file_hash", "starting") or not out.exists()
    assert not list(out.glob(".*.tmp")) and not (out / ".lock.owner").exists()
    assert prepare_small(monkeypatch, corpus[0], out) == whole


# ---- Near-duplicates ------------------------------------------------------------------------------------------------
def share_covered(train_texts, val_texts, run=13):
    """The share of the words of validation texts that lie in a run of 13 words that a training text has, too."""
    def runs_in(words):
        return [tuple(words[i:i + run]) for i in range(len(words) - run + 1)]

    known = {words for text in train_texts for words in runs_in(text.lower().split())}
    covered = total = 0
    for text in val_texts:
        words = text.lower().split()
        marked = set()
        for i, found in enumerate(runs_in(words)):
            if found in known:
                marked.update(range(i, i + run))
        covered += len(marked)
        total += len(words)
    return covered / total


@catches("data.encode_block", 'part == "train" and shares_a_run', "False and shares_a_run")
@catches("data.runs_of_words", "text.lower()", "text")
@catches("data.runs_of_words", "len(words) - RUN + 1", "len(words) - RUN")
@catches("data.keep_runs", "if in_validation(text, val_share):", "if not runs:")
def test_with_apart_no_run_of_13_words_is_in_both_parts_and_nothing_else_is_left_out(tmp_path, monkeypatch):
    filler = " ".join(f"w{i}" for i in range(13))
    documents = [f"{filler if i % 10 == 0 else ''} {sentence(i)} x{i} {' '.join(f'y{i}z{j}' for j in range(20))}".strip() for i in range(200)]
    held_out = [text for text in documents if data.in_validation(text, 0.1)]
    others = [text for text in documents if not data.in_validation(text, 0.1)]
    long = max(held_out, key=len).split()
    others += [" ".join(["Begin", *long[-13:]]).upper(), " ".join(["begin", *long[-12:]])]  # 13 words, and 12
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(held_out + others))
    assert share_covered(others, held_out) > 0.03
    found = {}
    for name, apart in (("with", True), ("without", False), ("default", None)):
        folder = data.prepare(str(text), tmp_path / name, 320, 24, False, 0.1, apart=apart)
        tokens = data.Rows(folder, "train", 320, 24)
        decoded = data.Tokenizer.load(folder).decode(tokens[np.arange(len(tokens))][:, 1:].flatten())
        found[name] = decoded.split("[SEP]")[:-1]
    assert found["default"] == found["without"] == others[:len(found["without"])]
    wanted = [text for text in others if share_covered([text], held_out) == 0]
    assert found["with"] == wanted[:len(found["with"])] and len(wanted) - 2 <= len(found["with"])
    assert share_covered(found["with"], held_out) == 0 and others[-1] in wanted and others[-2] not in wanted
    meta = files.read_json(tmp_path / "with" / "meta.json")
    assert meta["left_out"][0] == len(others) - len(wanted) > 10
    # However it is cut into blocks, shards and processes, and wherever it ended.
    for name, value in SMALL.items():
        monkeypatch.setattr(data, name, value)
    data.prepare(str(text), tmp_path / "one", 320, 24, False, 0.1, apart=True, processes=1)
    data.prepare(str(text), tmp_path / "three", 320, 24, False, 0.1, apart=True, processes=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def test_documentation_is_kept_apart_unless_told_otherwise(tmp_path, monkeypatch):
    texts = [("python", f"{sentence(i)} {sentence(3 * i)} {sentence(7 * i)} number {i}") for i in range(300)]
    monkeypatch.setattr(data, "read_docs", lambda progress=False: texts)
    monkeypatch.setattr(data, "docs_files", lambda: [("python", Path(json.__file__))])
    for apart, wanted in ((None, True), (False, False)):
        folder = data.prepare("docs", tmp_path / str(apart), 320, 24, True, 0.1, apart=apart)
        assert files.read_json(folder / "meta.json")["apart"] is wanted


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
