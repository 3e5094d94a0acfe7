"""The CPU stand-ins compute what they stand in for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.platform.sglang_cpu import moe_forward_native, murmur_hash32

MASK = 0xFFFFFFFF


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks, after Appleby's reference code."""
    h = seed
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & MASK
        k = ((k << 15) | (k >> 17)) * 0x1B873593 & MASK
        h = h ^ k
        h = ((h << 13) | (h >> 19)) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= len(data)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def test_the_reference_hash_gives_published_values() -> None:
    assert murmur3_32(b"test") == 0xBA6BD213
    assert murmur3_32(b"test", 0x9747B28C) == 0x704B81DC
    assert murmur3_32(b"") == 0


@settings(deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    column=st.integers(0, 200_000),
)
def test_hash_is_murmur3_of_seed_position_and_column(seed: int, position: int, column: int) -> None:
    key = (
        (seed & (2**64 - 1)).to_bytes(8, "little")
        + position.to_bytes(4, "little")
        + column.to_bytes(4, "little")
    )
    got = murmur_hash32(
        torch.tensor([seed]), torch.tensor([position]), torch.tensor([column], dtype=torch.int32)
    )
    assert got.tolist() == [[murmur3_32(key)]]


def test_hash_has_a_row_for_each_request() -> None:
    seeds, positions, columns = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.arange(5)
    got = murmur_hash32(seeds, positions, columns)
    rows = [murmur_hash32(seeds[i : i + 1], positions[i : i + 1], columns)[0] for i in range(2)]
    assert torch.equal(got, torch.stack(rows))
    assert torch.equal(got, murmur_hash32(seeds.to(torch.uint64), positions, columns))


def test_experts_add_up_and_those_of_other_ranks_add_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    num_experts, hidden, ffn, tokens = 3, 8, 5, 7
    layer = SimpleNamespace(
        w13_weight=torch.randn(num_experts, 2 * ffn, hidden, generator=generator),
        w2_weight=torch.randn(num_experts, hidden, ffn, generator=generator),
    )
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.tensor([[0, 1], [2, -1], [-1, -1], [1, 0], [2, 1], [0, 2], [-1, 0]])
    weights = torch.rand(tokens, 2, generator=generator)
    got = moe_forward_native(layer, x, SimpleNamespace(topk_ids=ids, topk_weights=weights), None)
    for t in range(tokens):
        expected = torch.zeros(hidden)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            if expert >= 0:
                gate, up = (layer.w13_weight[expert] @ x[t]).split(ffn)
                silu = gate / (1 + torch.exp(-gate))
                expected += weight * (layer.w2_weight[expert] @ (silu * up))
        torch.testing.assert_close(got[t], expected)
