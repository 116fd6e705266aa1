"""Not there: for devices alone. Who imports it hears so as from an original that was built without it."""

raise ImportError(
    "mooncake.ep moves the tokens of experts between devices; moonpool has none, so take another "
    "all-to-all backend",
    name="mooncake.ep",
)
