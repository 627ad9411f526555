"""Claims about course/: the handout for students, the grades of their solutions, and the lecture's notebook."""
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import rank
from course import assign, grade, lecture
from course.assign import main
from course.grade import TESTS, TOGETHER, Result, claims_of, run_limited
from course.homework import BLANKS, HANDED_OUT, HOMEWORK, PARTS, PROJECT, SOLUTIONS, alike, is_attempted, source
from maelm import Attention
from support.program import read_json
from tests.common import ROOT, fails, write_corpus


def solved(*tasks):
    """{file: its text} of a student who hands in our solutions to these tasks, and to no others."""
    texts = dict(HANDED_OUT)
    for part in [part for task in tasks for part in PARTS[task]]:
        texts = {file: text.replace(BLANKS[part], SOLUTIONS[part]) for file, text in texts.items()}
    return texts


def write(folder, texts):
    """Write files to a folder; returns it."""
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    return folder


def write_zip(path, texts):
    """Write files to a zip; returns its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
    return path


def grades(capsys, *arguments):
    """The lines that the grader prints."""
    main(["--grade", *map(str, arguments)])
    return capsys.readouterr().out.splitlines()


def lines_of(text):
    """The lines of a text that are long enough to be recognized."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 30}


# ---- The handout ----------------------------------------------------------------------------------------------------
def test_the_handout_is_short_and_has_every_test_and_no_line_of_a_solution(tmp_path, capsys):
    main(["--handout", str(tmp_path / "homework")])
    paths = [path for path in (tmp_path / "homework").rglob("*") if path.is_file()]
    texts = {path.relative_to(tmp_path / "homework").as_posix(): path.read_text() for path in paths}
    given = lines_of("\n".join(texts.values()))
    for task, file in HOMEWORK.items():
        for part in PARTS[task]:
            assert source(part, texts[file]) == BLANKS[part]
            assert (lines_of(source(part, PROJECT[file])) - lines_of(BLANKS[part])) & given == set()
    collected = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "attention or corrupt"],
                               cwd=tmp_path / "homework", capture_output=True, text=True).stdout
    assert "12/45 tests collected" in collected
    del texts["README.md"]
    for path in set(re.findall(r"[\w/]+\.(?:py|md)\b", "\n".join(texts.values()))):
        assert any(file.endswith(path) for file in texts), f"students do not get {path}"
    assert "name a new folder" in fails(lambda: main(["--handout", str(tmp_path)]), capsys)


def test_a_wrong_name_of_a_blank_is_refused(capsys):
    assert "MAELM.forward" in fails(lambda: main(["--blank", "forward"]), capsys)
    assert "from one file" in fails(lambda: main(["--blank", "tau_rank", "attention"]), capsys)


def test_the_table_of_tasks_is_the_graders():
    rows = re.findall(r"^\| (`.*`) \| `(.*)` \| \w+ \| (\d+) \|$", PROJECT["course/homework.md"], re.MULTILINE)
    assert rows == [(", ".join(f"`{part}`" for part in PARTS[task]), file, str(len(claims_of(task))))
                    for task, file in HOMEWORK.items()]
    assert f"| together | all | hard | {len(claims_of(TOGETHER))} |\n\n" in PROJECT["course/homework.md"]


def test_every_assert_of_a_task_has_a_message():
    blocks = [block for file in TESTS for block in PROJECT[file].split("\n\n\n") if block.startswith("@task(")]
    assert re.findall(r'^ +assert (?!.*, f?".*"$).*(?<!# App. C)$', "\n".join(blocks), re.MULTILINE) == []


# ---- The grades -----------------------------------------------------------------------------------------------------
COPIED = f"def attention(*given):\n    raise AssertionError({SOLUTIONS['MAELM.forward']!r})"
TAMPERED = """
import sys
sys.modules["conftest"].close = lambda *given, **more: None
torch.Tensor.all = lambda x: torch.tensor(True)
tau_rank = lambda values, tau: 1
"""
SUBMISSIONS = [  # task -> the end of its file, and the start of its line
    {"learning_rate_factor": ("import missing", "0/2 cannot be imported: ModuleNotFoundError: No module named 'miss"),
     "tau_rank": ("print('<testcase name=\"test_x\"/>' * 100)", "3/3 full marks"),
     "matthews": ("def broken(:", "0/3 cannot be imported: SyntaxError: invalid syntax"),
     "attention": ("def attention(*given):\n    return unknown", "0/3 no points without test_attention_and_its_gradi"),
     "relative_bucket": ("", "0/2 not attempted")},
    {"learning_rate_factor": ("import os\nos._exit(0)", "0/2 no report: the code ends Python"),
     "tau_rank": (TAMPERED, "0/3 no points without test_rank_is_the_smallest_k_that_reaches_tau; failed: test_rank"),
     "attention": (COPIED, "0/3 no points without ")}]


@pytest.mark.parametrize("submission", SUBMISSIONS)
def test_wrong_or_dishonest_code_costs_points_of_its_task_only(submission, tmp_path, capsys):
    texts = solved(*HOMEWORK.keys() - {"relative_bucket"})
    for task, (code, _) in submission.items():
        texts[HOMEWORK[task]] += f"\n\n{code}\n"
    write(tmp_path / "x", texts)
    found = grades(capsys, tmp_path / "x", "--only", *submission, "--json", tmp_path / "results.json")
    lines = iter(found)
    for task, (_, start) in submission.items():
        assert any(line.startswith(f"{task} {start}") for line in lines), found
    tests = read_json(tmp_path / "results.json")["tests"]
    scores = [int(start[0]) for _, start in submission.values()]
    assert [test["score"] for test in tests] == scores and found[-1].startswith(f"total {sum(scores)}/")
    assert not lines_of(SOLUTIONS["MAELM.forward"]) & lines_of("\n".join(found))
    assert not any(scores) or any(re.match(r" +maelm.py:\d+: in attention", line) for line in found)


@pytest.mark.parametrize("code, limits, seconds", [("while True: pass", [1, 999], 1), ("", [120, 1e-9], 0)])
def test_a_grade_takes_no_longer_than_its_limits(code, limits, seconds, tmp_path, capsys):
    (tmp_path / "rank.py").write_text(f"{PROJECT['rank.py']}\n\n{code}\n")
    line, *_ = grades(capsys, tmp_path, "--only", "tau_rank", "--time-limit", limits[0], "--total-limit", limits[1])
    assert line.startswith(f"tau_rank 0/3 ran out of time: more than {seconds} s")


def test_together_needs_all_of_maelm_py_only(monkeypatch):
    monkeypatch.setattr(grade, "run_limited", lambda *given: "has run")
    for missing, problem in (("matthews", "has run"), ("corrupt", "not attempted")):
        assert grade.run_task(TOGETHER, solved(*HOMEWORK.keys() - {missing}), 1, "")[0] == problem


ROOT_ONLY = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0,
                               reason="only root may run code as another user")


@pytest.mark.parametrize("user", ["", pytest.param("nobody", marks=ROOT_ONLY)])
def test_processes_that_the_code_has_started_end_with_it(user):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.mkfifo(folder / "late")
        late = os.open(folder / "late", os.O_RDONLY | os.O_NONBLOCK)
        child = f"{'setsid' if user else ''} sh -c 'echo hi; touch ready; sleep 600'"  # also in a session of its own
        script = f"{child} > late & while [ ! -e ready ]; do sleep 0.1; done"
        assert run_limited(["sh", "-c", script], folder, 60, user) == ""
        os.set_blocking(late, True)
        assert os.read(late, 99) == b"hi\n" and os.read(late, 99) == b""  # the end: nobody can write any more
        os.close(late)


def test_every_entry_of_a_class_has_a_line_and_a_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(assign, "grade", lambda texts, tasks, *limits: [  # without running the claims
        Result(task, 4 * is_attempted(task, texts), 4, "as nothing has run") for task in tasks])
    room, both, one = tmp_path / "class", solved("attention", "corrupt"), solved("corrupt")["maelm.py"]
    write(room / "anna/hand in", both)
    write(room / "anna/hand in/backup", {"maelm.py": one})
    write_zip(room / "ben.zip", {"homework/maelm.py": one, "__MACOSX/maelm.py": "no Python", "homework/pytest.ini": ""})
    write_zip(room / "cleo.ZIP", {"maelm.py": "\ufeff" + one, "venv/lib/site-packages/x/maelm.py": both["maelm.py"]})
    (room / "dan.zip").write_bytes((room / "ben.zip").read_bytes()[:90])
    write_zip(room / "eve.zip", {"inner.zip": "", "maelm (1).py": both["maelm.py"]})
    (room / "fay.tar.gz").touch()
    write(room / "gil", {"a/maelm.py": one, "b/maelm.py": one})
    (room / "hal").mkdir()
    (room / "hal/maelm.py").symlink_to(ROOT / "maelm.py")
    (room / "ian").symlink_to(ROOT)
    expected = ["anna: 8/8", "ben.zip: 4/8", "cleo.ZIP: 4/8", "dan.zip: 0/8; cannot be read: ",
                "eve.zip: 8/8",
                "fay.tar.gz: 0/8; cannot be read: found fay.tar.gz; a folder",
                "gil: 0/8; cannot be read: two files are named maelm.py", "hal: 0/8; cannot be read: found nothing",
                "ian: 0/8; cannot be read: found nothing"]
    found = grades(capsys, room, "--only", "attention", "corrupt", "--out", tmp_path / "out")
    expected.append("nearly equal, for you to read: our solution, anna: ")
    assert len(found) >= len(expected) and all(map(str.startswith, found, expected)), found
    table = (tmp_path / "out/grades.csv").read_text().splitlines()
    assert table[:3] == ["student,total,attention,corrupt", "anna,8,4,4", "ben.zip,4,0,4"] and len(table) == 10
    assert (tmp_path / "out/ben.zip.txt").read_text().startswith("attention 0/4 ")
    assert grades(capsys, room / "anna/hand in/maelm.py", "--only", "attention") == [
        "attention 4/4 as nothing has run", "total 4/4"]
    assert "mistyped" in fails(lambda: main(["--grade", str(tmp_path / "mistyped")]), capsys)
    results = tmp_path / "results.json"
    main(["--grade", str(room), "--only", "attention", "--json", str(results)])  # Gradescope's submission is no class
    assert read_json(results)["output"].startswith("cannot be read: two files")


def test_functions_of_nearly_the_same_syntax_tree_are_listed():
    ours = SOLUTIONS["apply_masks"]
    copied = re.sub(r"\bm\b", "count", ours).replace("is_masked", "hidden").replace("    B, ", "    # all\n    B, ")
    other = "def apply_masks(tokens, masked):\n" + "    tokens = tokens + masked[0, :4].sum() * 2\n" * 9
    texts = {name: {"maelm.py": text} for name, text in dict(anna=copied, ben=other, cleo="def broken(:").items()}
    assert alike(texts) == ["our solution, anna: apply_masks"]
    assert alike({"dan": texts["ben"], "eve": {"maelm.py": other.replace("tokens +", "tokens -")}}) == [
        "dan, eve: apply_masks"]


def test_the_last_definition_of_a_function_counts():
    ours = solved()["maelm.py"]
    blank, code = BLANKS["attention"], "def attention(q):\n    return q\n"
    for more in (code, "def attention (\n q): return q", f"if True:\n    {code[:17]} return q\n", "attention = max\n"):
        assert is_attempted("attention", {"maelm.py": f"{ours}\n{more}"}), more
    assert is_attempted("MAELM.forward", {"maelm.py": ours + "\nMAELM.forward = max\n"})
    for text in (ours, ours.replace(blank, ""), ours.replace(blank, code + blank)):
        assert not any(is_attempted(task, {"maelm.py": text}) for task in HOMEWORK)


def test_the_autograder_has_its_scripts_and_grades_alone(tmp_path):
    main(["--gradescope", str(tmp_path / "autograder.zip"), "--only", "attention", "corrupt"])
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(tmp_path)
    assert (tmp_path / "tasks").read_text() == "attention corrupt" and (tmp_path / "setup.sh").is_file()
    assert "--only $(cat ../tasks)" in (tmp_path / "run_autograder").read_text()
    end = subprocess.run([sys.executable, "-m", "course.assign", "--blank", "all"], cwd=tmp_path / "maelm",
                         capture_output=True, text=True)
    assert end.stdout == solved()["maelm.py"], end.stderr


# ---- The lecture -----------------------------------------------------------------------------------------------------
def pictures(notebook):
    """The number of pictures that the cells of a notebook show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_lecture_draws_what_rank_measures(tmp_path):
    notebook = nbformat.read(ROOT / "course/lecture.ipynb", as_version=4)
    committed = pictures(notebook)
    text = write_corpus(tmp_path / "text.txt", 500)
    cells = {cell.id: cell for cell in notebook.cells}
    cells["settings"].source += f"\nTEXT, SHARE, STEPS = {str(text)!r}, 1.0, 20"
    cells["flops"].source = cells["flops"].source.replace("0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9", "0.5")  # faster
    notebook.cells.append(nbformat.v4.new_code_cell("import json\nprint(json.dumps(found))"))
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": ROOT / "course"}}).execute()
    found = json.loads(notebook.cells[-1].outputs[0].text)
    assert pictures(notebook) == committed == 19

    models = [str(ROOT / "models" / name) for name in ("mae-lm", "mlm")]
    rank.main([*models, "--data", str(text), "--val-share=1", "--out", str(tmp_path / "rank")])
    measured = read_json(tmp_path / "rank" / "rank.json")["models"]
    assert list(found.values()) == list(measured.values())


def test_measures_of_the_lecture_are_their_formulas():
    torch.manual_seed(0)
    layer, x = Attention(8, 1, 0.0).double(), torch.randn(1, 20, 8, dtype=torch.float64)
    for part in (layer.query, layer.key_value, layer.output):
        torch.nn.init.zeros_(part.bias)
    qk, vo = lecture.single_head(layer)
    torch.testing.assert_close((x @ qk @ x.mT).softmax(-1) @ x @ vo, layer(x))
    text, rows = x[0], torch.randn(30, 8, dtype=torch.float64)
    _, _, directions = torch.linalg.svd(text)
    outside = rows - rows @ directions[:3].T @ directions[:3]
    share = (outside.norm() / rows.norm()) ** 2
    assert lecture.share_outside(rows.T @ rows, text.T @ text, 3) == pytest.approx(share.item())
    assert lecture.residual(text + 1) == pytest.approx(((text - text.mean(0)).norm() / (text + 1).norm()).item())
