"""Not supported: for devices only. Importing it raises ImportError, like an original built without it."""

raise ImportError(
    "mooncake.ep moves the tokens of experts between devices; moonpool has none, so take another "
    "all-to-all backend",
    name="mooncake.ep",
)
