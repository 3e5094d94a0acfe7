"""Which experts each token took in the engine. No SGLang here.

Routes are [L - 1, layers with routed experts, experts per token] int16: row t holds the experts of
token t of prompt and answer, in no particular order. The last token has none: the engine never fed
it to the model.
"""

from __future__ import annotations

import base64

import numpy as np

from rlhf.rollout.engine import RoutedLayers


def decode_routes(text: str, layers: RoutedLayers) -> np.ndarray:
    """SGLang's answer: base64 of int32 [tokens, all layers, experts per token].

    Raises:
        ValueError: it has another shape.
    """
    flat = np.frombuffer(base64.b64decode(text), np.int32)
    row = layers.stop * layers.experts_per_token
    if flat.size % row:
        raise ValueError(
            f"the engine's routes have {flat.size} numbers, no multiple of {layers.stop} layers * "
            f"{layers.experts_per_token} experts per token"
        )
    routes = flat.reshape(-1, layers.stop, layers.experts_per_token)
    return routes[:, layers.first :].astype(np.int16)


def expert_loads(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """[layers with routed experts, num_experts] int64: how many tokens took each expert."""
    num_layers = routes.shape[1]
    cells = routes.astype(np.int64) + num_experts * np.arange(num_layers)[:, None]
    counts = np.bincount(cells.ravel(), minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)
