"""Claims about files.py: exit codes, JSON and lines with checksums, folders and their locks."""
import contextlib
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import files
from conftest import HERE, SEVERAL, catches, fails, flipped, run_with_wrong_version, wrong_versions

VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                      max_leaves=6)
RECORDS = st.dictionaries(st.text(max_size=6), VALUES, max_size=5)


# ---- JSON -----------------------------------------------------------------------------------------------------------
@catches("files.read_json", "value = unseal(value, \"checksum\")", "value.pop(\"checksum\", 0)")
@catches("files.unseal", "if checksum == zlib.crc32(json.dumps(record).encode()):", "if name in sealed:")
@catches("files.seal", "json.dumps(record)", "json.dumps(list(record))")
@SEVERAL
@given(record=RECORDS, bit=st.integers(0, 10 ** 6))
def test_json_comes_back_and_a_flipped_bit_is_noticed_or_harmless(tmp_path, record, bit):
    path = tmp_path / "a.json"
    files.write_json(path, record)
    assert files.read_json(path) == record and list(files.read_json(path)) == list(record)
    assert list(json.loads(path.read_text())) == [*record, "checksum"]
    raw = path.read_bytes()
    for damaged in (flipped(raw, bit), raw[:bit % len(raw)]):
        path.write_bytes(damaged)
        try:
            assert files.read_json(path) == record
        except files.UserError as error:
            assert str(path) in str(error) and "restore it" in str(error)


def test_json_without_a_checksum_is_read_and_a_foreign_form_gets_none(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert files.read_json(path) == {"a": 1}
    files.write_json(path, [1, 2])
    assert files.read_json(path, kind=list) == [1, 2]
    files.write_json(path, {"id": "answer"}, checked=False)
    assert json.loads(path.read_text()) == {"id": "answer"}


@catches("files.read_json", "(ValueError, RecursionError)", "ValueError", content="[" * 200_000, message="a.json: damaged")
@pytest.mark.parametrize("content, message", [
    (None, "a.json: no such file"), ("", "a.json: damaged, cut off, or no JSON"), ("[" * 200_000, "a.json: damaged"),
    ("[1]", "a.json: holds no dict but a list"), ("null", "a.json: holds no dict"), (b"\xff\xfe{}", "a.json: damaged"),
    ("{}", "a.json: its field 'steps' is missing"), ('{"steps": "7"}', "a.json: its field 'steps' is missing or of another"),
    ('{"steps": 7, "checksum": 7}', 'a.json: damaged.*its checksum is another.*delete its field "checksum"'),
    ('{"steps": ' + "9" * 5000 + "}", "a.json: damaged"),
])
def test_bad_json_is_named_with_what_to_do(content, message, tmp_path):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(files.UserError, match=message):
        files.read_json(path, {"steps": int})


# ---- Lines of JSON --------------------------------------------------------------------------------------------------
@catches("files.read_lines", "record = unseal(record, \"crc\")", "record.pop(\"crc\", 0)")
@catches("files.read_lines", "if not cut_off(tail):", "if False:")
@catches("files.cut_off", 'errors="replace"', 'errors="strict"')
@SEVERAL
@given(records=st.lists(RECORDS, min_size=1, max_size=4), bit=st.integers(0, 10 ** 6), last=st.integers(0, 7))
def test_lines_come_back_and_a_flipped_bit_is_noticed_or_harmless(tmp_path, records, bit, last):
    path = tmp_path / "a.jsonl"
    path.unlink(missing_ok=True)
    assert files.read_lines(path) == []
    for record in records:
        files.append_line(path, record)
    assert files.read_lines(path) == records
    raw = path.read_bytes()
    for damaged in (flipped(raw, bit), flipped(raw, 8 * len(raw) - 8 + last)):
        path.write_bytes(damaged)
        try:
            assert files.read_lines(path) == records
        except files.UserError as error:
            assert f"{path}, line " in str(error) and "delete this line" in str(error)


@catches("files.append_line", "file.truncate(file.tell() - len(tail))", "pass")
@catches("files.append_line", 'line = b"\\n" + line', "pass")
@SEVERAL
@given(records=st.lists(RECORDS, min_size=1, max_size=3), cut=st.integers(0, 10 ** 6))
def test_a_line_that_a_crash_cut_off_is_left_out_and_hurts_no_other(tmp_path, records, cut):
    path = tmp_path / "a.jsonl"
    path.unlink(missing_ok=True)
    for record in records:
        files.append_line(path, record)
    raw = path.read_bytes()
    for left in (raw[:cut % len(raw)], raw[:-1]):
        path.write_bytes(left)
        whole = records[:left.count(b"\n") + (raw[len(left):len(left) + 1] == b"\n")]  # only its end is missing: it counts
        assert files.read_lines(path) == whole
        files.append_line(path, {"next": 1})
        assert files.read_lines(path) == [*whole, {"next": 1}]


def test_a_damaged_line_is_named_and_lines_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert files.read_lines(path) == [{"a": 1}, {"a": 2}]
    for line in ('{"a": ', "[1]", '{"a": 1, "crc": 5}', "[" * 200_000):
        path.write_text('{"a": 1}\n' + line + '\n{"a": 2}\n')
        with pytest.raises(files.UserError, match="a.jsonl, line 2: .*delete this line"):
            files.read_lines(path)


def start(code, *arguments):
    """A process that runs this code, with `files` as this test has it."""
    first = f"import sys, time\nsys.path.insert(0, {str(Path(files.__file__).parent)!r})\nimport {files.__name__} as files\n"
    return subprocess.Popen([sys.executable, "-c", first + code, *map(str, arguments)], cwd=HERE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": ""})


FLIPPED = flipped(gzip.compress(b"some words\n\n" * 100, mtime=0), 82)  # a block of no known type


# ---- Records --------------------------------------------------------------------------------------------------------
@catches("files.read_tsv", "len(row) >= len(names)", "row")
@catches("files.read_tsv", "header or next(rows, ())", "next(rows, ())")
@catches("files.read_jsonl", "if line.isspace():", "if False:")
def test_records_are_the_same_from_every_format(tmp_path):
    import pyarrow, pyarrow.parquet  # noqa: E401
    records = [{"text": "it said one, two", "label": "a"}, {"text": "naïve 数", "label": "b"}]
    (tmp_path / "a.csv").write_text('text,label\n"it said one, two",a\nnaïve 数,b\n', encoding="utf-8")
    (tmp_path / "a.tsv").write_text("text\tlabel\nit said one, two\ta\ncut off\nnaïve 数\tb\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    for suffix, read in files.RECORDS.items():
        assert list(read(tmp_path / f"a{suffix}")) == records, suffix
    first, *rest = files.read_tsv(tmp_path / "a.tsv", header=("text", "label"))
    assert first == {"text": "text", "label": "label"} and rest == records


@pytest.mark.parametrize("name, text, message", [
    ("a.jsonl", '{"a": 1}\n[1, 2]\n', r"a\.jsonl, line 2: not an object with named fields, but \[1, 2\]"),
    ("a.jsonl", '{"a": 1}\n\n{"a": \n', r"a\.jsonl, line 3: not JSON"),
    ("a.csv", "text,label\na,b\n" + "x" * 200_000 + ",c\n", r"a\.csv, line 3: not CSV: field larger"),
    ("a.parquet", "PAR1", r"a\.parquet: not a Parquet file"),
])
def test_a_bad_record_is_named_with_its_line(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(files.UserError, match=message):
        list(files.RECORDS[path.suffix](path))


@catches("files.lines", 'if "\\0" in line:', "if False:", name="a.txt", content="words".encode("utf-16-le"), message="NUL bytes")
@catches("files.lines", "path.suffix.lower()", "path.suffix", name="A.TXT.GZ", content=FLIPPED, message="damaged .GZ")
@pytest.mark.parametrize("name, content, message", [
    ("a.txt", "words".encode("utf-16-le"), r"a\.txt: holds NUL bytes, as UTF-16 does; convert the file to UTF-8"),
    ("a.txt.gz", FLIPPED, r"a\.txt\.gz: damaged \.gz file"), ("A.TXT.GZ", FLIPPED, r"A\.TXT\.GZ: damaged \.GZ file"),
    ("a.txt.xz", lzma.compress(b"words")[:-9], r"a\.txt\.xz: damaged \.xz file"),
    ("gone.txt", None, r"gone\.txt: cannot be read \(No such file"),
])
def test_text_that_is_none_is_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(files.UserError, match=message):
        list(files.lines(tmp_path / name))


# ---- Folders --------------------------------------------------------------------------------------------------------
@catches("files.kind_of", '(folder / "finetune.json").is_file()', "False")
def test_what_was_fine_tuned_from_an_export_is_no_export(tmp_path):
    """Its config.json is the export's, as transformers saves it."""
    (tmp_path / "finetune.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "mpnet", "maelm": {}}')
    assert files.kind_of(tmp_path) == "fine-tuning"


@pytest.mark.parametrize("name, content, kind", [
    ("config.json", '{"model": {}, "train": {}}', "run"), ("step_0000010.pt", "", "run"), ("meta.json", "{}", "corpus"),
    ("progress.json", "{}", "corpus"), ("config.json", '{"task": "sst2", "train": {}}', "fine-tuning"),
    ("finetune.json", "{}", "fine-tuning"), ("sweep.jsonl", "", "fine-tuning"), ("encoder.pt", "", "fine-tuning"),
    ("rank.json", "{}", "ranks"), ("notes.txt", "", None), ("config.json", '{"hidden_size": 4}', None)])
def test_a_folder_is_told_by_its_files_and_no_program_takes_that_of_another(name, content, kind, tmp_path):
    (tmp_path / name).write_text(content)
    assert files.kind_of(tmp_path) == kind
    before = sorted(tmp_path.iterdir())
    for mine, program in files.MAKERS.items():
        if kind in (None, mine):
            with files.claim_folder(tmp_path, mine) as folder:
                assert folder == tmp_path
        else:
            with pytest.raises(files.UserError, match=f"was made by {files.MAKERS[kind]}, and {program} would overwrite"):
                with files.claim_folder(tmp_path, mine):
                    pass
    assert set(before) == set(tmp_path.iterdir()) - {tmp_path / ".lock"}


def test_a_claimed_folder_is_made_and_goes_if_it_stays_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(KeyError), files.claim_folder(folder, "run"):
        assert folder.is_dir()
        raise KeyError
    assert not folder.exists()
    with files.claim_folder(folder, "run"):
        (folder / "a").touch()
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["a"]
    (tmp_path / "file").touch()
    for bad, message in (("file", "a file, not a folder"), ("file/deeper", "cannot write")):
        with pytest.raises(files.UserError, match=message), files.claim_folder(tmp_path / bad, "run"):
            pass


HOLD = """
import pathlib
with files.claim_folder(pathlib.Path(sys.argv[1]), "run"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
    pathlib.Path(sys.argv[1], "result").write_text("done")
"""


@contextlib.contextmanager
def hold(folder, seconds, code=HOLD):
    """A process that has claimed the folder for so many seconds; killed at the end."""
    with start(code, folder, seconds) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@catches("files.claim_folder", "lock = take(folder, wait)", "lock = FileLock(folder / '.lock')")
def test_the_second_in_a_folder_is_told_who_has_it_and_a_killed_one_has_nothing(tmp_path):
    with hold(tmp_path, 1000) as process:
        with pytest.raises(files.UserError) as error, files.claim_folder(tmp_path, "run"):
            pass
        process.kill()
        process.wait()
    assert f"{tmp_path}: process {process.pid} on " in str(error.value) and "wait for it" in str(error.value)
    with files.claim_folder(tmp_path, "run"):
        pass


@catches("files.take", "if not wait:", "if True:")
def test_who_waits_says_so_and_finds_the_work_done(tmp_path, capsys):
    with hold(tmp_path, 1.3), files.claim_folder(tmp_path, "run", wait=True):
        assert (tmp_path / "result").read_text() == "done"
    said = capsys.readouterr().err
    assert said.startswith(f"waiting for {tmp_path}, where process ") and said.count("\n") == 1


def test_who_waits_for_a_folder_that_is_removed_makes_it_again(tmp_path):
    folder, code = tmp_path / "a", HOLD.replace("    pathlib", "    0 and pathlib")
    with hold(folder, 1, code) as process, files.claim_folder(folder, "run", wait=True):
        assert process.wait() == 0 and folder.is_dir()
        (folder / "mine").touch()
    assert (folder / "mine").exists()


# ---- Command lines --------------------------------------------------------------------------------------------------
@catches("files.Parser.__init__", 'self.register("type", Path, path_of)', "pass")
def test_an_empty_name_of_a_folder_is_refused(capsys):
    parser = files.Parser(prog="p.py")
    parser.add_argument("--out", type=Path)
    assert "argument --out: the name is empty" in fails(lambda: parser.parse_args(["--out", ""]), capsys)
    assert parser.parse_args(["--out", "."]).out == Path(".")


def command(body):
    """A command of ours with this body, as a process."""
    process = start(f"with files.clear_errors('p.py'):\n print('ready', flush=True)\n {body}")
    process.stdout.readline()
    return process


@catches("files.clear_errors", "(signal.SIGINT, signal.SIGTERM)", "()", number=signal.SIGTERM, code=143)
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_one_line_and_its_code(number, code):
    process = command("time.sleep(1000)")
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == "p.py: interrupted; the same command continues\n"
    assert process.returncode == code


@catches("files.clear_errors", "except BrokenPipeError:", "except ZeroDivisionError:", flush=True)
@catches("files.clear_errors", "        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())\n", "", flush=False)
@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_gone_ends_a_command_quietly(flush):
    process = command(f"time.sleep(0.5); print('more', flush={flush})")
    process.stdout.close()
    assert process.wait(60) == 141 and process.stderr.read() == ""


def test_of_several_processes_the_first_one_speaks(monkeypatch, capsys):
    def bad():
        with files.clear_errors("p.py"):
            raise files.UserError("two\nlines")

    monkeypatch.setattr(time, "sleep", lambda seconds: files.interrupt(signal.SIGTERM, None))  # torchrun ends the others
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as exit:
        bad()
    assert exit.value.code == 2 and capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert fails(bad, capsys) == "p.py: two lines\n"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert fails(bad, capsys) == "p.py: two lines\n"


@catches("files.remembered", "with suppress(UserError):", "if path.is_file():")
@catches("files.remembered", "write_json(path", "write_json(path.with_name('other')")
def test_what_is_remembered_is_what_was_made_whatever_happens_to_its_file(tmp_path):
    path, made = tmp_path / "deep" / "kept.json", []

    def make():
        made.append(1)
        return [["lib", "lone \udc80 surrogate"], ["b", "c"]]
    whole = make()
    for _ in range(2):
        assert files.remembered(path, make) == whole and len(made) == 2  # and not a third time
    made.clear()
    path.write_bytes(flipped(path.read_bytes(), 300))
    for _ in range(2):
        assert files.remembered(path, make) == whole and len(made) == 1
    occupied = tmp_path / "file"
    occupied.touch()  # where a folder should be
    assert files.remembered(occupied / "kept.json", make) == whole


# ---- Wrong versions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("claim, wrong", wrong_versions(globals()))
def test_the_claim_catches_the_wrong_version(claim, wrong, request, monkeypatch):
    run_with_wrong_version(claim, wrong, request, monkeypatch)
