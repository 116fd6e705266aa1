"""What appears in ``lmcache.v1.storage_backend.connector``."""
