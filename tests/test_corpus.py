"""Claims about the files and the documentation that --data reads, prepared corpora, and the sequences of a step."""
import bz2
import gzip
import hashlib
import lzma
import pathlib
import re
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import train
from maelm import CLS
from support.model import checkpoints
from support.program.errors import UserError
from support.text import corpus, documents, tokenizer as tokenizers
from support.text.corpus import Rows, indices_of_step
from support.program import files
from support.program.files import json_lines, read_json
from support.tasks import results
from tests.common import ROOT, contents, fails, little_documents, sentence, write_corpus


def prepared(data, cache, tokenizer=None, **change):
    """Prepare a corpus in the folder `cache`; returns the folder of the corpus."""
    how = dict(data=str(data), column="text", cache=str(cache), vocab_size=320, uncased=True, val_share=0.1)
    return corpus.prepared_corpus(how | change, tokenizer)


@pytest.fixture(scope="module")
def folder(text):
    """The folder of the prepared little corpus."""
    return prepared(text, text.parent / "cache")


def documents_of(data):
    """All documents of --data."""
    return list(filter(None, documents.documents(documents.sources(str(data)))))


# ---- Documents ------------------------------------------------------------------------------------------------------
def test_every_format_gives_the_same_documents(tmp_path):
    expected = little_documents(40)
    plain = "\n \n".join(expected).encode()
    records = [{"id": 1, "text": text} for text in expected] + [{"text": None, "other": {"a": []}}, {"id": "x"}]
    lines = json_lines(records).encode()
    files = {"a.txt": b"\xef\xbb\xbf" + plain, "a.txt.xz": lzma.compress(plain), "a.jsonl": lines,
             "A.Jsonl.GZ": gzip.compress(lines), "a.json.bz2": bz2.compress(lines),
             "a[1]/Book [vol 2].TXT": plain, "a[1]/.a.txt": b"hidden", "a[1]/a.csv": b"of another format",
             "a.txt.zst": pyarrow.compress(plain, "zstd", asbytes=True)}
    (tmp_path / "a[1]").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "a[1]" / "B").symlink_to("Book [vol 2].TXT")  # has no suffix, and comes before the file
    pyarrow.parquet.write_table(pyarrow.table({"text": [*expected, None], "n": range(41)}), tmp_path / "a.parquet")
    for name in (*list(files)[:6], "a.txt.zst", "a.parquet", "a[1]"):
        assert documents_of(tmp_path / name) == expected, name


def test_text_without_blank_lines_is_split_by_size_or_end_of_text(tmp_path):
    lines = [f"{sentence(i)}\n" for i in range(2000)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    found = documents_of(tmp_path / "lines.txt")
    assert "\n".join(found) == "".join(lines).strip()
    assert {10_000 <= len(text) + 1 < 10_100 for text in found[:-1]} == {True}
    (tmp_path / "line.txt").write_text("word " * 1_000_000)  # of 5 million characters
    assert [len(text) for text in documents_of(tmp_path / "line.txt")] == [1 << 22, 5_000_000 - (1 << 22) - 2]
    stories = little_documents(3)
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join(stories) + "\n<|endoftext|>\nnot <|endoftext|> here")
    assert documents_of(tmp_path / "a.txt") == [*stories, "not <|endoftext|> here"]


def test_plus_joins_sources_unless_it_is_in_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c++").mkdir()
    (tmp_path / "here").mkdir()
    write_corpus(tmp_path / "c++" / "a.txt", 3)
    assert documents_of("c++") == little_documents(3)
    with pytest.raises(UserError, match="the folder here would be read instead"):  # instead of the Hub
        documents_of("hf:here")
    write_corpus(tmp_path / "b.txt", 2)
    assert documents_of("b.txt+b.txt") == 2 * little_documents(2)
    assert documents.sources("docs+hf:a/b:c+b.txt") == ["docs", "hf:a/b:c", pathlib.Path("b.txt")]


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'{"content": "x", "id": 3}', "a.jsonl, line 1: needs a field `text`; --column can be content, id"),
    ("a.txt", b"good text\n\ncaf\xe9", "a.txt: not UTF-8 .*; convert it"),
    ("a.txt.gz", gzip.compress(b"some words" * 99, mtime=0)[:-20], "a.txt.gz: cannot be read .Compressed file ended"),
    ("a.txt", b"few", "its train split has . tokens, too few for a sequence of seq_len=64"),
    ("b[2].txt", None, "b.2..txt: no such file or folder")])
def test_unreadable_input_gets_a_one_line_error(name, content, message, tmp_path, capsys):
    (tmp_path / "b1.txt").write_text("The name of another file is not its pattern.")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    flags = ["--data", str(tmp_path / name), "--out", str(tmp_path / "out"), "--cache", str(tmp_path)]
    line = fails(lambda: train.main(flags), capsys)
    assert re.search(message, line), line


# ---- The documentation on this machine ------------------------------------------------------------------------------
MODULE = '''"""A module that cannot be imported."""
raise SystemExit
def f():
    """  Returns nothing of interest.

        Not even here."""
add_docstr(f, r"""f(x) -> y, given by a call.""")
def g(): "only three words"
'''
FOUND = ["A module that cannot be imported.", "Returns nothing of interest.\n\nNot even here.",
         "f(x) -> y, given by a call."]


def test_docs_are_read_without_importing_and_kept_by_version(tmp_path, monkeypatch):
    files = {"lib/a.py": '"Text that two of them have."', "lib/b.py": "def", "one/m.py": MODULE,
             "one/tests/t.py": '"Tests are not part of it."', "two/c.py": '"Text that two of them have."\ndef'}
    files["two/d.py"] = '"Text that two of them have."\nclass A:\n  "Text of only this one."'
    files |= {f"{name}-1.0.dist-info/METADATA": f"Name: {name}\nVersion: 1.0" for name in ("one", "two")}

    def write():
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)

    write()
    for name in ("one", "two"):
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(documents, "PACKAGES", ("one", "two", "absent"))
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    expected = [("python", "Text that two of them have."), *[("one", text) for text in FOUND],
                ("two", "Text of only this one.")]
    read = documents.read_docs.__wrapped__  # without the memory of this process
    for cache in ("new", "lib/a.py"):  # the second is a file, which cannot be a cache
        assert read(str(tmp_path / cache)) == expected
    files["one/m.py"] = '"One has a new text."'
    write()
    assert read(str(tmp_path / "new")) == expected  # kept
    files["one-1.0.dist-info/METADATA"] = "Name: one\nVersion: 1.1"
    write()
    assert read(str(tmp_path / "new")) == [expected[0], ("one", "One has a new text."), expected[-1]]


def test_docs_leave_out_near_duplicates_of_validation(tmp_path, monkeypatch):
    texts = [" ".join(20 * [f"word{i}"]) for i in range(400)]
    copies = [f"Copied: {text.upper()} and more" for text in texts if corpus.in_validation(text, 0.1)]
    short = [f"short {i}" for i in range(200)]  # of fewer than 13 words, which may repeat each other
    short += [text.upper() for text in short if corpus.in_validation(text, 0.1)]
    for module in (corpus, documents):
        monkeypatch.setattr(module, "read_docs", lambda cache: [("python", text) for text in texts + copies + short])
    assert len([text for text in copies if not corpus.in_validation(text, 0.1)]) > 20
    terms = [text.replace("word", "term") for text in texts]
    mine = [*terms, *[f"again: {text}" for text in terms]]  # other sources may repeat themselves
    (tmp_path / "mine.jsonl").write_text(json_lines([{"text": text} for text in mine]))
    for data, more in (("docs", []), (f"docs+{tmp_path / 'mine.jsonl'}", mine)):
        folder = prepared(data, tmp_path)
        whole = tokenizers.Tokenizer.load(folder).decode(np.fromfile(folder / "train.bin", np.uint16))
        expected = [text.lower() for text in texts + short + more if not corpus.in_validation(text, 0.1)]
        assert whole == "".join(f"{text}[SEP]" for text in expected)


# ---- A prepared corpus, and the sequences of a step -----------------------------------------------------------------
@pytest.mark.parametrize("column, share, vocab_size", [
    ("body", 0.3, 65_536), ("body", 0.3, 65_537), ("body", 0.6, 320), ("title", 0.6, 320)])
def test_twenty_texts_are_split_by_hash_and_cut_into_sequences(column, share, vocab_size, tmp_path):
    records = [{"title": sentence(i), "body": text} for i, text in enumerate(little_documents(20))]
    (tmp_path / "a.jsonl").write_text(json_lines([*records, {"title": "", "body": None}]))
    how = dict(val_share=share, vocab_size=vocab_size)
    prepared(tmp_path / "a.jsonl", tmp_path, column="body" if column == "title" else "title", **how)  # another corpus
    folder = prepared(tmp_path / "a.jsonl", tmp_path, column=column, **how)
    parts = {"train": [], "val": []}
    for text in (record[column] for record in records):
        fraction = int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) / 16 ** 8
        parts["val" if fraction < share else "train"].append(text)
    meta = read_json(folder / "meta.json")
    assert meta["documents"] == {split: len(texts) for split, texts in parts.items()} | {"empty": 1}
    assert meta["bytes"] == sum(len(record[column].encode()) for record in records)
    for split, texts in parts.items():
        tokens = np.fromfile(folder / f"{split}.bin", np.uint32 if vocab_size == 65_537 else np.uint16)
        assert tokenizers.Tokenizer.load(folder).decode(tokens) == "".join(f"{text.lower()}[SEP]" for text in texts)
        assert meta["tokens"][split] == len(tokens)
        for n in (2, 24, 41):
            rows = Rows(folder, split, n)
            rows = rows[np.arange(len(rows))]
            assert (rows[:, 0] == CLS).all() and len(rows) == len(tokens) // (n - 1)
            assert np.array_equal(rows[:, 1:].flatten(), tokens[:len(rows) * (n - 1)])


def test_a_corpus_is_found_by_everything_that_shapes_it(tmp_path, monkeypatch):
    text = write_corpus(tmp_path / "text.txt")
    first = prepared(text, tmp_path)
    given = prepared(text, tmp_path, tokenizer=tokenizers.Tokenizer.load(first))
    assert contents(given) == contents(first)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "lock_folder", None)  # an existing corpus is only read
        assert prepared(text.rename(tmp_path / "moved.txt"), tmp_path) == first
    others = dict(uncased=False), dict(vocab_size=300), dict(val_share=0.2)
    names = {first, given, *[prepared(tmp_path / "moved.txt", tmp_path, **other) for other in others]}
    names.add(prepared(write_corpus(text, 401), tmp_path))
    monkeypatch.setattr(corpus, "CODE", corpus.CODE[1:])
    names.add(prepared(text, tmp_path))
    assert len(names) == 7


@pytest.mark.parametrize("file, old, new, kept", [
    ("maelm.py", '    "cross": dict(', '    "dec-3": dict(decoder_layers=3),\n    "cross": dict(', ""),
    ("maelm.py", "A Transformer layer:", "A comment  # and a", ""),
    ("finetune.py", "freeze the encoder, and", "keep the encoder as it is, and", ""),
    ("support/tasks/task.py", '    "custom": Task(', '    "mine": Task("small"),\n    "custom": Task(', ""),
    ("support/tasks/task.py", "is not one of the training labels", "is unknown", ""),
    ("support/tasks/results.py", "{format_number(run['value'])}", "{format_number(run['value'], 1)}", ""),
    ("maelm.py", "nn.GELU(), nn.Linear(4", "nn.ReLU(), nn.Linear(4", "run tuning"),
    ("support/model/build.py", "-torch.linspace(0, 1", "-torch.linspace(0, 2", "run tuning"),
    ("support/model/optim.py", "max(1, rows / columns)", "max(2, rows / columns)", "run"),
    ("support/model/cross_attention.py", "dropout=0.0)", "dropout=0.1)", "run"),
    ("train.py", "return (max_steps - step)", "return 0.5 * (max_steps - step)", "run"),
    ("finetune.py", "return (steps - step)", "return 0.5 * (steps - step)", "tuning"),
    ("support/model/heads.py", "nn.Tanh()", "nn.GELU()", "tuning"),
    ("support/model/checkpoints.py", "encoder.load_state_dict(self.weights)", "pass", "tuning"),
    ("support/tasks/classification.py", "random.permutation(len(lengths))", "np.arange(len(lengths))", "tuning"),
    ("support/tasks/classification.py", "2 * hits /", "hits /", "tuning"),
    ("support/tasks/squad.py", "min(null[q.id], no_answer)", "no_answer", "tuning"),
    ("support/tasks/probe.py", "max_iter=1000", "max_iter=10", "tuning"),
    ("support/tasks/task.py", "float(label) / self.scale", "float(label)", "tuning"),
    ("rank.py", "(tau - 1e-9)", "tau", "tuning"),
    ("support/text/tokenizer.py", r"| ?\p{N}{1,3}", r"| ?\p{N}{1,2}", "tuning corpus"),
    ("support/text/corpus.py", "NGRAM = 13", "NGRAM = 12", "run corpus"),
    ("support/text/documents.py", "len(text.split()) > 3", "len(text.split()) > 2", "corpus"),
    ("support/text/readers.py", "utf-8-sig", "utf-8", "corpus")])
def test_code_that_computes_is_known_and_code_that_prints_is_free(file, old, new, kept, tmp_path, monkeypatch):
    of_run = [name.removeprefix("code of ") for name in checkpoints.CODE]
    used = {"run": of_run, "tuning": results.CODE, "corpus": corpus.CODE}
    code = {name: (ROOT / name).read_text() for name in {file, *sum(map(list, used.values()), [])}}
    assert code[file].count(old) == 1
    found = []
    for texts in (code, code | {file: code[file].replace(old, new)}):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(files, "ROOT", tmp_path)
        found.append([files.code_hashes(*names) for names in used.values()])
    assert [name for name, before, now in zip(used, *found) if before != now] == kept.split()


@pytest.mark.parametrize("train, val, share", [
    (10 ** 7, 0, 0.01), (10 ** 7, 200_000, 0.01), (10 ** 6, 10 ** 6, 0.01), (50_000, 0, 0.01), (0, 50_000, 0.4),
    (50_000, 0, 0.999)])
def test_a_split_of_few_documents_is_cut_again_without_reading_the_corpus(train, val, share, tmp_path):
    whole = np.arange(train + val, dtype=np.uint16)
    whole[:train].tofile(tmp_path / "train.bin")
    whole[train:].tofile(tmp_path / "val.bin")
    tracemalloc.start()
    tokens = corpus.settle_validation(tmp_path, whole.dtype, share)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < max(10 ** 6, 3 * val) and sum(tokens.values()) == len(whole)
    assert share / 2 <= tokens["val"] / len(whole) <= max(2 * share, 0.1)
    parts = [np.fromfile(tmp_path / f"{split}.bin", np.uint16) for split in ("train", "val")]
    assert [*map(len, parts)] == [*tokens.values()] and np.array_equal(np.concatenate(parts), whole)


def test_the_tokenizers_sample_is_spread_evenly():
    texts = [f"{number:05}" * 10 for number in range(1000)]
    found = [int(piece[:5]) for piece in corpus.sample(iter(texts), 5000)]
    assert 50 <= len(found) <= 100 == len(corpus.sample(iter(texts[:100]), 5000))
    assert set(np.diff(found)) == {found[1]} and found[-1] > 980
    for end, count in ((" a", 1000), ("aa", 32)):  # without spaces, learning takes more memory
        assert len(corpus.sample((text[:-2] + end for text in texts), 50_000, corpus.cost_of)) == count


def test_prepare_reports_what_it_made_and_dropped(tmp_path, capsys):
    texts = [*little_documents(100), "", None, "  "]
    (tmp_path / "a.jsonl").write_text(json_lines({"text": text} for text in texts))
    flags = f"--data {tmp_path}/a.jsonl --cache {tmp_path} --vocab-size 320 --prepare".split()
    train.main(flags)
    *_, line = capsys.readouterr().out.splitlines()
    folder, = tmp_path.glob("*/")
    sizes = [(folder / f"{split}.bin").stat().st_size // 2 for split in ("train", "val")]
    density = sum(len(text.encode()) for text in little_documents(100)) / sum(sizes)
    assert line.startswith(f"{folder}: {sizes[0]:,} tokens for training, {sizes[1]:,} for validation; {density:.2f}")
    assert re.search(r"documents: (?=.*97 train)(?=.*3 val)(?=.*3 empty)", line)
    train.main(flags)
    assert capsys.readouterr().out == line + "\n"  # the second time, nothing is prepared
    (tmp_path / "greek.txt").write_text("καλημέρα σας " * 100)
    found = corpus.summary(prepared(tmp_path / "greek.txt", tmp_path, tokenizers.Tokenizer.load(folder)))
    for printed in (found, capsys.readouterr().out):
        assert f"; 1.00 bytes of text per token ({density:.2f} in {folder}, from which" in printed


BLOCK = ("val", 4, np.arange(4))  # a block that is written before the error


@pytest.mark.parametrize("function, results, seen", [
    ("encode", [BLOCK, *20 * [KeyboardInterrupt]], KeyboardInterrupt), ("write_json", OSError("No space"), OSError)])
def test_a_preparation_that_ends_early_is_never_used(function, results, seen, text, folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(seen):
        patch.setattr(corpus, function, Mock(side_effect=results))
        patch.setattr(corpus, "BATCH", 20)
        prepared(text, tmp_path)
    assert contents(prepared(text, tmp_path)) == contents(folder)


@pytest.mark.parametrize("total, batch", [(1, 3), (10, 4), (97, 10), (1000, 64)])
def test_every_epoch_is_a_new_permutation(total, batch):
    steps = [indices_of_step(5, step, batch, total) for step in range(3 * total // batch + 1)]
    epochs = np.concatenate(steps)[:3 * total].reshape(3, total)
    assert (np.sort(epochs) == np.arange(total)).all()
    assert total < 90 or len(np.unique([np.arange(total), *epochs], axis=0)) == 4
