"""Fields that no client may say to an engine, in forty ways; and what shows that one arrived."""

from __future__ import annotations

import json
import re

from tests.disagg_proxy.harness import Exchange

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
NIXL = '{"do_remote_prefill":true,"remote_host":"169.254.169.254","remote_port":80,"remote_block_ids":[1]}'
# (path, body, head): what a client sends. All carry the word that must not arrive, or a rank of 7777.
FORGED: list[tuple[str, str, str]] = [
    # vLLM's connectors
    (CHAT, f'{{"messages":[],"kv_transfer_params":{NIXL}}}', ""),
    (COMPLETIONS, f'{{"kv_transfer_params":{NIXL},"prompt":"x"}}', ""),
    ("/v1/responses", f'{{"input":"x","kv_transfer_params":{NIXL}}}', ""),
    ("/v1/embeddings", f'{{"input":"x","kv_transfer_params":{NIXL}}}', ""),
    ("/v1/messages", f'{{"messages":[],"kv_transfer_params":{NIXL}}}', ""),
    ("/tokenize", f'{{"prompt":"x","kv_transfer_params":{NIXL}}}', ""),
    (COMPLETIONS, '{"prompt":"x","kv_transfer_params":"169.254.169.254"}', ""),
    (COMPLETIONS, '{"prompt":"x","kv_transfer_params":["169.254.169.254"]}', ""),
    (COMPLETIONS, f'{{"prompt":["a","b"],"kv_transfer_params":[{NIXL},{NIXL}]}}', ""),
    # the same key, written so that a search for its bytes does not find it
    (COMPLETIONS, f'{{"prompt":"x","kv_transfer\\u005fparams":{NIXL}}}', ""),
    (COMPLETIONS, f'{{"prompt":"x","\\u006bv_transfer_param\\u0073":{NIXL}}}', ""),
    (
        COMPLETIONS,
        '{"prompt":"x",' + '"' + "".join(f"\\u{ord(c):04X}" for c in "kv_transfer_params") + f'":{NIXL}}}',
        "",
    ),
    (COMPLETIONS, f'{{"prompt":"x" , "kv_transfer_params"\n:\t{NIXL} }}', ""),
    # twice and more often; engines take the last
    (COMPLETIONS, f'{{"kv_transfer_params":null,"prompt":"x","kv_transfer_params":{NIXL}}}', ""),
    (COMPLETIONS, f'{{"kv_transfer_params":{NIXL},"prompt":"x","kv_transfer\\u005fparams":{NIXL}}}', ""),
    (COMPLETIONS, '{"prompt":"x"' + f',"kv_transfer_params":{NIXL}' * 50 + "}", ""),
    # inside of what engines take arguments from
    (COMPLETIONS, f'{{"prompt":"x","vllm_xargs":{{"a":1,"kv_transfer_params":{NIXL}}}}}', ""),
    (COMPLETIONS, f'{{"prompt":"x","vllm_xargs":{{"kv_transfer\\u005fparams":{NIXL}}}}}', ""),
    (COMPLETIONS, f'{{"prompt":"x","vllm\\u005fxargs":{{"kv_transfer_params":{NIXL}}}}}', ""),
    (COMPLETIONS, f'{{"vllm_xargs":{{}},"prompt":"x","vllm_xargs":{{"kv_transfer_params":{NIXL}}}}}', ""),
    (COMPLETIONS, f'{{"prompt":"x","extra_body":{{"kv_transfer_params":{NIXL}}}}}', ""),
    (
        COMPLETIONS,
        f'{{"prompt":"x","extra_body":{{"vllm_xargs":{{"kv_transfer_params":{NIXL}}}}}}}',
        "",
    ),
    (
        COMPLETIONS,
        f'{{"prompt":"x","sampling_params":{{"extra_args":{{"kv_transfer_params":{NIXL}}}}}}}',
        "",
    ),
    (
        GENERATE,
        f'{{"text":["a","b"],"sampling_params":[{{}},{{"extra_args":{{"kv_transfer_params":{NIXL}}}}}]}}',
        "",
    ),
    (COMPLETIONS, f'{{"prompt":"x","ec_transfer_params":{{"peer":{NIXL}}}}}', ""),
    # SGLang
    (GENERATE, '{"text":"x","bootstrap_host":"169.254.169.254","bootstrap_port":80,"bootstrap_room":1}', ""),
    (GENERATE, '{"text":["a","b"],"bootstrap_host":["169.254.169.254","169.254.169.254"]}', ""),
    (CHAT, '{"messages":[],"bootstrap_host":"169.254.169.254"}', ""),
    (GENERATE, '{"text":"x","bootstrap_pair_key":"169.254.169.254"}', ""),
    (GENERATE, '{"text":"x","data_parallel_rank":7777}', ""),
    (GENERATE, '{"text":"x","routed_dp_rank":7777,"disagg_prefill_dp_rank":7777}', ""),
    (GENERATE, '{"text":"x","rid":"169.254.169.254"}', ""),
    # TensorRT-LLM
    (
        COMPLETIONS,
        '{"prompt":"x","disaggregated_params":{"ctx_info_endpoint":"tcp://169.254.169.254"}}',
        "",
    ),
    # heads
    (CHAT, '{"messages":[]}', "X-data-parallel-rank: 7777\r\n"),
    (CHAT, '{"messages":[]}', "x-DATA-parallel-RANK: 0\r\nX-Data-Parallel-Rank: 7777\r\n"),
    (CHAT, '{"messages":[]}', "X-Override-Bootstrap-Host: 169.254.169.254\r\n"),
    (CHAT, '{"messages":[]}', "x-prefiller-host-port: 169.254.169.254:80\r\n"),
    (
        CHAT,
        '{"messages":[]}',
        "X-Request-Id: ___prefill_addr_169.254.169.254:1___decode_addr_169.254.169.254:2_a\r\n",
    ),
    (CHAT, '{"messages":[]}', "Authorization: Bearer 169.254.169.254\r\nCookie: a=169.254.169.254\r\n"),
    (CHAT, '{"messages":[]}', "X-API-Key: 169.254.169.254\r\nApi-Key: 169.254.169.254\r\n"),
]
# Not within the hexadecimal digits of ids that the proxy makes.
WORDS = re.compile(
    r"169\.254|(?<![0-9a-f])7777(?![0-9a-f])|kv_transfer|bootstrap|disaggregated|dp_rank|\"rid\"",
    re.IGNORECASE,
)


def shown(exchange: Exchange) -> str:
    """All that arrived, escapes of keys resolved."""
    body = json.loads(exchange.body) if exchange.body else None
    return json.dumps([exchange.target, exchange.headers, body])
