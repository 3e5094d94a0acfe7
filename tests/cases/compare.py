"""Compare what the product gives for a case with the case's right value.

    result = OPS[case["input"]["op"]](case["input"])     # may raise
    problems = compare(case, result_or_exception)         # [] means that the case holds

An op returns a dict with (at least) the keys of ``expected``. Numbers compare at 1e-4 relative
(1e-9 absolute), None equals None, the string "NaN" stands for a float NaN. ``any_of``: one of the
alternatives holds. ``error: true``: the op must raise, and the message must contain every string of
``message_names``. ``pack_schedule`` ops return {"schedule": [rank][microbatch][sample index],
"warned": bool}; its properties are checked here. Keys that state a property of the op's inside
(``finite``, ``raises``, ``warned``, ...) are keys like any other. Keys of DOCUMENTATION are
explanations, not checked.
"""

from __future__ import annotations

import math

DOCUMENTATION = {
    "full_with_padding_is_wrong",
    "experts_if_bias_in_bf16",
    "bias_if_mixed",
    "scales_if_local_ones_are_joined",
}


def same(want, got) -> bool:
    if want == "NaN":
        return isinstance(got, float) and math.isnan(got)
    if isinstance(want, bool) or want is None or isinstance(want, str):
        return (
            type(got) is type(want) and got == want
            if not isinstance(want, str)
            else str(got) == want
        )
    if isinstance(want, (int, float)):
        return (
            isinstance(got, (int, float))
            and not isinstance(got, bool)
            and math.isclose(want, got, rel_tol=1e-4, abs_tol=1e-9)
        )
    if isinstance(want, list):
        got = list(got) if isinstance(got, (list, tuple)) else got
        return (
            isinstance(got, list)
            and len(got) == len(want)
            and all(same(w, g) for w, g in zip(want, got, strict=True))
        )
    if isinstance(want, dict):
        return (
            isinstance(got, dict)
            and set(want) == set(got)
            and all(same(w, got[k]) for k, w in want.items())
        )
    return False


def schedule_problems(inp: dict, want: dict, result: dict) -> list[str]:
    lengths, cap, out = inp["lengths"], inp["cap"], []
    align = inp.get("align", 1)
    rounded = [-(-n // align) * align for n in lengths]
    ranks = result["schedule"]
    flat = [i for rank in ranks for mb in rank for i in mb]
    if sorted(flat) != list(range(len(lengths))):
        out.append("not every sample exactly once")
    if len({len(rank) for rank in ranks}) != 1:
        out.append("ranks have different numbers of micro-batches")
    if any(len(rank) % inp.get("multiple_per_rank", 1) for rank in ranks):
        out.append("not a multiple of multiple_per_rank")
    loads = [sum(rounded[i] for i in mb) for rank in ranks for mb in rank]
    if max(loads, default=0) > cap and not result.get("warned"):
        out.append(f"a micro-batch holds {max(loads)} > cap {cap}")
    if not want.get("error_or_padding") and any(not mb for rank in ranks for mb in rank):
        out.append("an empty micro-batch")
    if "min_total_microbatches" in want and len(loads) < want["min_total_microbatches"]:
        out.append(f"{len(loads)} micro-batches cannot be enough")
    return out


def compare(case: dict, result) -> list[str]:
    expected = case["expected"]
    if "any_of" in expected:
        tries = [
            compare(
                {
                    **case,
                    "expected": {**{k: v for k, v in expected.items() if k != "any_of"}, **alt},
                },
                result,
            )
            for alt in expected["any_of"]
        ]
        return (
            []
            if any(not t for t in tries)
            else ["none of any_of holds: " + " / ".join("; ".join(t) for t in tries)]
        )
    if expected.get("error") is True:
        if not isinstance(result, Exception):
            return [f"accepted, should be refused; gave {result!r}"]
        missing = [w for w in expected.get("message_names", []) if w not in str(result)]
        return [f"message {str(result)!r} does not name {missing}"] if missing else []
    if isinstance(result, Exception):
        if (
            expected.get("raises") is True
            or expected.get("error_or_padding")
            or "error_at_config_time_or_effective_cap_at_least" in expected
        ):
            return []
        for key in ("error_line", "error_names"):
            if key in expected:
                names = expected[key] if isinstance(expected[key], list) else [expected[key]]
                missing = [n for n in names if str(n) not in str(result)]
                return [f"message does not name {missing}"] if missing else []
        return [f"raised {type(result).__name__}: {result}"]
    if case["input"]["op"] == "pack_schedule" and "schedule" in result:
        if expected.get("long_sample_alone"):
            long = [i for i, n in enumerate(case["input"]["lengths"]) if n > case["input"]["cap"]]
            alone = all(any(mb == [i] for rank in result["schedule"] for mb in rank) for i in long)
            return (
                []
                if alone and result.get("warned")
                else ["the long sample is not alone with a warning"]
            )
        return schedule_problems(case["input"], expected, result)
    out = []
    for key, want in expected.items():
        if key in DOCUMENTATION or (key in ("raises", "finite") and key not in result):
            continue
        if key == "value_at_least":
            if not result.get("value", result.get(key, -1)) >= want:
                out.append(f"value below {want}")
        elif key not in result:
            out.append(f"no {key} in the result")
        elif not same(want, result[key]):
            out.append(f"{key}: want {want!r}, got {result[key]!r}")
    return out
