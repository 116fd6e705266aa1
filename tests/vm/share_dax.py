"""In the virtual machine, with /dev/dax0.0 (guest.sh) and NUMA node 1 without CPUs: memory of both, between
processes."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
from pathlib import Path

from moonpool import TransferEngine
from moonpool.core.errors import TooLarge

TOKEN = b"of this test, and of no other"
MIB = 1 << 20
SIZE = 4 * MIB
PLACE = "dax:/dev/dax0.0"
FACTS = Path("/sys/bus/dax/devices/dax0.0")


def serve(place: str, size: int) -> None:
    with TransferEngine("owner", token=TOKEN) as engine:
        memory = engine.allocate(size, place)
        assert memory.view[:4096] == bytes(4096)
        print(engine.addresses[0], memory.address, flush=True)
        sys.stdin.read()


class Owner:
    """A process whose engine has memory of that place."""

    def __init__(self, place: str, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, place, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address, memory = self.process.stdout.readline().split()
        self.memory = int(memory)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def there_and_back(engine: TransferEngine, owner: Owner, data: bytes) -> None:
    peer = engine.open(owner.address)
    local = bytearray(data)
    with engine.register(local):
        engine.write(peer, local, owner.memory)
        local[:] = bytes(SIZE)
        engine.read(peer, local, owner.memory)
        assert local == data


def managed_by_the_drop_in() -> None:
    """The protocol "cxl" of the drop-in: its managed buffers lie on the device."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "connectors" / "mooncake"))
    from mooncake.engine import TransferEngine as DropIn

    data = random.Random(6).randbytes(SIZE)
    engine = DropIn()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "cxl", "/dev/dax0.0") == 0
    buffer = engine.allocate_managed_buffer(SIZE)
    assert engine.write_bytes_to_buffer(buffer, data, SIZE) == 0
    assert is_on_device(data)
    assert engine.free_managed_buffer(buffer, SIZE) == 0


def is_on_device(data: bytes) -> bool:
    size = int((FACTS / "size").read_text())
    with open("/dev/dax0.0", "r+b") as device, mmap.mmap(device.fileno(), size) as all_of_it:
        return all_of_it.find(data) >= 0


def main() -> None:
    data = random.Random(5).randbytes(SIZE)
    size = int((FACTS / "size").read_text())
    print("dax0.0:", size // MIB, "MiB, align", (FACTS / "align").read_text().strip())
    with TransferEngine("user", token=TOKEN, transports=["shm"]) as engine:
        owner = Owner(PLACE, SIZE)
        there_and_back(engine, owner, data)
        moved = engine.metrics()["shm_write_bytes_total"]
        assert moved == SIZE, moved
        assert is_on_device(data), "the bytes are not on the device"
        # This process takes from the same device, and gets other memory.
        own = engine.allocate(SIZE, PLACE)
        own.view[:] = bytes([7]) * SIZE
        there_and_back(engine, owner, data)
        own.close()
        owner.kill()
        again = Owner(PLACE, size - 4 * MIB)  # what a killed process had is free
        try:
            engine.allocate(size - 4 * MIB, PLACE)
            raise AssertionError("memory was given twice")
        except TooLarge as error:
            print(error)
        again.kill()
        far = Owner("node:1", SIZE)
        there_and_back(engine, far, data)
        pages = [
            line
            for line in Path(f"/proc/{far.process.pid}/numa_maps").read_text().splitlines()
            if "moonpool" in line
        ]
        assert any("N1=" in line and "N0=" not in line for line in pages), pages
        far.kill()
    managed_by_the_drop_in()
    print("memory of the device and of the node was shared")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main()
