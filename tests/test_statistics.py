"""Running class statistics against moments computed the long way in float64."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from mr2_core import ClassStatistics

K, D = 5, 6
STATE = ("mean", "deviation", "p_deviation", "seen")


def some_batches(seed=0, batches=7):
    """Batches of real-looking features: class means apart, classes absent at times, singletons, class 4 never."""
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(K, D, generator=generator)
    for batch in range(batches):
        labels = torch.randint(3 if batch < 4 else 4, (9,), generator=generator)  # class 3 comes late
        labels[labels == 1] = labels[0] if batch == 2 else 1
        if batch == 5:
            labels[:] = 2
        if batch == 6:
            labels = torch.tensor([3])
        yield centres[labels] + torch.randn(len(labels), D, generator=generator), labels


def updated(batches, **options):
    statistics = ClassStatistics(K, D, **options)
    for features, labels in batches:
        statistics.update(features, labels)
    return statistics


def p_square(vector, p):
    return sum(abs(x) ** p for x in vector) ** (2 / p)


def recursion(batches, decay, p):
    """The recursion as it is printed, one class after the other."""
    mean, deviation, seen = np.zeros((K, D)), np.zeros(K), np.zeros(K, bool)
    for features, labels in batches:
        features, labels = features.double().numpy(), labels.numpy()
        for k in range(K):
            rows = features[labels == k]
            if len(rows) == 0:
                continue
            past = decay if seen[k] else 0.0
            new = past * mean[k] + (1 - past) * rows.mean(axis=0)
            spread = np.mean([p_square(row - new, p) for row in rows])
            deviation[k] = past * (deviation[k] + p_square(new - mean[k], p)) + (1 - past) * spread
            mean[k], seen[k] = new, True
    return mean, deviation, seen


def weights(batches, decay):
    """Every example of each class with its weight: β^(batches since) (1 − β), and no (1 − β) for the first batch."""
    rows = {k: ([], []) for k in range(K)}
    for features, labels in batches:
        for k in labels.unique().tolist():
            chosen = features[labels == k].double().numpy()
            values, weight = rows[k]
            first = not weight
            weight[:] = [decay * w for w in weight]
            weight += [(1.0 if first else 1 - decay) / len(chosen)] * len(chosen)
            values += list(chosen)
    return {k: (np.array(values), np.array(weight)) for k, (values, weight) in rows.items() if weight}


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
def test_moments_of_the_weighted_sample(decay):
    statistics = updated(some_batches(), decay=decay)
    sample = weights(some_batches(), decay)
    assert sorted(sample) == [0, 1, 2, 3]
    for k, (values, weight) in sample.items():
        assert weight.sum() == pytest.approx(1, abs=1e-12)
        mean = weight @ values
        np.testing.assert_allclose(statistics.mean[k], mean, rtol=1e-5, atol=1e-6)
        deviation = weight @ ((values - mean) ** 2).sum(axis=1)
        assert statistics.deviation[k].item() == pytest.approx(deviation, rel=1e-5, abs=1e-6)
        # The identity that makes a_k the class's mean squared feature norm.
        assert statistics.spread[k].item() == pytest.approx(weight @ (values**2).sum(axis=1), rel=1e-5)
    torch.testing.assert_close(statistics.p_deviation, statistics.deviation)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 5.0])
def test_recursion_for_any_norm(p):
    statistics = updated(some_batches(1), decay=0.8, p=p)
    mean, p_deviation, seen = recursion(some_batches(1), 0.8, p)
    deviation = recursion(some_batches(1), 0.8, 2)[1]
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statistics.deviation, deviation, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(statistics.p_deviation, p_deviation, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(statistics.seen, seen)
    spread = [p_square(m, p) + s for m, s in zip(mean, p_deviation, strict=True)]
    np.testing.assert_allclose(statistics.spread, spread, rtol=1e-5)


def test_default_decay_and_norm():
    torch.testing.assert_close(
        updated(some_batches()).state_dict(), updated(some_batches(), decay=0.9, p=2).state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("p", [1.0, 2.0, 7.0, 40.0])
def test_no_power_over_or_underflows(scale, p):
    batches = [(scale * features, labels) for features, labels in some_batches(2)]
    statistics = updated(batches, p=p)
    _, p_deviation, _ = recursion(batches, 0.9, p)
    np.testing.assert_allclose(statistics.p_deviation, p_deviation, rtol=2e-5)
    assert (statistics.spread[:4] > 0).all()


def test_absent_and_unseen_classes_do_not_move():
    statistics = updated(some_batches())
    assert statistics.seen.tolist() == [True, True, True, True, False]
    for name in ("mean", "deviation", "spread"):
        assert not getattr(statistics, name)[4].any()
    before = copy.deepcopy(statistics)
    statistics.update(torch.randn(4, D), torch.tensor([1, 1, 1, 1]))
    for name in STATE:
        now, then = getattr(statistics, name), getattr(before, name)
        kept = [0, 2, 3, 4]
        assert torch.equal(now[kept], then[kept])
        assert name == "seen" or not torch.equal(now[1], then[1])


def test_singletons():
    statistics = ClassStatistics(2, 3, decay=0.75)
    first, second = torch.tensor([[1.0, 2.0, 2.0]]), torch.tensor([[1.0, 2.0, 6.0]])
    statistics.update(first, torch.tensor([1]))
    assert statistics.deviation[1] == 0  # one example has no deviation ...
    assert statistics.spread[1] == 9  # ... and its square is all mean
    statistics.update(second, torch.tensor([1]))
    # Two examples with weights 3/4 and 1/4, 4 apart: 3/4 · 1/4 · 4².
    assert statistics.deviation[1].item() == pytest.approx(3.0)
    for _ in range(50):
        statistics.update(second, torch.tensor([1]))
    assert statistics.deviation[1].item() == pytest.approx(0, abs=1e-4)
    assert statistics.mean[1].tolist() == pytest.approx(second[0].tolist(), abs=1e-4)


def test_an_example_that_repeats_has_no_deviation():
    statistics = ClassStatistics(2, 64)
    example = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        statistics.update(example, torch.tensor([0]))
    assert statistics.deviation[0] == 0
    assert torch.equal(statistics.mean[0], example[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_taken_in_as_float32(dtype):
    rounded = [(features.to(dtype), labels) for features, labels in some_batches()]
    statistics = updated(rounded)
    same = updated([(features.float(), labels) for features, labels in rounded])
    for name in STATE:
        assert torch.equal(getattr(statistics, name), getattr(same, name))
    assert statistics.mean.dtype == statistics.deviation.dtype == statistics.p_deviation.dtype == torch.float32


def test_autocast_does_not_round_them():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = updated(some_batches(), p=3)
    assert all(torch.equal(getattr(inside, name), getattr(updated(some_batches(), p=3), name)) for name in STATE)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_casts_leave_them_in_float32(cast):
    statistics = updated(some_batches())
    before = copy.deepcopy(statistics)
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), statistics)
    cast(network)
    assert network[0].weight.dtype != torch.float32
    for name in STATE:
        assert getattr(statistics, name).dtype == getattr(before, name).dtype
        assert torch.equal(getattr(statistics, name), getattr(before, name))
    statistics.update(*next(some_batches()))


def test_float32_whatever_the_default_type():
    batches = list(some_batches())
    try:
        torch.set_default_dtype(torch.float64)
        statistics = updated((features.double(), labels) for features, labels in batches)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in STATE:
        assert torch.equal(getattr(statistics, name), getattr(updated(batches), name))


def test_moves_to_another_device():
    statistics = updated(some_batches()).to("meta", torch.float16)
    assert {buffer.device.type for buffer in statistics.buffers()} == {"meta"}
    assert statistics.mean.dtype == torch.float32


def by_state_dict(statistics):
    stream = io.BytesIO()
    torch.save(statistics.state_dict(), stream)
    stream.seek(0)
    loaded = ClassStatistics(K, D, decay=statistics.decay, p=statistics.p)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    return loaded


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), by_state_dict],
    ids=["deepcopy", "pickle", "file"],
)
def test_a_copy_continues_as_the_original(copied):
    batches = list(some_batches())
    original = updated(batches[:4], decay=0.7, p=3)
    other = copied(original)
    state = copy.deepcopy(original.state_dict())
    for features, labels in batches[4:]:
        other.update(features, labels)
    torch.testing.assert_close(original.state_dict(), state, rtol=0, atol=0)  # nothing is shared
    for name in STATE:
        assert torch.equal(getattr(other, name), getattr(updated(batches, decay=0.7, p=3), name))


def test_no_gradient_and_no_change_to_the_features():
    statistics = ClassStatistics(K, D)
    features, labels = next(some_batches())
    leaf = features.clone().requires_grad_()
    statistics.update(leaf, labels)
    assert torch.equal(leaf, features)
    assert not any(buffer.requires_grad for buffer in statistics.buffers())
    assert not statistics.spread.requires_grad


def test_refused_batches_change_nothing():
    statistics = updated(some_batches())
    before = copy.deepcopy(statistics.state_dict())
    features, labels = next(some_batches(3))
    broken = features.clone()
    broken[2, 1] = torch.nan
    with pytest.raises(ValueError, match="features holds NaN"):
        statistics.update(broken, labels)
    with pytest.raises(ValueError, match="labels"):
        statistics.update(features, labels + K)
    torch.testing.assert_close(statistics.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_are_left_out_where_values_are_not_looked_at(value, monkeypatch):
    """A compiled graph, like an accelerator, has no checks of values; the mask that replaces them runs here."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    features, labels = next(some_batches(4))
    kept = torch.ones(len(labels), dtype=torch.bool)
    kept[[0, 5]] = False
    broken = features.clone()
    broken[0, 3] = broken[5, 0] = value
    masked, without = updated(some_batches(), p=3), updated(some_batches(), p=3)
    masked.update(broken, labels)
    without.update(features[kept], labels[kept])
    torch.testing.assert_close(masked.state_dict(), without.state_dict(), rtol=1e-6, atol=1e-6)
    # A class of which nothing is finite counts as absent.
    before = copy.deepcopy(masked.state_dict())
    masked.update(torch.full((4, D), value), torch.tensor([0, 1, 4, 4]))
    after = masked.state_dict()
    assert after.pop("updates") == before.pop("updates") + 1
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def rank(number, address, folder):
    """One of two processes, with unequal shares of each batch: a class may be in one of them alone."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=2)
    share = slice(0, 2) if number == 0 else slice(2, None)
    statistics = updated(((features[share], labels[share]) for features, labels in some_batches(batches=6)), p=3)
    torch.save(statistics.state_dict(), folder / f"{number}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one_on_the_joined_batch(tmp_path):
    torch.multiprocessing.spawn(rank, ((tmp_path / "rendezvous").as_uri(), tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in (0, 1))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    joined = updated(some_batches(batches=6), p=3)
    torch.testing.assert_close(first, joined.state_dict(), rtol=1e-5, atol=1e-5)
