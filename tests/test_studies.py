"""Studies: what a run is, that nothing finished is lost, and the arithmetic of the tables."""

import dataclasses
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy import stats

from mr2_core import studies
from mr2_core.__main__ import duration, main, shard
from mr2_core.data import load_dataset
from mr2_core.methods import build_method
from mr2_core.studies import (
    Run,
    correct,
    execute,
    holm,
    in_words,
    interval,
    joint,
    labels_of,
    levels,
    read_endpoints,
    read_study,
    readable,
    run_study,
    table,
)

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
warmup = 4
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
    assert runs[1].configuration["hyperparameters"] == {"representation_weight": 0.01, "warmup": 4}
    assert runs[1].result == tmp_path / "tiny" / "mr2" / "seed0.json"
    assert len({run.identity for run in runs}) == 4


def test_a_setting_younger_than_recorded_runs_is_in_no_identity_until_it_is_used(study, tmp_path):
    plain = read_study(study(), tmp_path)[0]
    off = read_study(study(text=STUDY.replace("epochs = 2", "epochs = 2\nlayer_decay = 1.0")), tmp_path)[0]
    used = read_study(study(text=STUDY.replace("epochs = 2", "epochs = 2\nlayer_decay = 0.7")), tmp_path)[0]
    assert "layer_decay" not in plain.configuration["training"]
    assert plain.identity == off.identity != used.identity
    assert used.configuration["training"]["layer_decay"] == 0.7


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "tiny"', "", "lacks name"),
        ('name = "tiny"', 'nome = "tiny"\nname = "tiny"', "unknown keys nome"),
        ('kind = "{kind}"', 'kind = "final"', "kind is 'final'; expected one of tuning, confirmatory, descriptive"),
        ('method = "erm"', 'method = "irm"', "arm erm: method is 'irm'; expected one of erm"),
        ("representation_weight", "lambda", "arm mr2: method 'mr2' does not accept these hyperparameters: .*lambda"),
        ("epochs = 2", "epoch = 2", "unexpected keyword argument 'epoch'"),
        ("learning_rate = 0.05", "learning_rate = 0", r"arm mr2: learning_rate is 0; expected a number in \(0, inf\)"),
        ("seeds = [0, 1]", "seeds = [0, 1", "is not valid TOML"),
        ("seeds = [0, 1]", "seeds = 2", "seeds is 2; expected a list of whole numbers"),
        ("seeds = [0, 1]", 'seeds = ["0"]', "seeds is .'0'.; expected a list of whole numbers"),
        ("seeds = [0, 1]", 'seeds = [0]\nhead = "round"', "head is 'round'; expected one of linear, cosine"),
        ('model = "compact-grey"', 'model = "compakt"', "model is 'compakt'; expected one of compact"),
        ('method = "erm"', "", "arm erm: method is None; expected one of erm"),
        ("epochs = 2", "epochs = 2\nweight_decay = -1", r"weight_decay is -1; expected a number in \[0, inf\)"),
        ("epochs = 2", "epochs = 2\nmomentum = 1", r"momentum is 1; expected a number in \[0, 1\)"),
        ("seeds = [0, 1]", "seeds = [0, 1]\nsize = 16", r"augment is \(\); expected crop and flip with a size"),
    ],
)
def test_a_study_that_is_wrong_is_refused_before_anything_runs(study, tmp_path, old, new, sentence):
    assert old in STUDY
    with pytest.raises(ValueError, match=sentence):
        read_study(study(text=STUDY.replace(old, new)), tmp_path)


def test_counts_by_class_are_a_list_of_the_method(study, tmp_path):
    counts = list(range(1, 11))
    text = STUDY.replace('method = "mr2"', f'method = "ldam"\ncounts = {counts}').replace(
        "representation_weight = 0.01\nwarmup = 4", ""
    )
    run = read_study(study(text=text), tmp_path)[1]
    assert run.configuration["hyperparameters"] == {"counts": counts}
    assert execute(run, progress=False)["test_by_class"]
    for wrong, sentence in (
        (counts[:9], "expected 10 positive numbers"),
        (7, "expected 2 positive"),
        ([0, 1], "counts is"),
    ):
        with pytest.raises(ValueError, match=sentence):
            execute(read_study(study(text=text.replace(str(counts), str(wrong))), tmp_path)[1], progress=False)


def test_a_run_is_recorded_once_and_reported(study, tmp_path, capsys):
    path, results = study(), tmp_path / "results"
    command = ["run", str(path), "--results", str(results), "--seed", "1"]
    assert main(command) == 0
    assert "0 of 2 runs are done; 2 to do." in capsys.readouterr().out
    record = json.loads((results / "tiny" / "mr2" / "seed1.json").read_text())
    assert [epoch["epoch"] for epoch in record["history"]] == [1, 2]
    assert [len(set(epoch["margins"])) > 1 for epoch in record["history"]] == [False, True], "the first is warm-up"
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
    assert printed[0].startswith("arm,seeds,overall,easy,medium,hard")
    assert float(printed[1].split(",")[2]) == pytest.approx(
        100 * np.mean(json.loads((results / "tiny" / "erm" / "seed1.json").read_text())["test_by_class"]), abs=1e-6
    )

    path.write_text(path.read_text().replace("representation_weight = 0.01", "representation_weight = 0.02"))
    done = {run.arm for run in read_study(path, results) if run.record}
    assert done == {"erm"}, "a run of another configuration is not this run"


def evaluated(monkeypatch):
    """Collect the number of images of each evaluation."""
    sizes, predict = [], studies.predict_batches

    def spy(*arguments):
        outputs = predict(*arguments)
        sizes.append(len(outputs[0]))
        return outputs

    monkeypatch.setattr(studies, "predict_batches", spy)
    return sizes


def test_a_tuning_run_never_sees_the_test_images(study, tmp_path, monkeypatch):
    seen = evaluated(monkeypatch)
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


def test_a_run_under_way_is_left_to_its_process(study, tmp_path, capsys):
    runs = read_study(study(), tmp_path)[:2]
    runs[0].result.parent.mkdir(parents=True)
    with filelock.FileLock(runs[0].result.with_suffix(".lock")):
        assert run_study(runs) == 1
    assert "tiny erm seed 0 is being done by another process." in capsys.readouterr().out
    assert runs[1].record
    assert run_study(runs) == 0
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_command_and_save(study, tmp_path, number):
    path, results = study(text=STUDY.replace("epochs = 2", "epochs = 100000")), tmp_path / "results"
    command = [sys.executable, "-m", "mr2_core", "run", str(path), "--results", str(results), "--jobs", "2"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    deadline = time.monotonic() + 600  # on a busy machine three processes that import torch take their time
    while len(list(results.rglob("*.pt"))) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = process.poll() is None
    process.send_signal(number)
    process.wait()
    assert alive, "the command ended by itself"
    # Locks that can be taken are those of processes that are gone.
    for run in read_study(path, results)[:2]:
        with filelock.FileLock(run.result.with_suffix(".lock"), timeout=300):
            state = torch.load(run.result.with_name(f"{run.result.stem}-{run.identity}.pt"), weights_only=True)["state"]
            assert state["epoch"] > 0
    assert process.stdout.read().count("run the same command to go on") == 2  # it ends when the last worker has
    assert "Traceback" not in (tmp_path / "errors").read_text()


def test_torchrun_shares_a_run_stops_as_one_and_goes_on(study, tmp_path):
    path, results = study(text=STUDY.replace("epochs = 2", "epochs = 60")), tmp_path / "results"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mr2_core"]
    command += ["run", str(path), "--arm", "mr2", "--seed", "0", "--results", str(results)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    (run,) = [run for run in read_study(path, results) if (run.arm, run.seed) == ("mr2", 0)]
    checkpoint = run.result.with_name(f"{run.result.stem}-{run.identity}.pt")
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate()
    state = torch.load(checkpoint, weights_only=True)["state"]
    assert 0 < state["epoch"] < 60, errors
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("All runs are done.") == 1
    assert run.record["made_with"]["hardware"].startswith("2 × ")
    assert run.record["history"][: state["epoch"]] == state["history"]
    assert {path.name for path in results.rglob("*") if path.is_file()} == {"seed0.json", "seed0.npz"}


def test_endpoints(study, tmp_path):
    assert read_endpoints(study()) == {"references": ["erm"], "easy_margin": 1.0}
    text = STUDY.replace("[training]", '[endpoints]\nreferences = ["mr2"]\neasy_margin = 0.5\n[training]')
    assert read_endpoints(study(text=text)) == {"references": ["mr2"], "easy_margin": 0.5}
    for old, new, sentence in (
        ('["mr2"]', '["mr3"]', "endpoints names mr3; the arms are erm, mr2"),
        ("0.5", "0", "easy_margin is 0; expected a positive number"),
        ("0.5", '"1"', "easy_margin is '1'; expected a positive number"),
        ("easy_margin", "margin", "endpoints has unknown keys margin"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_endpoints(study(text=text.replace(old, new)))


def test_the_recorded_compact_baselines_use_what_their_tuning_chose():
    root = Path(__file__).parents[1]
    tuning, study = (
        read_study(root / "studies" / f"cifar100-baselines{part}.toml", root / "data" / "results")
        for part in ("-tuning", "")
    )
    trials = {}
    for run in tuning:
        assert run.record, f"{run.arm} has not been run"
        method = run.configuration["method"]
        trials.setdefault(method.removesuffix("-two-stage"), []).append(run)
    assert {method: len(runs) for method, runs in trials.items()} == {
        "ldam": 4,
        "group-dro": 4,
        "fair-dro": 6,
        "jtt": 4,
        "lff": 4,
        "supcon": 4,
    }
    for run in study:
        if run.study == "cifar100-baselines":
            best = max(trials[run.arm], key=lambda run: np.mean(run.record["validation_by_class"]))
            for part in ("method", "hyperparameters", "training", "per_class", "model"):
                assert run.configuration[part] == best.configuration[part], (run.arm, part)
    assert {run.arm for run in study if run.study == "cifar100-baselines"} == set(trials)
    assert {run.arm for run in study} == {*trials, "erm", "uniform", "mr2", "mr2-paper"}


def test_a_study_can_reuse_arms_of_another(study, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # so small a problem is quicker on one thread
    results = tmp_path / "results"
    first = study()
    own = (
        STUDY.replace("tiny", "second").replace("arms.erm", "arms.smooth").replace('method = "erm"', 'method = "focal"')
    )
    own = own.replace("arms.mr2", "arms.mr2-again").format(kind="descriptive").replace("seeds = [0, 1]", "seeds = [1]")
    second = tmp_path / "second.toml"
    second.write_text(own + '[reused]\nstudy = "tiny.toml"\narms = ["erm"]\n')
    runs = read_study(second, results)
    assert [(run.study, run.arm, run.seed) for run in runs] == [
        ("tiny", "erm", 1),
        ("second", "smooth", 1),
        ("second", "mr2-again", 1),
    ]
    assert runs[0] == read_study(first, results)[2]
    assert read_endpoints(second)["references"] == ["erm"]
    assert main(["run", str(second), "--results", str(results)]) == 0
    assert read_study(first, results)[2].record, "a reused run is a run of its own study"
    assert main(["report", str(second), "--results", str(results)]) == 0
    assert "3 of 3 runs are done; thirds by all; Δ against erm" in capsys.readouterr().out

    for old, new, sentence in (
        ('arms = ["erm"]', 'arms = ["irm"]', "reuses irm; expected arms of"),
        ("arms.smooth", "arms.erm", "reuses erm; expected arms of .* with names of their own"),
        ("per_class = 20", "per_class = 10", "per_class is 10, but 20 in"),
        ("seeds = [1]", "seeds = [1, 2]", r"has seeds \[2\], which"),
    ):
        second.write_text((own + '[reused]\nstudy = "tiny.toml"\narms = ["erm"]\n').replace(old, new))
        with pytest.raises(ValueError, match=sentence):
            read_study(second, results)


def test_a_study_of_ones_own_arrays(study, tmp_path, monkeypatch):
    digits = load_dataset("digits")
    np.savez(tmp_path / "own.npz", **{k: v for k, v in digits._asdict().items() if k != "class_names"})
    monkeypatch.setenv("MR2_DATA", str(tmp_path))
    text = STUDY.replace('"digits"', '"arrays"\nroot = "own.npz"')
    runs = [read_study(study(text=t), tmp_path / name)[0] for t, name in ((STUDY, "a"), (text, "b"))]
    first, second = (execute(run, progress=False) for run in runs)
    assert first["test_by_class"] == second["test_by_class"]
    assert first["identity"] != second["identity"]


def test_a_method_is_told_the_labels_it_is_trained_on(study, tmp_path, monkeypatch):
    run, seen, plain = read_study(study(), tmp_path)[0], [], build_method
    monkeypatch.setattr(
        "mr2_core.studies.build_method", lambda *a, labels, **more: seen.append(labels) or plain(*a, **more)
    )
    execute(run, progress=False)
    assert [labels.bincount().tolist() for labels in seen] == [[20] * 10]


def test_a_study_of_images_on_disk(study, tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    for part, count in (("train", 10), ("val", 4)):
        for label in "abc":
            for index in range(count):
                file = tmp_path / "set" / part / label / f"{index}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                pixels = generator.integers(0, 256, (*generator.integers(20, 40, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(file)
    monkeypatch.setenv("MR2_DATA", str(tmp_path))
    text = STUDY.replace('"digits"', '"folder"\nroot = "set"\nsize = 16').replace("per_class = 20", "per_class = 7")
    text = text.replace("compact-grey", "compact").replace("augment = []", "").replace("= 50", "= 4")
    path, results = study(text=text), tmp_path / "results"
    assert main(["run", str(path), "--seed", "0", "--workers", "1", "--results", str(results)]) == 0
    erm, mr2 = read_study(path, results)[:2]
    assert erm.configuration["size"] == 16
    assert [record["epoch"] for record in mr2.record["history"]] == [1, 2]
    assert {name: len(mr2.record[name]) for name in ("train_by_class", "validation_by_class", "test_by_class")} == {
        "train_by_class": 3,
        "validation_by_class": 3,
        "test_by_class": 3,
    }
    with np.load(mr2.result.with_suffix(".npz")) as arrays:
        assert arrays["label"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    sizes = evaluated(monkeypatch)
    execute(read_study(path, tmp_path / "again")[0], workers=0, progress=False)
    assert sizes == [6, 6, 6, 21, 12], "two images a class validate, after each epoch and in the end"
    sizes.clear()
    tuning = read_study(study("tuning", text), tmp_path / "tuning")[0]
    execute(tuning, workers=0, progress=False)
    assert sizes == [6, 6, 6, 21]


def test_official_validation_images_leave_all_others_for_training():
    labels = np.repeat(np.arange(3), 10)
    chosen, validation = studies.split({"per_class": None, "seed": 0}, labels, official=True)
    assert validation is None
    assert chosen.tolist() == list(range(30))
    chosen, validation = studies.split({"per_class": 4, "seed": 0}, labels)
    assert sorted(labels[validation]) == [0, 0, 1, 1, 2, 2]
    assert sorted(labels[chosen]) == sorted([0, 1, 2] * 4)
    assert not set(chosen) & set(validation)


def test_a_budget_stops_a_run_and_the_same_command_goes_on(study, tmp_path, capsys, monkeypatch):
    from mr2_core import training

    learning_rate, alarms = training.learning_rate, {1, 6}

    def ring(settings, step, steps):
        if step in alarms:
            alarms.remove(step)
            signal.raise_signal(signal.SIGALRM)  # as the timer of the budget does
        return learning_rate(settings, step, steps)

    monkeypatch.setattr(training, "learning_rate", ring)
    results = tmp_path / "results"
    command = ["run", str(study()), "--arm", "erm", "--seed", "0", "--results", str(results), "--budget", "1h"]
    for place in ("epoch 0, step 2", "epoch 1, step 3"):
        assert main(command) == 3
        assert f"Stopped at {place}; its state is in" in capsys.readouterr().out
    assert main(command) == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_diverges_is_named_and_keeps_no_other_from_its_turn(study, tmp_path, capfd, jobs):
    path = study(text=STUDY.replace("epochs = 2", "epochs = 2\nlearning_rate = 1e30"))
    command = ["run", str(path), "--seed", "0", "--results", str(tmp_path), "--jobs", str(jobs)]
    assert main(command) == 3
    seen = capfd.readouterr().out
    assert "tiny erm seed 0 has failed: Training became non-finite at epoch 0" in seen
    assert "1 runs are still missing" in seen
    runs = {run.arm: run for run in read_study(path, tmp_path) if run.seed == 0}
    assert runs["mr2"].record  # comes after, with a learning rate of its own
    assert not runs["erm"].result.exists()


def test_in_a_process_group_a_run_that_diverges_ends_the_command(study, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "world", lambda: (0, 2))  # as if another process waited for this one
    path = study(text=STUDY.replace("epochs = 2", "epochs = 2\nlearning_rate = 1e30"))
    with pytest.raises(FloatingPointError, match="Training became non-finite"):
        run_study(read_study(path, tmp_path))


def test_threads_are_the_users_or_one_each(study, tmp_path, monkeypatch):
    before, run, seen = torch.get_num_threads(), read_study(study(), tmp_path)[0], []
    torch.set_num_threads(3)
    try:
        assert run_study([run], jobs=2) == 0
        assert run.record["made_with"]["hardware"].endswith(" 1 threads")
        run.result.unlink()
        monkeypatch.setattr(studies, "execute", lambda *_, **__: seen.append(torch.get_num_threads()))
        run_study([run])
        assert seen == [torch.get_num_threads()] == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("git", ["missing", "elsewhere"])
def test_without_git_a_run_is_recorded_and_its_commit_is_not_known(study, tmp_path, monkeypatch, git):
    if git == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(studies, "__file__", str(tmp_path / "studies.py"))
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run = read_study(study(), tmp_path)[0]
    assert execute(run, progress=False)["made_with"] == run.record["made_with"]
    assert run.record["made_with"]["commit"] is None
    assert run.record["made_with"]["dirty"] is None


def test_provenance_sees_what_is_not_committed(tmp_path, monkeypatch):
    copy = tmp_path / "mr2_core"
    copy.mkdir()
    (copy / "studies.py").write_text("committed")
    (tmp_path / "studies").mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(studies, "__file__", str(copy / "studies.py"))
    assert studies.provenance("cpu")["dirty"] is False
    for path in (tmp_path / "studies" / "new.toml", copy / "studies.py"):
        before = path.read_text() if path.exists() else None
        path.write_text("changed")
        assert studies.provenance("cpu")["dirty"] is True
        path.unlink() if before is None else path.write_text(before)


def test_a_budget_spent_before_training_begins(study, tmp_path, capsys):
    assert main(["run", str(study()), "--results", str(tmp_path / "results"), "--budget", "0.001s"]) == 3
    assert "4 runs are still missing; the same command goes on." in capsys.readouterr().out


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

    def test_claims_and_adjusted_p_values(self, runs):
        frame = table(runs, reference="a", easy_margin=0.5)
        assert frame.loc["b", "hard gains"]
        assert frame.loc["b", "easy kept"]
        assert frame.loc["b", "p hard"] < 0.001
        assert frame.loc["b", "p easy"] == 1
        assert frame.loc["a", ["Δ hard", "p hard", "hard gains", "easy kept"]].isna().all()
        other = table(runs, reference="b")
        assert not other.loc["a", "hard gains"], "a loss, however certain, is no gain"
        some = table(runs[:-1], reference="a")
        assert "hard gains" in some, "all that was planned is done"
        runs[-1].result.unlink()
        assert "hard gains" not in table(runs, reference="a"), "claims wait for the last run"
        assert "p hard (Holm)" not in readable(table(runs, reference="a")), "and so does the p-value"
        shown = readable(frame)
        assert shown.loc["a", ["Δ hard", "p hard (Holm)", "hard gains"]].tolist() == ["", "", ""]
        low, high = frame.loc["b", ["low hard", "high hard"]]
        assert shown.loc["b", "Δ hard"] == f"{frame.loc['b', 'Δ hard']:+.1f} [{low:+.1f},\u00a0{high:+.1f}]"

    def test_a_descriptive_study_claims_nothing(self, runs):
        described = [dataclasses.replace(run, configuration={"kind": "descriptive"}) for run in runs]
        for run, other in zip(runs, described, strict=True):
            run.result.write_text(json.dumps(run.record | {"identity": other.identity}))
        frame = table(described, reference="a")
        assert frame.loc["b", "low hard"] > 0
        assert "hard gains" not in frame
        assert "p hard (Holm)" not in readable(frame)

    def test_ranking_weighs_arms_and_not_runs(self, runs):
        for run in runs:
            if run.arm == "b":
                validation = [0.5, 0.9, 0.7, 0.6, 0.3, 0.1]
                run.result.write_text(json.dumps(run.record | {"validation_by_class": validation}))
        for run in runs[2::2]:  # of the reference only the first seed is left
            run.result.unlink()
        # Over arms, class 0 has (0.9 + 0.5) / 2 and class 2 (0.58 + 0.7) / 2; over runs their order would turn.
        easy = np.mean([runs[0].record["test_by_class"][k] for k in (0, 1)])
        assert table(runs, reference="a").loc["a", "easy"] == pytest.approx(100 * easy)

    def test_ranking_may_be_one_arms(self, runs):
        for run in runs:
            if run.arm == "a":
                record = run.record | {"validation_by_class": list(self.RANKING_ACCURACY[::-1])}
                run.result.write_text(json.dumps(record))
        reversed_frame = table(runs, reference="a", ranking="a")
        assert reversed_frame.loc["b", "Δ easy"] > 5 > reversed_frame.loc["b", "Δ hard"]
        with pytest.raises(ValueError, match="ranking is 'c'"):
            table(runs, reference="a", ranking="c")

    def test_a_success_is_every_endpoint_against_every_reference(self, runs):
        """Arm c gains as much as b on the hard third, and loses twice the margin on the easy one."""
        generator, label = np.random.default_rng(2), labels_of(runs[0])

        def write(run, right):
            np.savez(run.result.with_suffix(".npz"), prediction=np.where(right, label, (label + 1) % 6), label=label)

        for run in [run for run in runs if run.arm == "b"]:
            write(run, correct(run) ^ ((label < 2) & (generator.random(len(label)) < 0.005)))
            other = dataclasses.replace(run, arm="c", result=run.result.parent.parent / "c" / run.result.name)
            other.result.parent.mkdir(exist_ok=True)
            other.result.write_text(json.dumps(run.record))
            write(other, correct(run) & ~((label < 2) & (generator.random(len(label)) < 0.04)))
            runs.append(other)
        frame = joint(runs, references=["a"], easy_margin=2.0)
        assert frame["succeeds"].to_dict() == {"b": True, "c": False}
        order = np.arange(6)
        scores = {arm: np.stack([correct(run).astype(float) for run in runs if run.arm == arm]) for arm in "abc"}
        gain = scores["b"] - scores["a"]
        p = max(interval(gain, label, order)[2][3], interval(gain + 0.02, label, order)[2][1])
        assert frame.loc["b", "p"] == pytest.approx(2 * p), "two arms might succeed"
        p = max(interval(gain + shift, label, order, share=0.5)[2][i] for shift, i in ((0, 3), (0.02, 1)))
        pools = joint(runs, references=["a"], easy_margin=2.0, share=0.5)
        assert pools.loc["b", "p"] == pytest.approx(2 * p)
        assert frame.loc["c", ["p easy", "p"]].tolist() == [1, 1]
        assert frame.loc["c", "p hard"] == frame.loc["b", "p hard"]
        # A reference that is as good as b leaves it nothing to gain.
        assert joint(runs, references=["a", "c"], easy_margin=2.0).loc["b", ["p hard", "p"]].tolist() == [1, 1]
        kept = joint(runs, references=["a"], easy_margin=8.0).loc["c", "p easy"]
        shifted = interval(scores["c"] - scores["a"] + 0.08, label, order)
        assert kept == pytest.approx(shifted[2][1])
        assert kept < 0.05
        with pytest.raises(ValueError, match="references holds erm; expected arms of the study"):
            joint(runs, references=["erm"])
        runs[0].result.unlink()
        with pytest.raises(ValueError, match="1 of 12 runs are not done; a success is judged once"):
            joint(runs, references=["a"])

    def test_report_ends_with_all_endpoints_at_once(self, runs, capsys, monkeypatch):
        monkeypatch.setattr(studies, "read_study", lambda *_: runs)
        monkeypatch.setattr(studies, "read_endpoints", lambda _: {"references": ["a"], "easy_margin": 1.0})
        assert main(["report", "s.toml"]) == 0
        assert "All endpoints at once: hard third above a, easy third kept" in capsys.readouterr().out
        assert main(["report", "s.toml", "--reference", "b"]) == 0
        assert "at once" not in capsys.readouterr().out, "the plan names other references"
        monkeypatch.setattr(studies, "read_study", lambda *_: runs[:2])
        assert main(["report", "s.toml"]) == 0
        assert "at once" not in capsys.readouterr().out, "one seed has no interval"
        monkeypatch.setattr(studies, "read_study", lambda *_: runs)
        runs[0].result.unlink()
        assert main(["report", "s.toml"]) == 0
        assert "at once" not in capsys.readouterr().out, "claims wait for the last run"

    def test_a_ranking_of_several_arms(self, runs):
        for run in runs:
            if run.arm == "a":
                run.result.write_text(json.dumps(run.record | {"validation_by_class": [0.5, 0.9, 0.7, 0.6, 0.3, 0.1]}))
        both = table(runs, reference="a", ranking="a+b")
        assert both.equals(table(runs, reference="a"))
        assert not both.equals(table(runs, reference="a", ranking="a"))

    def test_unknown_reference(self, runs):
        with pytest.raises(ValueError, match="no run of the reference arm 'c' is done; done are"):
            table(runs, reference="c")


def test_interval_covers_whatever_varies():
    """2,000 studies in which seeds and images both matter: each level's interval holds 0 in 95 % of them."""
    generator = np.random.default_rng(0)
    labels, ranking = np.repeat(np.arange(6), 15), np.arange(6)
    for by_seed, by_image, rest in ((1, 0, 0.5), (0, 3, 0.5), (0.5, 3, 1)):
        held = np.zeros(4)
        for _ in range(2000):
            seeds = by_seed * generator.standard_normal((5, 6))[:, labels]
            images = by_image * generator.standard_normal(len(labels))
            low, high, p = interval(seeds + images + rest * generator.standard_normal((5, 90)), labels, ranking)
            held += (low < 0) & (high > 0)
            np.testing.assert_array_equal(p > 0.05, (low < 0) & (high > 0))
        assert (held / 2000 > 0.94).all()
        if by_image == 0:
            np.testing.assert_allclose(held / 2000, 0.95, atol=0.02)


def test_interval_of_seeds_alone_is_student_s():
    by_class = np.random.default_rng(0).standard_normal((5, 6))
    low, high, p = interval(np.repeat(by_class, 4, axis=1), np.repeat(np.arange(6), 4), np.arange(6))
    for i, part in enumerate((slice(0, 6), slice(0, 2), slice(2, 4), slice(4, 6))):
        test = stats.ttest_1samp(by_class[:, part].mean(axis=1), 0)
        np.testing.assert_allclose((low[i], high[i]), test.confidence_interval())
        assert p[i] == pytest.approx(test.pvalue)


def test_an_interval_about_other_pools_covers_their_luck():
    """Each seed's difference is the mean of half of a pool of twenty numbers, whose expectation is 0."""
    generator, labels = np.random.default_rng(3), np.repeat(np.arange(3), 2)
    covered = {0.0: 0, 0.5: 0}
    for _ in range(400):
        pool = generator.standard_normal(20)
        difference = np.array([generator.choice(pool, 10, replace=False).mean() for _ in range(5)])
        for share in covered:
            low, high, _ = interval(np.repeat(difference[:, None], 6, axis=1), labels, np.arange(3), share=share)
            covered[share] += low[0] < 0 < high[0]
    # 380 are expected; an interval about this pool alone covers as rarely as one that is √6 too short
    assert abs(covered[0.5] - 380) < 4 * np.sqrt(400 * 0.95 * 0.05)
    assert covered[0.0] < 320
    with pytest.raises(ValueError, match=r"share is 1; expected .* at least 0 and below 1"):
        interval(np.zeros((2, 6)), labels, np.arange(3), share=1)


def test_p_values_are_read_as_words():
    assert [in_words(p) for p in (np.nan, 0.0004, 0.00149, 0.25)] == ["", "< 0.001", "0.001", "0.250"]


def test_holm():
    p = pd.Series([0.01, 0.04, np.nan, 0.03, 0.005], index=list("abcde"))
    # Worked by hand: sorted, times 4, 3, 2, 1, never falling
    np.testing.assert_allclose(holm(p, 4), [0.03, 0.06, np.nan, 0.06, 0.02])
    np.testing.assert_allclose(holm(p, 5), [0.04, 0.09, np.nan, 0.09, 0.025])  # one result is still to come


def test_no_variation_is_no_certainty():
    labels = np.repeat(np.arange(3), 4)
    low, high, p = interval(np.ones((5, 12)), labels, np.arange(3))
    assert np.isnan(p).all()
    np.testing.assert_array_equal(low, high)
    assert interval(np.zeros((5, 12)), labels, np.arange(3))[2].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="difference has 1 seeds; expected at least 2"):
        interval(np.ones((1, 12)), labels, np.arange(3))
    with pytest.raises(ValueError, match="and 2 images of each class"):
        interval(np.ones((5, 12)), np.minimum(np.arange(12), 1), np.arange(2))


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
