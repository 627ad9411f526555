"""Claims about README.md and the other pages, and about the models in the repository."""
import importlib
import re
from dataclasses import asdict

import pytest
import torch

import rank
import train
from maelm import ABLATIONS
from support.program import read_json
from tests.common import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("[bcd]*/*.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAE, MLM = (str(ROOT / "models" / name) for name in ("mae-lm", "mlm"))
FLAG = r"--[a-z][\w-]+"


def commands(page):
    """(program, arguments) of each command in a page's shell blocks that starts one of our programs."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from re.findall(r"(?:python|torchrun .*?)(?: -m)? (\S+\.\w+)((?: [^#&\n]+)?)", block)


def test_every_flag_on_the_pages_exists(capsys):
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    pages += [f"```sh\n{script.read_text().replace('on_node', 'torchrun')}```" for script in ROOT.glob("runs/*.sh")]
    for page in pages:
        for program, flags in commands(page):
            module = program.removesuffix(".py").replace("/", ".")
            pytest.raises(SystemExit, importlib.import_module(module).main, ["-h"])
            unknown = set(re.findall(FLAG, flags)) - set(re.findall(FLAG, capsys.readouterr().out))
            assert not unknown, f"{program} {flags}"


def test_python_of_the_readme_prints_what_its_comments_say(capsys):
    block, = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# -> (.*)", block)


def test_the_models_show_figure_1(tmp_path):
    (tmp_path / "pages.txt").write_text("\n\n".join(page.read_text(encoding="utf-8") for page in PAGES))
    rank.main([MAE, MLM, *f"--data pages.txt --val-share 1 --tokens 20000 --out {tmp_path}/rank".split()])
    found = read_json(tmp_path / "rank/rank.json")["models"]
    low, high = (found[name]["uncentered"]["mask_only"] for name in (MAE, MLM))
    assert sorted(high) == high and high[0] < 10 and high[-1] > 2 * low[-1]
    assert found[MLM]["uncentered"]["with_mask"][-1] > found[MLM]["uncentered"]["without_mask"][-1]


@pytest.mark.parametrize("row", ["mae-lm", "mlm"])
def test_the_models_have_the_recipe_of_laptop(row):
    state = torch.load(next(ROOT.glob(f"models/{row}/*.pt")))
    config, recipe = train.make_settings(train.PRESETS["laptop"] | ABLATIONS[row])
    fields = asdict(config) | asdict(recipe)
    not_kept = dict.fromkeys(("data", "cache", "seed", "checkpoint_interval", "keep_checkpoints"))
    assert fields | not_kept == fields | state["config"] | state["settings"] | not_kept


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), link
