"""Claims about data.py: tokenizer, rows, corpora."""
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data
import maelm
import train
from conftest import (HERE, catches, fails, run_with_wrong_version, sentence, write_corpus, wrong_versions)


# ---- Tokenizer, rows, corpora ---------------------------------------------------------------------------------------
def test_tokenizer_gives_back_every_text_and_agrees_with_tokenizers(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    texts = ["The cat sees a tree.", "naïve café — ∑ 数学 🙂\t\r\n  x", "[MASK] [CLS] is plain text", "\x00\x7f ~",
             "a" * 500, bytes(range(256)).decode("latin-1"), ""]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.lower()
        assert ids.tolist() == tokenizer.model.encode(text.lower(), add_special_tokens=False).ids
        assert len(ids) == 0 or data.NUM_SPECIAL <= ids.min() and ids.max() < len(tokenizer) <= 320


def test_token_ids_are_specials_then_bytes_then_merges(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    assert [tokenizer.decode([i]) for i in range(4)] == ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    assert [tokenizer.tiktoken.decode_single_token_bytes(4 + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert tokenizer.encode("Anna [MASK]", special=True)[-1] == maelm.MASK
    assert [maelm.CLS, maelm.PAD, maelm.SEP, maelm.MASK] == [data.SPECIALS.index(f"[{name}]") for name in
                                                             ("CLS", "PAD", "SEP", "MASK")]


def test_rows_are_the_documents_joined_by_sep_and_no_document_is_in_both_parts(corpus):
    text, folder = corpus
    tokenizer = data.Tokenizer.load(folder)
    found = {}
    for part in ("train", "val"):
        rows = data.Rows(folder, part, 320, 24)
        rows = rows[np.arange(len(rows))]
        assert (rows[:, 0] == maelm.CLS).all() and (rows[:, 1:] != maelm.CLS).all()
        assert (rows >= data.NUM_SPECIAL).sum(1).min() >= json.loads((folder / "meta.json").read_text())["min_real"]
        found[part] = tokenizer.decode(rows[:, 1:].flatten()).split("[SEP]")[:-1]  # the last one is cut off
    documents = [d.lower() for d in text.read_text().split("\n\n")]
    held_out = {d.lower() for d in text.read_text().split("\n\n") if data.in_validation(d, 0.1)}
    assert found["train"] == [d for d in documents if d not in held_out][:len(found["train"])]
    assert found["val"] == [d for d in documents if d in held_out][:len(found["val"])]
    assert len(found["val"]) > 10 and not set(found["train"]) & set(found["val"])


def test_the_same_text_gives_the_same_shards_from_every_format(corpus, tmp_path):
    import gzip, lzma, pyarrow, pyarrow.parquet  # noqa: E401
    documents = corpus[0].read_text().split("\n\n")
    lines = "".join(json.dumps({"id": 1, "text": d}) + "\n" for d in documents).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(corpus[0].read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "d.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(lines)
    sources = ["a.jsonl", "b.jsonl.gz", "c.txt.xz", "d.parquet", "hub"]
    for i, source in enumerate([*map(tmp_path.joinpath, sources), f"hf:{tmp_path / 'hub'}"]):
        out = data.prepare(str(source), tmp_path / str(i), 320, 24, True, 0.1)
        for name in ("train-00000.npy", "val-00000.npy", "tokenizer.json"):
            assert (out / name).read_bytes() == (corpus[1] / name).read_bytes(), source


def test_several_sources_are_joined_by_plus(corpus, tmp_path):
    other = write_corpus(tmp_path / "other.txt", 100)
    parts = data.parts(f"{corpus[0]}+{other}")
    assert [Path(name).name for _, name in parts] == ["text.txt", "other.txt"]
    assert data.parts("docs+hf:a/b:c") == [("docs", ""), ("hf", "a/b:c")]


@catches("data.names_in", "if source and Path(source).expanduser().exists():", "if False:")
def test_a_path_that_exists_is_one_source_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("c++", "c", "a+b"):
        (tmp_path / folder).mkdir()
        write_corpus(tmp_path / folder / "text.txt", 3)
    for source in ("c++", "a+b"):
        assert data.parts(source) == [(".txt", str(Path(source, "text.txt")))]
    assert data.parts("c+docs") == [(".txt", str(Path("c", "text.txt"))), ("docs", "")]


@catches("data.names_in", 'if "" in names:', "if False:", joined="c+")
@catches("data.corpus", "if source and (prepared", "if (prepared", joined="")
@pytest.mark.parametrize("joined", ["", "c+", "+c", "++", "c++docs"])
def test_an_empty_name_is_refused_and_never_means_this_folder(joined, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "c", 3)
    write_corpus(tmp_path / "text.txt", 400)
    (tmp_path / "meta.json").write_text("{}")  # as if this folder were a prepared one
    error = fails(lambda: data.main(["prepare", "--data", joined, "--out", "out", *OPTIONS]), capsys)
    assert f"--data {joined!r}: a name in it is empty" in error and not (tmp_path / "out").exists()
    with pytest.raises(data.UserError, match="a name in it is empty"):
        data.corpus(joined, tmp_path / "cache", 320, 24, True, 0.1)


def test_a_prepared_corpus_is_found_again_by_its_content(corpus, tmp_path):
    arguments = 320, 24, True, 0.1
    first = data.corpus(str(corpus[0]), tmp_path, *arguments)
    before = (first / "meta.json").stat().st_mtime_ns
    copy = tmp_path / "copy.txt"
    copy.write_bytes(corpus[0].read_bytes())
    assert data.corpus(str(copy), tmp_path, *arguments) == first and (first / "meta.json").stat().st_mtime_ns == before
    copy.write_text(copy.read_text() + "\n\nOne more document.")
    assert data.corpus(str(copy), tmp_path, *arguments) != first
    assert data.corpus(str(corpus[1]), tmp_path, *arguments) == corpus[1]


@catches("data.rows_of_step", "outside = x >= total", "outside = x < 0")
@catches("data.rows_of_step", "+ epoch[:, None].astype(np.uint64)", "")
def test_an_epoch_is_a_permutation_without_replacement():
    for total, batch in ((1, 3), (10, 4), (97, 10), (1000, 64)):
        steps = [data.rows_of_step(5, s, batch, total) for s in range(-(-3 * total // batch))]
        stream = np.concatenate(steps)
        for epoch in range(3):
            assert sorted(stream[epoch * total:(epoch + 1) * total]) == list(range(total))
        if total > 50:
            assert list(stream[:total]) != list(stream[total:2 * total]) != list(range(total))
            assert list(steps[0]) != list(data.rows_of_step(6, 0, batch, total))
    far = data.rows_of_step(0, 10 ** 9, 2048, 3 * 10 ** 10)
    assert far.min() >= 0 and far.max() < 3 * 10 ** 10 and len(set(far)) == 2048


def test_the_permutation_looks_random():
    x = np.concatenate([data.rows_of_step(0, s, 1000, 10 ** 6) for s in range(20)])
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.04 and abs(x.mean() / 10 ** 6 - 0.5) < 0.02


def test_documentation_is_read_without_importing(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('''"""A module that cannot be imported at all."""
raise SystemExit
def f():
    """  Returns nothing of interest.

        Not even here."""
add_docstr(f, r"""f(x) -> y, said by a call.""")
def g(): "short"
''')
    assert data.docstrings(module) == ["A module that cannot be imported at all.",
                                       "Returns nothing of interest.\n\nNot even here.", "f(x) -> y, said by a call."]


# ---- Records --------------------------------------------------------------------------------------------------------
@catches("data.read_tsv", "len(row) >= len(names)", "row")
@catches("data.read_tsv", "header or next(rows, ())", "next(rows, ())")
@catches("data.read_jsonl", "if line.isspace():", "if False:")
def test_records_are_the_same_from_every_format(tmp_path):
    import pyarrow, pyarrow.parquet  # noqa: E401
    records = [{"text": "it said one, two", "label": "a"}, {"text": "naïve 数", "label": "b"}]
    (tmp_path / "a.csv").write_text('text,label\n"it said one, two",a\nnaïve 数,b\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("text\tlabel\nit said one, two\ta\ncut off\nnaïve 数\tb\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for suffix, read in data.RECORDS.items():
        assert list(read(tmp_path / f"a{suffix}")) == records, suffix
    first, *rest = data.read_tsv(tmp_path / "a.tsv", header=("text", "label"))
    assert first == {"text": "text", "label": "label"} and rest == records


def test_a_null_text_is_an_empty_document(tmp_path):
    import pyarrow, pyarrow.parquet  # noqa: E401
    records = [{"text": "one"}, {"text": None}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for suffix in (".jsonl", ".parquet"):
        assert list(data.documents((suffix, str(tmp_path / f"a{suffix}")))) == ["one", "two"]


@pytest.mark.parametrize("name, text, message", [
    ("a.jsonl", '{"a": 1}\n[1, 2]\n', r"a\.jsonl, line 2: not an object with named fields, but \[1, 2\]"),
    ("a.jsonl", '{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: not JSON"),
    ("a.csv", "text,label\na,b\n" + "x" * 200_000 + ",c\n", r"a\.csv, line 3: not CSV: field larger"),
    ("a.parquet", "PAR1", r"a\.parquet: not a Parquet file"),
])
def test_a_bad_record_is_named_with_its_line(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(data.UserError, match=message):
        list(data.RECORDS[path.suffix](path))


# ---- Bad data -------------------------------------------------------------------------------------------------------
def bad_jsonl(path):
    path.write_text('{"text": "fine"}\n{"content": "x", "id": 3}\n')


def bad_json(path):
    path.write_text('{"text": "fine"}\n{"text": \n')


def bad_bytes(path):
    path.write_bytes(b"good text\n\n" * 3 + b"caf\xe9")


def bad_gzip(path):
    path.write_bytes(b"this is no gzip file")


def bad_parquet(path):
    path.write_bytes(b"PAR1 not really")


@pytest.mark.parametrize("name, make, message", [
    ("a.jsonl", bad_jsonl, r"a\.jsonl, record 2: no text column `text`; found: content, id"),
    ("a.jsonl", bad_json, r"a\.jsonl, line 2: not JSON"),
    ("a.txt", bad_bytes, r"a\.txt: byte 36 is not UTF-8 \(0xe9\)"),
    ("a.txt.gz", bad_gzip, r"a\.txt\.gz: damaged \.gz file"),
    ("a.parquet", bad_parquet, r"a\.parquet: not a Parquet file"),
    ("a.txt", Path.touch, r"its train part is too small for one row"),
    ("a.csv", Path.touch, r"a\.csv: holds no text; use \.txt, \.jsonl, \.parquet"),
    ("nothing", lambda path: None, r"nothing: no such file or folder"),
    ("empty", Path.mkdir, r"empty: holds no text"),
])
def test_bad_data_is_named_in_one_line_before_anything_is_written(name, make, message, tmp_path, capsys):
    make(tmp_path / name)
    error = fails(lambda: train.main(["--data", str(tmp_path / name), "--out", str(tmp_path / "out"),
                                      "--cache", str(tmp_path / "cache")]), capsys)
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()


def test_a_hub_name_without_network_says_so(tmp_path, monkeypatch):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "train.py", "--data", "hf:no/such-set", "--out", str(tmp_path / "o"),
               "--cache", str(tmp_path / "cache")]
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and not (tmp_path / "o").exists()
    assert re.search("hf:no/such-set: cannot be loaded .* Files of your own and docs need neither",
                     result.stderr.strip().splitlines()[-1])


def test_damaged_or_foreign_shards_are_refused(corpus, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(corpus[1], folder)
    shard = folder / "train-00000.npy"
    whole = shard.read_bytes()
    with pytest.raises(data.UserError, match="prepared with seq_len=24, this run has 32: pass --seq-len 24"):
        data.Rows(folder, "train", 320, 32)
    for damage in (b"XX" + whole[2:], whole[:-7], b""):
        shard.write_bytes(damage)
        with pytest.raises(data.UserError, match="train-00000.npy: "):
            data.Rows(folder, "train", 320, 24)
    np.save(shard, np.load(corpus[1] / "train-00000.npy").astype(np.int64))
    with pytest.raises(data.UserError, match="bad header: int64"):
        data.Rows(folder, "train", 320, 24)
    rows = np.load(corpus[1] / "train-00000.npy")
    rows[3, 5] = 320
    np.save(shard, rows)
    with pytest.raises(data.UserError, match="row 3 holds token id 320, but vocab_size=320"):
        data.Rows(folder, "train", 320, 24)[np.array([1, 3])]


# ---- Large corpora --------------------------------------------------------------------------------------------------
SMALL = dict(BLOCK_CHARACTERS=2000, SHARD_TOKENS=2400, PROCESS_BYTES=1)  # a small text has many blocks and shards
OPTIONS = ["--vocab-size", "320", "--seq-len", "24", "--val-share", "0.1"]


def prepare_small(monkeypatch, source, out, processes=1):
    for name, value in SMALL.items():
        monkeypatch.setattr(data, name, value)
    return contents(data.prepare(str(source), out, 320, 24, True, 0.1, processes=processes))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@catches("data.in_order", "yield waiting.popleft().result()\n            while",
         "yield waiting.pop().result()\n            while")
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
        files = {name: (out / name).stat().st_ino for part in ("train", "val") for name, _ in done.get(part, ())}
        with monkeypatch.context() as patch, contextlib.suppress(End):
            end_after(patch, 3 + ends % 2)  # the shards of both parts and progress.json; or one file of the next, too
            ends += 1
            assert ends < 50
            prepare_small(patch, corpus[0], out)
        assert files == {name: (out / name).stat().st_ino for name in files}, "a finished shard was written again"
    assert ends > 5 and contents(out) == whole


@catches("data.write_shards", "        stale.unlink()", "        pass")
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


@catches("data.sample", "max(val_share, 1 - share)", "1 - share")
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
    for name, value in (("LONGEST", 100), ("LONGEST_LINE", 150)):
        monkeypatch.setattr(data, name, value)
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
            "train": [[f"train-{i:05d}.npy", rows] for i in range(count)]}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = data.Rows(tmp_path, "train", 100, n)
    assert len(found) * n > 5 * 10 ** 10
    ends = np.arange(count)[:, None] * rows + [0, rows - 1]
    assert np.array_equal(found[ends.flatten()], np.arange(4, 4 + 2 * count)[:, None].repeat(n, 1))
    for step in (0, 51_199, 10 ** 7):
        assert found[data.rows_of_step(1, step, 2048, len(found))].shape == (2048, n)


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
