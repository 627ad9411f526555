"""Claims about the files and the documentation that --data reads, tokenizers, corpora, and the sequences of a step."""
import bz2
import gzip
import hashlib
import json
import lzma
import os
import re
import socket
import sys
from unittest.mock import Mock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import train
from maelm import CLS, MASK, NUM_SPECIAL, PAD, SEP
from support import corpus, docs, text as text_module
from support.corpus import Rows, indices_of_step
from support.program import UserError, json_lines, read_json
from support.text import Text
from support.tokenizer import SPECIALS, Tokenizer
from tests.common import contents, fails, little_documents, sentence, write_corpus

ODD = ["The cat sees a tree.", "naïve café — ∑ 数学 🙂\t\r\n  x", "\x00\x7f ~", "a" * 500, "İstanbul ẞ", " ", "",
       bytes(range(256)).decode("latin-1"), "ΑΣ ΣΑΣ. Σ ὈΔΥΣΣΕΎΣ"]


def prepared(data, cache, vocab_size=320, tokenizer=None, **change):
    """Prepare a corpus in the folder `cache`; returns it."""
    how = dict(data=str(data), cache=str(cache), val_share=0.1)
    return corpus.open_corpus(Text(**how | change), vocab_size, 4, tokenizer)


def documents_of(data, **settings):
    """All documents of --data."""
    return list(text_module.documents(Text(data=str(data), **settings)))


# ---- Documents ------------------------------------------------------------------------------------------------------
def test_every_format_gives_the_same_documents_and_asks_no_server(tmp_path, monkeypatch):
    expected = little_documents(40)
    plain = "\n \n".join(expected).encode()
    records = [{"id": 1, "text": text} for text in expected] + [{"text": None, "other": {"a": []}}, {"id": "x"}]
    records[-1]["text"] = " "
    lines = b"\n".join(json.dumps(record).encode() + b"\n" for record in records)  # with blank lines
    files = {"a.txt": b"\xef\xbb\xbf" + plain, "a.txt.xz": lzma.compress(plain), "a.jsonl": lines,
             "A.Jsonl.GZ": gzip.compress(lines), "a.json.bz2": bz2.compress(lines),
             "a[1]/Book [vol 2].TXT": plain, "a[1]/a.csv": b"of another format"}
    (tmp_path / "a[1]").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.table({"text": [*expected, None], "n": range(41)}), tmp_path / "a.parquet")
    (tmp_path / "a+b").symlink_to(tmp_path / "a[1]")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        patch.setattr(socket, "socket", None)
        for name in (*list(files)[:6], "a.parquet", "a[1]", "a+b"):
            assert documents_of(tmp_path / name) == expected, name
    assert documents_of("a.txt+a.jsonl") == 2 * expected
    with pytest.raises(UserError, match="the folder a.1. would be read instead"):  # instead of the Hub
        documents_of("hf:a[1]")


def test_text_without_blank_lines_is_split_by_size(tmp_path):
    lines = [f"{sentence(i)}\n" for i in range(2000)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    found = documents_of(tmp_path / "lines.txt")
    assert "\n".join(found) == "".join(lines).strip()
    assert {10_000 <= len(text) + 1 < 10_100 for text in found[:-1]} == {True}


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'{"content": "x", "id": 3}', "a.jsonl: --column can be content, id, not text"),
    ("a.txt", b"good text\n\ncaf\xe9", "a.txt, after record 1: cannot be read .*'utf-8' codec"),
    ("a.jsonl", b'{"text": 3, "id": 3}', "a.jsonl: needs text in its field text, not 3"),
    ("a.csv", b"a,text\n1,2\nx,y,z", "a.csv, after record 1: cannot be read .a row has more cells than the header"),
    ("a.csv", b'text\n"a', "a.csv, after record 0: cannot be read .unexpected end"),
    ("a.csv", b"text;text\n1;2", "a.csv, after record 0: cannot be read .two columns have one name"),
    ("a.txt", b"few", "its train split has . tokens, too few for a sequence of seq_len=64; .* --val-share"),
    ("a.txt", b" ", "contains no text"),
    ("a.jsonl", b'[{"text": "a", "id": 1}]', "a.jsonl, after record 0: .* is not a JSON object"),
    ("b[2].txt", None, "b.2..txt: has no file ending in .txt")])
def test_unreadable_input_gets_a_one_line_error(name, content, message, tmp_path, capsys):
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
add_docstr(f, text)
def g(): "only three words"
'''
FOUND = ["A module that cannot be imported.", "Returns nothing of interest.\n\nNot even here.",
         "f(x) -> y, given by a call."]


def test_docs_are_read_without_importing_and_kept_by_version(tmp_path, monkeypatch):
    files = {"lib/a.py": '"Text that two of them have."', "lib/b.py": "def", "one/m.py": MODULE,
             "lib/pydoc_data/topics.py": 'topics = {"if": "Help about if and else."}',
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
    monkeypatch.setattr(docs, "PACKAGES", ("one", "two", "absent"))
    monkeypatch.setattr(docs.sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    expected = [("python.a", "Text that two of them have."), ("python.pydoc_data", "Help about if and else."),
                *[("one", text) for text in FOUND], ("two", "Text of only this one.")]
    read = docs.read_docs.__wrapped__  # without the memory of this process
    for cache in ("new", "lib/a.py"):  # the second is a file, which cannot be a cache
        assert read(str(tmp_path / cache)) == expected
    files["one/m.py"] = '"One has a new text."'
    write()
    assert read(str(tmp_path / "new")) == expected  # kept
    files["one-1.0.dist-info/METADATA"] = "Name: one\nVersion: 1.1"
    write()
    assert read(str(tmp_path / "new")) == [*expected[:2], ("one", "One has a new text."), expected[-1]]


def test_docs_leave_out_the_texts_that_are_scored_and_near_duplicates(tmp_path, monkeypatch):
    """The second tenth after the validation split by hash is the dev split of tasks, here of 150 texts at most."""
    def is_unseen(text):
        return docs.in_validation(text, 0.1) or (docs.in_validation(text, 0.3) and not docs.in_validation(text, 0.2))

    texts = [" ".join(20 * [f"word{i}"]) for i in range(400)]
    held_out = [" ".join(text.upper().split()[:13]) for text in texts if is_unseen(text)]
    copies = [f"{7 * 'Copied '}{text}{more}" for text in held_out for more in ("", " and more")]
    short = [f"short {i}" for i in range(200)]  # of fewer than 13 words, which may repeat each other
    short += [text.upper() for text in short if is_unseen(text)]
    for module in (docs, text_module):
        monkeypatch.setattr(module, "read_docs", lambda cache: [("python", text) for text in texts + copies + short])
    terms = [text.replace("word", "term") for text in texts]
    mine = [*terms, *[f"again: {text}" for text in terms]]  # other sources may repeat themselves
    (tmp_path / "mine.jsonl").write_text(json_lines([{"text": text} for text in mine]))
    for data, more in (("docs", []), (f"docs+{tmp_path / 'mine.jsonl'}", mine)):
        found = prepared(data, tmp_path)
        whole = found.tokenizer.decode(np.fromfile(found.folder / "train.bin", np.uint16))
        expected = [text.lower() for text in texts + short if not is_unseen(text)]
        expected += [text.lower() for text in more if not docs.in_validation(text, 0.1)]
        assert whole == "".join(f"{text}[SEP]" for text in expected)
        assert found.tokenizer.to_json() == Tokenizer.train(expected, 320, True).to_json()


# ---- Tokenizers ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def tokenizer(request):
    """A tokenizer trained on the little language."""
    return Tokenizer.train(map(sentence, range(100)), 320, request.param)


def test_ids_are_specials_then_bytes_then_merges(tokenizer):
    assert [tokenizer.decode([i]) for i in (CLS, PAD, SEP, MASK)] == SPECIALS == ["[CLS]", "[PAD]", "[SEP]", "[MASK]"]
    pieces = [tokenizer.tiktoken.decode_single_token_bytes(i) for i in range(NUM_SPECIAL, len(tokenizer))]
    assert pieces[:256] == [bytes([b]) for b in range(256)] and len(tokenizer) == 320
    for i, piece in enumerate(pieces[256:], 256):  # each joins two earlier tokens
        assert any({piece[:cut], piece[cut:]} <= set(pieces[:i]) for cut in range(1, len(piece)))


def test_odd_texts_come_back_from_their_tokens(tokenizer):
    for text in (*ODD, "[CLS] [MASK]"):  # special tokens in a text are plain text
        ids = tokenizer.encode(text)
        assert all(NUM_SPECIAL <= i < len(tokenizer) for i in ids)
        letters = map(str.lower, text) if tokenizer.uncased else text
        assert tokenizer.decode([*ids, len(tokenizer)]) == "".join(letters)  # without the unused id


def test_a_word_is_one_piece_in_every_script():
    for text in ("हिन्दी में लिखा हुआ वाक्य", "שָׁלוֹם עוֹלָם", "தமிழ் மொழி", "re\u0301sume\u0301 a\u0300 cote\u0301",
                 "สวัสดี ครับ", "مَرْحَبًا بِك"):
        tokenizer = Tokenizer.train(50 * [text], 1000, True)  # whole pieces become tokens
        assert len(tokenizer.encode(text)) == len(text.split()), text


def test_tiktoken_gives_the_ids_of_tokenizers(tokenizer):
    letters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]  # all but surrogates
    texts = ["".join(letters[i:i + 1000]) for i in range(0, len(letters), 1000)]
    cased = [letter for letter in letters if letter.lower() != letter.upper()]
    texts += [*ODD, " ".join(f"a{letter} B" for letter in cased)]  # each also at the end of a word
    expected = tokenizer.model.encode_batch(texts, add_special_tokens=False)
    for text, found in zip(texts, expected):
        assert tokenizer.encode(text).tolist() == found.ids


# ---- A prepared corpus, and the sequences of a step -----------------------------------------------------------------
@pytest.mark.parametrize("column, share, size", [
    ("body", 0.3, 65_536), ("body", 0.3, 65_537), ("body", 0.6, 320), ("title", 0.6, 320)])
def test_twenty_texts_are_split_by_hash_and_cut_into_sequences(column, share, size, tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "__len__", lambda tokenizer: size)  # ids that never occur
    records = [{"title": sentence(i), "body": text} for i, text in enumerate(little_documents(20))]
    (tmp_path / "a.jsonl").write_text(json_lines([*records, {"title": "", "body": None}]))
    folder, tokenizer, *_ = prepared(tmp_path / "a.jsonl", tmp_path, column=column, val_share=share)
    parts = {"train": [], "val": []}
    for text in (record[column] for record in records):
        fraction = int(hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), 16) / 16 ** 8
        parts["val" if fraction < share else "train"].append(text)
    meta = read_json(folder / "meta.json")
    assert meta["documents"] == {split: len(texts) for split, texts in parts.items()}
    for split, texts in parts.items():
        tokens = np.fromfile(folder / f"{split}.bin", np.uint32 if size == 65_537 else np.uint16)
        assert tokenizer.decode(tokens) == "".join(f"{text.lower()}[SEP]" for text in texts)
        assert meta["tokens"][split] == len(tokens)
        for n in (2, 24, 41):
            rows = Rows(folder, split, n)
            rows = rows[np.arange(len(rows))]
            assert (rows[:, 0] == CLS).all() and len(rows) == len(tokens) // (n - 1)
            assert np.array_equal(rows[:, 1:].flatten(), tokens[:len(rows) * (n - 1)])


def test_a_corpus_is_used_again_until_its_content_changes(tmp_path, monkeypatch):
    def folder(data, **change):
        return prepared(data, tmp_path, **change).folder

    text = write_corpus(tmp_path / "text.txt")
    first = folder(text)
    assert first.name.startswith("text.txt-320-") and folder("text.txt") == first
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "lock_folder", None)  # an existing corpus is only read
        os.utime(text, (1, 1))
        assert folder(text) == first
    others = dict(uncased=False), dict(vocab_size=300), dict(val_share=0.2), dict(column="body")
    found = {folder(text, **other) for other in others}
    found.add(folder(text, tokenizer=Tokenizer.train(["other"], 300, True)))
    write_corpus(text, 399)
    assert len(found | {first, folder(text)}) == 7
    for module in (docs, text_module):
        monkeypatch.setattr(module, "read_docs", lambda cache: [("python", each) for each in little_documents()])
    monkeypatch.setattr(text_module, "versions", lambda: ["3.11"])
    before = folder("docs")
    assert before == folder("docs")
    monkeypatch.setattr(text_module, "versions", lambda: ["3.12"])
    assert folder(f"docs+{text}").name.startswith("docs+text.txt-320")
    assert folder("docs") != before and before.is_dir()


def test_the_tokenizers_sample_is_spread_evenly():
    texts = [f"{number:05}" * 10 for number in range(1000)]
    found = [int(piece[:5]) for piece in corpus.sample(iter(texts), 5000)]
    assert 50 <= len(found) <= 100 == len(corpus.sample(iter(texts[:100]), 5000))
    assert set(np.diff(found)) == {found[1]} and found[-1] > 980


def test_what_was_read_and_what_was_not_is_said_in_a_line_per_source(tmp_path, capsys):
    lines = json_lines({"text": text} for text in [*little_documents(100), "", None, "  "])
    lines += json_lines([{"other": "a field that the first record lacks"}, {"text": "last", "n": 3}])
    files = {"a/a.jsonl": lines, "a/b/b.csv": "id;text\n1;  One, two\n2;\n", "a/c.py": "x = 3", "a/d.md": "#",
             "a/e.md": "#", "a/.hidden/f.txt": "hidden", "b.tsv": "text\ttext2\n\"One\ttwo\n"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "a/again").symlink_to(tmp_path / "a")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/c.txt").write_text("    an indented line\nand more\n\n\n")
    (tmp_path / "a/link").symlink_to(tmp_path / "linked")
    flags = "--data a+b.tsv --cache cache --vocab-size 320 --seq-len 24 --val-share 0.1 --prepare".split()
    train.main(flags)
    _, *remarks = capsys.readouterr().out.splitlines()
    folder, = tmp_path.glob("cache/a+b*")
    sizes = [(folder / f"{split}.bin").stat().st_size // 2 for split in ("train", "val")]
    documents = documents_of("a+b.tsv")
    assert documents[100:] == ["last", "  One, two", "    an indented line\nand more", '"One']
    density = sum(len(text.encode()) for text in documents) / sum(sizes)
    count = read_json(folder / "meta.json")["documents"]
    assert sum(count.values()) == 104
    assert remarks == [
        f"{folder.relative_to(tmp_path)}:",
        "  a: 108 texts, of which 5 are empty or missing; files read: 3; other files: 2 .md, 1 .py",
        "  b.tsv: 1 texts, of which 0 are empty or missing; files read: 1; other files: none",
        f"  {sizes[0]:,} tokens for training, {sizes[1]:,} for validation, in lower case (--no-uncased keeps its case)"
        f"; documents: {count['train']} train, {count['val']} val; {density:.2f} bytes of text per token"]


def test_a_preparation_that_ends_early_is_never_used(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("support.corpus.np.append", Mock(side_effect=[np.zeros(3, np.uint32)] * 5 + [KeyboardInterrupt]))
        prepared(text, tmp_path)
    found, expected = [contents(prepared(text, cache).folder) for cache in (tmp_path, tmp_path / "other")]
    assert {name: found[name] for name in ("train.bin", "val.bin")} == {
        name: expected[name] for name in ("train.bin", "val.bin")}


@pytest.mark.parametrize("total, batch", [(1, 3), (10, 4), (97, 10), (1000, 64)])
def test_every_epoch_is_a_new_permutation(total, batch):
    steps = [indices_of_step(5, step, batch, total) for step in range(3 * total // batch + 1)]
    epochs = np.concatenate(steps)[:3 * total].reshape(3, total)
    assert (np.sort(epochs) == np.arange(total)).all()
    assert total < 90 or len(np.unique([np.arange(total), *epochs], axis=0)) == 4
