"""What Python hears from the data plane (``csrc/relay``): a record of each request, and counts. Values
only; the data plane itself is C++ and has a thread of its own."""
