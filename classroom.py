"""Assignments: hand out maelm.py with functions left blank, and grade what comes back. See docs/teaching.md.

    python test_maelm.py --blank all > student/maelm.py
    python test_maelm.py --grade student/maelm.py
"""
import ast
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import conftest
import data
import test_maelm as method
from tests import test_tasks as scoring
from tests import test_train as training

try:
    import resource
except ImportError:  # Windows, where nothing limits the memory of a task
    resource = None

HERE = Path(__file__).parent
MEMORY = 4 << 30  # bytes of data that a task's process may hold
HEADER = f"\n\n# ---- Tasks of other files {'-' * 86}\nimport math\n\nimport numpy as np\n"


# ---- The tasks ------------------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """A function that students write: where it is, how hard it is, and its tests, one point each."""
    file: str
    level: str
    tests: tuple


TASKS = {  # function or Class.method: from easy to hard
    "learning_rate_factor": Task("train", "easy", (
        training.test_warm_up_rises_in_equal_steps_and_ends_at_the_peak,
        training.test_after_warm_up_the_rate_falls_linearly_to_zero,
        training.test_without_warm_up_the_first_step_has_the_peak_rate,
    )),
    "tau_rank": Task("rank", "easy", (
        method.test_rank_is_the_smallest_k_whose_values_sum_to_tau,
        method.test_equal_singular_values_count_exactly,
        method.test_no_variance_has_rank_none,
        method.test_tau_must_be_a_share,
    )),
    "matthews": Task("tasks", "easy", (
        scoring.test_matthews_of_two_labels_is_the_textbook_formula,
        scoring.test_matthews_is_one_for_equal_labels_and_zero_for_a_constant,
        scoring.test_matthews_does_not_depend_on_the_names_of_the_labels,
        scoring.test_matthews_of_three_labels_is_gorodkins,
    )),
    "effective_rank": Task("rank", "medium", (
        method.test_rank_is_exact_on_built_spectra,
        method.test_a_gram_matrix_has_the_rank_of_its_matrix,
        method.test_the_mean_is_not_subtracted,
        method.test_rank_depends_on_the_spectrum_alone,
        method.test_what_has_no_rank_is_refused,
    )),
    "relative_bucket": Task("maelm", "medium", (
        method.test_near_distances_have_buckets_of_their_own,
        method.test_the_right_half_mirrors_the_left,
        method.test_all_far_distances_share_the_last_bucket,
        method.test_buckets_never_fall_with_distance_and_all_are_used,
        method.test_relative_buckets_are_t5s,
    )),
    "attention": Task("maelm", "medium", (
        method.test_equal_keys_get_equal_weights,
        method.test_a_key_hidden_by_the_bias_is_as_if_absent,
        method.test_the_bias_is_of_query_then_key,
        method.test_logits_are_divided_by_the_root_of_the_head_size,
        method.test_attention_drops_weights_out,
        method.test_attention_is_the_formula_in_float64_with_gradient_of_the_bias,
    )),
    "MAELM.decoder_input": Task("maelm", "medium", (
        method.test_kept_positions_get_their_representation_back,
        method.test_every_gap_holds_the_mask_embedding,
        method.test_the_mask_embedding_learns_from_every_gap,
        method.test_the_decoder_input_has_the_precision_of_the_encoder,
        method.test_decoder_input_is_the_two_case_formula,
    )),
    "MAELM.forward": Task("maelm", "medium", (
        method.test_loss_is_the_mean_negative_log_likelihood_over_masked_positions,
        method.test_only_the_masked_tokens_are_targets,
        method.test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary,
        method.test_mlm_is_the_textbook_mlm,
        method.test_a_uni_directional_decoder_predicts_all_tokens_but_the_first,
    )),
    "RelativeBias.forward": Task("maelm", "hard", (
        method.test_relative_bias_is_a_function_of_key_minus_query,
        method.test_relative_bias_is_of_query_then_key_in_every_row,
        method.test_one_row_of_positions_is_enough,
        method.test_the_gradient_of_a_bias_counts_its_uses,
    )),
    "Attention.forward": Task("maelm", "hard", (
        method.test_queries_are_from_x_and_keys_and_values_from_y,
        method.test_each_head_has_a_bias_of_its_own,
        method.test_attention_has_dropout_in_training_only,
        method.test_a_layer_equals_pytorchs_own,
    )),
    "corrupt": Task("maelm", "hard", (
        method.test_every_row_has_exactly_k_masks_and_no_special_token_among_them,
        method.test_kept_positions_are_the_rest_in_ascending_order,
        method.test_masks_are_uniform_over_real_tokens,
        method.test_corrupt_is_a_pure_function,
        method.test_delta_is_the_share_of_masks_that_the_encoder_reads,
        method.test_random_fill_is_a_real_token_and_mostly_not_the_true_one,
        method.test_bert_trick_is_80_10_10,
        method.test_a_row_with_too_few_real_tokens_is_refused,
        method.test_masked_tokens_cannot_reach_the_encoder,
    )),
    "Encoder.forward": Task("maelm", "hard", (
        method.test_the_encoder_is_its_parts_in_order,
        method.test_all_layers_are_the_embedding_output_and_every_layer,
        method.test_padding_changes_nothing,
        method.test_removing_equals_hiding,
        method.test_last_layer_at_masked_positions_equals_the_full_layer,
        method.test_embeddings_have_dropout_in_training_only,
    )),
}


def mistakes_in(name):
    """The wrong versions of a task's function that the decorators of its own tests state."""
    found = []
    for test in TASKS[name].tests:
        for wrong in getattr(test, "wrong_versions", []):
            if wrong.place == f"{TASKS[name].file}.{name}":
                found.append(wrong)
    return found


# ---- --blank --------------------------------------------------------------------------------------------------------
def source_of(task):
    """The text of the file that a task is in."""
    return (HERE / f"{TASKS[task].file}.py").read_text(encoding="utf-8")


def locate(statements, name):
    """The statements among which function or Class.method `name` is defined, and its place there, None if nowhere."""
    first, _, rest = name.partition(".")
    at = max((i for i, node in enumerate(statements) if getattr(node, "name", None) == first), default=None)
    return locate(statements[at].body, rest) if rest and at is not None else (statements, at)


def blanked(text, name):
    """`text` without the body of function `name`: its signature and docstring are the assignment."""
    statements, at = locate(ast.parse(text).body, name)
    docstring, lines = statements[at].body[0], text.splitlines()
    lines[docstring.end_lineno:statements[at].end_lineno] = [" " * docstring.col_offset + "raise NotImplementedError"]
    return "\n".join(lines) + "\n"


def student_file(names, change=blanked):
    """maelm.py with these tasks blanked; those of other files are at its end."""
    text, others = (HERE / "maelm.py").read_text(encoding="utf-8"), ""
    for name in names:
        if TASKS[name].file == "maelm":
            text = change(text, name)
        else:
            other = change(source_of(name), name)
            statements, at = locate(ast.parse(other).body, name)
            others += f"\n\n{ast.get_source_segment(other, statements[at])}\n"
    return text + (HEADER + others if others else "")


# ---- --grade --------------------------------------------------------------------------------------------------------
def is_import(node):
    """Whether a statement is an import."""
    return isinstance(node, (ast.Import, ast.ImportFrom))


def defines(node):
    """The names that a statement of a module defines."""
    if is_import(node):
        return {(name.asname or name.name).partition(".")[0] for name in node.names}
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {node.name} if hasattr(node, "name") else set()


def uses(nodes):
    """The names that syntax trees mention."""
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def graft(name, student):
    """Our module with the student's function in it, and with the names it needs that only the student defines.

    Takes and returns syntax trees: nothing else of the student's file can matter to the task."""
    ours, maelms = ast.parse(source_of(name)), ast.parse((HERE / "maelm.py").read_text(encoding="utf-8"))
    (mine, at), (theirs, there) = locate(ours.body, name), locate(student.body, name)
    methods = {n.name for n in mine if isinstance(n, ast.FunctionDef)}
    helpers = [n for n in theirs if isinstance(n, ast.FunctionDef) and n.name not in methods] if "." in name else []
    mine[at:at + 1] = grafted = [theirs[there], *helpers]
    known = set().union(*(defines(n) for n in [*ours.body, *maelms.body] if n in ours.body or not is_import(n)))
    new, needed, used = [n for n in student.body if defines(n) - known], [], uses(grafted) | {"*"}
    while more := [n for n in new if n not in needed and defines(n) & used]:
        needed, used = needed + more, used | uses(more)
    top = locate(ours.body, name.partition(".")[0])[1]
    ours.body[top:top] = [n for n in new if n in needed]
    return ours


def results(name, student):
    """For each test of a task, run on the student's function: its name, and what went wrong or an empty string."""
    for test in TASKS[name].tests:
        wrong = ""
        try:
            module = sys.modules["student"] = types.ModuleType("student")
            module.__file__ = str(HERE / f"{TASKS[name].file}.py")
            exec(compile(graft(name, student), module.__file__, "exec"), vars(module))
            with pytest.MonkeyPatch.context() as patch:
                conftest.put_in_place(patch, test, TASKS[name].file, module)
                torch.manual_seed(0)
                test()
        except BaseException as error:  # SystemExit too
            files = results.__code__.co_filename, test.__code__.co_filename
            lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
            text = str(error).strip() or lines[-1]  # the line of an assert without a message
            wrong = f"{type(error).__name__}: {text.splitlines()[0]}"[:100]
        yield test.__name__.removeprefix("test_"), wrong


def run_tests(name, student, connection):
    """What a task's own process does: nothing that it prints, allocates or starts can reach the grader."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own, to be ended with all that it starts
    if resource:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.RLIM_INFINITY))
    for stream, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), stream)
    connection.send("started")
    for result in results(name, student):
        connection.send(result)


def score(name, student, seconds):
    """Points of one task as a dict: passed, total, status, and messages of the failed tests."""
    total, found, status = len(TASKS[name].tests), [], ""
    statements, at = locate(student.body, name)
    body = [] if at is None else statements[at].body[bool(ast.get_docstring(statements[at])):]
    if all(re.match(r"raise NotImplementedError|pass$|\.\.\.$", ast.unparse(node)) for node in body):
        return dict(passed=0, total=total, status="not in the file" if at is None else "not attempted", messages=[])
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(name, student, theirs))
    process.start()
    theirs.close()
    try:
        mine.recv()
        end = time.monotonic() + seconds
        while len(found) < total and not status:
            status = "" if mine.poll(max(0, end - time.monotonic())) else "time limit"
            found += [] if status else [mine.recv()]
    except EOFError:
        status = "the process died"
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    messages = [f"{test}: {wrong}" for test, wrong in found if wrong]
    passed = len(found) - len(messages)
    messages += [f"{TASKS[name].tests[len(found)].__name__.removeprefix('test_')}: {status}"] if status else []
    status = status or ("full marks" if passed == total else "failed")
    return dict(passed=passed, total=total, status=status, messages=messages)


def read_student(path):
    """The syntax tree of a student's file; UserError if it has none."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise data.UserError(f"{path}: not a Python file: {error}") from None


# ---- The command ----------------------------------------------------------------------------------------------------
def tasks_named(names):
    """Full names of tasks; a method or a class alone will do where only one task has it."""
    found = []
    for name in names:
        fitting = [task for task in TASKS if name in ("all", task, *task.split("."))]
        if len(fitting) != 1 and name != "all":
            raise data.UserError(f"{name!r} is not the name of one task: use all, or of {', '.join(TASKS)}")
        found += fitting
    return list(dict.fromkeys(found))


def main(argv=None):
    parser = data.Parser(prog="test_maelm.py", description="For classes: see docs/teaching.md.", allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--blank", nargs="+", metavar="NAME", help="print maelm.py without their bodies; or all")
    what.add_argument("--grade", metavar="FILE", help="test each task that FILE holds; exit code 0 = full marks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these tasks, or all, also where FILE lacks them")
    parser.add_argument("--time-limit", type=float, default=5.0, metavar="SECONDS", help="for each task [5]")
    parser.add_argument("--json", action="store_true", help="print {task: {passed, total, status, messages}}")
    options = parser.parse_args(argv)
    with data.clear_errors(parser.prog):
        if options.blank:
            return print(student_file(tasks_named(options.blank)), end="")
        student, only, points = read_student(options.grade), tasks_named(options.only or []), {}
        held = [name for name in TASKS if TASKS[name].file == "maelm" or locate(student.body, name)[1] is not None]
        for name in only or held:
            points[name] = score(name, student, options.time_limit)
            if not options.json:
                passed, total, status, messages = points[name].values()
                print(" ".join([name, f"{passed}/{total}", status, *messages[:1]])[:120], flush=True)
        if options.json:
            print(json.dumps(points, indent=1))
        sys.exit(any(one["passed"] < one["total"] for one in points.values()))


if __name__ == "__main__":
    main()
