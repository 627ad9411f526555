"""Claims about course/: the handout for students, the grades of their solutions, and the lecture's notebook."""
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import rank
from course import assign, hand_in
from course.assign import main
from course.blanks import BLANKS, source, without
from course.grade import TESTS, TOGETHER, Result, claims_of
from course.hand_in import FILES, HOMEWORK, written_in
from course.running import Limits, delete_files, run_limited
from course.submissions import read_all
from support.program.files import read_json, write_json
from tests.common import ROOT, fails, write_corpus

NOTEBOOK = ROOT / "course" / "lecture.ipynb"
OURS = {file: (ROOT / file).read_text("utf-8") for file in FILES}


def solved(*names):
    """{file: its text} of a student who hands in our solutions to these tasks, and to no others."""
    return {file: without(file, [name for name in HOMEWORK if name not in names]) for file in FILES}


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
    assert len(paths) <= 12
    texts = {path.relative_to(tmp_path / "homework").as_posix(): path.read_text() for path in paths}
    given = lines_of("\n".join(texts.values()))
    for file, _, parts in HOMEWORK.values():
        for part in parts:
            assert source(texts[file], part) == BLANKS[part]
            assert (lines_of(source(OURS[file], part)) - lines_of(BLANKS[part])) & given == set()
    collected = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "attention or corrupt"],
                               cwd=tmp_path / "homework", capture_output=True, text=True).stdout
    assert "12/45 tests collected" in collected
    del texts["README.md"]
    for path in set(re.findall(r"[\w/]+\.(?:py|md)\b", "\n".join(texts.values()))):
        assert any(file.endswith(path) for file in texts), f"students do not get {path}"
    assert "name a new folder" in fails(lambda: main(["--handout", str(tmp_path)]), capsys)


def test_the_blank_file_has_no_solution_and_a_wrong_name_is_refused(capsys):
    main(["--blank", "all"])
    assert capsys.readouterr().out == solved()["maelm.py"]
    assert "MAELM.forward" in fails(lambda: main(["--blank", "forward"]), capsys)


def test_the_table_of_tasks_is_the_graders():
    rows = []
    for name, (file, level, parts) in HOMEWORK.items():
        rows.append(f"| {', '.join(f'`{part}`' for part in parts)} | `{file}` | {level} | {len(claims_of(name))} |")
    rows += [f"| together | all | hard | {len(claims_of(TOGETHER))} |"]
    assert "\n".join(rows) + "\n\n" in (ROOT / "course/homework.md").read_text()


def test_every_assert_of_a_task_has_a_message():
    for file in TESTS:
        for block in (ROOT / file).read_text().split("\n\n\n"):
            if block.startswith("@task("):
                assert re.findall(r'^ +assert (?!.*, f?".*"$).*(?<!# App. C)$', block, re.MULTILINE) == []


# ---- The grades -----------------------------------------------------------------------------------------------------
def test_an_error_in_a_task_costs_points_of_that_task_only(tmp_path, capsys):
    texts = solved("learning_rate_factor", "tau_rank", "attention", "matthews")
    texts["support/tasks/classification.py"] += "def broken(:\n"
    texts["train.py"] = "import missing\n" + texts["train.py"]
    texts["maelm.py"] = texts["maelm.py"].replace("d_h ** -0.5", "d_h ** -0.5 + unknown")
    texts["rank.py"] += "\nprint('<testcase name=\"test_x\"/>' * 100)\n"
    expected = [
        "learning_rate_factor 0/3 cannot be imported: ModuleNotFoundError: No module named 'missing'",
        "tau_rank 4/4 full marks",
        "effective_rank 0/5 not attempted",
        "matthews 0/4 cannot be imported: SyntaxError: invalid syntax",
        "attention 0/4 no points without test_attention_and_its_gradients_are_the_formulas; failed: test_attention",
    ]
    only = [line.partition(" ")[0] for line in expected]
    folder, results = tmp_path / "student", tmp_path / "results.json"
    (folder / "support/tasks").mkdir(parents=True)
    for file, text in texts.items():
        (folder / file).write_text(text)
    found = grades(capsys, folder, "--only", *only, "--verbose", "--json", results)
    assert all(any(line.startswith(start) for line in found) for start in expected), found
    assert any(re.match(r" +maelm.py:\d+ in attention: logits = .* unknown", line) for line in found)
    assert found[-1].strip() == "total 4/20"
    tests = json.loads(results.read_text())["tests"]
    assert [test["score"] for test in tests] == [0, 4, 0, 0, 0]


@pytest.mark.parametrize("code, status", [
    ("torch.Tensor.all = lambda x: torch.tensor(True)", "read by hand: claims that cannot hold did not fail"),
    ("torch.equal = lambda a, b: True", "read by hand: claims that cannot hold did not fail"),
    ("import os\nos._exit(0)", "no report: the code ends Python"),
    ("raise SystemExit", "cannot be imported: SystemExit"),
    ("input()", "cannot be imported: EOFError"),
    ("tau_rank = lambda values, tau: 1", "no points without test_rank_is_the_smallest_k_that_reaches_tau"),
    ("while True: pass", "ran out of time: more than 8 s of computing")])
def test_wrong_or_dishonest_code_gives_no_points(code, status, tmp_path, capsys):
    (tmp_path / "rank (1).py").write_text(f"{OURS['rank.py']}\n\n{code}\n")
    limit = 8 if "while True" in code else 99  # seconds of computing, so other programs do not matter
    line, _ = grades(capsys, tmp_path, "--only", "tau_rank", "--time-limit", limit)
    assert line.startswith(f"tau_rank 0/4 {status}")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may run code as another user")
def test_another_user_cannot_read_our_files_and_leaves_nothing(tmp_path):
    rights = dict(user=61234, group=61234, extra_groups=[])
    (tmp_path / "solution").write_text("ours")
    tmp_path.chmod(0o700)
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, 61234, 61234)
        os.mkfifo(f"{name}/late")
        os.chown(f"{name}/late", 61234, 61234)
        late = os.open(f"{name}/late", os.O_RDONLY | os.O_NONBLOCK)
        script = (f"cat {tmp_path}/solution > copy; touch /var/tmp/maelm-{os.getpid()}; "
                  "setsid sh -c 'echo hi; touch ready; sleep 60; echo no' > late & "
                  "while [ ! -e ready ]; do sleep 0.1; done")
        assert run_limited(["sh", "-c", script], Path(name), Limits(60, rights=rights)) == (0, "")
        assert (Path(name) / "copy").read_text() == ""
        os.set_blocking(late, True)
        assert os.read(late, 99) == b"hi\n" and os.read(late, 99) == b""  # the process has ended, and says no more
        os.close(late)
        delete_files(61234)
        assert not Path(f"/var/tmp/maelm-{os.getpid()}").exists()


def test_time_for_all_tasks_ends(tmp_path, capsys):
    (tmp_path / "rank.py").write_text(OURS["rank.py"])
    line, _ = grades(capsys, tmp_path, "--only", "tau_rank", "--total-limit", "1e-9")
    assert line.startswith("tau_rank 0/4 ran out of time: the whole grade")


def graded(texts, tasks, limits):
    """Grades without running the claims: full marks for a task whose function is written."""
    written = written_in(texts.get("maelm.py", ""))
    return [Result(task, 4 * (task in written), 4, "full marks, as nothing has run") for task in tasks]


def test_every_entry_of_a_class_has_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(assign, "grade", graded)
    text = solved("tau_rank")["maelm.py"]
    text += "\n\nif True:  # as pytest wants it\n    def attention(q, k, v, bias=None, p=0.0):\n"
    text += "        return F.scaled_dot_product_attention(q, k, v, bias, p)\n"
    text = text.replace(BLANKS["attention"], "")
    room = tmp_path / "class"
    (room / "anna").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "inner.zip", "w") as archive:
        archive.writestr("hand in\\Maelm.py", "\ufeff" + text)
        archive.writestr("__MACOSX/maelm.py", "no Python")
    with zipfile.ZipFile(room / "anna" / "ANNA.ZIP", "w") as archive:
        archive.write(tmp_path / "inner.zip", "inner.zip")
    (room / "broken.zip").write_bytes((tmp_path / "inner.zip").read_bytes()[:90])
    (room / "ben.py").write_text(text + "\n" + BLANKS["attention"])
    with tarfile.open(room / "cleo.tar.gz", "w:gz") as archive:
        archive.add(room / "ben.py", "code/maelm.py")
    (room / "dan.rar").touch()
    (room / "eve").symlink_to(ROOT)
    (room / "fay/lib/site-packages").mkdir(parents=True)  # a virtual environment around the homework
    (room / "fay/lib/site-packages/better.py").write_text(OURS["maelm.py"])
    (room / "fay/maelm.py").write_text(text + "\n" + BLANKS["attention"])
    expected = {"anna": "4/4", "ben.py": "0/4", "broken.zip": "0/4; cannot read all of it", "cleo.tar.gz": "0/4",
                "dan.rar": "0/4; no Python file", "eve": "0/4; no Python file", "fay": "0/4; no Python file"}
    found = dict(line.split(": ", 1) for line in grades(capsys, room, "--only", "attention"))
    assert found.keys() == expected.keys() and all(found[name].startswith(expected[name]) for name in expected), found
    for name in ("ben.py", "cleo.tar.gz"):
        (room / name).unlink()
    shutil.make_archive(str(tmp_path / "all"), "zip", room)
    assert grades(capsys, tmp_path / "all.zip", "--only", "attention")[0].startswith("anna: 4/4")
    assert "there is no such file" in fails(lambda: main(["--grade", str(tmp_path / "mistyped")]), capsys)
    results = tmp_path / "results.json"
    main(["--grade", str(room / "dan.rar"), "--json", str(results)])
    assert json.loads(results.read_text())["output"].startswith("no Python file")


@pytest.mark.parametrize("files, students", [
    (["hw\\maelm.py", "hw\\train.py", "hw\\rank.py"], 1), (["code/maelm.py", "answers.pdf"], 1),
    (["code/maelm.py", "toy/log.jsonl"], 1), (["maelm.py", "maelm (1).py", "train.py"], 1),
    (["hw/my_maelm.py", "hw/my_train.py"], 1), (["anna.py", "ben.py"], 2), (["anna/a.py", "ben/b.py", "cleo/c.pdf"], 3),
    (["anna_12_678_maelm.py", "ben_13_679_train.py"], 2),
    (["anna_12_678_maelm.py", "anna_12_679_train.py", "ben_LATE_13_680_maelm.py", "ben_LATE_13_681_rank-1.py"], 2)])
def test_a_class_is_told_from_a_submission(files, students, tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in files:
            name, = [name for name in FILES if Path(name).stem in file] or ["maelm.py"]
            archive.writestr(zipfile.ZipInfo(file), OURS[name])
    found = read_all(tmp_path / "all.zip", as_one=False)
    assert len(found) == students
    if students == 1:
        assert found["all.zip"].keys() == {name for name in (*FILES, "log.jsonl") if any(
            Path(name).stem in file for file in files)}


def test_the_last_definition_of_a_function_counts():
    blank = "def attention(q):\n    'Rules.'\n    raise NotImplementedError\n"
    code = "def attention(q):\n    return q\n"
    for text in (code, blank + code, f"{blank}if True:\n    {code[:17]} return q\n", blank + "attention = max\n"):
        assert "attention" in written_in(text), text
    assert "attention" not in written_in(code + blank)
    assert "MAELM.forward" in written_in("class MAELM:\n    pass\nMAELM.forward = max\n")
    assert "tau_rank" in written_in("def tau_rank[T](values: T):\n    return 1\n")  # Python 3.11 cannot read it


def test_a_class_has_a_table_and_a_text_per_student(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(assign, "grade", graded)
    (tmp_path / "class").mkdir()
    (tmp_path / "class/anna.py").write_text(OURS["maelm.py"])
    (tmp_path / "class/ben.py").write_text(solved("corrupt")["maelm.py"])
    grades(capsys, tmp_path / "class", "--only", "attention", "corrupt", "--out", tmp_path / "out")
    table = (tmp_path / "out/grades.csv").read_text().splitlines()
    assert table == ["student,total,attention,corrupt", "anna.py,8,4,4", "ben.py,4,0,4"]
    assert (tmp_path / "out/ben.py.txt").read_text().startswith("attention 0/4 ")


def test_the_autograder_has_its_scripts_and_grades_alone(tmp_path):
    main(["--gradescope", str(tmp_path / "autograder.zip")])
    shutil.unpack_archive(tmp_path / "autograder.zip", tmp_path)
    assert (tmp_path / "run_autograder").is_file() and (tmp_path / "setup.sh").is_file()
    end = subprocess.run([sys.executable, "test_maelm.py", "--blank", "attention"], cwd=tmp_path / "maelm",
                         capture_output=True, text=True)
    assert end.stdout == without("maelm.py", ["attention"]), end.stderr


def test_a_submission_is_packed_and_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hand_in.main(["hw.zip"]) == 2 and "train.py" in capsys.readouterr().out
    for file, text in solved("attention").items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "out/toy").mkdir(parents=True)
    (tmp_path / "out/toy/log.jsonl").write_text("{}")
    (tmp_path / "out/toy/step_1.pt").touch()
    assert hand_in.main(["hw.zip", "out/toy"]) == 0
    found = capsys.readouterr().out
    assert "maelm.py: corrupt is not written" in found and "attention is" not in found
    assert {*zipfile.ZipFile("hw.zip").namelist()} == {*FILES, "toy/log.jsonl"}


def test_a_run_folder_is_graded_by_its_loss_and_probe(tmp_path, capsys):
    (tmp_path / "toy" / "probe").mkdir(parents=True)
    log = '{"step": 9, "val_loss": 9.5}\n{"step": 10, "val_loss": 3.031}\n"val_loss": ..'
    (tmp_path / "toy" / "log.jsonl").write_text(log)
    write_json(tmp_path / "toy" / "probe" / "result.json", {"frozen": "mean", "value": {"median": 40.5}})
    assert grades(capsys, tmp_path / "toy") == ["validation loss 1/1 3.031, expected 2.93 to 3.13",
                                                "linear probe 0/1 40.5, expected 48 to 65", "total 1/2"]


# ---- The notebook ---------------------------------------------------------------------------------------------------
def pictures(notebook):
    """The number of pictures that the cells of a notebook show."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_lecture_draws_what_rank_measures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = pictures(notebook)
    text = write_corpus(tmp_path / "text.txt", 1000)
    settings, = [cell for cell in notebook.cells if cell.id == "settings"]
    settings.source += f"\nTEXT, SHARE, STEPS = {str(text)!r}, 1.0, 20"
    notebook.cells.append(nbformat.v4.new_code_cell("import json\nprint(json.dumps(found))"))
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": NOTEBOOK.parent}}).execute()
    found = json.loads(notebook.cells[-1].outputs[0].text)
    assert pictures(notebook) == committed == 18

    models = [str(ROOT / "models" / name) for name in ("mae-lm", "mlm")]
    rank.main([*models, "--data", str(text), "--val-share=1", "--out", str(tmp_path / "rank")])
    measured = read_json(tmp_path / "rank" / "rank.json")["models"]
    assert list(found.values()) == list(measured.values())


def test_the_first_cell_alone_fetches_the_repository_once(tmp_path):
    origin, alone = tmp_path / "origin", tmp_path / "alone"
    alone.mkdir()
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(origin)]
    for command in (["git", "init", "-q", str(origin)], [*git, "add", "."], [*git, "commit", "-qm", "first"]):
        subprocess.run(command, check=True)
        (origin / "course").mkdir(exist_ok=True)
        (origin / "course" / "lecture.py").touch()
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    first += "\nprint(os.getcwd() == sys.path[0], os.getcwd())"
    for address in (str(origin), ""):  # without an address, the fetched repository is found
        end = subprocess.run([sys.executable, "-c", first], cwd=alone, capture_output=True, text=True,
                             env={**os.environ, "MAELM_REPOSITORY": address})
        assert end.stdout == f"True {(alone / 'maelm').resolve()}\n", end.stderr
