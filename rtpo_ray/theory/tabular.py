"""A softmax policy with one free logit a (state, tokens so far, token), in the shape of the learner's policy."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtpo_ray.policy import modeling
from rtpo_ray.policy.forest import Layout
from rtpo_ray.theory.tree import Probabilities, Tree


class Table(nn.Module):
    """Logits [prefixes, tokens]; stands where a language model would."""

    _no_split_modules = ()

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(logits)


class TabularPolicy(modeling.Policy):
    """Begins as `start` (uniform); one entry a value when there is a value head, which begin at 0."""

    legal: Tensor  # [prefixes, tokens]

    def __init__(self, tree: Tree, start: Probabilities | None = None, value_head: bool = False) -> None:
        nn.Module.__init__(self)  # not Policy's, which is for Hugging Face models
        logits = _logits(tree, start or tree.uniform())
        prefixes: dict[tuple[int, ...], int] = {(0,): 0}  # row 0: padding
        for prefix, _ in logits:
            prefixes.setdefault(prefix, len(prefixes))
        table = torch.full((len(prefixes), 1 + max(token for _, token in logits)), -torch.inf)
        table[0] = 0.0
        for (prefix, token), value in logits.items():
            table[prefixes[prefix], token] = value
        self.prefixes = prefixes
        self.register_buffer("legal", torch.isfinite(table), persistent=False)
        self.lm = Table(table.nan_to_num(neginf=0.0))
        self.compute_dtype, self.plain_head = torch.float32, False
        self.value_head = nn.Linear(len(prefixes), 1, bias=False) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)

    def forward(
        self, input_ids: Tensor, rows: Tensor, columns: Tensor, labels: Tensor, temperature: float, layout: Layout | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As `modeling.Policy.forward`, of padded sequences only. KeyError when a sequence is none of the game's."""
        ids = input_ids.tolist()
        index = torch.tensor([self.prefixes[tuple(ids[row][: column + 1])] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)])
        logits = self.lm.weight[index].masked_fill(~self.legal[index], -torch.inf)
        values = None if self.value_head is None else self.value_head(F.one_hot(index, len(self.prefixes)).float()).sum(-1)
        return -F.cross_entropy(logits / temperature, labels, reduction="none"), values


def _logits(tree: Tree, policy: Probabilities) -> dict[tuple[tuple[int, ...], int], float]:
    """log pi by (context and tokens so far, token)."""
    found = {}
    for state, actions in tree.actions.items():
        for number, action in enumerate(actions):
            for length, value in enumerate(tree.token_logprobs(state, number, policy)):
                found[(*tree.context(state), *action[:length]), action[length]] = value
    return found
