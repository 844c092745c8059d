"""Studies: what a run is, that nothing finished is lost, and the arithmetic of the tables."""

import json
import multiprocessing
import shutil
import time

import numpy as np
import pytest
from scipy import stats

from mr2_core.__main__ import duration, main, shard
from mr2_core.studies import Run, execute, levels, read_study, table

STUDY = """
name = "tiny"
kind = "{kind}"
dataset = "digits"
per_class = 20
model = "compact-grey"
seeds = [0, 1]
[training]
epochs = 2
batch_size = 50
precision = "float32"
augment = []
[arms.erm]
method = "erm"
[arms.mr2]
method = "mr2"
representation_weight = 0.01
training = {{ learning_rate = 0.05 }}
"""


@pytest.fixture
def study(tmp_path):
    def write(kind="descriptive", text=STUDY):
        path = tmp_path / "tiny.toml"
        path.write_text(text.format(kind=kind))
        return path

    return write


def test_runs_are_seed_by_seed_and_an_arm_changes_the_training(study, tmp_path):
    runs = read_study(study(), tmp_path)
    assert [(run.seed, run.arm) for run in runs] == [(0, "erm"), (0, "mr2"), (1, "erm"), (1, "mr2")]
    assert [run.configuration["training"]["learning_rate"] for run in runs[:2]] == [0.1, 0.05]
    assert runs[1].configuration["hyperparameters"] == {"representation_weight": 0.01}
    assert runs[1].result == tmp_path / "tiny" / "mr2" / "seed0.json"
    assert len({run.identity for run in runs}) == 4


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "tiny"', "", "lacks name"),
        ('name = "tiny"', 'nome = "tiny"\nname = "tiny"', "unknown keys nome"),
        ('kind = "{kind}"', 'kind = "final"', "kind is 'final'; expected one of tuning, confirmatory, descriptive"),
        ('method = "erm"', 'method = "irm"', "arm erm: method is 'irm'; expected one of erm"),
        ("representation_weight", "lambda", "arm mr2: method 'mr2' does not accept these hyperparameters: .*lambda"),
        ("epochs = 2", "epoch = 2", "unexpected keyword argument 'epoch'"),
        ("learning_rate = 0.05", "learning_rate = 0", "arm mr2: learning_rate is 0; expected a positive number"),
        ("seeds = [0, 1]", "seeds = [0, 1", "is not valid TOML"),
    ],
)
def test_a_study_that_is_wrong_is_refused_before_anything_runs(study, tmp_path, old, new, sentence):
    assert old in STUDY
    with pytest.raises(ValueError, match=sentence):
        read_study(study(text=STUDY.replace(old, new)), tmp_path)


def test_a_run_is_recorded_once_and_reported(study, tmp_path, capsys):
    path, results = study(), tmp_path / "results"
    command = ["run", str(path), "--results", str(results), "--seed", "1"]
    assert main(command) == 0
    assert "0 of 2 runs are done; 2 to do." in capsys.readouterr().out
    record = json.loads((results / "tiny" / "mr2" / "seed1.json").read_text())
    assert [epoch["epoch"] for epoch in record["history"]] == [1, 2]
    assert np.mean(record["history"][-1]["margins"]) == pytest.approx(1, abs=1e-3)
    assert {len(record[f"{split}_by_class"]) for split in ("train", "validation", "test")} == {10}
    with np.load(results / "tiny" / "mr2" / "seed1.npz") as arrays:
        by_class = [(arrays["prediction"] == k)[arrays["label"] == k].mean() for k in range(10)]
        assert ((arrays["truth_probability"] >= 0) & (arrays["truth_probability"] <= arrays["top_probability"])).all()
    np.testing.assert_allclose(by_class, record["test_by_class"], atol=1e-3)
    assert {path.name for path in results.rglob("*") if path.is_file()} == {"seed1.json", "seed1.npz"}

    changed = {file: file.stat().st_mtime_ns for file in results.rglob("seed*")}
    assert main(command) == 0
    assert "2 of 2 runs are done; 0 to do." in capsys.readouterr().out
    assert changed == {file: file.stat().st_mtime_ns for file in results.rglob("seed*")}

    assert main(["report", str(path), "--results", str(results), "--reference", "erm", "--format", "csv"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(",seeds,overall,easy,medium,hard")
    assert float(printed[1].split(",")[2]) == pytest.approx(
        100 * np.mean(json.loads((results / "tiny" / "erm" / "seed1.json").read_text())["test_by_class"]), abs=1e-6
    )

    path.write_text(path.read_text().replace("representation_weight = 0.01", "representation_weight = 0.02"))
    done = {run.arm for run in read_study(path, results) if run.record}
    assert done == {"erm"}, "a run of another configuration is not this run"


def test_a_tuning_run_never_sees_the_test_images(study, tmp_path, monkeypatch):
    import mr2_core.studies

    seen, predict = [], mr2_core.studies.predict
    monkeypatch.setattr(mr2_core.studies, "predict", lambda m, x, **k: seen.append(len(x)) or predict(m, x, **k))
    run = read_study(study("tuning"), tmp_path)[0]
    record = execute(run, progress=False)
    assert "test_by_class" not in record
    assert not run.result.with_suffix(".npz").exists()
    assert 360 not in seen, "36 test images a class"
    assert seen


def test_killed_at_any_moment_no_finished_run_is_lost_and_none_is_half_written(study, tmp_path):
    path, results = study(), tmp_path / "results"
    # A fork server imports torch once, so that the moments fall into the runs and not into the imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mr2_core.studies", "sklearn.datasets"])
    generator = np.random.default_rng(0)

    def begin():
        process = context.Process(target=main, args=(["run", str(path), "--results", str(results)],))
        process.start()
        return process

    begin().join()  # warms the server
    shutil.rmtree(results)
    finished, killed = {}, 0
    while killed < 20:
        process = begin()
        time.sleep(generator.uniform(0, 1))
        if process.is_alive():
            process.kill()
            killed += 1
        process.join()
        now = {run.result: run.result.read_bytes() for run in read_study(path, results) if run.record}
        assert finished.items() <= now.items()
        finished = now
        if len(finished) == 4:  # begin again
            shutil.rmtree(results)
            finished = {}
    process = begin()
    process.join()
    assert all(run.record for run in read_study(path, results))


def test_a_budget_stops_a_run_and_the_same_command_goes_on(study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = study(text=STUDY.replace("epochs = 2", "epochs = 400"))
    command = ["run", str(path), "--arm", "erm", "--seed", "0", "--results", str(tmp_path / "results")]
    assert main([*command, "--budget", "2s"]) == 3
    first = capsys.readouterr().out
    assert "run the same command to go on" in first
    assert main([*command, "--budget", "2s"]) == 3
    epochs = [int(text.split("Stopped at epoch ")[1].split(",")[0]) for text in (first, capsys.readouterr().out)]
    assert epochs[1] > epochs[0] > 0


class TestTable:
    RANKING_ACCURACY = np.linspace(0.9, 0.1, 6)

    @pytest.fixture
    def runs(self, tmp_path):
        """Six classes of 200 test images; arm b is 10 points better on the two hardest; luck differs by seed."""
        generator = np.random.default_rng(1)
        label = np.repeat(np.arange(6), 200)
        runs = []
        for seed in range(4):
            luck = generator.random(len(label))
            for arm, gain in (("a", np.zeros(6)), ("b", np.array([0, 0, 0, 0, 0.1, 0.1]))):
                chance = (self.RANKING_ACCURACY + gain)[label]
                right = luck < chance
                run = Run("s", arm, seed, {"kind": "confirmatory"}, tmp_path / "s" / arm / f"seed{seed}.json")
                run.result.parent.mkdir(parents=True, exist_ok=True)
                by_class = [right[label == k].mean() for k in range(6)]
                run.result.write_text(
                    json.dumps(
                        {
                            "identity": run.identity,
                            "test_by_class": by_class,
                            "validation_by_class": list(self.RANKING_ACCURACY),
                        }
                    )
                )
                np.savez(
                    run.result.with_suffix(".npz"), prediction=np.where(right, label, (label + 1) % 6), label=label
                )
                runs.append(run)
        return runs

    def test_means_and_paired_differences(self, runs):
        frame = table(runs, reference="a")
        by_arm = {arm: np.mean([run.record["test_by_class"] for run in runs if run.arm == arm], axis=0) for arm in "ab"}
        for arm in "ab":
            thirds = [100 * by_arm[arm][i : i + 2].mean() for i in (0, 2, 4)]
            np.testing.assert_allclose(frame.loc[arm, ["easy", "medium", "hard"]].astype(float), thirds)
            assert frame.loc[arm, "overall"] == pytest.approx(100 * by_arm[arm].mean())
        assert frame.loc["b", "Δ hard"] == pytest.approx(frame.loc["b", "hard"] - frame.loc["a", "hard"])
        assert frame.loc["b", ["Δ easy", "low easy", "high easy"]].tolist() == [0, 0, 0]
        assert frame.loc["b", "low hard"] < 10 < frame.loc["b", "high hard"]

    def test_interval_is_the_two_way_bootstraps(self, runs):
        frame = table(runs, reference="a")
        difference = np.array(
            [
                np.mean([a.record["test_by_class"][k] - b.record["test_by_class"][k] for k in (4, 5)])
                for a, b in zip(runs[1::2], runs[::2], strict=True)
            ]
        )
        # Images are shared by the seeds' mean, so the interval is at least as wide as that over images alone.
        right = {
            arm: np.mean(
                [
                    np.load(r.result.with_suffix(".npz"))["prediction"]
                    == np.load(r.result.with_suffix(".npz"))["label"]
                    for r in runs
                    if r.arm == arm
                ],
                axis=0,
            )
            for arm in "ab"
        }
        gain = (right["b"] - right["a"])[800:]
        images = stats.norm.ppf(0.975) * 100 * np.sqrt(gain[:200].var() + gain[200:].var()) / 2 / np.sqrt(200)
        seeds = stats.norm.ppf(0.975) * 100 * difference.std() / np.sqrt(4)
        half = (frame.loc["b", "high hard"] - frame.loc["b", "low hard"]) / 2
        assert max(images, seeds) * 0.9 < half < np.hypot(images, seeds) * 1.6

    def test_ranking_may_be_one_arms(self, runs):
        for run in runs:
            if run.arm == "a":
                record = run.record | {"validation_by_class": list(self.RANKING_ACCURACY[::-1])}
                run.result.write_text(json.dumps(record))
        reversed_frame = table(runs, reference="a", ranking="a")
        assert reversed_frame.loc["b", "Δ easy"] > 5 > reversed_frame.loc["b", "Δ hard"]
        with pytest.raises(ValueError, match="ranking is 'c'"):
            table(runs, reference="a", ranking="c")

    def test_unknown_reference(self, runs):
        with pytest.raises(ValueError, match="no run of the reference arm 'c' is done; done are"):
            table(runs, reference="c")


def test_levels_are_overall_and_thirds():
    by_class = np.array([0.1, 0.9, 0.5, 0.7, 0.3, 0.2])
    np.testing.assert_allclose(levels(by_class, np.array([1, 3, 2, 4, 5, 0])), [0.45, 0.8, 0.4, 0.15])


def test_command_line_words():
    assert [duration(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    assert shard("2/8") == (1, 8)
    for wrong in ("0/8", "9/8", "2", "a/b"):
        with pytest.raises(Exception, match="is no shard"):
            shard(wrong)
    with pytest.raises(Exception, match="is no duration"):
        duration("20")


def test_list_shows_every_method(capsys):
    from mr2_core.methods import METHODS
    from mr2_core.models import BACKBONES

    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in [*METHODS, *BACKBONES])


def test_unknown_arm_or_file_is_one_sentence(study, tmp_path, capsys):
    assert main(["run", str(study()), "--results", str(tmp_path), "--arm", "mr3"]) == 2
    assert "the study has no arm mr3; it has erm, mr2." in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.toml")]) == 2
    assert "none.toml is no file" in capsys.readouterr().err
