"""Commands that use the proxy's parts; the proxy imports none of them.

simulator      replays a trace against simulated engines: what a policy or a layout would bring
replay         sends a trace's requests to live engines and measures the answers
serve_bench    conversations against an OpenAI API, beside a baseline
sizing         how much KV cache a model makes, and when fetching it is faster than computing it
savings        what the reuse of KV cache saved, by the metrics of proxies
mock_engine    an engine without a model: the OpenAI API, all hand-over forms, KV events
"""
