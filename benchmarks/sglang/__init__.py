"""SGLang's HiCache over our backend, and over SGLang's own ``mooncake`` backend: both driven alike, once on
SGLang's host pools alone and once in a whole server."""
