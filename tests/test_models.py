"""The trained models of models/, as the README's first commands use them."""
import json

import rank
from support import fill_mask
from tests.common import ROOT

MAE, MLM = (str(ROOT / "models" / name) for name in ("mae-lm", "mlm"))


def test_the_models_show_figure_1(tmp_path):
    rank.main([MAE, MLM, "--data", "docs", "--tokens", "20000", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "rank.json").read_text())["models"]
    low, high = (found[name]["uncentered"]["mask_only"] for name in (MAE, MLM))
    assert sorted(high) == high and high[0] < 10 and high[-1] > 2 * low[-1]
    assert found[MLM]["uncentered"]["with_mask"][-1] > found[MLM]["uncentered"]["without_mask"][-1]


def test_the_models_have_learned_english(capsys):
    for model in (MAE, MLM):
        fill_mask.main([model, "he went [MASK] the house."])
        assert capsys.readouterr().out.startswith("[MASK] 1: to 0.")
