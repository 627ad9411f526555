"""Claims about tokenizer, documentation, corpora and rows: their files in support/."""
import gzip
import json
import lzma
import os
import re
import shutil
import sys
import unicodedata
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers

import train
from maelm import CLS, MASK, NUM_SPECIAL, PAD, SEP
from support import corpus, documents
from support.cli import UserError
from support.corpus import Rows, rows_of_step
from support.tokenizer import SPECIALS, Tokenizer, byte_letters
from tests.common import contents, fails, little_documents, sentence, write_corpus


def prepared(data, cache, **change):
    """The folder of a little corpus in a folder `cache`."""
    how = dict(vocab_size=320, uncased=True, val_share=0.1) | change
    return corpus.prepared_corpus(corpus.CorpusConfig(str(data), str(cache), **how))


@pytest.fixture(scope="module")
def folder(text):
    """The little corpus, prepared."""
    return prepared(text, text.parent / "cache")


def documents_of(data):
    """All documents of --data."""
    return list(documents.documents(documents.sources(str(data))))


# ---- The tokenizer --------------------------------------------------------------------------------------------------
ODD = ["The cat sees a tree.", "naïve café — ∑ 数学 🙂\t\r\n  x", "\x00\x7f ~", "a" * 500, "İstanbul ẞ", " ", "",
       bytes(range(256)).decode("latin-1"), "ΑΣ ΣΑΣ. Σ ὈΔΥΣΣΕΎΣ"]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def tokenizer(request):
    """A tokenizer of the little language."""
    return Tokenizer.train(map(sentence, range(100)), 320, request.param)


def test_ids_are_specials_then_bytes_then_merges(tokenizer):
    assert (CLS, PAD, SEP, MASK, NUM_SPECIAL) == (0, 1, 2, 3, 4)
    assert [tokenizer.decode([i]) for i in range(4)] == SPECIALS == ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    pieces = [tokenizer.tiktoken.decode_single_token_bytes(i) for i in range(4, len(tokenizer))]
    assert pieces[:256] == [bytes([b]) for b in range(256)]
    for i, piece in enumerate(pieces[256:], 256):  # each joins two tokens that come before it
        assert any({piece[:cut], piece[cut:]} <= set(pieces[:i]) for cut in range(1, len(piece)))


def test_odd_texts_come_back_from_their_tokens(tokenizer):
    for text in (*ODD, "[CLS] [MASK]"):  # special tokens in a text are plain text
        ids = tokenizer.encode(text)
        assert all(NUM_SPECIAL <= i < len(tokenizer) for i in ids)
        letters = map(str.lower, text) if tokenizer.uncased else text
        assert tokenizer.decode(ids) == "".join(letters)


def test_tiktoken_gives_the_ids_of_tokenizers(tokenizer):
    letters = [chr(i) for i in range(sys.maxunicode + 1)]
    letters = [letter for letter in letters if unicodedata.category(letter) not in ("Cn", "Co", "Cs")]
    texts = ["".join(letters[i:i + 1000]) for i in range(0, len(letters), 1000)]
    cased = [letter for letter in letters if letter.lower() != letter.upper()]
    texts += [*ODD, " ".join(f"a{letter} B" for letter in cased)]  # also where a word ends
    expected = tokenizer.model.encode_batch(texts, add_special_tokens=False)
    for text, found in zip(texts, expected):
        assert tokenizer.encode(text).tolist() == found.ids


BYTES = tokenizers.pre_tokenizers.ByteLevel
SPLIT = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" ?\w+|\s|[^\w\s]+"), "isolated")


@pytest.mark.parametrize("layers", [[BYTES(False)], [SPLIT, BYTES(False, use_regex=False)]], ids=["gpt2", "split"])
def test_a_given_bpe_gives_its_ids_after_ours(layers, tmp_path):
    learned = json.loads(Tokenizer.train(little_documents(), 300, uncased=False).model.to_str())["model"]
    vocabulary = {token: i for i, token in enumerate([*reversed(byte_letters()), *list(learned["vocab"])[260:]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(layers)
    theirs.save(str(tmp_path / "t.json"))
    ours = Tokenizer.read(str(tmp_path / "t.json"))
    for example in (*little_documents(5), *ODD):
        assert ours.encode(example).tolist() == [NUM_SPECIAL + i for i in theirs.encode(example).ids]


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0})).save(str(tmp_path / "t.json"))
    for name, message in (("t.json", "not a byte-level BPE"), ("none.json", "cannot be read")):
        with pytest.raises(UserError, match=message):
            Tokenizer.read(str(tmp_path / name))


@pytest.mark.parametrize("old, new", [('"b":', '"no byte":'), ('"b": 102', '"b": 103'), ("[CLS]", "[XYZ]"), ("{", "")])
def test_a_damaged_tokenizer_is_refused_in_one_line(old, new, folder, tmp_path, capfd):
    text = json.dumps(json.loads((folder / "tokenizer.json").read_text()))
    assert old in text
    (tmp_path / "tokenizer.json").write_text(text.replace(old, new))
    with pytest.raises(UserError, match="tokenizer.json: damaged"):
        Tokenizer.load(tmp_path)
    assert capfd.readouterr().err == ""  # Rust prints before it panics


# ---- Documents ------------------------------------------------------------------------------------------------------
def test_every_format_gives_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet
    expected = little_documents(40)
    plain = "\n\n".join(expected).encode()
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in [*expected, None]).encode()
    files = {"a.txt": plain, "a.txt.xz": lzma.compress(plain), "a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines),
             "inside/deep/A.JSONL": lines, "inside/deep/.a.txt": b"hidden", "inside/deep/a.csv": b"of another format"}
    (tmp_path / "inside/deep").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": [*expected, None]}), tmp_path / "a.parquet")
    for name in (*list(files)[:4], "a.parquet", "inside", "inside/*/*.JSONL"):
        assert documents_of(tmp_path / name) == expected, name


def test_plus_joins_sources_unless_it_is_in_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c++").mkdir()
    (tmp_path / "here").mkdir()
    write_corpus(tmp_path / "c++" / "a.txt", 3)
    assert documents_of("c++") == little_documents(3)
    with pytest.raises(UserError, match="the folder here would be read in its place"):  # of the Hub
        documents_of("hf:here")
    write_corpus(tmp_path / "b.txt", 2)
    assert documents_of("b.txt+b.txt") == 2 * little_documents(2)
    assert [source.loader for source in documents.sources("docs+hf:a/b:c+b.txt")] == ["docs", "hub", "text"]


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'{"content": "x", "id": 3}', "a.jsonl: its records need a field `text`; --column can be content, id"),
    ("a.jsonl", b'{"text": 3}', "a.jsonl: field `text` of its records holds 3, not text"),
    ("a.jsonl", b'{"text": "fine"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
    ("a.txt", b"good text\n\ncaf\xe9", "a.txt, line 3: not UTF-8; convert"),
    ("a.txt.gz", gzip.compress(b"some words" * 99, mtime=0)[:-20], "a.txt.gz: cannot be read .Compressed file ended"),
    ("a.parquet", b"PAR1 not really", "a.parquet: cannot be read .Parquet magic bytes not found"),
    ("a.txt", b"", "its train split has 0 tokens, too few for a row of seq_len=64"),
    ("a.csv", b"a,b", "a.csv' is not docs, hf:NAME, or a file or folder with .txt, .jsonl"),
])
def test_unreadable_input_gets_one_line(name, content, message, tmp_path, capsys):
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
def g(): "short"
'''


def test_documentation_is_read_without_importing_and_kept(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def")
    found = documents.docstrings(tmp_path / "module.py")
    assert found == ["A module that cannot be imported.", "Returns nothing of interest.\n\nNot even here.",
                     "f(x) -> y, given by a call."]
    assert documents.docstrings(tmp_path / "broken.py") == []
    monkeypatch.setattr(documents, "docs_files", lambda: [("mine", tmp_path / "module.py")])
    for cache in ("new", "module.py"):  # nothing can be written below a file
        assert documents.read_docs(str(tmp_path / cache)) == [("mine", text) for text in found]
    assert len([*tmp_path.glob("new/docs-*.json")]) == 1


def test_docs_leave_out_near_duplicates_of_validation(tmp_path, monkeypatch):
    texts = [" ".join(20 * [f"word{i}"]) for i in range(400)]
    copies = [f"Copied: {text.upper()} and more" for text in texts if documents.in_validation(text, 0.1)]
    monkeypatch.setattr(documents, "read_docs", lambda cache: [("python", text) for text in texts + copies])
    monkeypatch.setattr(documents, "docs_files", lambda: [])
    assert len([text for text in copies if not documents.in_validation(text, 0.1)]) > 20
    folder = prepared("docs", tmp_path)
    whole = Tokenizer.load(folder).decode(np.fromfile(folder / "train.bin", np.uint16))
    assert whole == "".join(f"{text}[SEP]" for text in texts if not documents.in_validation(text, 0.1))


# ---- A prepared corpus, and the rows of a step ----------------------------------------------------------------------
def test_rows_of_any_length_are_cls_and_documents_joined_by_sep(text, folder):
    expected = {"train": "", "val": ""}
    for document in documents_of(text):
        split = "val" if documents.in_validation(document, 0.1) else "train"
        expected[split] += f"{document.lower()}[SEP]"
    assert expected["val"].count("[SEP]") > 20
    for split, whole in expected.items():
        tokens = np.fromfile(folder / f"{split}.bin", np.uint16)
        assert Tokenizer.load(folder).decode(tokens) == whole
        for n in (2, 24, 61):
            rows = Rows(folder, split, n)
            rows = rows[np.arange(len(rows))]
            assert (rows[:, 0] == CLS).all() and len(rows) == len(tokens) // (n - 1)
            assert np.array_equal(rows[:, 1:].flatten(), tokens[:len(rows) * (n - 1)])


def test_a_corpus_is_found_again_until_its_text_changes(tmp_path, monkeypatch):
    text, records = write_corpus(tmp_path / "text.txt"), tmp_path / "a.jsonl"
    first = prepared(text, tmp_path)
    records.write_text("".join(json.dumps({"id": 1, "body": document}) + "\n" for document in little_documents()))
    assert contents(prepared(records, tmp_path, column="body"))["train.bin"] == contents(first)["train.bin"]
    others = [prepared(text, tmp_path, uncased=False), prepared(text, tmp_path, tokenizer=Tokenizer.load(first))]
    for more in ("", "\n\nOne more document."):
        text.write_text(text.read_text() + more)
        os.utime(text, ns=(0, 0))
        others.append(prepared(text, tmp_path))
    assert len({first, *others}) == 5
    monkeypatch.setattr(corpus, "FileLock", None)  # what is there is only read
    assert prepared(text, tmp_path) == others[-1]


BLOCK = [("val", np.arange(4))]  # is written before the error


@pytest.mark.parametrize("function, results, seen", [
    ("encode_block", [BLOCK, *20 * [KeyboardInterrupt]], KeyboardInterrupt),
    ("encode_block", [BLOCK, *20 * [MemoryError]], UserError),
    ("write_json", KeyboardInterrupt, KeyboardInterrupt), ("write_json", OSError("No space left"), UserError)])
def test_a_preparation_that_ends_early_is_never_used(function, results, seen, text, folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(seen):
        patch.setattr(corpus, function, Mock(side_effect=results))
        prepared(text, tmp_path)
    assert contents(prepared(text, tmp_path)) == contents(folder)


@pytest.mark.parametrize("name, content", [("val.bin", b"cut"), ("train.bin", None), ("tokenizer.json", b"{}"),
                                           ("meta.json", b'{"train": [9, 24]}'), ("meta.json", b"{")])
def test_a_damaged_corpus_is_refused(name, content, text, folder, tmp_path, capsys):
    there = shutil.copytree(folder, tmp_path / folder.name)
    (there / name).unlink()
    if content is not None:
        (there / name).write_bytes(content)
    flags = f"--data {text} --cache {tmp_path} --out {tmp_path / 'out'} --vocab-size 320 --val-share 0.1".split()
    for more in ([], ["--prepare"]):
        assert f"{there}: this prepared corpus is damaged" in fails(lambda: train.main([*flags, *more]), capsys)


@pytest.mark.parametrize("token", [PAD, 65_535])
def test_ids_that_no_text_has_are_refused(token, folder, tmp_path):
    there = shutil.copytree(folder, tmp_path / folder.name)
    np.memmap(there / "train.bin", np.uint16, "r+")[30] = token
    with pytest.raises(UserError, match="train.bin: damaged; delete its folder"):
        Rows(there, "train", 24)[np.arange(9)]


@pytest.mark.parametrize("total, batch", [(1, 3), (10, 4), (97, 10), (1000, 64)])
def test_every_epoch_is_a_new_permutation(total, batch):
    steps = [rows_of_step(5, step, batch, total) for step in range(3 * total // batch + 1)]
    epochs = np.concatenate(steps)[:3 * total].reshape(3, total)
    assert (np.sort(epochs) == np.arange(total)).all()
    if total > 90:
        assert len(np.unique([np.arange(total), *epochs], axis=0)) == 4
        assert (steps[7] == rows_of_step(5, 7, batch, total)).all()
        assert (steps[7] != rows_of_step(6, 7, batch, total)).any()
