"""What appears in ``lmcache.v1.distributed.l2_adapters``."""
