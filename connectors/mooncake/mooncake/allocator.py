"""Not supported: for devices only. Importing it raises ImportError, like an original built without it."""

raise ImportError(
    "mooncake.allocator allocates memory of devices; moonpool registers what torch has allocated, "
    "so leave the custom memory pool off",
    name="mooncake.allocator",
)
