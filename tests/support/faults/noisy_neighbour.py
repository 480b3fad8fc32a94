"""A program that sends as many requests as it can: `python -m tests.support.faults.noisy_neighbour PORT ...`.

It repeats the requests in a folder, one file each, over several connections at once, until its standard input ends;
then it prints the number of answers by status. With `--unread` it does not read the answers.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
from collections import Counter
from contextlib import suppress
from itertools import cycle
from pathlib import Path

# Seconds for which an answer stays unread before the connection is replaced by another one.
UNREAD_S = 2.0


async def ask(port: int, requests: "cycle[bytes]", answers: Counter[str], *, reads: bool) -> None:
    with socket.socket() as connection:
        if not reads:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 12)
        try:
            while True:
                writer.write(next(requests))
                if not reads:
                    answers["unread"] += 1
                    await asyncio.sleep(UNREAD_S)
                    return
                head = await reader.readuntil(b"\r\n\r\n")
                answers[head.split()[1].decode()] += 1
                fields = dict(line.split(b": ", 1) for line in head.splitlines()[1:-1])
                if fields.get(b"connection") == b"close":
                    return
                await reader.readexactly(int(fields[b"content-length"]))
        finally:
            writer.close()


async def main() -> None:
    os.nice(10)  # a real one would run on another machine
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--unread", action="store_true")
    options = parser.parse_args()
    requests = cycle([file.read_bytes() for file in sorted(options.folder.iterdir())])
    answers = Counter[str]()

    async def again_and_again() -> None:
        while True:
            with suppress(OSError, EOFError, asyncio.LimitOverrunError):
                await ask(options.port, requests, answers, reads=not options.unread)
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(again_and_again()) for _ in range(options.connections)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(answers))  # noqa: T201 - its result


if __name__ == "__main__":
    asyncio.run(main())
