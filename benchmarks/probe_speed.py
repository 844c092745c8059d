"""How fast is the probe: heads that ``fit_probe`` solves together, against scikit-learn's, one after the other?

    python benchmarks/probe_speed.py

Each run is a draw, with replacement, of 10,000 of the embedded features of EfficientNet-Lite0, 128 wide, of 100
classes, and the objective is ERM's, which is that of scikit-learn's ``LogisticRegression`` too. That stops at its own
tolerance; the benchmark checks that ``fit_probe``, which goes before it and after it, leaves no larger gradient. Ends
with one line of JSON, ``name``, ``ratios``, ``seconds``, ``bars`` and ``ok``, and with exit status 1 if a bar is
missed. About two minutes on two cores.
"""

import argparse
import json
import sys
import time

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from mr2_core.data import load_features
from mr2_core.probe import fit_probe

DECAY = 0.02  # what cifar100-probe-lite0-tuning chose for ERM
RATIO, SECONDS = 1.5, 10.0  # at least; at most, for ten runs on two cores


def timed(work):
    """Result and seconds of one call."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def by_sklearn(features, labels):
    """Weight and bias of one run."""
    model = LogisticRegression(C=1 / (DECAY * len(labels)), max_iter=10_000).fit(features.numpy(), labels.numpy())
    return torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)


def gradient(features, labels, weight, bias):
    """Norm of the objective's gradient, in float64."""
    weight, bias = (part.double().requires_grad_() for part in (weight, bias))
    value = F.cross_entropy(features.double() @ weight.T + bias, labels) + DECAY / 2 * weight.square().sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, (weight, bias))]).norm().item()


def main():
    """Measure both and hold them against the bars; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="how many are solved (default: %(default)s)")
    runs = parser.parse_args().runs
    data = load_features("cifar100-efficientnet-lite0")
    labels = torch.from_numpy(data["y_train"].astype(np.int64))
    drawn = torch.randint(len(labels), (runs, len(labels)), generator=torch.Generator().manual_seed(0))
    features, labels = torch.from_numpy(data["x_train"])[drawn], labels[drawn]

    def together():
        return fit_probe(features, labels, torch.ones(100), DECAY)

    fit_probe(features[0, :1000], torch.arange(1000) % 100, torch.ones(100), DECAY)  # warms up
    probe, before = timed(together)
    others, theirs = timed(lambda: [by_sklearn(*run) for run in zip(features, labels, strict=True)])
    after = timed(together)[1]
    ours = list(zip(probe.weight, probe.bias, strict=True))
    left = [
        max(gradient(*problem, *head) for *problem, head in zip(features, labels, heads, strict=True))
        for heads in (ours, others)
    ]
    assert left[0] <= left[1], "fit_probe stopped earlier than scikit-learn, so that the times cannot be compared"
    ratio, seconds = theirs / ((before + after) / 2), max(before, after)
    shape = " × ".join(map(str, features.shape))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; features {shape}, 100 classes")
    print(f"fit_probe: {before:.1f} s and {after:.1f} s, {probe.iterations} steps, gradients up to {left[0]:.1e}")
    print(f"scikit-learn: {theirs:.1f} s, gradients up to {left[1]:.1e}")
    ok = ratio >= RATIO and seconds <= SECONDS
    print(
        json.dumps(
            {
                "name": "probe_speed",
                "ratios": {"scikit-learn/fit_probe": round(ratio, 3)},
                "seconds": {f"{runs} runs": round(seconds, 2)},
                "bars": {"scikit-learn/fit_probe": f">= {RATIO}", f"{runs} runs": f"<= {SECONDS} s"},
                "ok": ok,
            }
        )
    )
    return not ok


if __name__ == "__main__":
    sys.exit(main())
