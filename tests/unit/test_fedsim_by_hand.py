"""FedSim's forward pass in the paper's form, written out with numpy beside the paper's lines."""

import numpy as np
import torch
from scipy.special import erf
from torch import nn

from securevfl.config.presets import preset
from securevfl.models.fedsim import FedSimConfig, FedSimFamily

ROWS, LINKS, FEATURES, KEYS, OUTPUTS = 3, 7, 4, 2, 2


def test_the_papers_form_is_algorithm_1() -> None:
    """[FedSim] Algorithm 1 and section 4.2: split network, weight, sort and merge gate."""
    settings = preset("fedsim", neighbours=LINKS, hidden=6, layer_width=9, kernel=3).model
    assert isinstance(settings, FedSimConfig)
    torch.manual_seed(0)
    family = FedSimFamily()
    bottom = family.build_bottom(settings, num_features=FEATURES, key_dim=KEYS).eval()
    top = family.build_top(
        settings, num_features=FEATURES, key_dim=KEYS, outputs=OUTPUTS, classes=True
    ).eval()
    own, records = torch.randn(ROWS, FEATURES), torch.randn(ROWS, LINKS, FEATURES)
    similarities = torch.randn(ROWS, LINKS)
    present = torch.ones(ROWS, LINKS, dtype=torch.bool)
    with torch.no_grad():
        aggregate = bottom(records, torch.zeros(ROWS, LINKS, KEYS), present)
        got = top(own, torch.zeros(ROWS, KEYS), aggregate, similarities[:, None])

    theirs, ours, s = records.numpy(), own.numpy(), similarities.numpy()
    bottoms, tops = linear_layers(bottom), linear_layers(top)
    local = [tops[name] for name in tops if name.startswith("pairs.local")]
    of_row, of_link, out = (tops[f"pairs.{name}"] for name in ("of_row", "of_link", "out"))
    gate = [tops[name] for name in tops if name.startswith("similarity_model")]
    convolution = tops["merge.convolution"]
    perceptron = [tops[name] for name in tops if name.startswith("merge.perceptron")]
    for row in range(ROWS):
        scores = []
        mine = local_model(local, ours[row])
        for link in range(LINKS):
            c = local_model(list(bottoms.values()), theirs[row, link])  # line 5
            joined = apply(of_row, mine) + c @ of_link[0].T  # line 7, on both parts side by side
            o = apply(out, np.maximum(joined, 0))
            hidden = np.tanh(apply(gate[0], s[row, link : link + 1]))
            weight = 1 + apply(gate[1], hidden)
            scores.append(weight * o)  # line 9
        order = np.argsort(-s[row])  # line 10
        sorted_pairs = np.stack(scores)[order]
        windows = np.stack([sorted_pairs[i : i + 3].T for i in range(LINKS - 2)])
        seen = np.maximum(apply(convolution, windows), 0)
        merged = np.maximum(apply(perceptron[0], seen.reshape(-1)), 0)
        wanted = apply(perceptron[1], merged)  # line 11
        np.testing.assert_allclose(got[row].numpy(), wanted, rtol=1e-4, atol=1e-5)


Layer = tuple[np.ndarray, np.ndarray]


def linear_layers(model: nn.Module) -> dict[str, Layer]:
    """Weights and biases of all linear layers, by name, in their order."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
            found[name] = (layer.weight.detach().numpy(), bias.detach().numpy())
    return found


def apply(layer: Layer, inputs: np.ndarray) -> np.ndarray:
    """One linear layer."""
    return np.asarray(inputs @ layer[0].T + layer[1])


def local_model(layers: list[Layer], inputs: np.ndarray) -> np.ndarray:
    """A perceptron with one hidden layer; the paper names no activation, ours is GELU."""
    first, last = layers
    hidden = apply(first, inputs)
    return apply(last, hidden * (1 + erf(hidden / np.sqrt(2))) / 2)
