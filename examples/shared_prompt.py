"""Eight rollouts of one prompt, as GRPO has them, in one sequence that holds the prompt once: the same loss and gradients.

The tokens are a tree, the prompt its stem. `mask.tree` lets each token see itself and its ancestors, positions count along the
branch, and the logits at a token's parent predict it. Beside it the usual batch, which computes the prompt eight times.
"""

import torch
from torch import Tensor, nn

from backlight import mask
from backlight.nn import Attention

VOCABULARY, DIM, PROMPT = 64, 64, 256
LENGTHS = [24, 31, 17, 40, 28, 9, 36, 22]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention(DIM, heads=4, kv_heads=2)
        self.mlp = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor | None, tree: mask.Mask | None) -> Tensor:
        x = x + self.attention(self.norm(x), positions=positions, mask=tree)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor, positions: Tensor | None = None, tree: mask.Mask | None = None) -> Tensor:
        """Log-probabilities [B, S, vocabulary] of the token after each."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, tree)
        return self.read(x).log_softmax(dim=-1)


def shared(model: Model, prompt: Tensor, rollouts: list[Tensor]) -> tuple[list[Tensor], int]:
    """Log-probabilities of the tokens of each rollout, and how many tokens the model saw: the prompt is there once."""
    tokens = torch.cat([prompt, *rollouts])
    branches = torch.arange(PROMPT, len(tokens)).split(LENGTHS)
    parents = torch.arange(len(tokens)) - 1
    parents[torch.stack([branch[0] for branch in branches])] = PROMPT - 1
    positions = torch.cat([torch.arange(PROMPT), *(PROMPT + torch.arange(length) for length in LENGTHS)])
    # each rollout follows the one before it: rows stand in preorder, and the mask needs no order of its own
    said = model(tokens[None], positions, mask.tree(parents, preorder=True))[0]
    return [said[parents[branch], tokens[branch]] for branch in branches], len(tokens)


def unshared(model: Model, prompt: Tensor, rollouts: list[Tensor]) -> tuple[list[Tensor], int]:
    """The same from a batch of eight sequences, padded to the longest."""
    sequences = [torch.cat([prompt, rollout]) for rollout in rollouts]
    said = model(nn.utils.rnn.pad_sequence(sequences, batch_first=True))
    places = [torch.arange(PROMPT, len(sequence)) for sequence in sequences]
    found = [row[at - 1, sequence[at]] for row, at, sequence in zip(said, places, sequences, strict=True)]
    return found, sum(map(len, sequences))


torch.manual_seed(0)
model = Model()
prompt, rollouts = torch.randint(VOCABULARY, (PROMPT,)), [torch.randint(VOCABULARY, (length,)) for length in LENGTHS]
rewards = torch.randn(len(rollouts))
advantages = (rewards - rewards.mean()) / rewards.std()

losses, gradients, counts = {}, {}, {}
for way in (unshared, shared):
    model.zero_grad()
    logs, count = way(model, prompt, rollouts)
    loss = -torch.stack([advantage * log.mean() for advantage, log in zip(advantages, logs, strict=True)]).mean()
    loss.backward()
    name = way.__name__
    losses[name], counts[name] = loss.item(), count
    gradients[name] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

differences = {key: float((gradients["shared"][key] - g).norm() / g.norm()) for key, g in gradients["unshared"].items()}
worst = max(differences, key=lambda key: differences[key])
assert len(differences) == len(list(model.parameters())), "every parameter has a gradient"
assert differences[worst] < 1e-4, f"{worst} differs by {differences[worst]:.1e}"
print(f"loss {losses['unshared']:.6f} unshared, {losses['shared']:.6f} shared")
print(f"largest difference of a gradient, relative to its norm: {differences[worst]:.1e} ({worst})")
saved = 1 - counts["shared"] / counts["unshared"]
print(f"tokens {counts['unshared']} unshared, {counts['shared']} shared: {saved:.0%} saved")
