"""Claims about course/: the handout for students, the grades of their solutions, and the lecture's notebook."""
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import rank
from course import assign, grade, lecture
from course.assign import main
from course.grade import TESTS, TOGETHER, Result, claims_of, run_limited
from course.homework import BLANKS, HANDED_OUT, HOMEWORK, PARTS, PROJECT, SOLUTIONS, is_attempted, source
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
    assert "name a new folder" in fails(lambda: main(["--handout", str(tmp_path)]), capsys)


def test_the_table_of_tasks_is_the_graders():
    rows = re.findall(r"^\| (`.*`) \| `(.*)` \| \w+ \| (\d+) \|$", PROJECT["course/homework.md"], re.MULTILINE)
    assert rows == [(", ".join(f"`{part}`" for part in PARTS[task]), file, str(len(claims_of(task))))
                    for task, file in HOMEWORK.items()]
    assert f"| together | all | hard | {len(claims_of(TOGETHER))} |\n\n" in PROJECT["course/homework.md"]


def test_every_assert_of_a_task_has_a_message():
    blocks = [block for file in TESTS for block in PROJECT[file].split("\n\n\n") if block.startswith("@task(")]
    assert re.findall(r'^ +assert (?!.*, f?".*"$).*(?<!# App. C)$', "\n".join(blocks), re.MULTILINE) == []


# ---- The grades -----------------------------------------------------------------------------------------------------
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
    {"learning_rate_factor": ("import os\nos._exit(0)", "0/2 no report: the code ends Python before"),
     "tau_rank": (TAMPERED, "0/3 no points without test_rank_is_the_smallest_k_that_reaches_tau; failed: test_rank")}]


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
    assert [test["score"] for test in tests] == scores and f": total {sum(scores)}/" in found[-1]


def test_a_grade_takes_no_longer_than_its_limit(tmp_path, capsys):
    (tmp_path / "rank.py").write_text(f"{PROJECT['rank.py']}\n\nwhile True: pass\n")
    line, *_ = grades(capsys, tmp_path, "--only", "tau_rank", "--time-limit", 1)
    assert line.startswith("tau_rank 0/3 ran out of time: more than 1 s")


def test_together_needs_all_of_maelm_py_only(monkeypatch):
    monkeypatch.setattr(grade, "run_limited", lambda *given: "has run")
    for missing, problem in (("matthews", "has run"), ("corrupt", "not attempted")):
        assert grade.run_task(TOGETHER, solved(*HOMEWORK.keys() - {missing}), 1)[0] == problem


def test_processes_that_the_code_has_started_end_with_it(tmp_path):
    os.mkfifo(tmp_path / "late")
    late = os.open(tmp_path / "late", os.O_RDONLY | os.O_NONBLOCK)
    script = "sh -c 'echo hi; touch ready; sleep 600' > late & while [ ! -e ready ]; do sleep 0.1; done"
    assert run_limited(["sh", "-c", script], tmp_path, 60) == ""
    os.set_blocking(late, True)
    assert os.read(late, 99) == b"hi\n" and os.read(late, 99) == b""  # the end: nobody can write any more
    os.close(late)


def test_the_nearest_file_of_each_folder_is_graded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(assign, "grade", lambda texts, tasks, limit: [  # without running the claims
        Result(task, 4 * is_attempted(task, texts), 4, "as nothing has run") for task in tasks])
    both, one = solved("attention", "corrupt"), solved("corrupt")["maelm.py"]
    write(tmp_path / "anna/hand in", both)
    write(tmp_path / "anna/hand in/backup", {"maelm.py": one})
    write(tmp_path / "ben.b", {"maelm.py": "\ufeff" + one})
    (tmp_path / "hal").mkdir()
    (tmp_path / "hal/maelm.py").symlink_to(ROOT / "maelm.py")
    shutil.make_archive(str(tmp_path / "eve"), "zip", tmp_path / "anna")
    (tmp_path / "kim.zip").write_text("no zip")
    found = grades(capsys, tmp_path, "--only", "attention", "corrupt")  # a class
    totals = [line for line in found if "total" in line]
    assert totals == ["anna: total 8/8", "ben.b: total 4/8", "eve: total 8/8", "hal: total 0/8", "kim: total 0/8"]
    assert (tmp_path / "grades.csv").read_text().splitlines() == [
        "student,total,attention,corrupt", "anna,8,4,4", "ben.b,4,0,4", "eve,8,4,4", "hal,0,0,0", "kim,0,0,0"]
    assert grades(capsys, tmp_path / "eve.zip", "--only", "corrupt") == [
        "corrupt 4/4 as nothing has run", f"{tmp_path / 'eve.zip'}: total 4/4"]
    assert "hal: has no file named" in fails(lambda: main(["--grade", str(tmp_path / "hal")]), capsys)


def test_the_last_definition_of_a_function_counts():
    ours = solved()["maelm.py"]
    blank, code = BLANKS["attention"], "def attention(q):\n    return q\n"
    for more in (code, "def attention (\n q): return q", f"if True:\n    {code[:17]} return q\n", "attention = max\n"):
        assert is_attempted("attention", {"maelm.py": f"{ours}\n{more}"}), more
    assert is_attempted("MAELM.forward", {"maelm.py": ours + "\nMAELM.forward = max\n"})
    for text in (ours, ours.replace(blank, "")):
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
