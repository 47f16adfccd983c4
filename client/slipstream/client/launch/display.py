"""Shows a run on the screen: a line for each step and each event, a table at the end."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from slipstream.client.log_lines import record
from slipstream.client.page import PAGE
from slipstream.client.run_folder import read_summary
from slipstream.client.status import RunStatus, episodes_under_way, fates
from slipstream.client.terminal import complain, counted, discard, plain, this_command
from slipstream.core.run_folder import (
    CHECKPOINTS,
    EXPORTS,
    HELDOUT,
    LOGS,
    METRICS,
    SAMPLES,
    SUMMARY,
    log_path,
)
from slipstream.core.settings.config import Config
from slipstream.v1 import status_pb2

# The names in a run's folder that people look for.
FILES = (
    PAGE,
    SUMMARY,
    METRICS,
    SAMPLES,
    HELDOUT,
    "tensorboard/",
    "wandb/",
    "mlflow.db",
    "profile/",
    f"{CHECKPOINTS}/",
    f"{EXPORTS}/",
    f"{LOGS}/",
)
# The beginning of the controller's event of a failure.
FAILED = "the run failed: "
# The beginning of the controller's event of a normal stop.
STOPPING = "stopping: "
# Least seconds between two lines of steps, except the last step; metrics.jsonl has all steps.
STEP_EVERY_S = 2.0
LEVELS = {
    status_pb2.SEVERITY_WARNING: logging.WARNING,
    status_pb2.SEVERITY_ERROR: logging.ERROR,
}
# The beginning of a line for people, by its level.
MARKS = {logging.WARNING: "! ", logging.ERROR: "!! "}


class Display:
    """Writes progress to stdout, failures to stderr; records what decides the exit code."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._step_at_s = -math.inf
        self._started_s = time.monotonic()
        # time.monotonic of the last line.
        self.spoke_s = self._started_s
        self.last_event = 0
        self.is_over = False
        self.failure = ""
        # The cause of a failure that was shown already, only on stderr.
        self.told_failure = ""
        # Whether somebody has stopped the run, which ends now.
        self.is_stopping = False

    def show(self, event: status_pb2.Event) -> None:
        """Shows one event of the controller."""
        self.last_event = event.number
        if event.final_state:
            self.is_over = True
            if event.final_state == status_pb2.RUN_STATE_FAILED:
                self.failure = event.text
            return
        if event.text.startswith(FAILED):
            self.told_failure = event.text.removeprefix(FAILED)
            self.fail(self.told_failure)
            return
        self.is_stopping |= event.text.startswith(STOPPING)
        if event.metrics:
            is_due = time.monotonic() >= self._step_at_s + STEP_EVERY_S
            if is_due or event.step == self._config.run.steps:
                self._step_at_s = time.monotonic()
                metrics = event.metrics
                last_step = self._config.run.steps
                if "reward_mean" in metrics:
                    # All replies were given: demonstrations, whose rewards say nothing.
                    is_given = metrics.get("effective_sample_size") == 0
                    name, key = ("loss  ", "loss") if is_given else ("reward", "reward_mean")
                    # With its time the line fits a terminal.
                    line = (
                        f"step {event.step:>{len(str(last_step))}}/{last_step}  "
                        f"{name} {metrics[key]:6.3f}  "
                        f"lag {metrics['lag_mean']:.1f}, max {metrics['lag_max']:.0f}  "
                        f"{metrics['generated_tokens_per_s']:,.0f} tok/s  "
                        f"{metrics['step_s']:.2f} s"
                    )
                else:
                    norm = metrics["grad_norm"]
                    rate = metrics["learning_rate"]
                    line = f"step {event.step}  gradient norm {norm:.3g}, learning rate {rate:.3g}"
                self.tell(line, step=event.step)
        else:
            level = LEVELS.get(event.severity, logging.INFO)
            self.tell(event.text, level, step=event.step)

    @property
    def quiet_s(self) -> float:
        return time.monotonic() - self.spoke_s

    def tell(self, text: str, level: int = logging.INFO, *, step: int = 0) -> None:
        """Shows a line, after the seconds since the start and the mark of its level."""
        self.spoke_s = time.monotonic()
        elapsed = self.spoke_s - self._started_s
        marked = MARKS.get(level, "") + text
        self._write(f"{elapsed:7.1f} s  {plain(marked, indent=11)}\n", text, level, step)

    def warn(self, text: str) -> None:
        """Shows a warning of the command itself."""
        self.tell(text, logging.WARNING)

    def fail(self, cause: str) -> None:
        """Writes the cause of the run's failure to stderr, in the form of the command's errors."""
        self.spoke_s = time.monotonic()
        complain(cause)

    def resuming(self, first: str = "") -> str:
        """Returns the end of a line: `first`, and the command, unless `run.resume` is "never"."""
        if self._config.run.resume == "never":
            return ""
        return f"; {first}resume it with: {this_command()}"

    def summary(self) -> bool:
        """Shows the table at the end, from the summary if any; returns whether it was stopped."""
        folder = self._config.run_dir
        summary = read_summary(folder)
        if summary is None:
            self._write(f"\n  {folder} has no summary{self.resuming('mend the cause, then ')}\n")
            return False
        if summary["steps"]:
            rows = table_rows(summary)
            width = max(len(name) for name, _ in rows)
            lines = [f"  {name:<{width}}  {plain(value)}\n" for name, value in rows]
            files = [name for name in FILES if (folder / name).exists()]
            self._write("\n" + "".join(lines) + f"\n  {folder}/: {', '.join(files)}\n")
        if summary["state"] != "finished":
            ended = f"{summary['state']} at version {summary['steps']} of {self._config.run.steps}"
            first = "mend the cause, then " if summary["state"] == "failed" else ""
            self._write(f"\n  {ended}{self.resuming(first)}\n")
        return bool(summary["state"] == "stopped")

    def _write(
        self, text: str, message: str = "", level: int = logging.INFO, step: int = 0
    ) -> None:
        """Writes to stdout; a closed terminal or a reader that has ended does not end the run.

        A line for programs has `message`, by default the text without space around it.
        """
        line = record(message or text.strip(), level, step=step)
        try:
            print(text if line is None else f"{line}\n", end="", flush=True)
        except OSError as error:
            discard(sys.stdout)
            log = log_path(self._config.run_dir, "controller")
            self.fail(
                f"no more of the run can be shown here: {error.strerror}; it goes on, and its "
                f"events are in {log}"
            )


def loading_line(config: Config, num_servers: int) -> str:
    """Returns the first line of a run; this command starts `num_servers` of its servers."""
    into = counted(config.learner.world_size, "trainer rank")
    if not num_servers:
        then = f"rollout servers join at {config.controller.address}"
        return f"loading {config.model.path} into {into}; {then}"
    servers = counted(num_servers, "rollout server")
    return f"loading {config.model.path} into {into} and {servers}; that takes a while"


def table_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows of the table: names and values from a summary."""
    shares = {
        fleet: ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
        for fleet, parts in summary["time"].items()
    }
    several = summary["reward_steps"]
    span = f"{several} steps" if several > 1 else "step"
    mixed = summary["trajectories_with_several_versions"]
    probes = summary["publishes_verified"]
    publishes = f"{summary['publishes']} since the last start"
    rows = [("steps", f"{summary['steps']}")]
    # The steps of a client's own loop have neither groups nor rewards nor lags.
    if (first := summary["reward_first"]) is None:
        shares = {name: text.replace("groups", "the client") for name, text in shares.items()}
    else:
        last = summary["reward_last"]
        rows += [
            ("reward", f"{first:.3f} in the first {span}, {last:.3f} in the last {span}"),
            ("lag", f"at most {summary['max_lag_seen']}, promised {summary['max_staleness']}"),
        ]
    if summary["reward_heldout"] is not None:
        first_version = summary["reward_heldout_first_step"]
        ended = summary["reward_heldout_step"]
        # With a single round there is nothing to compare.
        earlier = f"{summary['reward_heldout_first']:.3f} at version {first_version}, "
        newest = f"{summary['reward_heldout']:.3f} at version {ended}"
        rows.append(("reward held out", f"{earlier if first_version != ended else ''}{newest}"))
    rows += [
        *(("suspended", f"{k}: {cause}") for k, cause in summary["suspended_environments"].items()),
        ("new weights", f"came in the middle of {mixed:,} trajectories"),
        ("generated tokens", fates(summary["ledger"])),
        ("publishes", f"{publishes}, {counted(probes, 'probe')} compared"),
    ]
    if (gap := summary["logprob_gap_mean"]) is not None:
        # Without sampled tokens there is none.
        largest = summary["logprob_gap_max"]
        rows.append(("log-probability gap", f"{gap:.1e} mean, {largest:.1e} largest"))
    return [
        *rows,
        *((f"time of the {fleet}", share) for fleet, share in shares.items()),
        ("wall time", f"{summary['wall_s']:.0f} s"),
    ]


def wait_line(run: RunStatus, most_tokens: int) -> str:
    """Returns one line that says why a run waits, whose replies may have `most_tokens`."""
    busy = [
        f"{s.server_id} {'has left' if s.state == 'left' else f'is {s.state}'}"
        for s in run.servers
        if s.state != "serving"
    ]
    servers = "; ".join(busy) if run.servers else "no rollout server has joined yet"
    if run.servers and all(s.state in ("left", "dead") for s in run.servers):
        servers += "; no rollout server is connected"
    waits = f"waits for {run.waiting_for}" if run.waiting_for else f"the run is {run.state}"
    if under_way := episodes_under_way(run):
        waits += f"; {under_way} (sampling.max_reply_tokens = {most_tokens:,})"
    return waits + (f"; {servers}" if servers else "")
