"""``moonpool mock-engine``: an OpenAI engine without a model, for tests and for trying layouts out.

It accounts for blocks, a prefix cache, and a batch that prefills in chunks and decodes together, as vLLM
does, serves the hand-over forms of vLLM, SGLang and TensorRT-LLM, and publishes KV events; seconds come from
a timing model, text from a hash of the prompt, so that an answer shows whether the right prompt was served.
One process, one event loop.

    http.py -> server.py -> api.py -> batch.py -> blocks.py -> events.py
                 sglang.py    |
           tensorrt_llm.py    |
                              +-> handover.py
"""
