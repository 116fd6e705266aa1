"""``moonpool mock-engine``: an OpenAI engine without a model, for tests and for trying layouts out.

It keeps accounts as vLLM does (blocks, a prefix cache, a batch that prefills in chunks and decodes together),
speaks the PD forms of vLLM, SGLang and TensorRT-LLM, and publishes KV events; seconds come from a timing
model, text from a hash of the prompt, so that an answer shows whether the right prompt was served. One
process, one event loop.

    http.py -> server.py -> api.py -> batch.py -> blocks.py -> events.py
                 sglang.py    |
           tensorrt_llm.py    |
                              +-> handover.py
"""
