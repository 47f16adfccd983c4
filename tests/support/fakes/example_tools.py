"""Environments with tools, for a model that follows a script (`agent_rig.script`)."""

from slipstream.client import Environment, Reply, ResetResult, StepResult

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds to the sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object"}},
}


class Adding(Environment[int]):
    """The model calls twice and then once; the reward is the sum of what it has added."""

    def tasks(self) -> list[int]:
        return [1]

    def reset(self, task: int) -> ResetResult:
        self.total = 0
        self.turns = 0
        return ResetResult([{"role": "user", "content": "call 1 2"}], tools=[ADD])

    def step(self, reply: Reply) -> StepResult:
        self.turns += 1
        if not reply.tool_calls:
            assert reply.content == reply, reply
            return StepResult(reward=self.total, metrics={"turns": self.turns})
        assert reply.content == "I call.", reply.content
        assert "<tool_call>" in reply
        for call in reply.tool_calls:
            assert call.name == "add"
            self.total += call.arguments["a"]
        words = ["call 5", "done"] if self.turns == 1 else ["all done"]
        *before, last = reply.tool_calls
        results = [
            {"role": "tool", "content": "ok", "tool_call_id": c.id} for c in before
        ]
        results.append({"role": "tool", "content": words[0], "tool_call_id": last.id})
        return StepResult(done=False, messages=results)


class Changing(Adding):
    """Other tools in the second turn, none in the third."""

    def step(self, reply: Reply) -> StepResult:
        self.turns += 1
        if self.turns == 3:
            # No one reads calls where there are no tools.
            assert reply.tool_calls == ()
            return StepResult(reward=float("<tool_call>" in reply))
        (call, *_) = reply.tool_calls
        result = {"role": "tool", "content": "call 7", "tool_call_id": call.id}
        return StepResult(
            done=False, messages=[result], tools=[LOOK] if self.turns == 1 else []
        )


class Thinking(Environment[int]):
    """Wants the reasoning apart from the answer."""

    def tasks(self) -> list[int]:
        return [1]

    def reset(self, task: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "think"}]

    def step(self, reply: Reply) -> StepResult:
        is_right = reply == "<think>Hm.</think>Yes."
        return StepResult(
            reward=float(
                is_right and (reply.content, reply.reasoning) == ("Yes.", "Hm.")
            )
        )


# Calls that a random model makes now and then, if each of them is one token.
CALLS = [
    f'<tool_call>\n{{"name": "look", "arguments": {{"place": {place}}}}}\n</tool_call>'
    for place in range(100)
]


class Looking(Environment[int]):
    """Rewards each call of `look`, whose answer is the place again; two calls are enough."""

    def tasks(self) -> range:
        return range(20)

    def reset(self, task: int) -> ResetResult:
        self.num_calls = 0
        return ResetResult(
            [{"role": "user", "content": f"look at {task}"}], tools=[LOOK]
        )

    def step(self, reply: Reply) -> StepResult:
        self.num_calls += len(reply.tool_calls)
        reward = 0.5 * len(reply.tool_calls)
        if not reply.tool_calls or self.num_calls >= 2:
            return StepResult(reward, metrics={"calls": self.num_calls})
        results = [
            {
                "role": "tool",
                "content": f"seen {call.arguments['place']}",
                "tool_call_id": call.id,
            }
            for call in reply.tool_calls
        ]
        return StepResult(reward, done=False, messages=results)
