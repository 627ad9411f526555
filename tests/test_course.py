"""Claims about course/assign.py: what students get, and what their solutions are worth."""
import re
import subprocess
import sys

from course.assign import (HERE, TASKS, alone, blank, claims_of, find, functions_of, hand_out, main, read, source,
                           unsolved, write)
from tests.common import fails

FILES = sorted({file for file, *_ in TASKS.values()})


def solved(*names):
    """{file: its text} of a student who solved these tasks as we do, and no others."""
    texts = {file: read(HERE / file) for file in FILES}
    for name, (file, *_) in TASKS.items():
        if name not in names:
            texts[file] = unsolved(texts[file], name)
    return texts


def lines_of(text):
    """The lines of a text that say something, without comments."""
    lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
    return {line for line in lines if len(line) >= 30}


# ---- What students get ----------------------------------------------------------------------------------------------
def test_the_handout_has_every_test_and_no_line_of_a_solution(tmp_path):
    hand_out(tmp_path / "homework")
    texts = {path.name: read(path) for path in (tmp_path / "homework").rglob("*") if path.is_file()}
    tests = texts["test_maelm.py"] + texts["test_homework.py"]
    given = lines_of("\n".join(texts.values()))
    for name, (file, *_) in TASKS.items():
        ours = read(HERE / file)
        for part in functions_of(name):
            solution = lines_of(source(ours, part)) - lines_of(blank(ours, part))
            assert solution & given == set()
            assert source(texts[file.rpartition("/")[2]], part) == blank(ours, part)
        assert [test for test in claims_of(name) if f"def {test.partition('::')[2]}(" not in tests] == []
    for hint in ("catches(", "svd_ranks"):
        assert hint not in tests + texts["conftest.py"]
    assert "corrupt" not in texts["fill_mask.py"]
    collected = subprocess.run([sys.executable, "-m", "pytest", "-q", "--collect-only"], cwd=tmp_path / "homework",
                               capture_output=True, text=True)
    assert f"{sum(len(claims_of(name)) for name in TASKS)} tests collected" in collected.stdout, collected.stdout
    assert "arxiv.org" in texts["assignment.md"] and "arxiv.org" in texts["README.md"]


def test_a_handout_needs_a_new_folder(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert "name a new folder" in fails(lambda: main(["--handout", str(tmp_path)]), capsys)


def test_a_blank_file_can_be_compiled_and_a_wrong_name_is_refused(capsys):
    main(["--blank", "all"])
    assert capsys.readouterr().out == solved("tau_rank")["maelm.py"]
    main(["--blank", "effective_rank", "tau_rank"])
    text = capsys.readouterr().out
    compile(text, "rank.py", "exec")
    assert text == solved()["rank.py"]
    assert "MAELM.forward" in fails(lambda: main(["--blank", "forward"]), capsys)


def test_the_teachers_table_has_every_task_with_its_points_and_hours():
    rows = re.findall(r"^\| `(\S+)` \| (\w+) \| (\d+) \| (\S+) \|", read(HERE / "course/teaching.md"), re.MULTILINE)
    expected = [(name, level, str(len(claims_of(name))), str(hours)) for name, (_, level, hours) in TASKS.items()]
    assert rows == expected


# ---- What solutions are worth ---------------------------------------------------------------------------------------
def test_our_solutions_of_the_others_complete_a_students_file():
    """So our own code, which passes test_maelm.py, gets full marks."""
    for name, (file, *_) in TASKS.items():
        ours = read(HERE / file)
        assert alone(solved(name)[file], name, ours) == ours


def test_a_students_indentation_and_helpers_stay():
    text = "class RelativeBias:\n\tdef forward(self):\n\t\treturn helper\n\n\n"
    text += source(solved()["maelm.py"], "corrupt")
    text += "\n\ndef helper():\n  return 1\n"
    found = alone(text, "MAELM.forward", read(HERE / "maelm.py"))
    compile(found, "student.py", "exec")
    assert find(found, "helper")
    assert "NotImplementedError" not in found


def test_what_goes_wrong_in_a_task_costs_that_task_only(tmp_path, capsys):
    texts = solved("tau_rank", "attention", "Attention.forward", "corrupt")
    texts["support/metrics.py"] += "def broken(:\n"
    texts["rank.py"] += "torch.testing.assert_close = print\n"
    wrong = texts["maelm.py"].replace("d_h ** -0.5", "d_h ** -1")
    wrong = wrong.replace("n, k = tokens", "exit_now()\n    n, k = tokens")
    texts["maelm.py"] = f"\ufeff{wrong}\n\ndef exit_now():\n    import os\n    os._exit(0)\n"
    for file, text in texts.items():
        write(tmp_path / file, text)
    expected = {
        "tau_rank": "0/2 no report: it cannot be imported, takes over 60 s, ends Python",
        "matthews": "0/2 cannot be read: invalid syntax (<unknown>, line",
        "effective_rank": "0/4 not attempted",
        "attention": "2/4 failed: test_attention_and_its_gradients_are_the_formulas",
        "Attention.forward": "3/3 full marks",
        "corrupt": "0/9 no report: it cannot be imported, takes over 60 s, ends Python",
    }
    assert main(["--grade", str(tmp_path), "--only", *expected]) == 1
    *lines, total = capsys.readouterr().out.splitlines()
    for line, (name, text) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"{name} {text}")
    assert total == "total 5/24"
