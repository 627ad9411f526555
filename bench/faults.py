"""Attacks the programs of this repository, and counts what survives.

    python bench/faults.py                             # all; prints a table, writes bench/results/faults.json
    python bench/faults.py flips inputs --seed 1 --out DIR

    kills    kill -9 at random moments; then the same command
    flips    a flipped bit or a cut tail in a file that the project wrote; then what reads it
    inputs   bad command lines and files: bench/inputs.txt
    folders  two programs in one folder, one cache made by three, folders that were changed or damaged
    disk     no space left, at each write; then the same command
    signals  SIGINT and SIGTERM at every stage, a closed pipe; then the same command

What is attacked, and what the outcomes mean, is in world.py. What can be is done in this process, by calling main().
"""
import argparse
import functools
import itertools
import platform
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

try:
    import resource  # not on Windows
except ImportError:
    resource = None

import torch
from tqdm import tqdm
from world import (GOOD, HERE, Ended, Victim, call, contents, copy_of, has, outcome, result_of, step, then,
                   undisturbed, world)

from data import Parser, write_json


class Row(NamedTuple):
    """One attack."""
    attack: str
    kind: str
    what: str
    outcome: str
    says: str  # the last line of stderr


def row(attack: str, kind: str, what: str, found: str, ended: Ended) -> Row:
    """A Row, with what the program said."""
    said = ended.err.strip().splitlines() or [""]
    return Row(attack, kind, what, found, said[-1][:300])


# ---- 1. kills ----------------------------------------------------------------------------------------------------
class Kill(NamedTuple):
    """What is killed."""
    kind: str
    times: int
    change: str  # go | slow
    command: str
    folder: str  # of the result
    processes: int = 1


LONGER = "--max-steps 30 --checkpoint-interval 2 --keep-checkpoints 2 --eval-interval 5"
KILLS = [
    Kill("in training", 20, "go", f"train {LONGER}", "new"),
    Kill("in saving", 14, "slow", f"train {LONGER}", "new"),
    Kill("two processes of torchrun", 8, "go", f"train {LONGER}", "new", 2),
    Kill("in prepare", 9, "slow", "prepare", "new"),
    Kill("in a sweep", 9, "slow", "tune --sweep --batch-size 8 --learning-rate 1e-3 --seeds 2", "new"),
]


@functools.cache
def timed(home: Path, case: Kill) -> tuple[float, dict]:
    """The seconds that a command takes, and its result."""
    with copy_of(home):
        victim = Victim(case.change, "start", case.command, case.processes)
        victim.ready()
        start = time.perf_counter()
        ended = victim.end()
        if ended.code:
            raise RuntimeError(f"{case.command}: {ended.err}")
        return time.perf_counter() - start, result_of(case.folder, ended)


def kill(home: Path, case: Kill, draw: random.Random) -> list[Row]:
    """Kill a command at a random moment, then give it again."""
    seconds, wanted = timed(home, case)
    alive = False
    while not alive:  # or it had ended before
        with copy_of(home):
            victim = Victim(case.change, "start", case.command, case.processes)
            victim.ready()
            moment = draw.uniform(0, seconds)
            time.sleep(moment)
            ids = victim.ids[-1:] if draw.random() < 0.5 else victim.ids  # of torchrun: one process, or all
            alive = victim.kill(ids)
            victim.end()
            if case.processes == 1:
                ended = call(case.command)
            else:
                ended = Victim("go", "start", case.command, case.processes).end()
            right = has(result_of(case.folder, ended), wanted)
    if case.processes > 1 and ended.code == 0:
        ended = ended._replace(err="")  # torchrun itself has remarks
    found = outcome(ended, right)
    if found == "refused":
        found = "UNCLEAR"
    return [row("kills", case.kind, f"{moment:.2f} of {seconds:.2f} s", found, ended)]


def kill_cases() -> list[Kill]:
    """Each kind as often as it says."""
    return [case for case in KILLS for _ in range(case.times)]


# ---- 2. flips ----------------------------------------------------------------------------------------------------
class Reader(NamedTuple):
    """A command, the folder of its result ("" = what it prints), and the files that it reads."""
    kind: str
    command: str
    folder: str
    files: tuple[str, ...]  # some with a * for a name that is a hash


RUN = ("run/config.json", "run/tokenizer.json", "run/step_0000006.pt")
TUNED = ("tuned/config.json", "tuned/tokenizer.json", "tuned/encoder.pt")
SHARDS = ("shards/meta.json", "shards/tokenizer.json", "shards/train-00000.npy", "shards/train-00001.npy",
          "shards/val-00000.npy")
READERS = [
    Reader("train.py continues", "train --out half --checkpoint-interval 1", "half",
           ("half/config.json", "half/tokenizer.json", "half/log.jsonl", "half/step_0000002.pt",
            "half/step_0000003.pt")),
    Reader("train.py, finished", "train --out run", "run", ("run/config.json", "run/step_0000006.pt")),
    Reader("train.py on shards", "train --batch-size 64", "new", SHARDS),
    Reader("train.py --fill-mask", "train --fill-mask 'the cat [MASK] a tree.' --init run", "", RUN),
    Reader("data.py prepare continues", "prepare --out begun", "begun",
           ("begun/progress.json", "begun/tokenizer.json", "begun/train-00000.npy")),
    Reader("data.py prepare, finished", "prepare --out shards", "shards", SHARDS),
    Reader("data.py verify", "verify --out shards", "", SHARDS),
    Reader("rank.py RUN", "rank run", "new", RUN),
    Reader("rank.py CHECKPOINT", "rank run/step_0000003.pt", "new", ("run/step_0000003.pt", "run/tokenizer.json")),
    Reader("rank.py FINE-TUNED", "rank tuned", "new", TUNED),
    Reader("rank.py on shards", "rank run --data shards", "new", SHARDS[:2] + SHARDS[4:]),
    Reader("rank.py again", "rank run --out ranks", "ranks", ("ranks/rank.json", "ranks/rank.csv")),
    Reader("finetune.py RUN", "tune", "new", RUN),
    Reader("finetune.py FINE-TUNED", "tune --init tuned", "new", TUNED),
    Reader("finetune.py again", "tune --out tuned", "tuned",
           ("tuned/config.json", "tuned/sweep.jsonl", "tuned/result.json", "tuned/before.json",
            "tuned/.kept/*/kept.json", "tuned/.kept/*/encoder.pt")),
    Reader("finetune.py --figure3", "tune --figure3 run/step_0000003.pt run/step_0000006.pt", "new",
           ("run/step_0000003.pt", "run/tokenizer.json")),
]
FLIPS = 600


def flip_cases() -> list[tuple[Reader, str]]:
    """(reader, file) in turns, 600."""
    pairs = [(reader, file) for reader in READERS for file in reader.files]
    return list(itertools.islice(itertools.cycle(pairs), FLIPS))


def flipped(raw: bytes, draw: random.Random) -> tuple[bytes, str]:
    """A flipped bit, anywhere or near an end where headers are, or a cut tail."""
    kind = draw.choice(("bit", "bit", "start", "end", "tail"))
    if kind == "tail":
        size = draw.randrange(len(raw))
        return raw[:size], f"cut off after {size} bytes"
    first, last = 0, len(raw)
    if kind == "start":
        last = min(last, 300)
    if kind == "end":
        first = max(first, last - 300)
    at, bit = draw.randrange(first, last), draw.randrange(8)
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1:], f"bit {bit} of byte {at}"


def flip(home: Path, case: tuple[Reader, str], draw: random.Random) -> list[Row]:
    """Flip a bit of a file, then read it."""
    reader, file = case
    wanted = undisturbed(home, reader.command, reader.folder)
    with copy_of(home):
        path = next(Path().glob(file))
        raw, what = flipped(path.read_bytes(), draw)
        path.write_bytes(raw)
        before = contents()
        ended = call(reader.command)
        right = has(result_of(reader.folder, ended), wanted)
        found = outcome(ended, right, lost=bool(before - contents()))
    return [row("flips", reader.kind, f"{file}: {what}", found, ended)]


# ---- 3. inputs ---------------------------------------------------------------------------------------------------
def input_cases() -> list[tuple[str, str]]:
    """(kind, line) of inputs.txt: lines `[kind]`, and below each the lines of that kind."""
    found = []
    for line in (HERE / "inputs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            kind = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append((kind, line))
    return found


def give_input(home: Path, case: tuple[str, str], draw: random.Random) -> list[Row]:
    """Give a bad input: it has to be refused."""
    kind, line = case
    with copy_of(home):
        command = step(line)
        before = contents()
        ended = call(command)
        found = outcome(ended, right=False, lost=bool(before - contents()))
    return [row("inputs", kind, line, found, ended)]


# ---- 4. folders ---------------------------------------------------------------------------------------------
class Holder(NamedTuple):
    """A command that is at work in the folder `new`, at a place in its code, while others want to work there."""
    kind: str
    command: str
    place: str
    rivals: tuple[str, ...]


class Race(NamedTuple):
    """Commands that start at the same moment. All have to end well, or at least one; of unequal ones just one."""
    kind: str
    commands: tuple[tuple[str, str], ...]  # (command, folder of its result)
    all_end: bool


class Change(NamedTuple):
    """A line of steps, the last of which has to be refused, or to have the result of an undisturbed command."""
    kind: str
    line: str
    folder: str = ""  # of the result; "" = is refused
    like: str = ""  # the undisturbed command; of another folder: `new`
    files: tuple[str, ...] = ()  # of the result; () = all
    stays: str = ""  # a file that must not be changed


TRAIN, PREPARE, TUNE, RANK = "train", "prepare", "tune", "rank run"
RUNS = "train --data text.txt"
HALF = "train --out half --checkpoint-interval 1"
FOLDERS = [
    Holder("while train.py works", TRAIN, "train.train_step", ("train --seed 1", TRAIN, PREPARE, TUNE, RANK)),
    Holder("while prepare works", PREPARE, "data.write_shards", (TRAIN, TUNE, RANK, "prepare --no-uncased")),
    Holder("while finetune.py works", TUNE, "finetune.train", ("tune --seq-len 12", TRAIN, PREPARE, RANK)),
    Race("two equal commands", ((TRAIN, "new"), (TRAIN, "new")), False),
    Race("two equal commands", ((PREPARE, "new"), (PREPARE, "new")), False),
    Race("two equal commands", (("tune --seeds 4", "new"), ("tune --seeds 4", "new")), True),
    Race("two equal commands", ((RANK, "new"), (RANK, "new")), True),
    Race("two other commands", ((TRAIN, "new"), ("train --seed 1", "new")), False),
    Race("two other commands", ((PREPARE, "new"), ("prepare --no-uncased", "new")), False),
    Race("two other commands", ((TUNE, "new"), ("tune --seq-len 12", "new")), False),
    Race("two other commands", ((TRAIN, "new"), (PREPARE, "new")), False),
    Race("two other commands", ((TRAIN, "new"), (TUNE, "new")), False),
    Race("a cold cache, three processes", tuple((f"{RUNS} --out {name}", name) for name in "abc"), True),
    Change("the text was edited", f"{RUNS} --stop-at 3 ; text.txt=@more ; {RUNS}"),
    Change("prepared again, in another way",
           "prepare --out again ; train --data again --stop-at 3 ; again=@gone ; prepare --out again --no-uncased ; "
           "train --data again"),
    Change("prepared again, of another text",
           "prepare --out again ; train --data again --stop-at 3 ; again=@gone text.txt=@more ; prepare --out again ; "
           "train --data again"),
    Change("a checkpoint of the user's own",
           f"half/step_best.pt=<half/step_0000001.pt ; {HALF} --keep-checkpoints 1",
           "half", f"{HALF} --keep-checkpoints 1", stays="half/step_best.pt"),
    Change("the newest checkpoint is damaged", f"half/step_0000003.pt=@cut ; {HALF}", "half", HALF),
    Change("the two newest are damaged", f"half/step_0000003.pt=@flip half/step_0000002.pt=@cut ; {HALF}",
           "half", HALF),
    Change("all are damaged",
           f"half/step_0000003.pt=@flip half/step_0000002.pt=@cut half/step_0000001.pt='' ; {HALF}"),
    Change("the log was deleted", f"half/log.jsonl=@gone ; {HALF}"),
    Change("a checkpoint of another run", f"half/step_0000003.pt=<other/step_0000003.pt ; {HALF}"),
    Change("a lost shard comes back", "shards/train-00001.npy=@gone ; prepare --out shards", "shards", "prepare"),
    Change("a lost shard of half a corpus comes back", "begun/train-00000.npy=@gone ; prepare --out begun", "begun",
           "prepare"),
    Change("a damaged shard comes back", "shards/val-00000.npy=@flip ; prepare --out shards", "shards", "prepare"),
    Change("a damaged tokenizer comes back", "shards/tokenizer.json=@cut ; prepare --out shards", "shards", "prepare"),
    Change("other numbers of epochs into one folder",
           "tune --out t ; tune --out t --epochs 2 ; tune --out t", "t", "tune --out t",
           ("result.json", "encoder.pt")),
    Change("a lost encoder comes back", "tuned/encoder.pt=@gone ; tune --out tuned", "tuned", "tune --out tuned"),
    Change("a lost result comes back", "tuned/result.json=@gone ; tune --out tuned", "tuned", "tune --out tuned"),
    Change("a lost last line comes back", "tuned/sweep.jsonl=@lastline ; tune --out tuned", "tuned",
           "tune --out tuned"),
]


def attack_folder(home: Path, case: Holder | Race | Change, draw: random.Random) -> list[Row]:
    """Work in a folder in which another program works, or has worked."""
    with copy_of(home):
        return {Holder: hold, Race: race, Change: change}[type(case)](home, case)


def hold(home: Path, case: Holder) -> list[Row]:
    """Each rival has to be refused, or to wait; and the first has to end well."""
    rows = []
    first = Victim("wait", case.place, case.command)
    if not first.ready():
        return [row("folders", case.kind, case.command, "UNCLEAR", first.end())]
    for rival in case.rivals:
        before = contents()
        end_waiting = threading.Timer(5, first.go)  # who waits is the last of the rivals
        end_waiting.start()
        ended = call(rival)
        end_waiting.cancel()
        # Only the same command has something to wait for.
        right = rival == case.command and has(result_of("new", ended), undisturbed(home, rival, "new"))
        found = outcome(ended, right, lost=first.waits and bool(before - contents()))
        rows.append(row("folders", case.kind, rival, found, ended))
    first.go()
    ended = first.end()
    found = outcome(ended, has(result_of("new", ended), undisturbed(home, case.command, "new")))
    return [*rows, row("folders", case.kind, "its own result", found, ended)]


def race(home: Path, case: Race) -> list[Row]:
    """Start the commands together. Who ends well must have left the right result."""
    victims = [Victim("wait", "start", command) for command, _ in case.commands]
    for victim in victims:
        victim.ready()
    for victim in victims:
        victim.go()
    rows = []
    for victim, (command, folder) in [*zip(victims, case.commands)]:
        ended = victim.end()
        for other in victims:
            other.process.wait()
        right = has(result_of(folder, ended), undisturbed(home, command, folder))
        found = outcome(ended, right)
        if found == "refused" and case.all_end:
            found = "UNCLEAR"
        rows.append(row("folders", case.kind, command, found, ended))
    well = sum(one.outcome != "refused" for one in rows)
    if well == 0 or (well > 1 and not case.all_end and len(set(case.commands)) > 1):
        return [one._replace(outcome="WRONG") for one in rows]
    return rows


def change(home: Path, case: Change) -> list[Row]:
    """Do the steps, and judge the last."""
    command = step(case.line)
    before, kept = contents(), Path(case.stays).read_bytes() if case.stays else b""
    ended = call(command)
    if case.folder:
        wanted = undisturbed(home, case.like, case.folder if case.folder in case.like else "new")
        wanted = {name: value for name, value in wanted.items() if name in case.files or not case.files}
        found = outcome(ended, has(result_of(case.folder, ended), wanted))
        if found == "refused":
            found = "UNCLEAR"
    else:
        found = outcome(ended, right=False, lost=bool(before - contents()))
    if case.stays and Path(case.stays).read_bytes() != kept:
        found = "LOST"
    return [row("folders", case.kind, case.line, found, ended)]


# ---- 5. disk ------------------------------------------------------------------------------------------------
WRITERS = [("train", "new"), (HALF, "half"), ("prepare", "new"), ("prepare --out begun", "begun"), ("tune", "new"),
           ("rank run", "new")]
SIZES = (0, 700, 3_000, 20_000, 100_000)  # bytes that a file may have


def disk_cases() -> list[tuple[str, str, str, int]]:
    """(command, folder, fsync | size, number): the fsync that fails, or the largest file."""
    faults = [("fsync", number) for number in range(1, 7)]
    if resource:
        faults += [("size", size) for size in SIZES]
    return [(*writer, *fault) for writer in WRITERS for fault in faults]


def failing(number: int) -> Callable:
    """An fsync that fails from its `number`-th call on."""
    calls = itertools.count(1)

    def fsync(file: int) -> None:
        if next(calls) >= number:
            raise OSError(28, "No space left on device")
    return fsync


def limited(command: str, size: int) -> Ended:
    """Run a command that may not write a file of more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        return call(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk(home: Path, case: tuple, draw: random.Random) -> list[Row]:
    """Give a command when the disk is full, then when it is not."""
    command, folder, fault, number = case
    with copy_of(home):
        before = contents()
        if fault == "size":
            ended = limited(command, number)
        else:
            with mock.patch("os.fsync", failing(number)):
                ended = call(command)
        right = ended.code == 0 and has(result_of(folder, ended), undisturbed(home, command, folder))
        found = outcome(ended, right, lost=bool(before - contents()) and folder == "new")
        again, last = then(home, command, folder)
    if found in GOOD:
        found = found if again in GOOD else again
        ended = ended if again in GOOD else last
    return [row("disk", fault, f"{command}: {number}", found, ended)]


# ---- 6. signals ---------------------------------------------------------------------------------------------
COLD = f"{RUNS} --val-share 0.3"
STAGES = [  # command, the function at whose start the signal comes
    (COLD, "data.sample"), (COLD, "data.write_shards"), ("train", "train.evaluate"), ("train", "train.train_step"),
    ("train", "train.save_checkpoint"), ("train", "train.draw_loss"), ("train", "train.examples"),
    ("prepare", "data.sample"), ("prepare", "data.write_shards"), ("rank run", "rank.stream"),
    ("rank run", "rank.write_csv"), ("rank run", "rank.draw"), ("tune", "finetune.read_task"),
    ("tune", "finetune.train"), ("tune", "finetune.predict"), ("tune", "finetune.keep_files"),
    ("tune", "finetune.append_line"), ("tune", "finetune.publish")]
PIPED = ("train", "prepare", "rank run", "tune")


def signal_cases() -> list[tuple[str, str, int]]:
    """(command, place, signal); signal 0: what reads its output ends."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    return [(*stage, int(number)) for stage in STAGES for number in numbers] + [(name, "start", 0) for name in PIPED]


def send_signal(home: Path, case: tuple, draw: random.Random) -> list[Row]:
    """Interrupt a command, then give it again."""
    command, place, number = case
    with copy_of(home):
        victim = Victim(str(number or "go"), place, command)
        if not number:
            victim.ready()
            victim.process.stdout.close()
        ended = victim.end()
        short = "Traceback" not in ended.err and len(ended.err.strip().splitlines()) <= 1
        if number:
            told = "continue" in ended.out + ended.err and ended.code == 128 + number
        else:
            told = ended.code in (0, 141)  # there was nobody to tell
        found, last = then(home, command, "new")
    if found in GOOD:
        found = "refused" if short and told else outcome(ended, right=False, code=-1)
        last = ended
    name = f"signal {number}" if number else "closed pipe"
    return [row("signals", name, f"{command}: {place}", found, last)]


# ---- 7. The table -------------------------------------------------------------------------------------------
ATTACKS = {  # cases, and what does one of them
    "kills": (kill_cases, kill),
    "flips": (flip_cases, flip),
    "inputs": (input_cases, give_input),
    "folders": (lambda: FOLDERS, attack_folder),
    "disk": (disk_cases, fill_disk),
    "signals": (signal_cases, send_signal),
}


def attack(name: str, home: Path, seed: int = 0, most: int | None = None) -> list[Row]:
    """All rows of an attack, or those of at most so many of its cases, drawn at random."""
    make_cases, one = ATTACKS[name]
    cases = make_cases()
    count = min(most or len(cases), len(cases))
    chosen = sorted(random.Random(seed).sample(range(len(cases)), count))
    rows = []
    for number in tqdm(chosen, name, disable=None):
        case = cases[number]
        try:
            rows += one(home, case, random.Random(f"{seed} {number}"))
        except (RuntimeError, OSError) as error:  # a mistake in the tables, or in an undisturbed command
            rows.append(Row(name, "undisturbed", str(case)[:200], "TRACEBACK", str(error)[-300:]))
    return rows


def as_table(rows: list[Row]) -> str:
    """What was tried, how often, what survived; in Markdown."""
    lines = ["| attack | | tried | survived | outcomes |", "|---|---|---|---|---|"]
    groups = {}
    for one in rows:
        kind = one.kind
        if one.attack == "inputs":
            kind = kind.split(":")[0]  # the program; its kinds are many
        groups.setdefault((one.attack, kind), []).append(one.outcome)
    for (name, kind), outcomes in groups.items():
        found = Counter(outcomes)
        survived = sum(found[good] for good in GOOD)
        shown = ", ".join(f"{count} {one}" for one, count in found.most_common())
        lines.append(f"| {name} | {kind} | {found.total()} | {survived} | {shown} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/faults.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)} [all]")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments and bits [0]")
    parser.add_argument("--most", type=int, help="at most so many cases of each attack [all]")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for faults.json [bench/results]")
    options = parser.parse_args(argv)
    unknown = [name for name in options.attacks if name not in ATTACKS]
    if unknown:
        parser.error(f"{unknown[0]}: no such attack; there are {', '.join(ATTACKS)}")
    start, rows = time.perf_counter(), []
    with world() as home:
        for name in options.attacks or ATTACKS:
            rows += attack(name, home, options.seed, options.most)
    bad = [one for one in rows if one.outcome not in GOOD]
    for one in bad:
        print(f"{one.outcome}: {one.attack}, {one.kind}: {one.what}\n    {one.says}")
    print(as_table(rows))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    write_json(options.out / "faults.json", {
        "commit": commit.stdout.strip(), "machine": platform.platform(), "torch": torch.__version__,
        "seed": options.seed, "seconds": round(time.perf_counter() - start), "tried": len(rows),
        "survived": len(rows) - len(bad), "table": as_table(rows).splitlines(), "bad": [one._asdict() for one in bad]})


if __name__ == "__main__":
    main()
