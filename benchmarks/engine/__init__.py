"""The engine benchmarks in parts: driver (a real vLLM in a process of its own), fleet (the engines, the node
and the model of one run).

The driver runs under the interpreter that has vLLM and moonpool; everything else under the one that has
moonpool.
"""
