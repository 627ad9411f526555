"""Claims about data.py: tokenizer, rows, corpora."""
import functools
import gzip
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
import maelm
import train
from conftest import (HERE, SEVERAL, catches, fails, run_with_wrong_version, sentence,
                      write_corpus, wrong_versions)


OPTIONS = ["--vocab-size", "320", "--seq-len", "24", "--val-share", "0.1"]


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


@catches("data.lower", 'text.replace("\\N{GREEK CAPITAL LETTER SIGMA}", "\\N{GREEK SMALL LETTER SIGMA}")', "text")
def test_every_assigned_character_and_every_document_has_the_ids_of_tokenizers(corpus):
    tokenizer = data.Tokenizer.load(corpus[1])
    assigned = [chr(i) for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) not in ("Cn", "Co", "Cs")]
    texts = ["".join(assigned[i:i + 1000]) for i in range(0, len(assigned), 1000)]
    cased = [letter for letter in assigned if letter.lower() != letter.upper()]
    texts += [" ".join(f"a{letter} B" for letter in cased)]  # at the end of words
    texts += [Path(json.__file__).read_text(), "ΑΣ ΣΑΣ. Σ ὈΔΥΣΣΕΎΣ", "İstanbul ẞ"]
    for text, wanted in zip(texts, tokenizer.model.encode_batch(texts, add_special_tokens=False)):
        assert tokenizer.encode(text).tolist() == wanted.ids
        assert tokenizer.decode(wanted.ids) == "".join(letter.lower() for letter in text)


@SEVERAL
@given(text=st.text(), special=st.booleans())
def test_a_text_comes_back_from_its_tokens(cased, text, special):
    for name in data.SPECIALS:
        text = text.replace(name, "")
    ids = cased.encode(text, special=special)
    assert cased.decode(ids) == text and (ids >= data.NUM_SPECIAL).all()
    assert ids.tolist() == cased.model.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def cased():
    """A tokenizer that tells case."""
    import data  # the right one, even while a wrong version has its place
    return data.Tokenizer.train([sentence(i) for i in range(100)], 300, False)


@catches("data.pack", "stream[count * (n - 1):]", "stream[len(stream):]")
@SEVERAL
@given(parts=st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=6), n=st.integers(2, 9))
def test_packing_keeps_every_token_in_order_however_the_stream_is_cut(parts, n):
    rest, packed = np.empty(0, np.uint16), []
    for part in parts:
        rows, rest = data.pack(np.concatenate([rest, np.array(part, np.uint16)]), n)
        assert rows.shape == (len(rows), n) and (rows[:, 0] == data.CLS).all() and len(rest) < n - 1
        packed += rows[:, 1:].flatten().tolist()
    assert packed + rest.tolist() == [token for part in parts for token in part]


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
@catches("data.prepared_folder", 'if source == "":', "if False:", joined="")
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


# ---- Sources -------------------------------------------------------------------------------------------------------
def test_a_null_text_is_an_empty_document(tmp_path):
    import pyarrow, pyarrow.parquet  # noqa: E401
    records = [{"text": "one"}, {"text": None}, {"text": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for suffix in (".jsonl", ".parquet"):
        assert list(data.documents((suffix, str(tmp_path / f"a{suffix}")))) == ["one", "two"]


def bad_jsonl(path):
    path.write_text('{"text": "fine"}\n{"content": "x", "id": 3}\n')


def bad_json(path):
    path.write_text('{"text": "fine"}\n{"text": \n')


def bad_bytes(path):
    path.write_bytes(b"good text\n\n" * 3 + b"caf\xe9")


def bad_gzip(path):
    path.write_bytes(b"this is no gzip file")


def numbers(path):
    path.write_text('{"text": "words"}\n{"text": 3}\n')


def bad_parquet(path):
    path.write_bytes(b"PAR1 not really")


def utf16(path):
    path.write_bytes("These are words.\n\nMore of them.".encode("utf-16-le"))


def damaged_gzip(path):
    raw = bytearray(gzip.compress(b"some words\n\n" * 100))
    raw[20] ^= 16
    path.write_bytes(raw)


def link_to_nothing(path):
    path.mkdir()
    (path / "a.txt").write_text("words")
    (path / "more").symlink_to(path / "gone")


@pytest.mark.parametrize("name, make, message", [
    ("a.txt", utf16, r"a\.txt: holds NUL bytes, as UTF-16 does; convert"),
    ("a.txt.gz", damaged_gzip, r"a\.txt\.gz: damaged \.gz file"),
    ("a", link_to_nothing, r"a/more is a link to nothing"),
    ("a.jsonl", bad_jsonl, r"a\.jsonl, record 2: no text column `text`; found: content, id"),
    ("a.jsonl", numbers, r"a\.jsonl, record 2: its `text` is 3, no text"),
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


@catches("data.files_in", "if not path.exists():", "if False:")
def test_a_link_to_nothing_is_named(tmp_path):
    link_to_nothing(tmp_path / "a")
    with pytest.raises(data.UserError, match="more is a link to nothing"):
        data.parts(str(tmp_path / "a"))


@catches("data.parts", 'kind == "docs" and colon or ', "", name="docs:x")
@pytest.mark.parametrize("name", ["docs:x", "docs:", "hf:"])
def test_a_source_has_the_name_it_needs_and_no_other(name):
    with pytest.raises(data.UserError, match=f"--data {name}: give docs, which has no choices, or hf:NAME"):
        data.parts(name)


@catches("data.files_in", "followlinks=True", "followlinks=False")
@catches("data.files_in", "if os.path.realpath(here) in seen:", "if False:")
@catches("data.files_in", 'name.startswith(".") or real in seen', "real in seen")
@catches("data.files_in", 'if not name.startswith(".")', "if name")
@catches("data.text_format", "suffix.lower() for", "suffix for")
def test_a_folder_is_read_through_links_once_and_without_hidden_files(tmp_path, monkeypatch):
    folder, other = tmp_path / "texts", tmp_path / "other"
    for name in ("b", "a.TXT", ".hidden.txt", ".ipynb_checkpoints/a.txt", "c.md", "b/d.jsonl"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "." in name:
            path.write_text('{"text": "words"}')
        else:
            path.mkdir()
    other.mkdir()
    (other / "e.txt").write_text("words")
    (folder / "link").symlink_to(other)
    (folder / "b" / "again").symlink_to(folder)
    (folder / "twice.txt").symlink_to(folder / "a.TXT")
    read = [(kind, str(Path(name).relative_to(folder))) for kind, name in data.parts(str(folder))]
    assert read == [(".txt", "a.TXT"), (".jsonl", "b/d.jsonl"), (".txt", "link/e.txt")]
    assert data.what_is_read(str(folder)) == f"{folder}: 3 files, 39 bytes; 1 of other formats are left out"
    monkeypatch.chdir(folder)
    (folder / "docs").mkdir()
    (folder / "docs" / "page.md").touch()  # docs is the documentation nevertheless
    monkeypatch.setattr(data, "docs_files", lambda: [("python", Path("a.TXT"))])
    assert data.what_is_read("docs+link") == "docs+link: 2 files, 22 bytes"


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    write_corpus(tmp_path / "a.txt", 3)
    (tmp_path / "closed").mkdir()

    def refuse(scan, message, *arguments):
        if "closed" in str(arguments[0]):
            raise PermissionError(13, "Permission denied", str(arguments[0]))
        return scan(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", functools.partial(refuse, os.scandir, ""))
        with pytest.raises(data.UserError, match="closed cannot be read"):
            data.parts(str(tmp_path))
    (tmp_path / "closed" / "b.txt").write_text("words")
    monkeypatch.setattr("builtins.open", functools.partial(refuse, open, ""))
    with pytest.raises(data.UserError, match="b.txt: cannot be read"):
        data.content_hash(str(tmp_path))


@catches("data.fingerprint", "if status.st_size > SAMPLED:", "if False:")
def test_a_large_file_that_changes_between_its_samples_is_another(tmp_path):
    path = tmp_path / "a.txt"
    with open(path, "wb") as file:
        file.truncate(100 << 20)
    before = data.content_hash(str(path))
    assert before == data.content_hash(str(path))
    with open(path, "rb+") as file:
        file.seek((1 << 20) + 1000)  # behind the first sample
        file.write(b"x")
    assert data.content_hash(str(path)) != before


def test_a_hub_name_without_network_says_so(tmp_path, monkeypatch):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "train.py", "--data", "hf:no/such-set", "--out", str(tmp_path / "o"),
               "--cache", str(tmp_path / "cache")]
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and not (tmp_path / "o").exists()
    assert re.search("hf:no/such-set: cannot be loaded .* Files of your own and docs need neither",
                     result.stderr.strip().splitlines()[-1])


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
