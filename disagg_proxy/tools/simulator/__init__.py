"""A cluster in one process: engines, caches, links and a pool as discrete events, under the proxy's own
policy.

A trace of requests goes in, what became of each comes out. No clock, no socket, no thread: the time is that
of the events. The policy, the loads and the models that learn are the objects that the proxy runs
(``disagg_proxy.conductor``, ``disagg_proxy.conductor.inflight``); what is simulated is what they act on.
docs/simulator.md says what the model leaves out.
"""
