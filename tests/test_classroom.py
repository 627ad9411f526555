"""Claims about classroom.py: tasks, blanks, grades."""
import ast
import json
import re
import subprocess
import sys

import pytest

from classroom import TASKS, blanked, locate, main, mistakes_in, results, source_of, student_file
from conftest import HERE, fails


# ---- The tasks ------------------------------------------------------------------------------------------------------
def blank_but(name):
    """The file of a student who solved one task, as we do, and left all others blank."""
    return student_file(TASKS, change=lambda text, task: text if task == name else blanked(text, task))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", TASKS)
def test_a_task_stands_alone_and_its_own_tests_catch_each_mistake(name):
    text = blank_but(name)
    statements, at = locate(ast.parse(text).body, name)
    function = ast.get_source_segment(text, statements[at])
    assert not [wrong for _, wrong in results(name, ast.parse(text)) if wrong]
    assert len(TASKS[name].tests) >= 3 and len(mistakes_in(name)) >= 4
    for _, source, mistake, _ in mistakes_in(name):
        assert function.count(source) == 1, f"{source!r} must occur once in {name}"
        student = ast.parse(text.replace(function, function.replace(source, mistake)))
        caught = next((wrong for _, wrong in results(name, student) if wrong), "")
        assert caught and not caught.startswith(("NameError", "SyntaxError")), (mistake, caught)


def test_the_instructors_page_lists_every_task_with_its_level_and_points():
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (\d+) \|", (HERE / "docs/teaching.md").read_text(), re.M)
    assert rows == [(name, task.level, str(len(task.tests))) for name, task in TASKS.items()]


# ---- --blank --------------------------------------------------------------------------------------------------------
def test_a_blank_is_signature_docstring_and_nothing_else(capsys):
    main(["--blank", "all"])
    text = capsys.readouterr().out
    exec(compile(text, "maelm.py", "exec"), {"__name__": "maelm"})  # the student's file can be imported
    for name in TASKS:
        (ours, i), (theirs, j) = (locate(ast.parse(t).body, name) for t in (source_of(name), text))
        docstring, body = theirs[j].body
        assert ast.dump(theirs[j].args) == ast.dump(ours[i].args)
        assert ast.get_docstring(theirs[j]) == ast.get_docstring(ours[i])
        assert body.lineno == docstring.end_lineno + 1 and ast.unparse(body) == "raise NotImplementedError"
    main(["--blank", "corrupt", "Encoder"])
    assert capsys.readouterr().out == blanked(blanked((HERE / "maelm.py").read_text(), "corrupt"), "Encoder.forward")


# ---- --grade --------------------------------------------------------------------------------------------------------
def test_an_untouched_file_is_not_attempted(tmp_path, capsys):
    (tmp_path / "maelm.py").write_text(student_file(TASKS))
    with pytest.raises(SystemExit) as end:
        main(["--grade", str(tmp_path / "maelm.py")])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 1 and lines == [f"{name} 0/{len(TASKS[name].tests)} not attempted" for name in TASKS]


def grade(path, *flags):
    done = subprocess.run([sys.executable, HERE / "test_maelm.py", "--grade", path, "--json", *flags],
                          capture_output=True, text=True, timeout=300)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_reference_has_full_marks(tmp_path):
    (tmp_path / "solved.py").write_text(student_file(TASKS, change=lambda text, name: text))
    code, points, _ = grade(tmp_path / "solved.py", "--time-limit", "60")
    assert list(points) == list(TASKS) and {one["status"] for one in points.values()} == {"full marks"} and code == 0


HOSTILE = [  # (task, body, message)
    ("learning_rate_factor", "while True: print('x' * 1000)", "ends_at_the_peak: time limit"),
    ("tau_rank", "raise SystemExit(0)", "SystemExit: 0"),
    ("matthews", "return matthews(predicted, true)", "RecursionError"),
    ("relative_bucket", "return torch.ones(1 << 36)", "allocate"),
    ("attention", "import os; os._exit(0)", "the process died"),
    ("MAELM.decoder_input", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "the process died"),
    ("MAELM.forward", "import subprocess, sys; subprocess.run(['sleep', '1000'])", "time limit"),
]


def test_nothing_that_a_student_writes_can_break_the_grader(tmp_path):
    text = "raise RuntimeError('the file is read, not run')\n" + student_file(TASKS)
    for name, body, _ in HOSTILE:
        statements, at = locate(ast.parse(text).body, name)
        node, lines = statements[at].body[1], text.splitlines()
        lines[node.lineno - 1] = " " * node.col_offset + body
        text = "\n".join(lines)
    (tmp_path / "hostile.py").write_text(text)
    code, points, errors = grade(tmp_path / "hostile.py", "--time-limit", "3")
    assert code == 1 and errors == "" and list(points) == list(TASKS)
    for name, _, message in HOSTILE:
        assert points[name]["passed"] == 0 and message in points[name]["messages"][0], (name, points[name])
    assert points["corrupt"]["status"] == "not attempted"


def test_helpers_imports_and_methods_of_the_student_come_along():
    text = blank_but("relative_bucket").replace('''from dataclasses import''', '''import bisect as search
from dataclasses import''')
    statements, at = locate(ast.parse(text).body, "relative_bucket")
    text = text.replace(ast.get_source_segment(text, statements[at]), """
LIMIT = 10 ** 9


def one(r, half, exact, farthest):
    starts = [exact ** (half - exact - i) * farthest ** i for i in range(half - exact)]
    size = abs(r) if abs(r) < exact else exact - 1 + search.bisect(starts, min(LIMIT, abs(r)) ** (half - exact))
    return size + half * (r > 0)


def relative_bucket(distance, num_buckets, max_distance):
  half = num_buckets // 2
  return torch.tensor([one(r, half, half // 2, max_distance) for r in distance.flatten().tolist()]).view(distance.shape)


def unused(x=corrupt(None, None, None)):
    pass
""")
    assert not [wrong for _, wrong in results("relative_bucket", ast.parse(text)) if wrong]
    text = blank_but("MAELM.forward").replace("    def forward(self, tokens: Tensor, corruption: Corruption)", """
    def true_tokens(self, tokens, at):
        return tokens.gather(1, at).flatten()

    def forward(self, tokens: Tensor, corruption: Corruption)""")
    assert "tokens.gather(1, at).flatten())" in text
    text = text.replace("tokens.gather(1, at).flatten())", "self.true_tokens(tokens, at))")
    assert not [wrong for _, wrong in results("MAELM.forward", ast.parse(text)) if wrong]


@pytest.mark.parametrize("content, message", [
    (None, "No such file"), (b"def f(:\n", "not a Python file: invalid syntax"),
    (b"\xff\xfe\x00", "not a Python file: 'utf-8'"), (b"x = '\x00'", "not a Python file")])
def test_a_file_that_cannot_be_graded_is_named_in_one_line(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "student.py").write_bytes(content)
    line = fails(lambda: main(["--grade", str(tmp_path / "student.py")]), capsys)
    assert message in line and "student.py" in line


@pytest.mark.parametrize("flags, message", [
    ([], "required"), (["--blank", "corupt"], "'corupt' is not the name of one task: use all, or of "),
    (["--blank", "forward"], "'forward' is not"), (["--grade", __file__, "--only", "x"], "'x' is not the name")])
def test_a_bad_command_of_the_kit_gets_one_line(flags, message, capsys):
    assert message in fails(lambda: main(flags), capsys)
