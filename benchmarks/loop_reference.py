"""MR2 with a Python loop over the classes, as in the paper's released code: what ``loss_speed.py`` measures against.

The formulas are those printed in the paper, with the running moments of :class:`mr2_core.ClassStatistics`, so that
the values can be compared. The released code loops in the same way, but divides the exponent of the representation loss
by 10 D and multiplies the loss by D / (10 K), which costs no time and changes the value. Its ``exp`` is taken as
it is, here too: beyond an exponent of 88 it overflows in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LoopMR2(nn.Module):
    """The printed MR2 (p = 2) with per-class loops; arguments as in :class:`mr2_core.MR2Loss`."""

    def __init__(self, num_classes, feature_dim, *, mean_margin=1.0, representation_weight=0.1, decay=0.9):
        super().__init__()
        self.num_classes, self.mean_margin = num_classes, mean_margin
        self.representation_weight, self.decay = representation_weight, decay
        self.register_buffer("mean", torch.zeros(num_classes, feature_dim))
        self.register_buffer("deviation", torch.zeros(num_classes))
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.bool))

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor) -> None:
        """Move the moments of every class that the batch holds."""
        for k in range(self.num_classes):
            rows = features[labels == k]
            if len(rows) == 0:
                continue
            if not self.seen[k]:
                self.mean[k] = rows.mean(dim=0)
                self.deviation[k] = (rows - self.mean[k]).norm(dim=1).pow(2).mean()
                self.seen[k] = True
            else:
                mean = self.decay * self.mean[k] + (1 - self.decay) * rows.mean(dim=0)
                past = self.deviation[k] + (mean - self.mean[k]).norm().pow(2)
                self.deviation[k] = self.decay * past + (1 - self.decay) * (rows - mean).norm(dim=1).pow(2).mean()
                self.mean[k] = mean

    def margins(self) -> Tensor:
        """γ of Corollary 1; a class that was not seen has c̄."""
        power = (self.mean.norm(dim=1).pow(2) + self.deviation).pow(1 / 3)
        margins = self.mean_margin * self.seen.sum() * power / power[self.seen].sum()
        return torch.where(self.seen, margins, self.mean_margin)

    def representation(self, features: Tensor, labels: Tensor) -> Tensor:
        """The printed representation loss, class by class, from the differences of all pairs."""
        margin = 2 * self.deviation.sum() / (self.deviation > 0).sum().clamp(min=1)
        total = features.new_zeros(())
        for k in range(self.num_classes):
            rows = features[labels == k]
            if len(rows) < 2:
                continue
            itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
            difference = rows[:, None] - rows[None, :]
            square = difference.norm(dim=2).masked_fill(itself, 0).pow(2)
            terms = torch.exp(square - margin).masked_fill(itself, 0).sum(dim=1)
            total = total + torch.log1p(terms).sum()
        return total / len(features)

    def forward(self, logits: Tensor, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Update the moments and return total, logit and representation loss."""
        self.update(features, labels)
        logit = F.cross_entropy(logits / self.margins()[labels][:, None], labels)
        representation = self.representation(features, labels)
        return logit + self.representation_weight * representation, logit, representation
