"""What bench/faults.py attacks survives, in a short form; and the attacks notice what does not."""
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import rank
from conftest import HERE

sys.path.insert(0, str(HERE / "bench"))
import faults  # noqa: E402
import world  # noqa: E402


@pytest.fixture(scope="module")
def home():
    """The small world."""
    with world.world() as home:
        yield home


def bad(rows):
    """The rows that did not survive, for print."""
    assert rows
    return "\n".join(map(str, (row for row in rows if row.outcome not in world.GOOD)))


# ---- The programs ---------------------------------------------------------------------------------------------------
def test_what_is_killed_ends_with_the_same_weights_when_the_command_is_given_again(home):
    assert not bad(faults.attack("kills", home, most=2))


def test_no_flipped_bit_gives_another_result(home):
    assert not bad(faults.attack("flips", home, seed=1, most=48))


def test_every_bad_input_is_refused_in_one_line_and_nothing_is_lost(home):
    assert not bad(faults.attack("inputs", home, most=60))


@pytest.mark.parametrize("kind", [case.kind for case in faults.FOLDERS if isinstance(case, faults.Change)])
def test_a_folder_that_was_changed_is_refused_or_mended(kind, home):
    case = next(case for case in faults.FOLDERS if case.kind == kind)
    assert not bad(faults.attack_folder(home, case, None))


def test_nobody_works_in_the_folder_of_another_program(home):
    assert not bad(faults.attack_folder(home, faults.FOLDERS[0], None))


def test_three_processes_share_a_cold_cache(home):
    case = next(case for case in faults.FOLDERS if case.kind.startswith("a cold cache"))
    assert not bad(faults.attack_folder(home, case, None))


def test_a_full_disk_is_one_line_and_no_loss(home):
    assert not bad(faults.attack("disk", home, most=12))


def test_a_signal_is_one_line_and_the_same_command_continues(home):
    assert not bad(faults.attack("signals", home, most=3))


# ---- The attacks ----------------------------------------------------------------------------------------------------
def test_the_table_of_inputs_has_every_command_and_at_most_five_of_a_kind():
    cases = faults.input_cases()
    assert len(cases) == len({line for _, line in cases}) >= 200
    assert max(Counter(kind for kind, _ in cases).values()) <= 5
    commands = {line.split(" ; ")[-1].split()[0] for _, line in cases}
    assert commands == set(world.COMMANDS)


def test_flips_reach_every_file_that_the_programs_read():
    cases = faults.flip_cases()
    assert len(cases) == 600
    names = {Path(file).name for _, file in cases}
    assert names >= {"config.json", "tokenizer.json", "log.jsonl", "step_0000003.pt", "train-00000.npy", "val-00000.npy",
                     "meta.json", "progress.json", "encoder.pt", "result.json", "sweep.jsonl", "rank.json"}


def refusal(*lines, code=2):
    """The end of a program that refuses."""
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(code)


def another_rank():
    path = Path("new/rank.json")
    path.write_text(path.read_text().replace("32", "31"))


def overwritten():
    Path("run/config.json").write_text("{}")
    refusal("rank.py: no")


@pytest.mark.parametrize("mistake, outcome", [
    (lambda: None, "harmless"), (another_rank, "WRONG"), (lambda: {}["config"], "TRACEBACK"),
    (lambda: refusal("rank.py: no"), "refused"), (lambda: refusal("no", "no"), "UNCLEAR"), (refusal, "UNCLEAR"),
    (lambda: refusal("rank.py: no", code=1), "UNCLEAR"), (overwritten, "LOST")],
    ids=["nothing", "another number", "traceback", "refusal", "two lines", "no line", "another code", "overwritten"])
def test_the_attacks_notice(mistake, outcome, home, monkeypatch):
    reader = faults.Reader("a program with a mistake", "rank run", "new", ("text.txt",))
    world.undisturbed(home, reader.command, reader.folder)
    main = rank.main

    def wrong(arguments):
        main(arguments)
        mistake()
    monkeypatch.setattr(rank, "main", wrong)
    monkeypatch.setattr(faults, "flipped", lambda raw, draw: (raw, "nothing is flipped"))
    rows = faults.flip(home, (reader, "text.txt"), None)
    assert [row.outcome for row in rows] == [outcome]


def test_the_attacks_notice_a_result_that_a_flipped_bit_changed(home, monkeypatch):
    def damaged(raw, draw):
        return raw.replace(b"cat", b"dog"), "another word"
    monkeypatch.setattr(faults, "flipped", damaged)
    reader = faults.Reader("a text", "rank run", "new", ("text.txt",))
    rows = faults.flip(home, (reader, "text.txt"), None)
    assert [row.outcome for row in rows] == ["WRONG"]


def test_the_attacks_notice_an_input_that_is_accepted(home):
    rows = faults.give_input(home, ("nothing is wrong", "rank run --tau 0.5"), None)
    assert [row.outcome for row in rows] == ["WRONG"]


def test_the_documented_table_is_the_recorded_one():
    recorded = json.loads((HERE / "bench/results/faults.json").read_text())
    documented = (HERE / "docs/faults.md").read_text()
    assert "\n".join(recorded["table"]) in documented and f"commit {recorded['commit']}" in documented
    assert recorded["survived"] == recorded["tried"]
