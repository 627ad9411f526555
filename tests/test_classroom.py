"""Claims about classroom.py and handout.py: tasks, grades, blanks, folders for students."""
import ast
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import handout
from classroom import TASKS, Submission, answering, load, locate, main, place_of, text_of
from conftest import HERE, QUICK, fails, write_corpus
from handout import blank_file, blanked, call_test, stored_answers

FILES = dict.fromkeys(task.file for task in TASKS.values())


# ---- The tasks ------------------------------------------------------------------------------------------------------
def blank_but(name):
    """The file of a student who solved one task, as we do, and left all others blank."""
    return blank_file(TASKS, change=lambda text, task: text if task == name else blanked(text, task))


def solved(names=TASKS):
    """The file of a student who solved these tasks as we do, and got no others."""
    return blank_file(list(names), change=lambda text, name: text)


def instead(text, name, function):
    """A student's file with this text for a task's function."""
    statements, at = locate(ast.parse(text).body, name)
    lines = text.splitlines()
    lines[statements[at].lineno - 1:statements[at].end_lineno] = function.strip("\n").splitlines()
    return "\n".join(lines) + "\n"


def unwritten(function):
    """A function that a student has not written yet."""
    @functools.wraps(function)
    def missing(*args, **kwargs):
        raise NotImplementedError
    return missing


def failures(name, text, answers=None):
    """(test, its error) for the tests of a task that fail on a student's file. With `answers` no other task is solved,
    and these are what they have instead, as in a folder that --handout made."""
    for test in TASKS[name].tests:
        with pytest.MonkeyPatch.context() as patch:
            for other, calls in (answers or {}).get(test, {}).items():
                owner, attribute = place_of(other)
                patch.setattr(owner, attribute, answering(unwritten(getattr(owner, attribute)), calls))
            submission = Submission(dict.fromkeys(FILES, (Path("student.py"), ast.parse(text))), [name])
            try:
                for owner, attribute, function in load(submission, name):
                    patch.setattr(owner, attribute, function, raising=False)
                call_test(name, test)
            except (Exception, pytest.fail.Exception) as error:
                yield test, error


def mistakes_in(name):
    """The wrong versions of a task's function that the decorators of its own tests state."""
    found = []
    module = importlib.import_module(TASKS[name].tested_in)
    for test in TASKS[name].tests:
        for wrong in getattr(getattr(module, test), "wrong_versions", []):
            if wrong.place == f"{TASKS[name].file}.{name}":
                found.append(wrong)
    return found


@pytest.fixture(scope="session")
def answers():
    """What --handout stores."""
    return stored_answers(list(TASKS))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", TASKS)
def test_with_stored_answers_a_task_stands_alone_and_its_own_tests_catch_each_mistake(name, answers):
    text = blank_but(name)
    statements, at = locate(ast.parse(text).body, name)
    function = ast.get_source_segment(text, statements[at])
    assert list(failures(name, text, answers)) == []
    assert len(TASKS[name].tests) >= 3 and len(mistakes_in(name)) >= 4
    for _, source, mistake, _ in mistakes_in(name):
        assert function.count(source) == 1, f"{source!r} must occur once in {name}"
        found = failures(name, text.replace(function, function.replace(source, mistake)), answers)
        _, error = next(found, ("", None))
        assert error and not isinstance(error, (NameError, SyntaxError)), (mistake, error)


def test_who_calls_another_task_in_a_way_of_their_own_is_told_to_write_that_first(answers):
    text = blank_but("Attention.forward").replace("attention(q, split(k), split(v), bias, p)",
                                                  "torch.cat([attention(q, split(k), split(v), bias, p)])")
    assert list(failures("Attention.forward", text, answers)) == []
    text = text.replace("attention(q,", "attention(q + 0.1,")
    assert "attention is still to be written" in str(next(failures("Attention.forward", text, answers))[1])


def test_each_test_belongs_to_one_task():
    tests = [test for task in TASKS.values() for test in task.tests]
    assert len(set(tests)) == len(tests)


def test_the_instructors_pages_list_every_task_with_its_points_and_every_mistake_with_its_reason():
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (\d+) \|", (HERE / "docs/teaching.md").read_text(), re.M)
    assert rows == [(name, task.level, str(len(task.tests))) for name, task in TASKS.items()]
    sections = (HERE / "docs/mistakes.md").read_text().split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == list(TASKS)
    for name, section in zip(TASKS, sections):
        listed = re.findall(r"^\| `(.*?)` \| (?:`(.*?)`|nothing) \| .{10,} \|$", section, re.M)
        assert sorted(listed) == sorted((wrong.source.strip(), wrong.mistake.strip()) for wrong in mistakes_in(name))


# ---- --blank --------------------------------------------------------------------------------------------------------
def test_a_blank_is_signature_docstring_and_nothing_else(capsys):
    main(["--blank", "all"])
    text = capsys.readouterr().out
    exec(compile(text, "maelm.py", "exec"), {"__name__": "maelm"})  # the student's file can be imported
    assert text.startswith(f"# Tasks: {' '.join(TASKS)}\n")
    for name, task in TASKS.items():
        (ours, i), (theirs, j) = (locate(ast.parse(t).body, name) for t in (text_of(task.file), text))
        docstring, body = theirs[j].body
        assert ast.dump(theirs[j].args) == ast.dump(ours[i].args)
        assert ast.get_docstring(theirs[j]) == ast.get_docstring(ours[i])
        assert body.lineno == docstring.end_lineno + 1 and ast.unparse(body) == "raise NotImplementedError"
    main(["--blank", "Encoder", "corrupt"])
    ours = blanked(blanked(text_of("maelm"), "corrupt"), "Encoder.forward")
    assert capsys.readouterr().out == f"# Tasks: corrupt Encoder.forward\n{ours}"


@pytest.mark.parametrize("content", ["", None])
def test_without_our_own_code_nothing_is_handed_out_or_graded(content, tmp_path):
    """As after `--blank all > maelm.py`, or with a blank file in the place of maelm.py."""
    for path in HERE.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "student.py").write_text(solved(["tau_rank"]))
    (tmp_path / "maelm.py").write_text(blank_file(["corrupt"]) if content is None else content)
    for flags in (["--blank", "all"], ["--grade", "student.py"]):
        done = subprocess.run([sys.executable, "test_maelm.py", *flags], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
        assert "git checkout maelm.py" in done.stderr


# ---- --grade --------------------------------------------------------------------------------------------------------
def grade(path, *flags, folder=HERE, **environment):
    """The results.json of a submission: (exit code, the whole, {task: its tests}, what was printed to stderr)."""
    done = subprocess.run([sys.executable, "test_maelm.py", "--grade", path, "--json", *flags], cwd=folder,
                          env=os.environ | environment, capture_output=True, text=True, timeout=300)
    whole, tasks = json.loads(done.stdout), {}
    for test in whole["tests"]:
        tasks.setdefault(test["tags"][0], []).append(test)
    return done.returncode, whole, tasks, done.stderr


def test_an_untouched_file_is_not_attempted(tmp_path, capsys):
    (tmp_path / "maelm.py").write_text(blank_file(TASKS))
    with pytest.raises(SystemExit) as end:
        main(["--grade", str(tmp_path / "maelm.py")])
    lines = capsys.readouterr().out.splitlines()
    total = sum(len(task.tests) for task in TASKS.values())
    assert lines == [*(f"{name} 0/{len(TASKS[name].tests)} not attempted" for name in TASKS), f"total 0/{total}"]
    assert end.value.code == 1


def test_what_was_given_earns_nothing_and_a_report_has_values_traceback_and_what_was_printed(tmp_path):
    text = instead(blank_file(["tau_rank", "matthews"]), "tau_rank", """
def tau_rank(values, tau):
    breakpoint()  # nobody answers: it goes on
    print("values are", len(values))
    return 2 // int(values[0] > 0)""")
    (tmp_path / "student.py").write_text(text)
    done = subprocess.run([sys.executable, "test_maelm.py", "--grade", tmp_path / "student.py", "--verbose"], cwd=HERE,
                          capture_output=True, text=True)
    assert re.search(r"assert \[2, 2, 2, 2, 2\] == \[1, 2, 2, 3, 4\].*values are 4", done.stdout, re.S)
    assert re.search(r"> +return 2 // int\(values\[0\] > 0\)\n.*student.py:\d+: ZeroDivisionError", done.stdout, re.S)
    assert done.stdout.endswith("matthews 0/4 not attempted\ntotal 0/8\n") and "BdbQuit" not in done.stdout


HOSTILE = [  # (task, body, message)
    ("learning_rate_factor", "while True: print('x' * 1000)", "time limit|too large"),
    ("tau_rank", "raise SystemExit(0)", "SystemExit: 0"),
    ("matthews", "return matthews(predicted, true)", "RecursionError"),
    ("relative_bucket", "return torch.ones(1 << 36)", "allocate"),
    ("attention", "import os; os._exit(0)", "the process died"),
    ("MAELM.decoder_input", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})('\\ud800')", "Odd"),
    ("MAELM.forward", "import subprocess, sys; subprocess.run(['sleep', '1000'])", "time limit of 4 s"),
    ("Attention.forward", "return 1 / 0", "student.py.*ZeroDivisionError"),
    ("RelativeBias.forward", "from maelm import RelativeBias as ours; return ours.forward", "imports maelm"),
    ("corrupt", "import pytest; pytest.raises = None", "imports pytest"),
]


def test_nothing_that_a_student_writes_can_break_the_grader_and_our_code_is_out_of_reach(tmp_path):
    text = "raise RuntimeError('the file is read, not run')\n" + blank_file(TASKS)
    for name, body, _ in HOSTILE:
        statements, at = locate(ast.parse(text).body, name)
        node, lines = statements[at].body[1], text.splitlines()
        lines[node.lineno - 1] = " " * node.col_offset + body
        text = "\n".join(lines)
    (tmp_path / "student.py").write_text(text)
    code, whole, tasks, errors = grade(tmp_path / "student.py", "--time-limit", "4")
    assert code == 1 and errors == "" and list(tasks) == list(TASKS) and whole["score"] == 0
    for name, _, message in HOSTILE:
        assert re.search(message, tasks[name][0]["output"], re.S), (name, tasks[name][0])
    assert tasks["Encoder.forward"][0]["output"] == "not attempted"
    for name, tests in tasks.items():
        assert [test["name"] for test in tests] == [f"{name}: {test[5:]}" for test in TASKS[name].tests]
        assert {(test["score"], test["max_score"], test["status"]) for test in tests} == {(0, 1, "failed")}


def test_a_report_shows_no_line_of_our_solutions(tmp_path):
    """A student's wrong call of another task's function fails inside of ours."""
    text = blank_but("Attention.forward").replace("split(v), bias, p)", "split(v)[:, :, 1:], bias, p)")
    assert "split(v)[:, :, 1:]" in text
    (tmp_path / "student.py").write_text(text)
    _, _, tasks, _ = grade(tmp_path / "student.py", "--only", "Attention.forward")
    output = "".join(test["output"] for test in tasks["Attention.forward"])
    assert "split(v)[:, :, 1:]" in output and "RuntimeError" in output
    assert "F.dropout(weights" not in output and "def attention" not in output and "catches" not in output


def test_a_formula_as_long_as_you_like_costs_its_own_task_only(tmp_path):
    long = "def tau_rank(values, tau):\n    return " + "+".join(["1"] * 400)
    (tmp_path / "student.py").write_text(instead(solved(["tau_rank", "matthews"]), "tau_rank", long))
    _, whole, tasks, errors = grade(tmp_path / "student.py")
    assert errors == "" and whole["score"] == len(tasks["matthews"]) == 4 and len(tasks["tau_rank"]) == 4


def test_a_table_that_is_filled_outside_of_functions_is_filled():
    text = instead(solved(["tau_rank"]), "tau_rank", """
SQUARES = {}
for i in range(3):
    SQUARES[i] = i * i
NAMES = []
NAMES.append("one")


def helper(x):
    return helper.offset + x


helper.offset = 5


def tau_rank(values, tau):
    assert SQUARES == {0: 0, 1: 1, 2: 4} and NAMES == ["one"] and helper(1) == 6
    return 2""")
    messages = [str(error) for _, error in failures("tau_rank", text)]
    assert messages and not any("SQUARES" in message or "offset" in message for message in messages), messages


def test_helpers_imports_and_methods_of_the_student_come_along_and_win():
    text = blank_but("relative_bucket").replace('''from dataclasses import''', '''import bisect as search
from dataclasses import''')
    text = instead(text, "relative_bucket", """
LIMIT = 10 ** 9


def fill(r, half, exact, farthest):  # the name of one of ours
    starts = [exact ** (half - exact - i) * farthest ** i for i in range(half - exact)]
    size = abs(r) if abs(r) < exact else exact - 1 + search.bisect(starts, min(LIMIT, abs(r)) ** (half - exact))
    return size + half * (r > 0)


def relative_bucket(distance, num_buckets, max_distance):
  half = num_buckets // 2
  return torch.tensor([fill(r, half, half // 2, max_distance) for r in distance.flatten().tolist()]).view(distance.shape)


def unused(x=corrupt(None, None, None)):
    pass
""")
    assert list(failures("relative_bucket", text)) == []
    text = blank_but("MAELM.forward").replace("    def forward(self, tokens: Tensor, corruption: Corruption)", """
    def true_tokens(self, tokens, at):
        return tokens.gather(1, at).flatten()

    def forward(self, tokens: Tensor, corruption: Corruption)""")
    assert "tokens.gather(1, at).flatten())" in text
    text = text.replace("tokens.gather(1, at).flatten())", "self.true_tokens(tokens, at))")
    assert list(failures("MAELM.forward", text)) == []


def test_a_helper_that_has_the_name_of_one_of_ours_does_not_change_our_code():
    text = blank_but("Encoder.forward").replace("def take(x: Tensor, at: Tensor | None) -> Tensor:", """
def take(x):
    return x


def give(x: Tensor, at: Tensor | None) -> Tensor:""")
    text = text.replace("h = F.dropout(self.norm(h)", "h = take(F.dropout(self.norm(h)").replace(
        "self.training)\n        states", "self.training))\n        states")
    assert "h = take(" in text and list(failures("Encoder.forward", text)) == []


def test_the_other_tasks_are_ours_whatever_the_student_wrote_there():
    text = instead(solved(), "attention", "def attention(q, k, v, bias=None, p=0.0):\n    return q")
    assert list(failures("Attention.forward", text)) == [] and next(failures("attention", text))


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), (b"def f(:\n", "not a Python file: invalid syntax"),
    (b"\xff\xfe\x00", "not a Python file: 'utf-8'"), (b"x = '\x00'", "not a Python file"),
    (b"# Tasks: tau_rank\ndef f(:\n", "not a Python file: invalid syntax"), (b"x = 1\n", 'no line "# Tasks: ..."'), (b"# Tasks: corrupt nonsense\n", "'nonsense' is not the name")])
def test_a_file_that_cannot_be_graded_is_named_in_one_line_and_in_the_json(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "student.py").write_bytes(content)
    line = fails(lambda: main(["--grade", str(tmp_path / "student.py")]), capsys)
    assert message in line and (content == b"# Tasks: corrupt nonsense\n" or "student.py" in line)
    with pytest.raises(SystemExit):
        main(["--grade", str(tmp_path / "student.py"), "--json"])
    printed = json.loads(capsys.readouterr().out)
    names = TASKS["tau_rank"].tests if content and b"tau_rank" in content else ()
    assert message in printed["output"] and printed["score"] == 0 and printed["max_score"] == len(names)
    assert [test["name"] for test in printed["tests"]] == [f"tau_rank: {name[5:]}" for name in names]


@pytest.mark.parametrize("flags, message", [
    ([], "required"), (["--blank", "corupt"], "'corupt' is not the name of one task: use all, or of "),
    (["--blank", "forward"], "'forward' is not"), (["--grade", __file__, "--only", "x"], "'x' is not the name"),
    (["--handout", str(HERE)], "is there already")])
def test_a_bad_command_of_the_kit_gets_one_line(flags, message, capsys):
    assert message in fails(lambda: main(flags), capsys)


def test_a_laptop_without_fcntl_resource_and_fork_can_grade_and_train(tmp_path):
    """As Windows is: no program needs these modules, and processes are started anew."""
    for module in ("fcntl", "resource"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not on this system')\n")
    (tmp_path / "sitecustomize.py").write_text("""import os
import multiprocessing
multiprocessing.get_all_start_methods = lambda: ["spawn"]
for name in ("setsid", "killpg"):
    vars(os).pop(name, None)
""")
    (tmp_path / "student.py").write_text(solved(["tau_rank"]))
    code, whole, _, errors = grade(tmp_path / "student.py", PYTHONPATH=str(tmp_path))
    assert (code, whole["score"], whole["max_score"]) == (0, 4, 4), errors
    subprocess.run([sys.executable, "-c", "import train, rank, finetune, handout"], cwd=HERE, check=True,
                   env=os.environ | {"PYTHONPATH": str(tmp_path)})


# ---- pytest --student -----------------------------------------------------------------------------------------------
def pytest_in(folder, *flags):
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags], cwd=folder,
                          env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, text=True,
                          timeout=300)


def test_pytest_tests_a_students_code_and_says_whose_it_tests(tmp_path):
    (tmp_path / "student.py").write_text(instead(
        solved(["tau_rank", "matthews"]), "tau_rank", "def tau_rank(values, tau):\n    print('my code')\n    return 2"))
    done = pytest_in(HERE, f"--student={tmp_path / 'student.py'}", "-k", "tau_rank")
    assert done.returncode == 1 and "4 failed, " in done.stdout, done.stdout
    assert "my code" in done.stdout and f"tested: {tmp_path / 'student.py'}" in done.stdout
    done = pytest_in(tmp_path, HERE / "test_maelm.py", "-k", "test_no_variance_has_rank_none")
    assert f"tested: {HERE}, and no other files" in done.stdout


# ---- --handout ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def homework(answers, tmp_path_factory):
    """A folder for students with all tasks."""
    folder = tmp_path_factory.mktemp("handout") / "homework"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handout, "stored_answers", lambda names: answers)
        main(["--handout", str(folder)])
    return folder


def statements_of(text, name):
    """The statements of a function, as their syntax, without the short ones."""
    statements, at = locate(ast.parse(text).body, name)
    dumps = [ast.dump(node) for node in ast.walk(statements[at]) if isinstance(node, ast.stmt) and node is not statements[at]]
    return {dump for dump in dumps if len(dump) > 160}


def test_a_folder_for_students_holds_no_solution_and_no_wrong_version(homework):
    files = [path for path in homework.rglob("*") if path.is_file()]
    assert {"maelm.py", "rank.py", "train.py", "tasks.py", "assignment.md", "README.md"} < {path.name for path in files}
    assert "handout.py" not in {path.name for path in files}
    given = {}
    for path in homework.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.stmt):
                given[ast.dump(node)] = path.name
        assert "@catches" not in path.read_text() and "Wrong" not in path.read_text()
    elsewhere = {ast.dump(node) for file in handout.programs()
                 for node in ast.walk(ast.parse(handout.blank_of(file, TASKS))) if isinstance(node, ast.stmt)}
    for name, task in TASKS.items():
        statements, at = locate(ast.parse((homework / f"{task.file}.py").read_text()).body, name)
        assert [type(node) for node in statements[at].body] == [ast.Expr, ast.Raise]
        lines = statements_of(text_of(task.file), name) - elsewhere
        assert lines and not lines & set(given), name
        assert f"## {name}\n\n{len(task.tests)} points" in (homework / "assignment.md").read_text()


def test_a_solution_that_would_be_handed_out_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(handout, "stored_answers", lambda names: {})
    monkeypatch.setattr(handout, "README", "{first}\n    fewest = n - int(special.sum(1).max())\n")
    assert "README.md: fewest = n" in fails(lambda: main(["--handout", str(tmp_path / "new"), "corrupt"]), capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_import_that_the_teachers_grading_refuses_is_refused_at_home(homework, tmp_path):
    folder = tmp_path / "homework"
    shutil.copytree(homework, folder)
    text = (folder / "tasks.py").read_text().replace("import math\n", "import math\nimport pytest as helper\n")
    text = instead(text, "matthews", "def matthews(predicted, true):\n    return helper.approx(1.0)")
    (folder / "tasks.py").write_text(text)
    for place, path in ((folder, "."), (HERE, folder)):
        _, _, tasks, _ = grade(path, "--only", "matthews", folder=place)
        assert ["imports pytest" in test["output"] for test in tasks["matthews"]] == [True] * 4


def test_the_folder_grades_itself_and_trains_once_our_solutions_are_pasted_in(homework, tmp_path):
    folder = tmp_path / "homework"
    shutil.copytree(homework, folder)
    for file in FILES:
        head = (folder / f"{file}.py").read_text().partition("\n")[0]
        (folder / f"{file}.py").write_text(f"{head}\n{text_of(file)}")
    code, whole, tasks, errors = grade(".", "--time-limit", "60", folder=folder)
    assert {test["status"] for test in whole["tests"]} == {"passed"} and list(tasks) == list(TASKS), errors
    assert code == 0
    done = pytest_in(folder, "-k", "tau_rank")
    assert "4 passed" in done.stdout and "tested: " in done.stdout, done.stdout
    write_corpus(folder / "text.txt")
    subprocess.run([sys.executable, "train.py", "--data", "text.txt", "--val-share", "0.1", "--cache", "cache", "--out",
                    "out", *QUICK], cwd=folder, check=True, capture_output=True)
    assert (folder / "out/loss.png").is_file()


def test_a_folder_with_some_tasks_has_their_tests_alone(tmp_path):
    main(["--handout", str(tmp_path / "new"), "tau_rank", "learning_rate_factor"])
    assert text_of("maelm") == (tmp_path / "new/maelm.py").read_text()
    tests = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (tmp_path / "new").rglob("test*.py")))
    assert sorted(tests) == sorted([*TASKS["tau_rank"].tests, *TASKS["learning_rate_factor"].tests])
    assert set(torch.load(tmp_path / "new/answers.pt", weights_only=True)["answers"]) == set(tests)
