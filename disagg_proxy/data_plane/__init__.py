"""Values that Python reads from the relay (``csrc/relay``): a record of each request, and counters. The relay
itself is C++ and has its own thread."""
