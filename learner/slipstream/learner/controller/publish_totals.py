"""What publishing has cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.v1 import fleet_pb2


@dataclass
class PublishTotals:
    """What publishing has cost so far."""

    publishes: int = 0
    verified: int = 0
    paused_s: float = 0.0
    bytes_sent: int = 0
    last_paused_s: float = 0.0
    probe_gap_max: float = 0.0
    last_stages: fleet_pb2.PublishStages = field(default_factory=fleet_pb2.PublishStages)

    def served(self, report: fleet_pb2.PublishReport) -> None:
        """A server goes on with new weights."""
        self.paused_s += report.paused_s
        self.last_paused_s, self.last_stages = report.paused_s, report.stages

    def gauges(self) -> dict[str, float]:
        """What the newest publish cost the server that took it last."""
        stages = self.last_stages
        return {
            "pause_s": self.last_paused_s,
            "publish_prepare_s": stages.prepare_s,
            "publish_stop_s": stages.pause_s,
            "publish_receive_s": stages.receive_s,
            "publish_load_s": stages.load_s,
            "publish_resume_s": stages.resume_s,
            "publish_copied": float(stages.copied),
        }

    def summary(self) -> dict[str, float]:
        """The totals under the names that they have in the summary."""
        return {
            "publishes": self.publishes,
            "publishes_verified": self.verified,
            "probe_gap_max": self.probe_gap_max,
            "pause_s": self.paused_s,
            "published_bytes": self.bytes_sent,
        }
