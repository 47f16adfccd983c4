"""The server's processes start from a loop that forks, beside gRPC at work."""

import os
import sys

import pytest
from support.rigs.completed import completed

pytestmark = pytest.mark.process

PROGRAM = """
import asyncio, collections
import slipstream.rollout_server
import grpc, grpc.aio, uvloop

async def echo(request, context):
    return request

async def main():
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"E": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    codes = collections.Counter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/t.T/E")

        async def calls():
            while True:
                await call(b"")

        tasks = [asyncio.create_task(calls()) for _ in range(8)]
        for _ in range(25):
            process = await asyncio.create_subprocess_exec("true", start_new_session=True)
            codes[await process.wait()] += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop(0)
    print(dict(codes))

uvloop.run(main())
"""


def test_grpc_does_nothing_in_the_forks_of_the_server() -> None:
    # The tests' own process is told by the package already.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GRPC_")
    }
    done = completed([sys.executable, "-c", PROGRAM], check=True, env=environ)
    assert done.stdout == "{0: 25}\n"
    assert "fork() handlers" not in done.stderr, done.stderr[-500:]
