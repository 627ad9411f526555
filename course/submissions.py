"""Submissions: a folder, an archive or a file, or a whole class of them, and the texts in them that are graded."""
import re
import shutil
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from course.hand_in import FILES, parts_in, written_in
from support.program.errors import printable

RESULTS = ("log.jsonl", "result.json")  # of a run folder
PROBLEM = "problem"
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
CANVAS = re.compile(r"^(.+?(?:_LATE)?_\d+)_\d+_.+")  # a file in a download from Canvas, such as anna_123_456_maelm.py
HOMEWORK_FILE = re.compile(r"(maelm|train|rank|metrics)[\W\d_]*\.py|log\.jsonl", re.IGNORECASE)  # also maelm (1).py


class Found(NamedTuple):
    """A text in a submission. Every file and folder also has an entry without a role."""
    place: tuple[str, ...]  # the names of the folders and archives that lead to it, and its own name
    role: str = ""  # the name in FILES whose functions the text contains, a name in RESULTS, or PROBLEM
    text: str = ""


def unpack(path: Path, folder: Path):
    """Unpack a zip or tar. Raises many types of errors if it is broken."""
    if not path.name.lower().endswith(".zip"):
        shutil.unpack_archive(path, folder, "tar", filter="data")
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            entry.filename = entry.filename.replace("\\", "/")  # as some programs on Windows separate folders
            archive.extract(entry, folder)


def texts_in(path: Path, place: tuple[str, ...] = ()) -> Iterator[Found]:
    """The texts in a file, or in a folder and in archives inside archives. Links are not followed, and hidden files,
    installed packages and our models are left out."""
    name = path.name.lower()
    if name in ("models", "site-packages", "__macosx") or name.startswith("."):
        return
    yield Found(place)
    if path.is_symlink() or not (path.is_dir() or path.is_file()):  # a pipe would wait
        return
    if path.is_dir():
        for entry in path.iterdir():
            yield from texts_in(entry, (*place, entry.name))
    elif name.endswith(ARCHIVES):
        with tempfile.TemporaryDirectory() as folder:
            try:
                unpack(path, Path(folder))
            except Exception as error:  # a broken archive must not stop a class
                yield Found(place, PROBLEM, f"cannot read all of it: {error}")
            yield from texts_in(Path(folder), place)
    elif name.endswith(".py"):
        text = path.read_text("utf-8-sig", "replace")
        yield from [Found(place, file, text) for file in FILES if not written_in(text).isdisjoint(parts_in(file))]
    else:
        yield from [Found(place, file, path.read_text("utf-8", "replace")) for file in RESULTS if name.endswith(file)]


def by_role(found: list[Found]) -> dict[str, str]:
    """The texts of one submission. If several have the same role, the one with the most functions counts or, of equals,
    the one with the shortest path."""
    def weight(each):
        functions = written_in(each.text).intersection(parts_in(each.role))
        return len(functions), -len("/".join(each.place))

    texts = {each.role: each.text for each in sorted(found, key=weight) if each.role}  # the last one stays
    return texts or {PROBLEM: "no Python file with a written function of the homework"}


def students_in(found: list[Found]) -> dict[str, list[Found]]:
    """The texts of each top entry by its name, after opening folders that hold only one entry. Files from Canvas belong
    to the student in their names."""
    inside = [each for each in found if each.place]
    while len({each.place[0] for each in inside}) == 1 and any(len(each.place) > 1 for each in inside):
        inside = [each._replace(place=each.place[1:]) for each in inside if len(each.place) > 1]
    students = defaultdict(list)
    for each in inside:
        students[CANVAS.sub(r"\1", each.place[0])].append(each)
    return students


def read_all(path: Path, as_one: bool) -> dict[str, dict[str, str]]:
    """The texts of a submission by its name or, for a class, of each student, in printable names. In a class, two
    students have the same file, and none is at the top, so code/ beside toy/ is no class; Canvas names the students."""
    path = path.resolve()
    found = [*texts_in(path)]
    students = students_in(found)
    from_canvas = any(CANVAS.match(each.place[0]) for theirs in students.values() for each in theirs)
    written = []  # the files of each student, one after another; a broken archive may have had any of them
    for theirs in students.values():
        roles = {each.role for each in theirs}
        written += FILES if PROBLEM in roles else roles.intersection(FILES)
    is_class = from_canvas or len(written) > len({*written})
    if as_one or not is_class or any(HOMEWORK_FILE.fullmatch(name) for name in students):
        return {printable(path.name): by_role(found)}
    return {printable(name): by_role(theirs) for name, theirs in sorted(students.items())}
