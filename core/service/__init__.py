"""The processes of the pool: node and master, and what a process needs to be one.

node, node_socket, node_events    the node, its Unix socket, its KV events
master, cluster                   the master, and the nodes that it knows
admin_http, metrics, probes       pages, metrics, /livez and /readyz
kv_events, event_replays, curve   published events, their replays, their encryption
tls, control_tls                  certificates of pages and of connections to the master
addresses, reach                  where a process listens, and how others reach it
http_get, http_faults             a client for pages; what a server logs of bad requests
processes, backoff                signals, children, pauses between attempts
"""
