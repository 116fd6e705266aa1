"""Not supported: for devices only. Importing it raises ImportError, like an original built without it."""

raise ImportError(
    "mooncake.pg is a process group of devices; moonpool has none, so take torch's own backends (nccl, gloo)",
    name="mooncake.pg",
)
