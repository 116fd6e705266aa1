"""A tenant with a key of its own against another one: engines, prompts and priority that are not its own."""

from __future__ import annotations

import json
import random
import socket
import threading
from pathlib import Path

from benchmarks.hostile.bed import COMPLETIONS, HERE, Setting, ask, bearer, none_of, until
from benchmarks.processes import Failed, free_port
from benchmarks.report import Row
from moonpool.disagg_proxy.tenant_salts import salt_of

ROWS = """
[[clients]]
name = "a"
key = "key-of-a"

[[clients]]
name = "b"
key = "key-of-b"

[[clients]]
name = "b-urgent"
key = "key-of-b-urgent"
tenant = "b"
max_priority = 100

[[clients]]
name = "engines"
key = "key-of-engines"
may = ["register"]
"""
PROMPT_TOKENS = 640
A_REQUESTS = 12
RUNS_TOKENS, WAITS_TOKENS = 20_000, 10_000  # the proxy takes a second or so for each, before it has learnt
PREFILL_US = 50  # so that one takes half a second or more


def rows_file(setting: Setting) -> Path:
    file = setting.folder / "clients.toml"
    file.write_text(ROWS)
    return file


def tenants(setting: Setting) -> list[Row]:
    """B registers an engine, and removes A's; B asks for what A has asked."""
    events = [f"tcp://{HERE}:{free_port()}" for _ in range(2)]
    _, engine = setting.mock_engine("--events", events[0], "--replay", events[1])
    words = ["--policy", "conductor", "--tokenizer", "none", "--discovery", "http"]
    words += ["--engine", f"a=http://{HERE}:{engine}", "--events", f"a={events[0]},{events[1]}"]
    words += ["--clients-file", str(rows_file(setting))]
    _, port = setting.proxy(*words)
    with socket.create_server((HERE, 0)) as rogue:
        rogue.setblocking(False)
        accepted = engines_of_b(port, rogue.getsockname()[1])
        for _ in range(A_REQUESTS):
            told(port, "key-of-a", [1, 2, 3])
        came = 0
        try:
            while True:
                rogue.accept()[0].close()
                came += 1
        except BlockingIOError:
            pass
    return [
        none_of("tenant B registers an engine, removes one, looks: accepted of 4", accepted),
        none_of(f"connections to B's engine, of the proxy and {A_REQUESTS} requests of A", came),
        none_of(
            "tokens of A's prompts that B is told are cached, by answer, decision or /query", probed(port)
        ),
    ]


def engines_of_b(port: int, rogue_port: int) -> int:
    engine = {"instance_id": "rogue", "url": f"http://{HERE}:{rogue_port}", "modelname": "mock"}
    attempts = [
        ("POST", "/register", engine),
        ("POST", "/unregister", {"instance_id": "a"}),
        ("GET", "/engines", None),
        ("GET", "/ui/data", None),
    ]
    statuses = [ask(port, verb, path, body, bearer("key-of-b")).status for verb, path, body in attempts]
    return sum(status not in (401, 403) for status in statuses)


def told(port: int, key: str, prompt: list[int], **more: str) -> int:
    """The most tokens of a prompt that the answer or the decision says are cached."""
    body = {"model": "mock", "prompt": prompt, "max_tokens": 2, **more}
    reply = ask(port, "POST", COMPLETIONS, body, bearer(key) | {"X-Moonpool-Decision": "1"})
    if reply.status != 200:
        raise Failed(f"a request with {key} got {reply.status}: {reply.body!r}")
    details = reply.json()["usage"].get("prompt_tokens_details") or {}
    decision = json.loads(reply.headers["x-moonpool-decision"])
    return max(details.get("cached_tokens") or 0, decision["own_tokens"])


def matched(port: int, key: str, ids: list[int]) -> int:
    body = {"model": "mock", "token_ids": ids, "block_size": 16}
    content = ask(port, "POST", "/query", body, bearer(key)).json()
    return max((row["longest_matched"] for row in content.get("default", {}).values()), default=0)


def probed(port: int) -> int:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(PROMPT_TOKENS)]
    told(port, "key-of-a", prompt)
    until(lambda: matched(port, "key-of-a", prompt) > PROMPT_TOKENS // 2, "the proxy hears of A's blocks")
    half = prompt[: PROMPT_TOKENS // 2]
    found = matched(port, "key-of-b", prompt)
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": salt_of("a")}):
        found = max(found, told(port, "key-of-b", half, **more))
    if told(port, "key-of-a", half) == 0:
        raise Failed("A does not find its own blocks")
    return found


def priority(setting: Setting) -> list[Row]:
    """One engine computes a prompt of B; two of A and one of B wait in the proxy. B's claims priority 100:
    how many places that gains it. A client of B whose row may claim it shows that it can be seen."""
    _, engine = setting.mock_engine("--prefill-us", str(PREFILL_US), "--requests-max", "1")
    words = ["--policy", "conductor", "--tokenizer", "none", "--queue-max", "64"]
    words += ["--engine", f"a=http://{HERE}:{engine}", "--clients-file", str(rows_file(setting))]
    _, port = setting.proxy(*words)
    plain = place_of_last(port, 1, "key-of-b", 0)
    claimed = place_of_last(port, 2, "key-of-b", 100)
    allowed = place_of_last(port, 3, "key-of-b-urgent", 100)
    if allowed >= plain:
        raise Failed(f"a priority that may be claimed has no effect either: place {allowed}, without {plain}")
    return [none_of("places that tenant B gains by claiming priority 100", max(plain - claimed, 0))]


def place_of_last(port: int, number: int, key: str, claimed: int) -> int:
    """Of those that waited, in the order of their answers."""
    ended: list[str] = []

    def send(name: str, key: str, tokens: int, claimed: int = 0) -> threading.Thread:
        # None has a prefix in common with another.
        prompt = [number * 1000 + len(threads), *range(1, tokens)]
        head = bearer(key) | ({"X-Moonpool-Priority": str(claimed)} if claimed else {})
        body = {"model": "mock", "prompt": prompt, "max_tokens": 1}

        def run() -> None:
            if ask(port, "POST", COMPLETIONS, body, head).status == 200:
                ended.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def waiting() -> int:
        page = ask(port, "GET", "/metrics").body.decode()
        line = next(row for row in page.splitlines() if row.startswith("moonpool_proxy_queue_requests "))
        return int(float(line.split()[1]))

    threads: list[threading.Thread] = []
    threads.append(send("runs", "key-of-b", RUNS_TOKENS))
    until(lambda: in_flight(port) >= 1, "a request is computed")
    for count, (name, whose, claims) in enumerate(
        (("a1", "key-of-a", 0), ("a2", "key-of-a", 0), ("b", key, claimed))
    ):
        threads.append(send(name, whose, WAITS_TOKENS, claims))
        until(lambda count=count: waiting() > count, "a request waits in the proxy")
    for thread in threads:
        thread.join()
    return ended.index("b")


def in_flight(port: int) -> float:
    page = ask(port, "GET", "/metrics").body.decode()
    rows = [row for row in page.splitlines() if row.startswith("moonpool_proxy_requests_in_flight")]
    return sum(float(row.split()[-1]) for row in rows)
