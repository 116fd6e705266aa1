"""Not there: for devices alone. Who imports it hears so as from an original that was built without it."""

raise ImportError(
    "mooncake.allocator allocates memory of devices; moonpool registers what torch has allocated, "
    "so leave the custom memory pool off",
    name="mooncake.allocator",
)
