"""The processes of the pool, node and master, and their shared parts.

node, node_socket                the node, its Unix socket
service_process                  start, HTTP endpoints, signals and stop of node and master
node_event_source                the node's KV events
kv_event_publisher               publishes KV events; event_replays, zmq_curve: replays and encryption
zmq_liveness                     notices over ZMQ that a host vanished
master, cluster                  the master, and a client's list of its nodes
admin_http, metrics, probes      HTTP endpoints, metrics, /livez and /readyz
process_metrics                  which build runs, since when, and what it takes: of the proxy, too
http_tls, control_tls            TLS of HTTP endpoints, and of connections to the master
data_tls                         TLS of connections to nodes of other hosts
addresses, listen_addresses      parsing; the addresses to listen on and to advertise
http_get, http_faults            an HTTP client; log records of bad requests
processes, backoff, exit_codes   signals and children; pauses between attempts; errors of a command
"""
