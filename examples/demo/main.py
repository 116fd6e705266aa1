"""The demo that `make demo` runs: two vLLM engines, one pool, and a table of who computed what.

The story: a long document is asked about once, so one engine computes its KV cache and the pool keeps it. The
same request comes again and the proxy sends it to the other engine, which has never seen the document: it
takes the KV from the pool, answers at once, and its answer is the same, token for token. Then more questions
about the same document, and a second document that travels in the other direction.

Ends with 0 when every check holds, 1 when one does not, 2 when it could not be shown at all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import counters
import model_choice
from chat import Answer, RequestFailed, ask
from cluster import Cluster, StartFailed
from model_choice import BLOCK_TOKENS, Model
from report import Check, Row, print_checks, print_table, write_json

OUTPUT_TOKENS = 24
STARTED_VARIABLE = "MOONPOOL_STARTED_AT"
STARTED_S = float(os.environ.get(STARTED_VARIABLE) or time.time())
ATTEMPTS = 4


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
    """Sends requests through the proxy one after the other, and asks the engine that answered what it
    counted.
    """

    def __init__(self, cluster: Cluster, model: Model) -> None:
        self.cluster = cluster
        self.model = model
        self.rows: list[Row] = []

    def warm_up(self) -> None:
        """Each engine's first step prepares buffers; a prompt shorter than one block touches no cache."""
        for address in self.cluster.engines.values():
            ask(address, self.model.served_name, "hi", 2)

    def request(self, asked: str, prompt: str) -> Row:
        before = {name: counters.engine_counts(address) for name, address in self.cluster.engines.items()}
        offered = self._offered()
        answer = ask(self.cluster.proxy, self.model.served_name, prompt, OUTPUT_TOKENS)
        name = self._engine_of(answer)
        address = self.cluster.engines[name]
        counts = counters.settled(lambda: counters.engine_counts(address), answer.prompt_tokens, before[name])
        if counts.computed >= BLOCK_TOKENS:
            # New blocks are on their way into the pool, and the next request wants them.
            counters.wait_until_still(self._offered, more_than=offered)
        row = Row(asked, answer, counts)
        self.rows.append(row)
        say(f"    {asked}: {name}, first token after {1000 * answer.ttft_s:.0f} ms")
        return row

    def request_elsewhere(self, asked: str, prompt: str, other_than: str) -> Row:
        """The same, until another engine's turn has come; the rows in between stay in the table."""
        for _ in range(ATTEMPTS):
            row = self.request(asked, prompt)
            if row.answer.engine != other_than:
                return row
        raise RequestFailed(
            f"the proxy sent {ATTEMPTS} requests in a row to {other_than}; is the other engine up?"
        )

    def _offered(self) -> int:
        """Grows with every block that an engine brings to its node, new or known."""
        return sum(counters.node_offered(address) for address in self.cluster.nodes.values())

    def _engine_of(self, answer: Answer) -> str:
        """The proxy names engines as up.toml does, or by their address."""
        for name, (host, port) in self.cluster.engines.items():
            if answer.engine == name or answer.engine.removeprefix("http://").rstrip("/") == f"{host}:{port}":
                return name
        raise RequestFailed(
            f"the answer's X-Moonpool-Engine is {answer.engine!r}, which is none of our engines"
        )

    def run(self) -> list[Check]:
        first_document = document("harvest", 38)
        question = "\nWhat does paragraph 7 say?"
        first = self.request("a document, asked about", first_document + question)
        shared = self.request_elsewhere(
            "the same again", first_document + question, other_than=first.answer.engine
        )
        self.request("same document, other question", first_document + "\nAnd paragraph 9?")
        self.request("same document, third question", first_document + "\nIs reading 12 right?")
        self.request("less than one block", "hi")
        second = self.request("a second document", document("tide", 24) + question)
        back = self.request_elsewhere(
            "the same again", document("tide", 24) + question, other_than=second.answer.engine
        )
        turned = second.answer.engine == shared.answer.engine
        return [
            *self._shared("the other engine served what only the first had computed", first, shared),
            *self._shared("and " + ("in the other direction" if turned else "once more"), second, back),
            *self._accounts(),
        ]

    @staticmethod
    def _shared(name: str, computed: Row, served: Row) -> list[Check]:
        pool, prompt = served.counts.pool, served.answer.prompt_tokens
        whole_blocks = (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        seen = (
            f"{computed.answer.engine} computed {computed.counts.computed} tokens; {served.answer.engine} "
            f"took {pool} of {prompt} from the pool and computed {served.counts.computed}"
        )
        same = (
            computed.answer.token_ids == served.answer.token_ids
            and computed.answer.text == served.answer.text
        )
        return [
            Check(
                name,
                pool == whole_blocks and computed.counts.pool == 0 and served.counts.own_cache == 0,
                seen,
            ),
            Check(
                "with the same output",
                same and len(served.answer.token_ids) == OUTPUT_TOKENS,
                f"{len(served.answer.token_ids)} tokens, {'identical' if same else 'DIFFERENT'}",
            ),
        ]

    def _accounts(self) -> list[Check]:
        """The engines' figures against the nodes': what one side says it got, the other says it gave."""
        total = [counters.engine_counts(address) for address in self.cluster.engines.values()]
        tokens = sum(counts.pool for counts in total)
        loaded = sum(counts.pool_bytes for counts in total)
        errors = sum(counts.load_errors for counts in total)
        expected = tokens * self.model.token_bytes if self.model.token_bytes else loaded
        nodes = self.cluster.nodes.values()
        served = counters.wait_until_equal(lambda: sum(map(counters.node_served_bytes, nodes)), expected)
        weight = (
            f"{self.model.token_bytes:,} bytes per token"
            if self.model.token_bytes
            else "(this model's bytes per token are not known here: the engines' own figure)"
        )
        checks = [
            Check("no load failed", errors == 0, f"{errors} load errors"),
            Check(
                f"the {'node' if len(nodes) == 1 else 'nodes'} served exactly that",
                served == expected == loaded and tokens > 0,
                f"{served:,} bytes served = {tokens:,} tokens x {weight}; the engines loaded {loaded:,}",
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


def curl_line(demo: Demo) -> str:
    host, port = demo.cluster.proxy
    body = f'{{"model": "{demo.model.served_name}", "stream": true, "max_tokens": 16, "messages": [{{"role": "user", "content": "hello"}}]}}'  # fmt: skip # noqa: E501
    return (
        f"curl -iN http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    )


def show(options: argparse.Namespace) -> int:
    model = model_choice.given(options.model) if options.model else model_choice.tiny(Path(options.cache))
    say(f"model: {model.source}")
    with Cluster(model, options.cpu, options.nodes) as cluster:
        say(f"moonpool up --config {cluster.config} (logs in {cluster.folder})")
        nodes = "a node" if options.nodes == 1 else "a master, two nodes"
        say(f"starting {nodes}, two vLLM engines and the proxy; an engine takes half a minute")
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
        print(
            f"\nTry it by hand; X-Moonpool-Engine in the head says who answered:\n\n    {curl_line(demo)}\n"
        )
        if not options.once:
            print("The pool at a glance, in another terminal:\n")
            print(f"    MOONPOOL_RUNTIME_DIR={cluster.runtime} {sys.executable} -m moonpool status\n")
            print("It serves until Ctrl-C.", flush=True)
            while True:
                time.sleep(1.0)
                cluster.check_alive()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Two vLLM engines share one pool of KV cache.")
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
