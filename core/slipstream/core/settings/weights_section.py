"""The section `weights`: how new weights travel, and how often they are probed."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from slipstream.core.settings.section import Host, Positive, Section, Silence

DeltaSetting = Literal["off", "gpu", "host"]
StageSetting = Literal["auto"] | bool


def _check_storage(url: str) -> str:
    # fsspec joins the URLs of a chain by two colons.
    links = [urlsplit(link) for link in url.split("::")]
    if any("@" in link.netloc or link.query or link.fragment for link in links):
        # The value is not shown: it may hold a password.
        raise ValueError(
            "a storage URL has no user, password, query or fragment: credentials come from the "
            "environment"
        )
    return url


StorageUrl = Annotated[str, AfterValidator(_check_storage)]


class WeightsSection(Section):
    """The transport of new weights to the rollout servers."""

    # nccl: between GPUs; ipc: within one host, also on a shared GPU; gloo: TCP, from main memory.
    # auto: gloo if any part computes on a CPU, ipc on a shared GPU, else nccl.
    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    # Address of trainer rank 0's machine that the transport of weights uses.
    host: Host = "127.0.0.1"
    # Size at which a bucket is closed; the size of the largest tensor, if that is more.
    bucket_mib: Positive = 64
    # Engines receive new weights next to those that serve, and requests wait only for the copies.
    # It takes the memory of the weights on the wire, on a GPU out of `gpu_memory_utilization`.
    # auto: while requests run, if there is room; on a GPU for up to a sixth of that share.
    stage_on_server: StageSetting = "auto"
    # Send only the elements that changed since the last publish, if that is at most half as long.
    # The trainer keeps the published weights for it, gpu: next to its own weights, with an eighth
    # more; host: in main memory, which takes longer. An engine's worker takes memory for one
    # bucket.
    delta: DeltaSetting = "off"
    # Folder, or URL of fsspec such as s3://bucket/prefix, into which the trainer writes versions
    # for servers with rollout_server.weights_from = "storage". A server may have its own name for
    # it. Without it no server takes weights from storage.
    storage_url: StorageUrl | None = None
    # Limit of writing a version to storage, and of fetching a version from there.
    storage_deadline_s: Silence = 600.0
    # Limit of one bucket; the trainer also waits this long for a server that is not ready, or
    # loads.
    bucket_deadline_s: float = Field(2.0, ge=0.1)
    # Limit of preparing, of joining the communicator and of loading the received weights.
    join_deadline_s: Silence = 20.0
    # Prove every n-th publish by the log-probabilities of a probe, besides its digests; the first
    # publish always has a probe.
    verify_every: Positive = 10
