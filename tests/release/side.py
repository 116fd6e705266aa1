"""One side of a conversation between two releases, under the Python of either: only what both know.

python side.py engine TRANSPORT               says where its memory is; at the next line of input what is
                                              in it
python side.py transfer TRANSPORT ADDRESS AT  reads all of that, writes it anew, and reads 64 pieces of it
python side.py store SOCKET                   a line of input is a call, {"do": .., ..}; a line of output
                                              its answer
"""

from __future__ import annotations

import hashlib
import json
import sys

from moonpool import Batch, Store, TransferEngine

TOKEN = b"of this conversation, and of no other use"
SIZE = 3 << 20  # more than a frame
PIECES, PIECE = 64, 4096
APART = SIZE // PIECES


def pattern(number: int) -> bytes:
    return hashlib.shake_128(bytes([number])).digest(SIZE)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def engine(transport: str) -> None:
    with TransferEngine("serving", token=TOKEN, transports=[transport]) as serving:
        memory = serving.allocate(SIZE)
        memory.view[:] = pattern(1)
        say(address=serving.addresses[0], at=memory.address)
        for _ in sys.stdin:
            say(holds=next((n for n in (1, 2) if memory.view == pattern(n)), 0))


def transfer(transport: str, address: str, at: str) -> None:
    remote = int(at)
    with TransferEngine("calling", token=TOKEN, transports=[transport]) as calling:
        here = calling.allocate(SIZE)
        peer = calling.open(address)
        calling.read(peer, here.address, remote, SIZE)
        read = here.view == pattern(1)
        here.view[:] = pattern(2)
        calling.write(peer, here.address, remote, SIZE)
        here.view[:] = bytes(SIZE)
        places = [i * APART for i in range(PIECES)]
        local = [here.address + place for place in places]
        calling.transfer(Batch("read", peer, local, [remote + place for place in places], [PIECE] * PIECES))
        whole = pattern(2)
        pieces = all(here.view[place : place + PIECE] == whole[place : place + PIECE] for place in places)
        say(read=read, pieces=pieces)


def store(socket: str) -> None:
    with Store(socket, token=TOKEN) as opened:
        say(ready=True)
        for line in sys.stdin:
            call = json.loads(line)
            name, number = call["name"], call.get("number", 0)
            if call["do"] == "put":
                more = {"replicas": call["replicas"]} if "replicas" in call else {}
                if call.get("replace"):
                    more["replace"] = True
                opened.put([name], [pattern(number)], **more)
                say(done=True)
            elif call["do"] == "get":
                got = opened.get([name])[0]
                say(holds=0 if got is None else next((n for n in range(1, 9) if got == pattern(n)), -1))
            elif call["do"] == "exists":
                say(exists=[str(presence) for presence in opened.exists([name])])
            else:
                say(removed=[bool(removed) for removed in opened.remove([name])])


if __name__ == "__main__":
    {"engine": engine, "transfer": transfer, "store": store}[sys.argv[1]](*sys.argv[2:])
