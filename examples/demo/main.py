"""The demo that `make demo` runs: prefill and decode engines apart, a pool, and a proxy that knows where each
prefix lies; and a table of who computed what.

The story: a report is asked about, so the prefill engine computes its KV cache and hands it over to the
decode engine, which answers. The next turn of that conversation is short: the decode engine has the rest in
its own cache, and nothing is handed over. The turn after brings another report: prefill computes it behind
what it has itself and what it finds in the pool, where decode has put the turn before. A greeting is not
worth a hand-over. And what the prefill engine computed for somebody else, decode takes from the pool.

Then each prompt is computed once more, whole, by one engine that reuses nothing: the answers must be the
same, token for token.

Ends with 0 when every check holds, 1 when one does not, 2 when it could not be shown at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import counters
import model_choice
from chat import Answer, Message, RequestFailed, ask
from cluster import PREFILL, Cluster, StartFailed
from model_choice import BLOCK_TOKENS, Model
from report import Check, Row, print_checks, print_table, write_json

OUTPUT_TOKENS = 24
STARTED_VARIABLE = "MOONPOOL_STARTED_AT"
STARTED_S = float(os.environ.get(STARTED_VARIABLE) or time.time())


def say(text: str) -> None:
    print(f"[{time.time() - STARTED_S:6.1f} s] {text}", flush=True)


def document(subject: str, lines: int) -> str:
    """A text that is long, harmless and different for each subject."""
    return "\n".join(
        f"{number}. The {subject} report, paragraph {number}: reading {number * 37 % 101} of series "
        f"{number * 53 % 89}, checked twice."
        for number in range(1, lines + 1)
    )


class Demo:
    """Sends requests one after the other, and asks the engines that had a part in them what they counted."""

    def __init__(self, cluster: Cluster, model: Model) -> None:
        self.cluster = cluster
        self.model = model
        self.rows: list[Row] = []
        self._asked: list[list[Message]] = []

    def warm_up(self) -> None:
        """Each engine's first step prepares buffers; a prompt shorter than one block touches no cache."""
        for address in self.cluster.engines.values():
            ask(address, self.model.served_name, [user("hi")], 2)

    def request(self, asked: str, messages: list[Message], *, at: str = "") -> Row:
        """at: the engine that is asked itself, without the proxy."""
        before = {name: counters.engine_counts(address) for name, address in self.cluster.engines.items()}
        stored_bytes = self._stored_bytes()
        address = self.cluster.engines[at] if at else self.cluster.proxy
        answer = ask(address, self.model.served_name, messages, OUTPUT_TOKENS)
        answer = dataclasses.replace(answer, engine=at or self._engine_of(answer))
        prefill = answer.decision.get("prefill")
        parts = {
            name: counters.settled(
                lambda address=self.cluster.engines[name]: counters.engine_counts(address),
                answer.prompt_tokens,
                before[name],
            )
            for name in ([str(prefill)] if prefill else []) + [answer.engine]
        }
        row = Row(asked, answer, parts)
        if new := new_block_tokens(row):
            # They are on their way into the pool, and the next request wants them.
            at_least = stored_bytes + new * (self.model.token_bytes or 1)
            counters.wait_until_still(self._stored_bytes, at_least)
        self.rows.append(row)
        self._asked.append(messages)
        say(f"    {asked}: {', '.join(parts)}; first token after {1000 * answer.ttft_s:.0f} ms")
        if answer.decision:
            print(f"               X-Moonpool-Decision: {json.dumps(answer.decision)}", flush=True)
        return row

    def _stored_bytes(self) -> int:
        """Grows with every block that an engine brings to its node and that is new there."""
        return sum(counters.node_stored_bytes(address) for address in self.cluster.nodes.values())

    def _engine_of(self, answer: Answer) -> str:
        """The proxy names engines as up.toml does."""
        if answer.engine in self.cluster.engines:
            return answer.engine
        raise RequestFailed(
            f"the answer's X-Moonpool-Engine is {answer.engine!r}, which is none of our engines"
        )

    def run(self) -> list[Check]:
        talk = [user(document("harvest", 26) + "\nWhat does paragraph 7 say?")]
        first = self.request("a report, asked about", talk)
        talk = [*talk, assistant(first.answer), user("And paragraph 9? Answer in one sentence, please.")]
        second = self.request("the next turn, short", talk)
        talk = [*talk, assistant(second.answer), user(document("tide", 14) + "\nCompare both.")]
        third = self.request("a turn with another report", talk)
        greeting = self.request("a greeting", [user("hi")])
        alone = [user(document("weather", 24) + "\nWhat does paragraph 7 say?")]
        elsewhere = self.request("a third report, asked of prefill", alone, at=PREFILL)
        pooled = self.request("the same, asked of the proxy", alone)
        return [
            handed_over(first),
            stayed(second, first),
            all_four(third, first, second),
            not_worth_it(greeting),
            from_the_pool(pooled, elsewhere),
            self._same_as_plain(),
            *self._accounts(),
        ]

    def _same_as_plain(self) -> Check:
        """Every prompt again, computed whole by one engine: a salt of its own keeps all caches out of it."""
        wrong = []
        for number, (row, messages) in enumerate(zip(self.rows, self._asked, strict=True), 1):
            address = self.cluster.engines[PREFILL]
            before = counters.engine_counts(address)
            plain = ask(address, self.model.served_name, messages, OUTPUT_TOKENS, salt=f"plain run {number}")
            counts = counters.settled(
                lambda address=address: counters.engine_counts(address), plain.prompt_tokens, before
            )
            if counts.computed != plain.prompt_tokens:
                raise RequestFailed(f"a plain run reused tokens: {counts}")
            if (plain.token_ids, plain.text) != (row.answer.token_ids, row.answer.text):
                wrong.append(str(number))
        say("    computed all of them once more, whole and by one engine")
        return Check(
            "the same output as one engine alone, which computes the whole prompt",
            not wrong,
            f"request {', '.join(wrong)} DIFFERS"
            if wrong
            else f"{len(self.rows)} answers of {OUTPUT_TOKENS} tokens, identical",
        )

    def _accounts(self) -> list[Check]:
        """The engines' figures against those of others: what one side says it got, the other says it gave."""
        total = [counters.engine_counts(address) for address in self.cluster.engines.values()]
        tokens = sum(counts.pool for counts in total)
        loaded = sum(counts.pool_bytes for counts in total)
        errors = sum(counts.errors for counts in total)
        expected = tokens * self.model.token_bytes if self.model.token_bytes else loaded
        nodes = self.cluster.nodes.values()
        served = counters.wait_until_equal(lambda: sum(map(counters.node_served_bytes, nodes)), expected)
        weight = (
            f"{self.model.token_bytes:,} bytes per token"
            if self.model.token_bytes
            else "(this model's bytes per token are not known here: the engines' own figure)"
        )
        handovers = sum(row.is_apart for row in self.rows)
        seen = counters.wait_until_equal(lambda: counters.proxy_handovers(self.cluster.proxy), handovers)
        asked = sum(bool(row.answer.decision) for row in self.rows)
        compared = counters.wait_until_equal(lambda: counters.proxy_predictions(self.cluster.proxy)[0], asked)
        wrong = counters.proxy_predictions(self.cluster.proxy)[1]
        checks = [
            Check("no load and no hand-over failed", errors == 0, f"{errors} errors"),
            Check(
                f"the {'node' if len(nodes) == 1 else 'nodes'} served exactly that",
                served == expected == loaded and tokens > 0,
                f"{served:,} bytes served = {tokens:,} tokens x {weight}; the engines loaded {loaded:,}",
            ),
            Check(
                "the proxy split as many requests as were handed over",
                seen == handovers > 0,
                f"{seen} of {asked} requests",
            ),
            Check(
                "it knew what each engine would find in its caches",
                compared == asked and not wrong,
                f"{compared - wrong} of {asked} predictions came true",
            ),
        ]
        return checks if len(nodes) == 1 else [*checks, self._from_node_to_node(served)]

    def _from_node_to_node(self, served: int) -> Check:
        """Each engine loads only what the other one computed, and that lies in the other one's node."""
        sent = {name: counters.node_sent_bytes(address) for name, address in self.cluster.nodes.items()}
        return Check(
            "all of it over TCP, from both nodes",
            sum(sent.values()) == served and all(sent.values()),
            ", ".join(f"{name} sent {count:,} bytes" for name, count in sent.items()),
        )


# What the rows must show


def handed_over(row: Row) -> Check:
    """All of the prompt but its last token, which the engine that answers computes itself."""
    prompt = row.answer.prompt_tokens
    return Check(
        "prefill computed, decode took it over",
        row.is_apart and row.computing.computed == prompt and row.answering.handed_over == prompt - 1,
        f"of {prompt} tokens prefill computed {row.computing.computed}, decode took over "
        f"{row.answering.handed_over} and computed {row.answering.computed}",
    )


def stayed(row: Row, turn_before: Row) -> Check:
    prompt, own = row.answer.prompt_tokens, row.answering.own_cache
    return Check(
        "the next turn was answered where the last one was decoded",
        not row.is_apart and own >= whole_blocks(turn_before.answer.prompt_tokens) > 0,
        f"decode found {own} of {prompt} tokens in its own cache and computed {row.answering.computed}",
    )


def all_four(row: Row, first: Row, turn_before: Row) -> Check:
    """prefill's own cache has the first turn, the pool the second, which decode computed."""
    prefill, decode = row.computing, row.answering
    return Check(
        "prefill reused its own cache and the pool; decode took over what it lacked",
        row.is_apart
        and prefill.own_cache >= whole_blocks(first.answer.prompt_tokens)
        and prefill.pool > 0
        and prefill.own_cache + prefill.pool >= whole_blocks(turn_before.answer.prompt_tokens)
        and decode.own_cache >= whole_blocks(turn_before.answer.prompt_tokens)
        and decode.own_cache + decode.handed_over == row.answer.prompt_tokens - 1,
        f"prefill: {prefill.own_cache} own, {prefill.pool} from the pool, {prefill.computed} computed; "
        f"decode: {decode.own_cache} own, {decode.handed_over} handed over",
    )


def not_worth_it(row: Row) -> Check:
    return Check(
        "a short prompt was not handed over",
        not row.is_apart and row.answering.computed == row.answer.prompt_tokens,
        f"decode computed {row.answering.computed} tokens itself",
    )


def from_the_pool(row: Row, computed: Row) -> Check:
    prompt, pool = row.answer.prompt_tokens, row.answering.pool
    return Check(
        "what prefill had computed for another, decode took from the pool",
        not row.is_apart and pool == whole_blocks(prompt - 1) and computed.answering.computed == prompt,
        f"prefill computed {computed.answering.computed} tokens; decode took {pool} of {prompt} from the "
        f"pool and computed {row.answering.computed}",
    )


def new_block_tokens(row: Row) -> int:
    """Tokens of the whole blocks that the engine which computed the prompt had from nowhere."""
    known = row.computing.own_cache + row.computing.pool
    return whole_blocks(row.answer.prompt_tokens) - whole_blocks(known)


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(answer: Answer) -> Message:
    return {"role": "assistant", "content": answer.text}


def curl_line(demo: Demo) -> str:
    host, port = demo.cluster.proxy
    body = f'{{"model": "{demo.model.served_name}", "stream": true, "max_tokens": 16, "messages": [{{"role": "user", "content": "hello"}}]}}'  # fmt: skip # noqa: E501
    return (
        f"curl -iN http://{host}:{port}/v1/chat/completions -H 'X-Moonpool-Decision: 1' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def show(options: argparse.Namespace) -> int:
    model = model_choice.given(options.model) if options.model else model_choice.tiny(Path(options.cache))
    say(f"model: {model.source}")
    with Cluster(model, options.cpu, options.nodes) as cluster:
        say(f"moonpool up --config {cluster.config} (logs in {cluster.folder})")
        nodes = "a node" if options.nodes == 1 else "a master, two nodes"
        say(f"starting {nodes}, a prefill and a decode engine and the proxy; an engine takes half a minute")
        cluster.wait_until_ready(say)
        serving_s = time.time() - STARTED_S
        say(f"serving at http://{cluster.proxy[0]}:{cluster.proxy[1]}, {serving_s:.0f} s after the start")
        demo = Demo(cluster, model)
        try:
            demo.warm_up()
            checks = demo.run()
        except (RequestFailed, OSError) as error:
            raise StartFailed(f"{error}\n{cluster.tails()}") from error
        print()
        print_table(demo.rows)
        print_checks(checks)
        passed = all(check.passed for check in checks)
        if options.json:
            facts = {"model": model.served_name, "serving_after_s": round(serving_s, 1)}
            write_json(Path(options.json), demo.rows, checks, facts)
            say(f"wrote {options.json}")
        if not passed:
            print(f"\nerror: not every check held\n{cluster.tails()}", file=sys.stderr)
            return 1
        say("proved: what one engine computed, the other did not have to")
        print(f"\nTry it by hand; the head says who answered, and why:\n\n    {curl_line(demo)}\n")
        if not options.once:
            print("The pool at a glance, in another terminal:\n")
            print(f"    MOONPOOL_RUNTIME_DIR={cluster.runtime} {sys.executable} -m moonpool status\n")
            print("It serves until Ctrl-C.", flush=True)
            while True:
                time.sleep(1.0)
                cluster.check_alive()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Prefill and decode engines apart, a pool, and a proxy that knows where each prefix lies."
    )
    parser.add_argument(
        "--cache", default=str(Path.home() / ".cache" / "moonpool"), help="where the tiny model is"
    )
    parser.add_argument(
        "--model", default="", help="a folder or a hub name; default: a tiny model made on the spot"
    )
    parser.add_argument("--json", default="", help="write the table to this file")
    parser.add_argument(
        "--nodes", type=int, choices=(1, 2), default=1, help="2: each engine on a node, and host, of its own"
    )
    parser.add_argument("--once", action="store_true", help="end after the proof")
    parser.add_argument("--cpu", action="store_true", help="this machine has no GPU")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return show(options)
    except KeyboardInterrupt:
        say("stopped; everything is down")
        return 0 if not options.once else 130
    except (StartFailed, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
