"""Not there: for devices alone. Who imports it hears so as from an original that was built without it."""

raise ImportError(
    "mooncake.pg is a process group of devices; moonpool has none, so take torch's own backends (nccl, gloo)",
    name="mooncake.pg",
)
