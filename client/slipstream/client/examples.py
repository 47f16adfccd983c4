"""An example of each command, shown below its options."""

from __future__ import annotations

EXAMPLES = {
    "run": "slipstream run deploy/configs/quickstart.toml run.name=second run.steps=50",
    "learner": "slipstream learner run.toml --node-rank 1 --master 10.0.0.1:29500",
    "rollout-server": "slipstream rollout-server run.toml --controller 10.0.0.1:7070",
    "submit": "slipstream submit my_tasks:Reverse --args '{\"length\": 3}' --weight 0.5",
    "status": "slipstream status --controller 10.0.0.1:7070",
    "environments": "slipstream environments",
    "drain": "slipstream drain server-1 --reason maintenance",
    "stop": "slipstream stop --reason 'the reward is high enough'",
    "replay": "slipstream replay runs/quickstart",
    "set-aside": "slipstream set-aside runs/quickstart 17",
    "export": "slipstream export runs/quickstart --step 100 --out model",
    "dashboard": "slipstream dashboard runs --port 0",
    "doctor": "slipstream doctor deploy/configs/quickstart.toml",
}
