"""The engine benchmarks in parts: driver (a real vLLM in a process of its own), fleet (the engines, the node
and the model of one run). For a CUDA card besides: card (its facts), dummy_model (a large model without
files), card_driver (the driver), background (decode beside loads and saves).

Drivers run under the interpreter that has vLLM and moonpool; everything else under the one that has
moonpool.
"""
