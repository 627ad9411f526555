"""Assignments: the tasks, and what a student's solution of them is worth. handout.py makes what students get.

    python test_maelm.py --blank all > student/maelm.py     # one file; --handout DIR: a whole folder
    python test_maelm.py --grade student/maelm.py           # a line for each task; --verbose: all that went wrong
    pytest --student=student/maelm.py -k corrupt            # the same tests by pytest itself

See docs/teaching.md.
"""
import ast
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple

import pytest

from files import Parser, UserError, clear_errors

try:
    import resource
except ImportError:  # Windows, where nothing limits the memory of a task
    resource = None

HERE = Path(__file__).resolve().parent
ANSWERS = HERE / "answers.pt"  # only in a folder that --handout made
MEMORY = 4 << 30  # bytes of data that a task's process may hold
OUTPUT = 16 << 20  # bytes that it may print
SHOWN = 10_000  # characters of what it printed that are reported
HEAD = "# Tasks: "  # of the line of a student's file that names what is to be written


# ---- The tasks ------------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """A function that students write: where it is, how hard it is, and its tests, one point each."""
    file: str
    level: str
    tested_in: str  # the module of its tests
    tests: tuple


TASKS = {  # function or Class.method: from easy to hard
    "learning_rate_factor": Task("train", "easy", "tests.test_train", (
        "test_warm_up_rises_in_equal_steps_and_ends_at_the_peak",
        "test_after_warm_up_the_rate_falls_linearly_to_zero",
        "test_without_warm_up_the_first_step_has_the_peak_rate",
    )),
    "tau_rank": Task("rank", "easy", "test_maelm", (
        "test_rank_is_the_smallest_k_whose_values_sum_to_tau",
        "test_equal_singular_values_count_exactly",
        "test_no_variance_has_rank_none",
        "test_tau_must_be_a_share",
    )),
    "matthews": Task("tasks", "easy", "tests.test_tasks", (
        "test_matthews_of_two_labels_is_the_textbook_formula",
        "test_matthews_is_one_for_equal_labels_and_zero_for_a_constant",
        "test_matthews_does_not_depend_on_the_names_of_the_labels",
        "test_matthews_of_three_labels_is_gorodkins",
    )),
    "effective_rank": Task("rank", "medium", "test_maelm", (
        "test_rank_is_exact_on_built_spectra",
        "test_a_gram_matrix_has_the_rank_of_its_matrix",
        "test_the_mean_is_not_subtracted",
        "test_rank_depends_on_the_spectrum_alone",
        "test_what_has_no_rank_is_refused",
    )),
    "relative_bucket": Task("maelm", "medium", "test_maelm", (
        "test_near_distances_have_buckets_of_their_own",
        "test_the_right_half_mirrors_the_left",
        "test_all_far_distances_share_the_last_bucket",
        "test_buckets_never_fall_with_distance_and_all_are_used",
        "test_relative_buckets_are_t5s",
    )),
    "attention": Task("maelm", "medium", "test_maelm", (
        "test_equal_keys_get_equal_weights",
        "test_a_key_hidden_by_the_bias_is_as_if_absent",
        "test_the_bias_is_of_query_then_key",
        "test_logits_are_divided_by_the_root_of_the_head_size",
        "test_attention_drops_weights_out",
        "test_attention_is_the_formula_in_float64_with_gradient_of_the_bias",
    )),
    "MAELM.decoder_input": Task("maelm", "medium", "test_maelm", (
        "test_kept_positions_get_their_representation_back",
        "test_every_gap_holds_the_mask_embedding",
        "test_the_mask_embedding_learns_from_every_gap",
        "test_the_decoder_input_has_the_precision_of_the_encoder",
        "test_decoder_input_is_the_two_case_formula",
    )),
    "MAELM.forward": Task("maelm", "medium", "test_maelm", (
        "test_loss_is_the_mean_negative_log_likelihood_over_masked_positions",
        "test_only_the_masked_tokens_are_targets",
        "test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary",
        "test_mlm_is_the_textbook_mlm",
        "test_a_uni_directional_decoder_predicts_all_tokens_but_the_first",
    )),
    "RelativeBias.forward": Task("maelm", "hard", "test_maelm", (
        "test_relative_bias_is_a_function_of_key_minus_query",
        "test_relative_bias_is_of_query_then_key_in_every_row",
        "test_one_row_of_positions_is_enough",
        "test_the_gradient_of_a_bias_counts_its_uses",
    )),
    "Attention.forward": Task("maelm", "hard", "test_maelm", (
        "test_queries_are_from_x_and_keys_and_values_from_y",
        "test_each_head_has_a_bias_of_its_own",
        "test_attention_has_dropout_in_training_only",
        "test_a_layer_equals_pytorchs_own",
    )),
    "corrupt": Task("maelm", "hard", "test_maelm", (
        "test_every_row_has_exactly_k_masks_and_no_special_token_among_them",
        "test_kept_positions_are_the_rest_in_ascending_order",
        "test_masks_are_uniform_over_real_tokens",
        "test_corrupt_is_a_pure_function",
        "test_delta_is_the_share_of_masks_that_the_encoder_reads",
        "test_random_fill_is_a_real_token_and_mostly_not_the_true_one",
        "test_bert_trick_is_80_10_10",
        "test_a_row_with_too_few_real_tokens_is_refused",
        "test_what_the_encoder_reads_does_not_depend_on_the_masked_tokens",
    )),
    "Encoder.forward": Task("maelm", "hard", "test_maelm", (
        "test_the_encoder_is_its_parts_in_order",
        "test_all_layers_are_the_embedding_output_and_every_layer",
        "test_padding_changes_nothing",
        "test_removing_equals_hiding",
        "test_last_layer_at_masked_positions_equals_the_full_layer",
        "test_embeddings_have_dropout_in_training_only",
    )),
}


# ---- Reading code ---------------------------------------------------------------------------------------------------
@functools.cache
def tree_of(file):
    """The syntax tree of one of our files."""
    return ast.parse(text_of(file))


def text_of(file):
    """The text of one of our files, named without its suffix."""
    return (HERE / f"{file}.py").read_text(encoding="utf-8")


def locate(statements, name):
    """The statements among which function or Class.method `name` is defined, and its place there, None if nowhere."""
    first, _, rest = name.partition(".")
    at = max((i for i, node in enumerate(statements) if getattr(node, "name", None) == first), default=None)
    return locate(statements[at].body, rest) if rest and at is not None else (statements, at)


def is_blank(function):
    """Whether nothing is written in a function yet."""
    body = function.body[bool(ast.get_docstring(function)):]
    return all(isinstance(node, ast.Pass) or is_ellipsis(node) or is_still_to_do(node) for node in body)


def is_ellipsis(node):
    """Whether a statement is three dots."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def is_still_to_do(node):
    """Whether a statement is `raise NotImplementedError`, with or without a message."""
    error = node.exc if isinstance(node, ast.Raise) else None
    error = error.func if isinstance(error, ast.Call) else error
    return isinstance(error, ast.Name) and error.id == "NotImplementedError"


def defines(node):
    """The names that a statement defines: of a function or a class its own, otherwise all in it."""
    if hasattr(node, "name"):
        return {node.name}
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.alias):
            names.add((inner.asname or inner.name).partition(".")[0])
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
    return names


def changes(node):
    """The names whose values a statement outside of functions changes: x by `x[0] = 1`, `x.a = 1` or `x.append(1)`."""
    names = set()
    for inner in ast.walk(node) if not hasattr(node, "name") else []:
        target = None
        if isinstance(inner, (ast.Attribute, ast.Subscript)) and isinstance(inner.ctx, ast.Store):
            target = inner
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):  # a call whose result nobody takes
            target = inner.value.func
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
            if isinstance(target, ast.Name):
                names.add(target.id)
    return names


def uses(nodes):
    """The names that syntax trees mention, attributes included."""
    names = {"*"}  # what `from x import *` defines, for all that is known
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                names.add(inner.id)
            if isinstance(inner, ast.Attribute):
                names.add(inner.attr)
    return names


def reached(start, statements):
    """Those of the statements that define or change what `start` uses, and what these use in turn; in their order."""
    found, names = [], uses(start)
    while more := [node for node in statements if node not in found and (defines(node) | changes(node)) & names]:
        found += more
        names |= uses(more)
    return [node for node in statements if node in found]


# ---- What a student wrote -------------------------------------------------------------------------------------------
class Submission(NamedTuple):
    """What a student hands in: for each of our files with tasks, where they are written; and the tasks to be graded."""
    files: dict  # name of our file -> (path, syntax tree)
    tasks: list


def names_in(text):
    """What the lines "# Tasks: ..." of a text name."""
    return " ".join(re.findall(f"^{HEAD}(.*)$", text, re.M)).split()


def read_submission(path, only=()):
    """The Submission in a folder, or in a single file that holds the tasks of all files. Graded is what its lines
    "# Tasks: ..." name, or `only` these. UserError if it is no Python, or names no tasks."""
    path = Path(path)
    paths = {task.file: path for task in TASKS.values()}
    if path.is_dir():
        paths = {file: path / f"{file}.py" for file in paths}
        # The tasks of a file that is not there may be at the end of maelm.py, as --blank writes them.
        paths = {file: place if place.exists() else path / "maelm.py" for file, place in paths.items()}
        paths = {file: place for file, place in paths.items() if place.exists()}
        if not paths:
            raise UserError(f"{path}: holds no file with tasks, such as maelm.py; name the folder or file of a student")
    files, named = {}, []
    for file, place in paths.items():
        try:
            text = place.read_text(encoding="utf-8")
            files[file] = place, ast.parse(text, place.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{place}: not a Python file: {error}") from None
        named += names_in(text)
    tasks = tasks_named(only or named)
    if not tasks:
        raise UserError(f'{path}: no line "{HEAD}..." says what was to be written, as in a file that --blank made; '
                        "put it there, or name the tasks with --only")
    return Submission(files, tasks)


def function_in(submission, name):
    """The syntax tree of a task's function as the student wrote it, or None if it is nowhere."""
    path, tree = submission.files.get(TASKS[name].file, (None, ast.Module([], [])))
    statements, at = locate(tree.body, name)
    return None if at is None else statements[at]


@functools.cache
def stored():
    """What --handout stores for the folder of a student: `answers` and `imports`. Here it is empty."""
    if not ANSWERS.exists():
        return {"answers": {}, "imports": []}
    import torch
    return torch.load(ANSWERS, weights_only=True)


def imports_of(tree):
    """{an import at the top of a file: its text}."""
    return {node: ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))}


@functools.cache
def given(file):
    """All that students were given: the statements of a file and of maelm.py, also those in classes, as text. In a
    student's folder the files are the student's, and given of their imports are those that were handed out."""
    found = set()
    for tree in (tree_of(file), tree_of("maelm")):
        imports = imports_of(tree)
        for node in tree.body:
            if ANSWERS.exists() and node in imports and imports[node] not in stored()["imports"]:
                continue
            found |= {ast.dump(inner) for inner in [node, *getattr(node, "body", [])]}
    return found


def refuse_imports(nodes):
    """ImportError if the student imports our code, which holds the solution, or what could change the tests."""
    ours = {path.stem for path in HERE.glob("*.py")} | {"tests", "pytest", "_pytest", "importlib"}
    for node in nodes:
        for inner in ast.walk(node):
            modules = []
            if isinstance(inner, ast.Import):
                modules = [alias.name for alias in inner.names]
            if isinstance(inner, ast.ImportFrom):
                modules = [inner.module or "."]
            for module in modules:
                if module.partition(".")[0] in ours or module == ".":
                    raise ImportError(f"imports {module}, which a solution may not: all that a task needs is there")


def own_code(tree, name):
    """What a student wrote or changed beside a task's function: (statements, those of the task's class).

    Other tasks are left out, and of classes with tasks all but their methods; there `__init__` is ours."""
    old = given(TASKS[name].file)
    class_name = name.rpartition(".")[0]
    of_tasks = {task.partition(".")[0] for task in TASKS}
    statements = [node for node in tree.body
                  if ast.dump(node) not in old and not (defines(node) | changes(node)) & of_tasks]
    if not class_name:
        return statements, []
    ours = {task.rpartition(".")[2] for task in TASKS if task.startswith(f"{class_name}.")} | {"__init__"}
    inside = tree.body[locate(tree.body, class_name)[1]].body
    return statements, [node for node in inside if ast.dump(node) not in old and not defines(node) & ours]


def load(submission, name):
    """[(module or class, name in it, the student's function)]: of a task, and of methods that it calls and that the
    student wrote or changed. LookupError if there is none, ImportError if it imports what it may not.

    The student's definitions win: their code sees its own helpers, imports and constants, even where ours have the same
    name, and otherwise our module. Ours never sees theirs, and the other tasks are ours for both."""
    function = function_in(submission, name)
    if function is None:
        raise LookupError(f"{name} is not in the file")
    path, tree = submission.files[TASKS[name].file]
    helpers, methods = own_code(tree, name)
    needed = reached([function], helpers + methods)
    refuse_imports([function, *needed])
    code = [node for node in helpers if node in needed]
    methods = [*(node for node in methods if node in needed), function]

    # A namespace of the student's own, that starts as a copy of ours: what is defined anew there leaves ours alone.
    module = importlib.import_module(TASKS[name].file)
    student = sys.modules["student"] = types.ModuleType("student")
    ours = {**vars(sys.modules["maelm"]), **vars(module)}
    vars(student).update((key, value) for key, value in ours.items() if key[:2] != "__")
    class_name = name.rpartition(".")[0]
    if not class_name:
        exec(compile(ast.Module([*code, function], []), str(path), "exec"), vars(student))
        return [(module, name, getattr(student, name))]

    # Methods are defined in a class that has nothing else, and go from there to ours.
    holder = copy.copy(tree.body[locate(tree.body, class_name)[1]])
    holder.bases = holder.keywords = holder.decorator_list = []
    holder.body = methods
    exec(compile(ast.Module([*code, holder], []), str(path), "exec"), vars(student))
    theirs, target = getattr(student, class_name), getattr(module, class_name)
    setattr(student, class_name, target)
    return [(target, inner, vars(theirs)[inner]) for node in methods for inner in defines(node)]


# ---- Stored answers: in place of the other tasks, where nobody may see our solution ---------------------------------
def sketch(value):
    """(text, numbers) that tell apart the inputs of functions, and are as near as the inputs are."""
    if hasattr(value, "parameters"):  # a module
        text, numbers = sketch(tuple(value.parameters()))
        return f"{value.training} {getattr(value, 'config', '')} {text}", numbers
    if hasattr(value, "get_state"):  # a generator
        value = value.get_state()
    if hasattr(value, "detach"):
        x = value.detach().double().flatten().nan_to_num(neginf=-100.0)
        # Two sums with weights that no two entries share: a change of one of them, or of their order, shows.
        wave = 0.7 * x.new_ones(len(x)).cumsum(0)
        return f"{value.dtype}{tuple(value.shape)}", [float(x @ wave.sin()), float(x @ wave.cos())]
    if isinstance(value, tuple):
        parts = [sketch(part) for part in value]
        return str([text for text, _ in parts]), [number for _, numbers in parts for number in numbers]
    return repr(value), []


def inputs_of(function, args, kwargs):
    """The sketch of a call's arguments, whether they are named, given by place, or left at their defaults."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return sketch(tuple(call.arguments.values()))


def answering(function, calls):
    """A stand-in for a function: what is stored for these inputs in `calls`, a list of (text, numbers, output); for
    others the function itself."""
    def answer(*args, **kwargs):
        text, numbers = inputs_of(function, args, kwargs)
        for stored, near, output in calls:  # near: a student's rounding is another
            if stored == text and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-3) for a, b in zip(numbers, near)):
                if isinstance(output, tuple):  # the only one that a task returns
                    return sys.modules["maelm"].Corruption(*output)
                return copy.deepcopy(output)
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(str(error) or f"{function.__qualname__} is still to be written, and no answer is "
                                      "stored for these inputs: this need be no mistake; write it first") from None
    return answer


def place_of(name):
    """The module or class that a task's function is in, and its name there."""
    class_name, _, function = name.rpartition(".")
    module = importlib.import_module(TASKS[name].file)
    return getattr(module, class_name) if class_name else module, function


def file_of_tests(name):
    """The file that a task's tests are in."""
    return HERE / (TASKS[name].tested_in.replace(".", "/") + ".py")


# ---- The tests on the student's code, by pytest ---------------------------------------------------------------------
class StudentTests:
    """A plugin of pytest: of all tests those of a student's tasks, each with the student's function in its place."""
    def __init__(self, path, only=()):
        self.path, self.submission = path, read_submission(path, only)
        self.task_of = {test: name for name in self.submission.tasks for test in TASKS[name].tests}

    def pytest_ignore_collect(self, collection_path):
        """Do not even import the other test files: True. None would be what pytest does without us."""
        files = [file_of_tests(name) for name in self.submission.tasks]
        return True if collection_path.suffix == ".py" and collection_path not in files else None

    def pytest_collection_modifyitems(self, config, items):
        """Leave the tests of the student's tasks, and let -k find them by the names of the tasks."""
        others = [item for item in items if item.name not in self.task_of]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.name in self.task_of]
        for item in items:
            name = self.task_of[item.name]
            item.extra_keyword_matches.update([name, *name.split(".")])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Leave out of tracebacks our functions, for another task's is a solution, and the decorators of tests, which
        quote solutions."""
        if call.excinfo:
            theirs = {path.resolve() for path, _ in self.submission.files.values()}
            for file in {task.file for task in TASKS.values()}:
                if file in sys.modules and HERE / f"{file}.py" not in theirs:
                    sys.modules[file].__tracebackhide__ = True  # read by pytest
        report = yield
        for entry in getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", []):
            if entry.lines and entry.lines[0].lstrip().startswith("@"):
                lines = itertools.dropwhile(lambda line: not line.lstrip().startswith(("def ", "class ")), entry.lines)
                entry.lines[:] = list(lines)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """Run a test while the student's function is in the place of ours."""
        import torch
        with pytest.MonkeyPatch.context() as patch:
            # Stored answers come first, so that the student's code sees them, too.
            for name, calls in stored()["answers"].get(item.name, {}).items():
                owner, attribute = place_of(name)
                patch.setattr(owner, attribute, answering(getattr(owner, attribute), calls))
            for owner, attribute, function in load(self.submission, self.task_of[item.name]):
                patch.setattr(owner, attribute, function, raising=False)
            torch.manual_seed(0)
            return (yield)

    def pytest_report_header(self):
        """Whose code is tested."""
        return f"tested: {self.path}: {', '.join(self.submission.tasks)}"

    def pytest_terminal_summary(self, terminalreporter):
        """The same at the end, where it is read."""
        terminalreporter.write_line(f"tested: {self.path}")


# ---- --grade --------------------------------------------------------------------------------------------------------
class Result(NamedTuple):
    """What a test said of a student's function."""
    test: str
    passed: bool
    message: str = ""  # the first line of what went wrong
    output: str = ""  # all of it: the assertion with its values, the traceback, and what the student printed


class Messenger:
    """A plugin of pytest that sends each Result through a connection, and before the first one that it begins."""
    def __init__(self, connection):
        self.connection = connection

    def pytest_collection_finish(self):
        self.connection.send("begins")

    def pytest_runtest_logreport(self, report):
        if report.when != "call":
            return
        message = output = ""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
            printed = report.capstdout + report.capstderr
            output = report.longreprtext + (f"\nprinted:\n{printed[-SHOWN:]}" if printed else "")
        test = report.nodeid.rpartition("::")[2]
        self.connection.send(tuple(Result(test, report.passed, message, output)))


def run_tests(path, name, connection):
    """What a task's own process does: nothing that it prints, allocates or starts can reach the grader."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own, to be ended with all that it starts
    if resource:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT, resource.RLIM_INFINITY))
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), stream)
    os.environ["PYTHONBREAKPOINT"] = "0"  # nobody could answer
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed, which takes a second to load
    tests = [f"{file_of_tests(name)}::{test}" for test in TASKS[name].tests]
    pytest.main(["-vv", "-p", "no:debugging", "-p", "no:cacheprovider", "-c", str(HERE / "pyproject.toml"), *tests],
                plugins=[StudentTests(path, [name]), Messenger(connection)])


def grade(path, name, seconds):
    """The Results of a task's tests, which run in a process of its own, for so many seconds in all."""
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(path, name, theirs))
    process.start()
    theirs.close()
    results, wrong = [], ""
    try:
        mine.recv()  # that it begins: to start Python does not count
        end = time.monotonic() + seconds
        while len(results) < len(TASKS[name].tests) and not wrong:
            if mine.poll(max(0, end - time.monotonic())):
                results.append(Result(*mine.recv()))
            else:
                wrong = f"time limit of {seconds:g} s"
    except EOFError:
        wrong = "the process died"
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return results + none_passed(name, wrong)[len(results):]


def none_passed(name, why):
    """Results of a task whose tests did not run."""
    return [Result(test, False, why, why) for test in TASKS[name].tests]


def score(submission, path, name, seconds):
    """(status, Results) of a task; the status says it in a few words."""
    function = function_in(submission, name)
    if function is None or is_blank(function):
        status = "not in the file" if function is None else "not attempted"
        return status, none_passed(name, status)
    results = grade(path, name, seconds)
    wrong = [result for result in results if not result.passed]
    if not wrong:
        return "full marks", results
    # Where there is no more to be read than one line, the grader wrote it: a time limit, say.
    return (wrong[-1].message if wrong[-1].message == wrong[-1].output else "failed"), results


def report(points):
    """A dict in the format of Gradescope, from {task: (status, Results)}."""
    tests = []
    for name, (_, results) in points.items():
        for result in results:
            tests.append({"name": f"{name}: {result.test.removeprefix('test_')}", "tags": [name],
                          "score": int(result.passed), "max_score": 1,
                          "status": "passed" if result.passed else "failed", "output": result.output})
    return {"score": sum(test["score"] for test in tests), "max_score": len(tests), "tests": tests}


def report_unread(path, only, why):
    """The report on a submission that cannot be read: no test passed, of the tasks that `only` or its text names."""
    names = list(only)
    if not only:
        for file in path.glob("*.py") if path.is_dir() else [path]:
            names += names_in(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else []
    known = []
    with contextlib.suppress(UserError):  # a name that is none
        known = tasks_named(names)
    return report({name: (why, none_passed(name, why)) for name in known}) | {"output": why}


def print_task(name, status, results, verbose):
    """A line for a task, and with `verbose` all that went wrong."""
    wrong = [result for result in results if not result.passed]
    line = [name, f"{len(results) - len(wrong)}/{len(results)}", status]
    if wrong and wrong[0].message != status:
        line.append(f"{wrong[0].test.removeprefix('test_')}: {wrong[0].message}")
    say(" ".join(line)[:120])
    if verbose:
        for result in wrong:
            if result.message != status:
                say(f"\n{name}, {result.test}:\n{result.output}\n")


def say(text):
    """Print what may hold characters that this terminal does not have."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


# ---- The command ----------------------------------------------------------------------------------------------------
def tasks_named(names):
    """Full names of tasks; a method or a class alone will do where only one task has it."""
    found = []
    for name in names:
        fitting = [task for task in TASKS if name in ("all", task, *task.split("."))]
        if len(fitting) != 1 and name != "all":
            raise UserError(f"{name!r} is not the name of one task: use all, or of {', '.join(TASKS)}")
        found += fitting
    return [task for task in TASKS if task in found]


def check_ours():
    """UserError if one of our solutions is gone, as when a blank file has been written over maelm.py."""
    for name, task in TASKS.items():
        try:
            statements, at = locate(tree_of(task.file).body, name)
            whole = at is not None and not is_blank(statements[at])
        except (SyntaxError, ValueError, OSError):
            whole = False
        if not whole:
            raise UserError(f"{HERE / task.file}.py: {name} is not in it; restore the file, for example with `git "
                            f"checkout {task.file}.py`, and write what students get elsewhere, such as to student/")


def import_ours():
    """Import what all tests need, once for all processes that are forked from this one."""
    try:
        for module in ["conftest", *dict.fromkeys(task.file for task in TASKS.values())]:
            importlib.import_module(module)
    except Exception as error:  # of a student's folder, whatever is in it
        raise UserError(f"{HERE}: its files cannot be imported: {type(error).__name__}: {error}") from error


def grade_all(options):
    """{task: (status, Results)} of a submission; each is printed as soon as it is known, unless as JSON in the end."""
    submission, points = read_submission(options.grade, options.only or ()), {}
    import_ours()
    for name in submission.tasks:
        points[name] = score(submission, options.grade, name, options.time_limit)
        if not options.json:
            print_task(name, *points[name], options.verbose)
    return points


def main(argv=None):
    parser = Parser(prog="test_maelm.py", description="For classes: see docs/teaching.md.", allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="NAME", help="print maelm.py without their bodies; or all")
    what.add_argument("--handout", nargs="+", metavar=("DIR", "NAME"), help="make a folder for students [all]")
    what.add_argument("--grade", type=Path, metavar="FILE", help="test its tasks; a folder will do; exit code 0 = full "
                      "marks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks, or all, also where FILE lacks them")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="SECONDS", help="for each task [20]")
    parser.add_argument("--verbose", action="store_true", help="all of what went wrong, with what was printed")
    parser.add_argument("--json", action="store_true", help="print results.json of Gradescope: tests, score, max_score")
    options = parser.parse_args(argv)
    with clear_errors(parser.prog):
        if ANSWERS.exists() and not options.grade:
            raise UserError(f"{HERE} is a folder for students, without our solutions; use --grade")
        if not ANSWERS.exists():
            check_ours()
        if options.grade:
            try:
                points = grade_all(options)
            except (UserError, OSError) as error:
                if options.json:
                    print(json.dumps(report_unread(options.grade, options.only or [], str(error)), indent=1))
                raise
            done = report(points)
            print(json.dumps(done, indent=1) if options.json else f"total {done['score']}/{done['max_score']}")
            sys.exit(done["score"] < done["max_score"])
        import handout  # not in the folder that it makes
        if options.blank:
            print(handout.blank_file(tasks_named(options.blank)), end="")
        else:
            folder, *names = options.handout
            handout.make(Path(folder), tasks_named(names or ["all"]))


if __name__ == "__main__":
    main()
