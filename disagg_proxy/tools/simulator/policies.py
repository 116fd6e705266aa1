"""The policies of other routers, for comparison in one simulation or behind one proxy.

Each policy is written from what its project documents and publishes, with its documented defaults; here each
uses our load accounting and index, which are exact where theirs are guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.disagg_proxy.conductor.choice import Choice, Request
from moonpool.disagg_proxy.conductor.policies.roles import Roles, is_worth_splitting
from moonpool.disagg_proxy.conductor.worker import Role, Worker

DYNAMO_BLOCK_TOKENS = 64
DYNAMO_POOL_CREDIT = 0.75  # of a block in the host's memory
SGLANG_SHARE_MIN = 0.3  # of the prompt that must match
SGLANG_IMBALANCE_MIN = 64  # requests
SGLANG_IMBALANCE_TIMES = 1.5
VLLM_POOL_CREDIT = 0.6  # of a token in an external store
_PREFILL = Role.PREFILL  # an enum's members are slow to look up


class Scored:
    """Gives every worker a cost for a request. The least ``cost`` computes; with prefill and decode apart,
    the least ``decode_cost`` decodes. Where some serve requests whole beside those, the least ``cost`` of all
    that compute (the projects do not say; it is the plain generalisation). Of equals the one that was chosen
    longest ago.
    """

    uses_tokens = True

    def __init__(self) -> None:
        self._roles = Roles()
        self._turn = 0
        self._turns: dict[int, int] = {}

    def compare(self, request: Request, able: Sequence[Worker]) -> None:
        """Called with the workers before their ``cost`` is asked."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """What to compute this request there costs, in any unit; the least wins. May be negative. A subclass
        must have it."""
        raise NotImplementedError

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Tokens in the KV cache of those that decode there, and will when their prompts are computed."""
        return worker.load.context_tokens + worker.pending_handover_tokens

    def choose(self, request: Request, workers: Sequence[Worker], now_s: float) -> Choice:
        """``compare``, then ``cost`` once for each worker that may compute, in the order of the places."""
        groups = self._roles.of(workers)
        if groups.decode_workers:
            decode_workers = groups.decode_workers
            decode = self._least(
                decode_workers, [self.decode_cost(request, each, now_s) for each in decode_workers]
            )
            able = groups.able(decode)
            if able and is_worth_splitting(request, decode):
                best, least = self._cheapest(request, able, now_s)
                if best.role is _PREFILL:
                    return self._choice(request, decode, best, least)
                return self._choice(request, best, None, least)
            return self._choice(request, decode, None, 0.0)
        best, least = self._cheapest(request, groups.self_sufficient, now_s)
        return self._choice(request, best, None, least)

    def sent(self, request: Request, choice: Choice, now_s: float) -> None:
        """Both workers of the choice go to the end of the order among equals."""
        self._turn += 1
        self._turns[choice.decode.place] = self._turns[choice.computes.place] = self._turn

    def _cheapest(self, request: Request, able: Sequence[Worker], now_s: float) -> tuple[Worker, float]:
        self.compare(request, able)
        costs = [self.cost(request, each, now_s) for each in able]
        return self._least(able, costs), min(costs)

    def _least(self, workers: Sequence[Worker], costs: Sequence[float]) -> Worker:
        least = min(costs)
        turns = self._turns.get
        equal = [each for each, cost in zip(workers, costs, strict=True) if cost <= least]
        return min(equal, key=lambda each: turns(each.place, -1)) if len(equal) > 1 else equal[0]

    def _choice(self, request: Request, decode: Worker, prefill: Worker | None, cost: float) -> Choice:
        own = request.own_at(prefill or decode)
        return Choice(decode, prefill, why={"cost": cost, "own_tokens": own})


class DynamoCost(Scored):
    """NVIDIA Dynamo's KV router with its defaults (1.6): prefill blocks that wait there and are to be
    computed for this request, less the blocks it holds, and the blocks of those that decode there. Among
    decode workers alone what is held counts for nothing.
    """

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """In blocks of DYNAMO_BLOCK_TOKENS tokens. A token in the pool counts DYNAMO_POOL_CREDIT of one in
        the worker's own cache."""
        load = worker.load
        held = request.own_at(worker) + DYNAMO_POOL_CREDIT * request.from_pool(worker)
        prefill = max(load.prefill_rest_tokens + request.tokens - held, 0.0)
        return (prefill + load.context_tokens) / DYNAMO_BLOCK_TOKENS


class LoadBalancing(Scored):
    """The Mooncake paper's load balancing, which leaves caches out of account: the fewest seconds of prefill
    in the queue."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Seconds of prefill in the worker's queue, without this request's own."""
        return worker.load.wait_s(now_s)


class MinTtft(Scored):
    """Algorithm 1 of the Mooncake paper without its transfer, cache-aware scheduling by local caches alone:
    the least predicted time to the first token, as if nothing could be fetched."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Seconds: the prefill in the worker's queue, and this request's own by the worker's model."""
        own = request.own_at(worker)
        return worker.load.wait_s(now_s) + worker.prefill_s(request.tokens, own)


class _DecodesByRequests(Scored):
    """Of decode workers the one with the fewest requests."""

    def decode_cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests there, and those whose prompts are still computed elsewhere."""
        return worker.in_flight + worker.pending_handover


class LMetric(_DecodesByRequests):
    """LMetric (arXiv 2603.15202), one product and nothing to tune: (tokens to compute there, this request's
    included) x (requests there, this one included)."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Tokens x requests. A prompt that is held whole counts as one token, or the requests would not
        count."""
        rest = worker.load.prefill_rest_tokens + request.tokens - request.own_at(worker)
        return max(rest, 1) * (worker.in_flight + 1)


class SGLangCacheAware(_DecodesByRequests):
    """sglang-router's ``cache_aware`` with its defaults (0.3): the longest match, if it is more than
    SGLANG_SHARE_MIN of the prompt, else the fewest requests; also those when the numbers of requests are
    further apart than both limits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._balances = False

    def compare(self, request: Request, able: Sequence[Worker]) -> None:
        """Decides whether this request goes by load or by prefix; ``cost`` follows that."""
        counts = [each.in_flight for each in able]
        apart = max(counts) - min(counts)
        longest = max(request.own_at(each) for each in able)
        self._balances = (
            apart > SGLANG_IMBALANCE_MIN and max(counts) > SGLANG_IMBALANCE_TIMES * min(counts)
        ) or longest <= SGLANG_SHARE_MIN * request.tokens

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """Requests in flight, or minus the tokens that the worker's own cache holds."""
        return worker.in_flight if self._balances else -request.own_at(worker)


class VllmKvAware(_DecodesByRequests):
    """vllm-router's ``kv_aware`` with its defaults (0.1.17): tokens that wait there and those to compute for
    this request, less credit for what lies in the pool."""

    def cost(self, request: Request, worker: Worker, now_s: float) -> float:
        """In tokens. A token in the pool counts VLLM_POOL_CREDIT of one in the worker's own cache."""
        held = request.own_at(worker) + VLLM_POOL_CREDIT * request.from_pool(worker)
        return worker.load.prefill_rest_tokens + max(request.tokens - held, 0.0)
