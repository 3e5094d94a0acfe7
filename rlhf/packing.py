"""Which sequences run together: spread over data parallel ranks by cost, packed under a budget.

Pure arithmetic on lengths; every rank computes the same schedule.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.weights.model_shape import ModelShape

KARMARKAR_KARP_LIMIT = 2048
"""Above this many sequences the greedy rule is as good and much faster."""
MAX_IMBALANCE = 1.01
"""Largest over mean cost of the ranks that one micro-batch less is worth."""


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Training cost of one sequence of n tokens: ``per_token * n + per_square * n**2`` FLOP."""

    per_token: float
    per_square: float

    def __call__(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_square * num_tokens**2


def sequence_cost(shape: ModelShape) -> SequenceCost:
    """FLOP of the matrix products of one forward pass; backward is twice that for both terms.

    Of experts, those that a token sees.
    """
    layers = range(shape.num_layers)
    weights = sum(_attention_weights(shape) + _mlp_weights(shape, n) for n in layers)
    value_dim = shape.head_dim if shape.mla is None else shape.mla.v_head_dim
    # causal: half of the n x n scores, two products (QK and AV) of 2 FLOP per element
    square = shape.num_heads * (shape.head_dim + value_dim)
    return SequenceCost(2.0 * weights, float(shape.num_layers * square))


def _attention_weights(shape: ModelShape) -> int:
    mla, heads = shape.mla, shape.num_heads
    if mla is None:
        return shape.hidden_size * shape.head_dim * 2 * (heads + shape.num_kv_heads)
    query = heads * shape.head_dim
    rank = mla.q_lora_rank
    queries = shape.hidden_size * query if rank is None else rank * (shape.hidden_size + query)
    latent = shape.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    key_value = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + latent + key_value + heads * mla.v_head_dim * shape.hidden_size


def _mlp_weights(shape: ModelShape, layer: int) -> int:
    """Of one token: gate, up and down of each MLP that it sees, and the router."""
    moe = shape.moe
    if moe is None or not shape.has_experts(layer):
        return 3 * shape.hidden_size * shape.ffn_size
    seen = moe.num_experts_per_token + moe.num_shared_experts
    return shape.hidden_size * (3 * seen * moe.ffn_size + moe.num_experts)


@dataclass(frozen=True, slots=True)
class Budget:
    """What one packed forward pass may hold."""

    tokens: int
    """Largest sum of lengths, each rounded up to ``align``."""
    align: int = 1
    """Lengths of sequences count in multiples of this (2 * cp, and tp under sequence parallel)."""
    multiple: int = 1
    """Micro-batches per rank come in multiples of this (pp under virtual pipelining)."""

    def rounded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.align) * self.align

    def fewest(self, num_tokens: int, dp: int) -> int:
        """Micro-batches per rank that so many rounded tokens need at least."""
        per_rank = -(-num_tokens // (self.tokens * dp))
        return -(-per_rank // self.multiple) * self.multiple


Schedule = list[list[list[int]]]
"""[dp rank][micro-batch] -> indices of sequences. Equal numbers of micro-batches on all ranks."""


def schedule_microbatches(
    lengths: Sequence[int],
    dp: int,
    budget: Budget,
    cost: SequenceCost,
    groups: Sequence[int] | None = None,
) -> Schedule:
    """Spread sequences over DP ranks by cost and pack each rank's share under the token budget.

    Every sequence appears once. All ranks get the same number of micro-batches, a multiple of
    ``budget.multiple``; where there are too few sequences for that, some micro-batches are empty
    and become padding with zero weight.

    Args:
        lengths: [N] tokens of each sequence.
        groups: [N], equal for samples of one prompt. They stay in one micro-batch, which computes
            the prompt once, as long as that costs neither micro-batches nor balance.

    Raises:
        ValueError: a sequence is longer than the budget.
    """
    too_long = [(i, n) for i, n in enumerate(lengths) if budget.rounded(n) > budget.tokens]
    if too_long:
        i, n = max(too_long, key=lambda pair: pair[1])
        raise ValueError(
            f"sequence {i} has {n} tokens, more than train.tokens_per_microbatch={budget.tokens}; "
            "raise it, or lower data.max_prompt_tokens or rollout.sampling.max_new_tokens"
        )
    if not lengths:
        return [[] for _ in range(dp)]
    tokens, costs = [budget.rounded(n) for n in lengths], [cost(n) for n in lengths]
    best = _schedule([[i] for i in range(len(lengths))], tokens, costs, dp, budget)
    if groups is not None:
        whole = _schedule(_units(groups, tokens, budget.tokens), tokens, costs, dp, budget)
        if _as_good(whole, best, costs):
            return whole
    return best


def _as_good(new: Schedule, old: Schedule, costs: Sequence[float]) -> bool:
    """No more micro-batches, none of them idle that was not, ranks as even in cost."""
    allowed = max(MAX_IMBALANCE, _imbalance(costs, _shares(old)))
    num_idle = [sum(not micro for rank in schedule for micro in rank) for schedule in (new, old)]
    return (
        len(new[0]) <= len(old[0])
        and num_idle[0] <= num_idle[1]
        and _imbalance(costs, _shares(new)) <= allowed
    )


def _units(groups: Sequence[int], tokens: Sequence[int], cap: int) -> list[list[int]]:
    """Runs of samples of one prompt, each under the cap."""
    units: dict[tuple[int, int], list[int]] = {}
    num_runs: dict[int, int] = {}
    for i, group in enumerate(groups):
        run = units.setdefault((group, num_runs.setdefault(group, 0)), [])
        if sum(tokens[j] for j in run) + tokens[i] > cap:
            num_runs[group] += 1
            run = units.setdefault((group, num_runs[group]), [])
        run.append(i)
    return list(units.values())


def _schedule(
    units: list[list[int]],
    tokens_each: Sequence[int],
    costs_each: Sequence[float],
    dp: int,
    budget: Budget,
) -> Schedule:
    """Units, lists of sequences that stay together, over ranks and micro-batches."""
    tokens = [sum(tokens_each[i] for i in unit) for unit in units]
    costs = [sum(costs_each[i] for i in unit) for unit in units]

    def num_micro(shares: list[list[int]]) -> int:
        fewest = max(len(_pack_tightly(share, tokens, budget.tokens)) for share in shares)
        return -(-fewest // budget.multiple) * budget.multiple

    shares = partition(costs, dp)
    num = num_micro(shares)
    if num > budget.fewest(sum(tokens), dp):
        even = _even_in_both(tokens, costs, dp)
        if _imbalance(costs, even) <= MAX_IMBALANCE and num_micro(even) < num:
            shares, num = even, num_micro(even)
    packed = [_pack(share, tokens, costs, num, budget.tokens) for share in shares]
    return [[sorted(i for u in micro for i in units[u]) for micro in rank] for rank in packed]


def _shares(schedule: Schedule) -> list[list[int]]:
    """What each rank holds over all its micro-batches."""
    return [[i for micro in rank for i in micro] for rank in schedule]


def partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices in ``parts`` groups of nearly equal total cost; deterministic.

    Karmarkar-Karp differencing for up to KARMARKAR_KARP_LIMIT items, longest-first above.
    """
    if parts == 1:
        return [list(range(len(costs)))]
    if len(costs) > KARMARKAR_KARP_LIMIT:
        return _longest_first(costs, parts)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, c in enumerate(costs):
        groups: list[tuple[float, list[int]]] = [(0.0, [])] * (parts - 1) + [(float(c), [i])]
        heapq.heappush(heap, (-float(c), i, groups))
    tie = len(costs)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        # the lightest of one with the heaviest of the other
        merged = sorted(
            ((x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)),
            key=lambda group: (group[0], group[1]),
        )
        tie += 1
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], tie, merged))
    return sorted(sorted(group) for _, group in heap[0][2]) if heap else [[] for _ in range(parts)]


def _longest_first(costs: Sequence[float], parts: int) -> list[list[int]]:
    heap = [(0.0, p) for p in range(parts)]
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, p = heapq.heappop(heap)
        out[p].append(i)
        heapq.heappush(heap, (load + costs[i], p))
    return [sorted(group) for group in out]


def _first_fit(order: Sequence[int], tokens: Sequence[int], cap: int) -> list[list[int]]:
    """First fit of items in the given order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, left in enumerate(room):
            if tokens[i] <= left:
                bins[b].append(i)
                room[b] -= tokens[i]
                break
        else:
            bins.append([i])
            room.append(cap - tokens[i])
    return bins


def _longest_order(indices: Sequence[int], tokens: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda i: (-tokens[i], i))


def _even_in_both(tokens: Sequence[int], costs: Sequence[float], parts: int) -> list[list[int]]:
    """Groups of nearly equal tokens and nearly equal cost: longest first to whom lacks most."""
    all_tokens, all_costs = sum(tokens), sum(costs)
    heap = [(0.0, p) for p in range(parts)]
    loads = [(0, 0.0)] * parts
    out: list[list[int]] = [[] for _ in range(parts)]
    for i in _longest_order(range(len(tokens)), tokens):
        _, p = heapq.heappop(heap)
        out[p].append(i)
        loads[p] = (loads[p][0] + tokens[i], loads[p][1] + costs[i])
        heapq.heappush(heap, (max(loads[p][0] / all_tokens, loads[p][1] / all_costs), p))
    return [sorted(group) for group in out]


def _imbalance(costs: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    loads = [sum(costs[i] for i in share) for share in shares]
    return max(loads) * len(loads) / sum(loads)


def _pack_tightly(share: Sequence[int], tokens: Sequence[int], cap: int) -> list[list[int]]:
    """As few bins as we find: first fit, or bins that are each filled as full as possible."""
    order = _longest_order(share, tokens)
    bins = _first_fit(order, tokens, cap)
    fewest = -(-sum(tokens[i] for i in share) // cap)
    if len(bins) == fewest or len(share) > KARMARKAR_KARP_LIMIT:
        return bins
    return min(bins, _fullest_bins(order, tokens, cap), key=len)


def _fullest_bins(order: Sequence[int], tokens: Sequence[int], cap: int) -> list[list[int]]:
    """Bin after bin the fullest that the items left can make, of the longest items possible."""
    unit = math.gcd(cap, *(tokens[i] for i in order))
    left, bins = list(order), []
    while left:
        first, *rest = left
        rest.reverse()
        room = (cap - tokens[first]) // unit
        whole = (1 << (room + 1)) - 1
        sums = [1]  # bit b of sums[k]: the k shortest have a subset of b units
        for i in rest:
            sums.append((sums[-1] | sums[-1] << tokens[i] // unit) & whole)
        chosen, want = [first], sums[-1].bit_length() - 1
        for k in range(len(rest), 0, -1):
            size = tokens[rest[k - 1]] // unit
            if size <= want and sums[k - 1] >> (want - size) & 1:
                chosen.append(rest[k - 1])
                want -= size
        assert want == 0, f"{want} units of a bin have no items"
        bins.append(chosen)
        taken = set(chosen)
        left = [i for i in left if i not in taken]
    return bins


def _pack(
    share: Sequence[int], tokens: Sequence[int], costs: Sequence[float], num: int, cap: int
) -> list[list[int]]:
    """One rank's share in exactly ``num`` bins under the cap, as even in cost as they come."""
    order = sorted(share, key=lambda i: (-costs[i], i))
    bins: list[list[int]] = [[] for _ in range(num)]
    room, load = [cap] * num, [0.0] * num
    for i in order:
        fits = [b for b in range(num) if tokens[i] <= room[b]]
        if not fits:
            return _split(_pack_tightly(share, tokens, cap), num)
        b = min(fits, key=lambda b: (load[b], b))
        bins[b].append(i)
        room[b] -= tokens[i]
        load[b] += costs[i]
    return [sorted(b) for b in bins]


def _split(bins: list[list[int]], num: int) -> list[list[int]]:
    """Split the fullest bins until there are ``num``; empty ones when nothing is left to split."""
    bins = [sorted(b) for b in bins]
    while len(bins) < num:
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]))
        if len(bins[fullest]) < 2:
            bins.append([])
            continue
        whole = bins.pop(fullest)
        bins += [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return bins
