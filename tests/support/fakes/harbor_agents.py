"""Agents of Harbor for tests: inside a sandbox, on the host, and one that attacks its sandbox."""

import asyncio
import json
import secrets
import shlex
import urllib.request
from typing import Any

from harbor.agents.base import BaseAgent

SLEEPS = "SLEEPS "
ASK = r"""
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]})
asked = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
with urllib.request.urlopen(asked) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
open("/app/answer.txt", "w").write("7" if "7" in text else "8")
"""
# Every line is a way out, and must fail.
ATTACKS = (
    "touch /usr/planted",
    "mount -o remount,rw,bind /usr",
    "umount /usr",
    "echo x > /proc/sys/kernel/hostname",
    "mount -t proc proc /mnt",
    "mount -t tmpfs tmpfs /mnt",
    "unshare --user --map-root-user true",
    "unshare --cgroup --mount true",
    "unshare --mount true",
    "head -c 1 /proc/kpageflags && test -s /proc/kpageflags",
    "ls /.host/etc",
    "cat /etc/shadow",
    "ls /proc/1/root/etc/shadow",
    "nsenter -t 1 -m ls /etc/shadow",
    "mknod /dev/sda b 8 0 && head -c 1 /dev/sda",
    "python3 -c \"import socket; socket.create_connection(('192.0.2.1', 80), 2)\"",
    'python3 -c "import socket; socket.socket(40).connect((2, 1024))"',
    'test -n "$(find / -xdev -name model.sock 2>/dev/null)"',
    'kill -0 2 && test "$(ps -e | wc -l)" -gt 40',
    "head -c 2000000000 /dev/zero > /app/large",
)


class Inside(BaseAgent):
    """Runs a program in the sandbox, which calls the model once."""

    runs_inside = True

    @staticmethod
    def name() -> str:
        return "inside"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:  # noqa: ANN401 - Harbor's
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ANN401
        command = f"python3 -c {shlex.quote(ASK)} {shlex.quote(instruction)}"
        ended = await environment.exec(command, env=self.extra_env, timeout_sec=100)
        if ended.return_code:
            raise RuntimeError(ended.stderr)


class Sleeps(Inside):
    """Leaves a program in the sandbox, whose command it prints, and waits."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ANN401
        command = f"sleep {10**8 + secrets.randbelow(10**8)}"
        await environment.exec(f"setsid {command} < /dev/null > /dev/null 2>&1 &")
        print(SLEEPS + command, flush=True)
        await environment.exec(command)


class Late(Inside):
    """Writes the right answer, and does not end."""

    runs_inside = False

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ANN401
        await environment.exec("echo 7 > /app/answer.txt")
        await environment.exec("sleep infinity")


class OnHost(Inside):
    """Calls the model from the worker, and tells its sandbox the answer."""

    runs_inside = False

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ANN401
        variables = self.extra_env
        body = {"model": "any", "messages": [{"role": "user", "content": instruction}]}
        asked = urllib.request.Request(
            variables["OPENAI_BASE_URL"] + "/chat/completions",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {variables['OPENAI_API_KEY']}"},
        )

        def ask() -> str:
            with urllib.request.urlopen(asked) as answer:
                text: str = json.load(answer)["choices"][0]["message"]["content"]
                return text

        text = await asyncio.to_thread(ask)
        await environment.exec(f"echo {7 if '7' in text else 8} > /app/answer.txt")


class Attacks(Inside):
    """Tries each way out; the answer is right if none worked."""

    runs_inside = False

    async def run(self, instruction: str, environment: Any, context: Any) -> None:  # noqa: ANN401
        ways_out: list[str] = []
        for command in ATTACKS:
            ended = await environment.exec(command, timeout_sec=60)
            if ended.return_code == 0:
                ways_out.append(command)
        # A link must not lead the host's copies elsewhere.
        await environment.exec("rm -f /app/large; ln -s /etc/shadow /logs/agent/link")
        if ways_out:
            raise RuntimeError(f"ways out: {ways_out}")
        await environment.exec("echo 7 > /app/answer.txt")
