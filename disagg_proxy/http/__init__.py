"""HTTP/1.1 without sockets: bytes in, requests and answers out.

Heads are parsed by httptools (llhttp, strict) and written anew, so that nothing ambiguous passes through;
bodies are never parsed beyond their framing. Nothing here knows of an event loop, a clock or an engine.
"""
