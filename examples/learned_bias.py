"""Train with a learned bias: heads find out which distances matter, and the table they learn says so.

The task: every token is the sum of the tokens 3 and 7 places before it. Content does not say where those are, and no position
is given to the model but the bias by distance. A notebook as a script: each `# %%` is a cell, and this runs all of them:

    python examples/learned_bias.py                     seconds on a CPU
"""

# %% The data: sequences of numbers below 7, each the sum of two earlier ones
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import backlight

NUMBERS, DISTANCES, LAGS, LENGTH, HEADS, DIM = 7, 16, (3, 7), 48, 2, 32
torch.manual_seed(0)


def sequences(count: int, generator: torch.Generator) -> Tensor:
    """[count, LENGTH + 1]"""
    tokens = torch.randint(NUMBERS, (count, LENGTH + 1), generator=generator)
    for i in range(max(LAGS), LENGTH + 1):
        tokens[:, i] = sum(tokens[:, i - lag] for lag in LAGS) % NUMBERS
    return tokens


# %% The model: one attention call, whose only positions are a table [heads, distances]
class Model(nn.Module):
    def __init__(self, learned: bool):
        super().__init__()
        self.embed = nn.Embedding(NUMBERS, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.read = nn.Sequential(nn.Linear(DIM, 128), nn.GELU(), nn.Linear(128, NUMBERS))
        self.bias = nn.Parameter(torch.zeros(HEADS, DISTANCES)) if learned else None

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(tokens)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # distances beyond the table are out of the window: the bias is about the others
        y = backlight.attention(q, k, v, causal=True, window=(DISTANCES - 1, 0), bias=self.bias)
        return self.read(y.transpose(1, 2).flatten(2))


# %% Training: the bias is a parameter like any other, and gets its gradient from the same backward
def trained(learned: bool, steps: int = 120) -> tuple[Model, float]:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = Model(learned)
    others = [parameter for name, parameter in model.named_parameters() if name != "bias"]
    # logits of a bias have to travel some units: a step of their own size
    groups = [{"params": others}, *([{"params": [model.bias], "lr": 0.1}] if learned else ())]
    optimizer = torch.optim.Adam(groups, lr=3e-3)
    for step in range(steps):
        passages = sequences(32, generator)
        logits, wanted = model(passages[:, :-1])[:, max(LAGS) :], passages[:, max(LAGS) + 1 :]
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == wanted).float().mean().item()
            print(f"  step {step:3d}   loss {loss.item():.3f}   right {right:5.1%}")
    return model, right


print("without positions")
_, blind = trained(learned=False)
print("with a learned bias by distance")
model, right = trained(learned=True)

# %% What it learned: the weight of a distance among equal contents. A row predicts its successor, so lag 3 is distance 2
print("\nshare of attention by distance, if contents did not matter")
shares = model.bias.detach().softmax(dim=-1)
for head in range(HEADS):
    print(f"  head {head}  " + " ".join(f"{share:4.0%}" for share in shares[head].tolist()))
print("  distance " + " ".join(f"{distance:4d}" for distance in range(DISTANCES)))
found = sorted({distance + 1 for distance in shares.sum(0).topk(len(LAGS)).indices.tolist()})
print(f"lags asked for {list(LAGS)}, found {found}; right {right:.1%}, without positions {blind:.1%}")
assert found == list(LAGS)
assert right > 0.95 > 0.5 > blind

# %% The gradient by hand: dbias is ds added up along its diagonals (docs/math.md); here by finite differences
x = torch.randn(3, 1, HEADS, 20, 8, dtype=torch.float64)
table = torch.randn(HEADS, DISTANCES, dtype=torch.float64, requires_grad=True)


def loss_of(table: Tensor) -> Tensor:
    return backlight.attention(*x, causal=True, bias=table).square().sum()


loss_of(table).backward()
nudge = torch.zeros_like(table)
nudge[1, 4] = 1e-6
difference = (loss_of(table + nudge) - loss_of(table - nudge)).item() / 2e-6
print(f"\ndbias[1, 4] {table.grad[1, 4].item():.8f}, by finite differences {difference:.8f}")
torch.testing.assert_close(table.grad[1, 4].item(), difference, rtol=1e-6, atol=0)
