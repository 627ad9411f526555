"""Claims about course/assign.py: what students get, and what their solutions are worth."""
import re
import subprocess
import sys

from course.assign import (HERE, TASKS, alone, blank, claims_of, find, functions_of, hand_out, main, source,
                           unsolved)
from tests.common import fails

OURS = {file: (HERE / file).read_text("utf-8") for file in TASKS.values()}


def solved(*names):
    """{file: its text} of a student who solved these tasks as we do, and no others."""
    texts = dict(OURS)
    for name, file in TASKS.items():
        if name not in names:
            texts[file] = unsolved(texts[file], name)
    return texts


def lines_of(text):
    """The lines of a text that say something, without comments."""
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    return {line for line in lines if len(line) >= 30}


# ---- What students get ----------------------------------------------------------------------------------------------
def test_the_handout_is_new_and_has_every_test_and_no_line_of_a_solution(tmp_path, capsys):
    hand_out(tmp_path / "homework")
    texts = {path.name: path.read_text() for path in (tmp_path / "homework").rglob("*") if path.is_file()}
    tests = texts["test_maelm.py"] + texts["test_homework.py"]
    given = lines_of("\n".join(texts.values()))
    for name, file in TASKS.items():
        for part in functions_of(name):
            solution = lines_of(source(OURS[file], part)) - lines_of(blank(OURS[file], part))
            assert solution & given == set()
            assert source(texts[file.rpartition("/")[2]], part) == blank(OURS[file], part)
        assert [test for test in claims_of(name) if f"def {test.partition('::')[2]}(" not in tests] == []
    assert not {"copying.py", "test_mistakes.py"} & texts.keys()
    assert "apply_masks" not in texts["fill_mask.py"]
    collected = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only"], cwd=tmp_path / "homework",
                               capture_output=True, text=True)
    assert f"{sum(len(claims_of(name)) for name in TASKS)} tests collected" in collected.stdout, collected.stdout
    assert "arxiv.org" in texts["assignment.md"] and "arxiv.org" in texts["README.md"]
    assert "name a new folder" in fails(lambda: main(["--handout", str(tmp_path)]), capsys)


def test_a_blank_file_can_be_compiled_and_a_wrong_name_is_refused(capsys):
    main(["--blank", "all"])
    text = capsys.readouterr().out
    compile(text, "maelm.py", "exec")
    assert text == solved("tau_rank")["maelm.py"]
    assert "MAELM.forward" in fails(lambda: main(["--blank", "forward"]), capsys)


def test_the_teachers_table_has_every_task_with_its_points():
    page = (HERE / "course/teaching.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| \w+ \| (\d+) \|", page, re.MULTILINE)
    assert rows == [(name, str(len(claims_of(name)))) for name in TASKS]


# ---- What solutions are worth ---------------------------------------------------------------------------------------
def test_our_solutions_of_the_others_complete_a_students_file():
    """So our own code, which passes test_maelm.py, gets full marks."""
    for name, file in TASKS.items():
        assert alone(solved(name)[file], name, OURS[file]) == OURS[file]


def test_a_students_indentation_and_helpers_stay():
    text = "class RelativeBias:\n\tdef forward(self):\n\t\treturn helper\n\n\n"
    text += source(solved()["maelm.py"], "corrupt")
    text += "\n\ndef helper():\n  return 1\n"
    found = alone(text, "MAELM.forward", OURS["maelm.py"])
    compile(found, "student.py", "exec")
    assert find(found, "helper")
    assert "NotImplementedError" not in found


def test_what_goes_wrong_in_a_task_costs_that_task_only(tmp_path, capsys):
    texts = solved("learning_rate_factor", "tau_rank", "attention", "Attention.forward", "corrupt")
    texts["support/metrics.py"] += "def broken(:\n"
    texts["rank.py"] += "torch.testing.assert_close = print\n"
    texts["train.py"] = "import missing\n" + texts["train.py"]
    wrong = texts["maelm.py"].replace("d_h ** -0.5", "d_h ** -1")
    wrong = wrong.replace("fewest = int(", "exit_now()\n    fewest = int(")
    texts["maelm.py"] = f"\ufeff{wrong}\n\ndef exit_now():\n    import os\n    os._exit(0)\n"
    (tmp_path / "support").mkdir()
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    expected = {
        "learning_rate_factor": "0/2 no report: it cannot be imported, takes over 60 s, or ends Python",
        "tau_rank": "0/2 the file names assert_close or pytest",
        "matthews": "0/2 cannot be read: invalid syntax (<unknown>, line",
        "effective_rank": "0/4 not attempted",
        "attention": "2/4 failed: test_attention_and_its_gradients_are_the_formulas",
        "Attention.forward": "3/3 full marks",
        "corrupt": "0/11 no report: it cannot be imported, takes over 60 s, or ends Python",
    }
    assert main(["--grade", str(tmp_path), "--only", *expected]) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    for line, (name, text) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"{name} {text}")
    assert total == "total 5/28"
