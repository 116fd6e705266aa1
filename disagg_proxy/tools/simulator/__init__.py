"""A cluster in one process: engines, caches, links and a pool as discrete events, under the proxy's own
policy.

The input is a trace of requests, the output what became of each. No clock, no socket, no thread: the time is
that of the events. The policy, the loads and the learning models are the objects that the proxy runs
(``disagg_proxy.conductor``, ``disagg_proxy.conductor.inflight``); engines, caches and links are simulated.
docs/simulator.md says what the model leaves out.
"""
