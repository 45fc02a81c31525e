"""Figures in the texts of the study's pages: how a text is filled, and what is allowed for."""

import pytest


@pytest.fixture
def findings(study):
    return study("findings")


def test_a_text_is_filled_between_its_marks(findings, tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "HERE", tmp_path)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "one.md").write_text("{share:.1%} of {runs[bf16]} runs\n")
    page = "before\n<!-- from pages/one.md by report.py -->\nold\n<!-- end of it -->\nafter 5%\n"
    found = findings.filled(page, {"share": 0.125, "runs": {"bf16": 3}})
    assert found == page.replace("old", "12.5 % of 3 runs")
    with pytest.raises(KeyError, match="share"):
        findings.filled(page, {})


def test_a_run_or_seed_that_is_not_there_is_named(findings):
    arms = findings.Told({"nvfp4": {1: {"name": "one"}}})
    assert arms.run("nvfp4", 1) == {"name": "one"}
    with pytest.raises(ValueError, match="no run of nvfp4 with seed 2 can be compared"):
        arms.run("nvfp4", 2)
    with pytest.raises(ValueError, match=r"0 runs in a\.json, of which pages/ tells"):
        findings._run_in({"one": [{"session": {"file": "b.json"}}]}, "a.json")


def test_a_run_that_was_not_asked_the_questions_has_no_part_in_a_mean(findings):
    run = {"arm": "nvfp4", "tag": "", "seed": 1, "state": "done", "metrics": {"step": [1]}, "validation": {}}
    asked = run | {"seed": 2, "validation": {"1": {"samples": 1, "right": "10"}}}
    assert findings.Measure({"nvfp4": {1: run, 2: asked}}, "pass1").mean["nvfp4"] == 0.5


@pytest.mark.parametrize(
    ("interval", "told"), [((0.009, 0.036), "0.022 (0.009 to 0.036)"), ((-0.001, 0.045), "0.022 (-0.001 to +0.045)")]
)
def test_a_size_has_a_sign_where_its_interval_has_0_in_it(findings, paired, interval, told):
    assert findings._size(paired.Difference(3, 0.0224, *interval)) == told


def test_the_interval_of_many_comparisons_is_bonferronis(findings, paired):
    values = {("a", 1): 0.0, ("a", 2): 0.5, ("a", 3): 0.1, ("b", 1): 0.2, ("b", 2): 0.4, ("b", 3): 0.9}
    fit = paired.Fit([(arm, seed, value) for (arm, seed), value in values.items()])
    one = fit.difference("b", "a")
    five = findings.allowing(fit, one, 5)
    assert five.mean == one.mean
    assert (five.high - five.mean) / (one.high - one.mean) == pytest.approx(9.925 / 4.303, rel=1e-3)  # 2 degrees
