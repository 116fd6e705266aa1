"""The proxy: one HTTP address in front of many engines that speak the OpenAI API.

Bytes are moved by the data plane in C++ (``csrc/relay``, ``_native.Relay``): one thread that serves all
sockets and asks Python once a request where it goes. Here is what is not per byte: settings, the choice,
health checks, the proxy's own pages and metrics. It is not an HTTP framework, and parses no request in Python
unless a policy looks at prompts.

    server, fleet, settings    puts the parts together; engines that join and leave
    process, group             a proxy as a process, and as several of them
    listen_sockets, takeover   its sockets, from a proxy to its successor
    dispatch                   one request: what is known of its prompt, candidates, the plan, the books
    conductor                  which engine computes it, and whether it is taken: pure
    tokens, events             what is known of a prompt: its ids, and the holders of its blocks
    engines, discovery         one engine, its health and its kind; which engines there are
    peers                      several proxies that share their books
    data_plane                 what the C++ half reports
    endpoints, ui, tracing     what is shown: metrics (metric_family), a page for people, spans

    from_config                what a configuration says of the proxy

    csrc/                      the C++ half: relay (sockets), http, json (parsers), conductor (prefix index)
    tools/                     simulator, replay, sizing, mock_engine: commands of their own

Start at ``server.serve``; docs/proxy.md has the map, the limits, the metrics and what happens when things
fail.
"""

if __name__ != "moonpool.disagg_proxy":
    raise ImportError(f"import moonpool.disagg_proxy: {__name__} would be a second copy of each module")
