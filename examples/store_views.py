"""Zero-copy: numpy arrays go in as they lie in memory, and come out as views of the pool's own memory.

Needs a node on this host: `moonpool node --dram 1GiB`
"""

from __future__ import annotations

import numpy as np

from moonpool import Store


def main() -> None:
    keys = np.arange(32 * 64, dtype=np.float32).reshape(32, 64)
    values = -keys
    with Store(namespace="example-views") as store:
        # One object of two parts: K then V, gathered while it is copied into the pool.
        store.put("layer/0", [keys, values])

        # A view is a read-only memoryview over shared memory: nothing is copied, however large it is. It
        # keeps its object in place until the last reference to it is gone, even when the object is removed
        # meanwhile.
        view = store.get("layer/0")
        assert view is not None
        store.remove("layer/0")
        loaded = np.frombuffer(view, dtype=np.float32).reshape(2, 32, 64)
        print("writable:", loaded.flags.writeable, "K equal:", np.array_equal(loaded[0], keys))
        print(
            "V equal:", np.array_equal(loaded[1], values), "still in the pool:", bool(store.exists("layer/0"))
        )


if __name__ == "__main__":
    main()
