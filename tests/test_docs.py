"""Claims of README.md, docs/ and bench/: their commands run, their tables are complete; and what the code promises."""
import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import maelm
from conftest import HERE, write_corpus, write_hub_model


# ---- README.md, docs/ -----------------------------------------------------------------------------------------------
def commands_of(page):
    """Every python, pytest, torchrun and mkdir command in the shell blocks of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", (HERE / page).read_text(), re.S)
    commands = [part.partition("  #")[0].strip() for block in blocks for line in block.splitlines()
                for part in line.split("&&")]
    return [command for command in commands if re.match(r"(python|pytest|torchrun|mkdir) ", command)]


SHORTER = (" --max-steps 3 --warmup-steps 1 --eval-rows 8 --batch-size 8 --micro-batch-size 4 --encoder-layers 1 "
           "--encoder-dim 32 --encoder-heads 2 --cache cache")
PAGES = [str(path.relative_to(HERE)) for path in sorted([*HERE.glob("*.md"), *HERE.glob("docs/*.md")])]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_every_command_of_the_documentation_runs(page, tmp_path):
    for path in (*HERE.glob("*.py"), *HERE.glob("requirements*.txt"), HERE / "pyproject.toml", HERE / "LICENSE"):
        shutil.copy(path, tmp_path)
    shutil.copytree(HERE / "tests", tmp_path / "tests")
    for folder in ("my_texts", "hub"):
        (tmp_path / folder).mkdir()
        write_corpus(tmp_path / folder / "text.txt", 10_000)
    shorter = SHORTER + ("" if page == "README.md" else " --data my_texts")
    python = shlex.quote(sys.executable)
    commands = commands_of(page)
    assert "python train.py" in commands and len(commands) > 5
    if any("convert.py import" in command for command in commands):
        write_hub_model(tmp_path / "roberta", layers=1)
    for command in commands:
        command = command.replace("import hf:roberta-base", "import roberta")
        line = re.sub(r"hf:\S+", f"hf:{tmp_path / 'hub'}", command).replace("--nproc_per_node 8", "--nproc_per_node 2")
        line = re.sub("^torchrun", "python -m torch.distributed.run --standalone", line)
        line = re.sub("^python", python, re.sub("^pytest", "python -m pytest", line))
        if "train.py" in line and "--estimate" not in line:
            line += shorter
        if "finetune.py" in line:
            line += " --seeds 1 --epochs 0.1"
        done = subprocess.run(line, shell=True, cwd=tmp_path,
                              capture_output=True, text=True, timeout=900)
        graded = "--grade" in line or "--student" in line  # where nothing is written yet
        assert done.returncode == graded, (command, done.stdout, done.stderr)
        if command == "python train.py":
            assert "unigram entropy" in done.stdout and (page != "README.md" or done.stdout.count("[") >= 4)
    assert (tmp_path / "out/toy/loss.png").is_file() and (tmp_path / "out/toy-mlm/loss.png").is_file()


def test_the_python_of_the_readme_prints_what_its_comments_say(capsys):
    block, = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# -> (.*)", block)


def test_the_readme_lists_every_ablation_and_preset():
    text = (HERE / "README.md").read_text()
    for name in [*maelm.ABLATIONS, *maelm.PRESETS]:
        assert f"`{name}`" in text, name
    assert "Differs from the paper" not in text and (HERE / "maelm.py").read_text().count("Differs from the paper") == 5


def test_the_code_keeps_its_promises():
    """Who imports whom; nothing is left undocumented; test files can be read in one go."""
    trees = {path.stem: ast.parse(path.read_text()) for path in HERE.glob("*.py") if not path.stem.startswith("test_")}
    for name, tree in trees.items():
        imported = {n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names} | {
            node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        # data, maelm and run import no program; of the programs only finetune imports others. data needs no torch, and
        # no program needs a module that Windows lacks.
        programs = imported & {"train", "finetune", "rank", "convert"}
        if name in ("data", "maelm", "run", "train", "rank"):
            assert not programs, f"{name} imports {programs}"
        assert name != "finetune" or programs <= {"train", "rank"}
        assert name not in ("data", "maelm") or "run" not in imported
        assert name != "data" or not imported & {"torch", "maelm"}
        assert name == "classroom" or not imported & {"fcntl", "resource"}, name
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main":
                assert ast.get_docstring(node), f"{name}.{node.name} has no docstring"
    for path in [HERE / "test_maelm.py", HERE / "conftest.py", *HERE.glob("tests/*.py")]:
        assert len(path.read_text().splitlines()) <= 800, f"{path.name} is too long"


# ---- bench/ ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("script, files, sections", [
    ("cpu", {"cpu.json", "cost.png"}, ["where_time_goes", "distance_to_the_limit", "base_size", "cost", "compiling"]),
    ("gpu", {"gpu-tiny.json"}, ["training", "compiled", "kernels", "train_py", "curves", "correctness", "kernel_names",
                               "apart"])])
def test_every_section_of_a_benchmark_gives_its_table(script, files, sections, tmp_path):
    done = subprocess.run([sys.executable, f"bench/{script}.py", "--tiny", "--out", str(tmp_path), "--budget", "1e6"],
                          cwd=HERE, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == files
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(found["sections"]) == sections
    for name, section in found["sections"].items():
        assert section.get("rows") and set(section) == {"rows", "seconds"}, (name, section)
        starts = {str(value).partition(":")[0] for row in section["rows"] for value in row.values()}
        assert not {"not available", "fails", "skipped"} & starts, name
        assert f"**{name}**" in done.stdout
    if script == "gpu":  # what is compared with the formula is the formula
        for row in found["sections"]["correctness"]["rows"]:
            limit = {"bfloat16": 2e-2, "float32": 2e-6}[row["dtype"]]
            assert max(row[key] or 0 for key in ("output", "q", "k", "v", "table")) < limit, row
        for section in ("kernels", "apart"):
            errors = [row["error of output"] for row in found["sections"][section]["rows"] if row["dropout"] == 0]
            assert max(error or 0 for error in errors) < 2e-2 and 0 in errors
        first, second = found["sections"]["train_py"]["rows"]
        assert (first["steps"], second["steps"]) == ("1 to 2", "3 to 4")


def test_the_first_command_is_measured_for_each_kind_of_cpu_that_this_one_can_play(tmp_path):
    done = subprocess.run([sys.executable, "bench/laptop.py", "--tiny", "--out", str(tmp_path)], cwd=HERE,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "laptop.json").read_text())
    for row in found["rows"]:
        assert row["kind of CPU"] in done.stdout and row["of which optimizers ms"] > 0
    info = Path("/proc/cpuinfo")
    if info.is_file() and "avx2" in info.read_text().split():
        assert found["rows"][-1]["kind of CPU"] == "AVX2"


def test_a_section_that_fails_or_comes_too_late_is_recorded_and_the_rest_goes_on(bench, tmp_path, capsys):
    def good():
        """Works."""
        return [{"a": 1.0, "b": "x"}]

    def bad():
        """Fails."""
        raise RuntimeError("no such kernel")
    bench.cpu.write_report([bad, good], (), tmp_path / "r.json", {}, budget=60)
    sections = json.loads((tmp_path / "r.json").read_text())["sections"]
    assert sections["bad"]["error"] == "RuntimeError: no such kernel"
    assert sections["good"]["rows"] == [{"a": 1.0, "b": "x"}]
    assert "| 1 | x |" in capsys.readouterr().out
    bench.cpu.write_report([good], (), tmp_path / "r.json", {}, budget=0)
    assert "skipped" in json.loads((tmp_path / "r.json").read_text())["sections"]["good"]


def test_a_machine_without_git_is_measured_too(bench, tmp_path, monkeypatch):
    assert bench.cpu.machine(torch.device("cpu"))["device"]
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no program at all
    assert bench.cpu.commit() == "" and bench.cpu.machine(torch.device("cpu"))["commit"] == ""


def test_the_benchmark_of_a_gpu_needs_no_datasets():
    """A machine with a GPU may have what training needs, and no more."""
    program = ("import sys\nsys.modules['datasets'] = sys.modules['pyarrow'] = None\nsys.path[:0] = ['bench', '.']\n"
               "import gpu")
    subprocess.run([sys.executable, "-c", program], cwd=HERE, check=True, timeout=240)


def test_without_a_gpu_the_benchmark_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        bench.gpu.main([])
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
