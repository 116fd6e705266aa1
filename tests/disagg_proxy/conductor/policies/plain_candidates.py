"""What ``_native.Candidates`` answers, in plain Python: the conductor's formula, instance by instance."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.worker import Worker

EQUAL_S = 0.001
EQUAL_GAP_S = 0.00005
_K = 1e-3
_M = 1e-6

Found = tuple[Worker, str, float, float, float, int, bool, float, float, float]
_Row = tuple[float, float, float, float, int, bool, Worker, float, float]


def cheapest(
    instances: Sequence[Worker],
    tokens: int,
    owned: Sequence[int],
    in_pool: int,
    now_s: float,
    *,
    ahead_s: float,
    urgency: float,
    marginal_delay: float,
    reuse_probability: float,
    spare_s: float,
    stalled: float,
    gap_most_s: float,
    need_tokens: int,
    without: Worker | None,
    last: Worker | None,
    last_own: int,
    noise: float,
    unseen_s: float,
    draws: int = 1,
) -> Found:
    """draws: how many draws there were, this one included."""
    found: list[_Row] = []
    for instance in [each for each in instances if each is not without] or instances:
        own = owned[instance.place] if instance.place < len(owned) else 0
        if instance is last and last_own >= 0:
            own = last_own
        a, b, c, load, latency, token, hidden, share, step, steps = (
            instance.prefill_model.regression.coefficients
        )
        step_s = 0.0
        if instance.load.decodes:
            step_s = instance.decode_model.predict(instance.load.decodes, instance.load.context_tokens)
        rest = tokens - own
        prefill_s = a + b * _K * rest + c * _M * (tokens * tokens - own * own) + load * _K * own
        prefill_s += step_s * (step + steps * _K * rest)
        transfer_s = lost_s = 0.0
        pull = in_pool - own
        fetches = pull > 0
        wait_s = instance.load.wait_s(now_s)
        if fetches:
            transfer_s = pull_s = latency + token * _K * pull + share * ahead_s
            if wait_s:
                transfer_s = hidden * _K * pull
                pull_s = max(transfer_s, pull_s)
            saved_s = b * _K * pull + c * _M * (in_pool * in_pool - own * own) + step_s * steps * _K * pull
            if pull_s < saved_s + spare_s or not instance.obeys:
                prefill_s += transfer_s - saved_s
                lost_s = max(pull_s - saved_s, 0.0)
            else:
                transfer_s, fetches = 0.0, False
        ttft_s = wait_s + prefill_s
        gap_s = _gap_s(instance, tokens, now_s)
        if _gap_s(instance, tokens, math.inf) + ttft_s > gap_most_s or not (
            need_tokens == 0 or _has_room(instance, need_tokens)
        ):
            continue
        cost = (
            urgency * ttft_s
            + marginal_delay * prefill_s * (wait_s + 0.5 * prefill_s)
            + reuse_probability * b * _K * rest
        )
        cost += stalled * instance.load.decodes * prefill_s
        found.append((cost, ttft_s, prefill_s, transfer_s, own, fetches, instance, lost_s, gap_s))
    if not found:
        first_s = _gap_s(instances[0], tokens, now_s)
        return instances[0], "only", math.inf, 0.0, 0.0, -1, False, 0.0, math.inf, first_s
    row, reason = _best(found, last, noise)
    if reason not in ("only", "session") and unseen_s > EQUAL_S:
        cheapest_row = min(found, key=lambda each: each[0])
        unseen = unseen_s * len(found) / len(instances) * (urgency + marginal_delay * cheapest_row[2])
        if sorted(found, key=lambda each: each[0])[1][0] < cheapest_row[0] + unseen:
            row, reason = _draw(found, unseen, uniform(now_s, draws)), "drawn"
    cost, ttft_s, prefill_s, transfer_s, own, fetches, instance, lost_s, gap_s = row
    return instance, reason, ttft_s, prefill_s, transfer_s, own, fetches, lost_s, cost, gap_s


def _best(found: list[_Row], last: Worker | None, noise: float) -> tuple[_Row, str]:
    near = min(each[0] for each in found) + EQUAL_S
    stays = next((each for each in found if each[6] is last), None)
    if len(found) == 1:
        return found[0], "only"
    if stays is not None and stays[0] <= near + noise * stays[1]:
        return stays, "session"
    equal = [each for each in found if each[0] <= near]
    longest = max(each[4] for each in equal)
    longer = [each for each in equal if each[4] == longest]
    best = min(longer, key=lambda each: (each[6].load.requests, each[6].turn))
    if len(equal) > 1:
        return best, "match" if len(longer) < len(equal) else "turn"
    soonest = min(each[1] for each in found) + EQUAL_S
    return best, "least_time" if best[1] <= soonest else "spares_others"


def _draw(found: list[_Row], unseen_s: float, chance: float) -> _Row:
    """Shares of the unseen work that bring all costs to one level, by bisection."""
    costs = sorted(found, key=lambda each: each[0])
    low, high = costs[0][0], costs[0][0] + unseen_s
    for _ in range(200):
        level = (low + high) / 2
        if sum(max(level - each[0], 0.0) for each in costs) < unseen_s:
            low = level
        else:
            high = level
    left = chance * unseen_s
    for each in costs:
        left -= max(high - each[0], 0.0)
        if left < 0:
            return each
    return next(each for each in reversed(costs) if each[0] < high)


def uniform(now_s: float, number: int) -> float:
    (bits,) = struct.unpack("<Q", struct.pack("<d", now_s))
    mask = (1 << 64) - 1
    bits = (bits + 0x9E3779B97F4A7C15 * number) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    bits ^= bits >> 31
    return float(bits >> 11) * 2.0**-53


def _gap_s(instance: Worker, tokens: int, now_s: float) -> float:
    load = instance.load
    return instance.decode_model.predict(
        load.decodes + instance.pending_handover + 1,
        load.context_tokens + instance.pending_handover_tokens + tokens,
        load.stall_s(now_s),
    )


def _has_room(instance: Worker, tokens: int) -> bool:
    there = instance.load.context_tokens + instance.pending_handover_tokens
    return not instance.room_tokens or there + tokens <= instance.room_tokens


def least_gap(
    instances: Sequence[Worker], tokens: int, need_tokens: int, now_s: float
) -> tuple[Worker, float]:
    roomy = [each for each in instances if _has_room(each, need_tokens)]
    equal: list[Worker] = []
    least_s = math.inf
    for instance in roomy or instances:
        gap_s = _gap_s(instance, tokens, now_s)
        if gap_s < least_s - EQUAL_GAP_S:
            equal.clear()
            least_s = gap_s
        if gap_s < least_s + EQUAL_GAP_S:
            equal.append(instance)
    return min(equal, key=lambda each: (each.load.requests, each.turn)), least_s
